package agentsandboxes

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	channelPath     = "/channel"
	acceptPath      = "/channel/accept"
	channelProtocol = "bullpen-channel"
	openTimeout     = 5 * time.Second
	headerTimeout   = 10 * time.Second
	retryPause      = time.Second
)

// models serves the model APIs to the programs of a sandbox.
type models struct {
	url, token string
}

// ModelsURL returns where programs in the sandbox reach the model APIs.
func (b *Sandbox) ModelsURL() string { return b.models.url }

// ModelsToken returns the API key for the model APIs. It is valid in this sandbox only.
func (b *Sandbox) ModelsToken() string { return b.models.token }

// openModels serves the model APIs to the sandbox until that is closed.
func (b *Sandbox) openModels(ctx context.Context) (*models, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://sandbox"+channelPath, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("open the channel of the sandbox: %w", err)
	}
	answer, err := b.Transport(0).RoundTrip(r)
	if err != nil {
		return nil, fmt.Errorf("open the channel of the sandbox: %w", err)
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	var channel struct {
		Port int `json:"port"`
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, 1<<10)).Decode(&channel); err != nil {
		return nil, fmt.Errorf("open the channel of the sandbox: status %d: %w", answer.StatusCode, err)
	}
	if channel.Port == 0 {
		return nil, fmt.Errorf("open the channel of the sandbox: status %d, without a port", answer.StatusCode)
	}
	m := &models{"http://127.0.0.1:" + strconv.Itoa(channel.Port), newToken()}
	listener := &channelListener{sandbox: b}
	listener.ctx, listener.cancel = context.WithCancel(b.ctx)
	server := &http.Server{
		Handler: b.modelHandler(m.token), ReadHeaderTimeout: headerTimeout,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), // tenants can cause any number
	}
	b.work.Go(func() { _ = server.Serve(listener) }) // it ends with the sandbox
	b.work.Go(func() {
		<-b.ctx.Done()
		_ = server.Close() // it closes connections, which nobody needs any more
	})
	return m, nil
}

// modelRoutes are the routes that programs in sandboxes may use, with their methods by path.
var modelRoutes = map[string]string{ // read only
	"/anthropic/v1/messages":              http.MethodPost,
	"/anthropic/v1/messages/count_tokens": http.MethodPost,
	"/anthropic/v1/models":                http.MethodGet,
	"/openai/v1/responses":                http.MethodPost,
	"/openai/v1/chat/completions":         http.MethodPost,
	"/openai/v1/models":                   http.MethodGet,
}

// untrusted are headers that only a proxy in front of this server may set.
var untrusted = []string{ // read only
	"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip", "Traceparent", "Tracestate",
}

// modelHandler returns the handler of the requests of a sandbox's programs.
func (b *Sandbox) modelHandler(token string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := web.SecretOf(r)
		if given == "" {
			given = r.Header.Get("X-Api-Key")
		}
		// Requests to the port can also come from outside, if the sandbox's ports are public.
		if subtle.ConstantTimeCompare([]byte(given), []byte(token)) == 0 {
			http.Error(w, "the API key is not that of this sandbox", http.StatusUnauthorized)
			return
		}
		if modelRoutes[strings.TrimSuffix(r.URL.Path, "/")] != r.Method {
			http.Error(w, "programs in this sandbox can only use the model APIs", http.StatusNotFound)
			return
		}
		for _, name := range untrusted {
			r.Header.Del(name)
		}
		ctx := web.FromSandbox(r.Context(), func() (*proto.Key, error) { return b.modelKey(r.Context()) })
		b.sandboxes.Server.ServeHTTP(w, r.WithContext(ctx))
	})
}

// modelKey returns the session's API key with the rights that programs in the sandbox have.
func (b *Sandbox) modelKey(ctx context.Context) (*proto.Key, error) {
	key, _, err := b.sandboxes.Keys.ValidKey(ctx, b.session.Key)
	if err != nil {
		refusal := *api.NewError(err)
		// The session has no other key: programs that try again after a 401 would do so in vain.
		refusal.Permanent = refusal.Code == api.CodeUnauthorized || refusal.Code == api.CodeForbidden
		return nil, &refusal
	}
	limited := *key
	limited.Scopes, limited.Global = []proto.Scope{proto.ScopeExecute}, false
	return &limited, nil
}

// channelListener accepts the connections that programs make to the port of the channel.
type channelListener struct {
	sandbox *Sandbox
	ctx     context.Context
	cancel  context.CancelFunc
}

// Accept implements [net.Listener].
func (l *channelListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.accept()
		switch {
		case l.ctx.Err() != nil:
			if err == nil {
				_ = conn.Close() // nobody uses it
			}
			return nil, net.ErrClosed
		case err == nil:
			return conn, nil
		}
		select {
		case <-l.ctx.Done():
		case <-time.After(retryPause):
		}
	}
}

// accept waits for a connection.
func (l *channelListener) accept() (net.Conn, error) {
	r, err := http.NewRequestWithContext(l.ctx, http.MethodPost, "http://sandbox"+acceptPath, http.NoBody)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", channelProtocol)
	answer, err := l.sandbox.Transport(0).RoundTrip(r)
	if err != nil {
		return nil, err
	}
	body, ok := answer.Body.(io.ReadWriteCloser)
	if answer.StatusCode != http.StatusSwitchingProtocols || !ok {
		return nil, errors.Join(fmt.Errorf("the guest answers with status %d", answer.StatusCode), answer.Body.Close())
	}
	return newConn(body), nil
}

// Close implements [net.Listener].
func (l *channelListener) Close() error {
	l.cancel()
	return nil
}

// Addr implements [net.Listener].
func (*channelListener) Addr() net.Addr { return channelAddr{} }

// channelAddr is the address of both ends of a connection.
type channelAddr struct{}

func (channelAddr) Network() string { return "tcp" }
func (channelAddr) String() string  { return "127.0.0.1:0" }

// channelConn is a connection whose end in this process has deadlines, which an upgraded one lacks.
type channelConn struct {
	net.Conn
	close func()
}

func newConn(body io.ReadWriteCloser) net.Conn {
	ours, theirs := net.Pipe()
	closeAll := sync.OnceFunc(func() {
		_ = ours.Close()
		_ = theirs.Close()
		_ = body.Close()
	})
	pass := func(to io.Writer, from io.Reader) {
		_, _ = io.Copy(to, from) // whoever is left learns of the end
		closeAll()
	}
	go pass(theirs, body)
	go pass(body, theirs)
	return &channelConn{ours, closeAll}
}

// Close implements [net.Conn].
func (c *channelConn) Close() error {
	c.close()
	return nil
}

// RemoteAddr implements [net.Conn].
func (*channelConn) RemoteAddr() net.Addr { return channelAddr{} }
