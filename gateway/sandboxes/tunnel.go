package sandboxes

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	pingPath        = "/health"
	setTimeout      = 5 * time.Second
	dialTimeout     = 5 * time.Second
	maxIdleConns    = 32
	idleConnTimeout = 90 * time.Second
	maxTransports   = 1024
	maxHeader       = 64 << 10 // bytes of the header of an answer
)

// Endpoints finds the endpoints of workers.
type Endpoints interface {
	// Endpoint returns the endpoint of a worker, or [proto.ErrNotFound] if it does not answer.
	Endpoint(ctx context.Context, worker string) (proto.WorkerEndpoint, error)
}

// Tunnels are the ways to the workers of live sandboxes. It is safe for concurrent use.
type Tunnels struct {
	Endpoints Endpoints

	mu         sync.Mutex
	transports map[string]*http.Transport // by worker, whose name is never reused
}

// ErrNotReached means that a sandbox is not on its worker any more.
var ErrNotReached = errors.New("the sandbox is not on its worker")

// transport returns the transport to a worker.
func (t *Tunnels) transport(ctx context.Context, worker string) (*http.Transport, error) {
	t.mu.Lock()
	found := t.transports[worker]
	t.mu.Unlock()
	if found != nil {
		return found, nil
	}
	endpoint, err := t.Endpoints.Endpoint(ctx, worker)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if found := t.transports[worker]; found != nil {
		return found, nil
	}
	if t.transports == nil {
		t.transports = map[string]*http.Transport{}
	}
	for name, old := range t.transports {
		if len(t.transports) < maxTransports {
			break
		}
		old.CloseIdleConnections()
		delete(t.transports, name)
	}
	made := newTransport(endpoint)
	t.transports[worker] = made
	return made, nil
}

// newTransport returns a transport that connects to a worker, whatever the host of a request, and to
// nobody else.
func newTransport(to proto.WorkerEndpoint) *http.Transport {
	dialer := &tls.Dialer{Config: &tls.Config{
		MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, //nolint:gosec // verified by its hash below
		VerifyConnection: func(state tls.ConnectionState) error {
			if len(state.PeerCertificates) == 0 || sha256.Sum256(state.PeerCertificates[0].Raw) != to.Certificate {
				return errors.New("the certificate is not the worker's")
			}
			return nil
		},
	}}
	return &http.Transport{
		DialTLSContext: dialTLS(dialer, to.Address), MaxIdleConnsPerHost: maxIdleConns, IdleConnTimeout: idleConnTimeout,
		DisableCompression: true, ResponseHeaderTimeout: 0, MaxResponseHeaderBytes: maxHeader,
	}
}

// identify adds what proves to a worker that a gateway sends a request for a sandbox.
func identify(h http.Header, sandbox, ticket string) {
	h.Set(proto.HeaderSandbox, sandbox)
	h.Set(proto.HeaderTicket, ticket)
}

// ask sends a request of the gateway's own and returns the status of the answer.
func (t *Tunnels) ask(ctx context.Context, worker, sandbox, ticket, method, path, body string) (int, error) {
	answer, err := t.send(ctx, worker, sandbox, ticket, method, path, body)
	if err != nil {
		return 0, err
	}
	return answer.StatusCode, answer.Body.Close()
}

// send sends a request of the gateway's own and returns the answer, whose body the caller closes.
func (t *Tunnels) send(
	ctx context.Context, worker, sandbox, ticket, method, path, body string,
) (*http.Response, error) {
	transport, err := t.transport(ctx, worker)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, method, "https://worker"+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, fmt.Errorf("ask worker %s: %w", worker, err)
	}
	identify(r.Header, sandbox, ticket)
	answer, err := transport.RoundTrip(r)
	if err != nil {
		return nil, fmt.Errorf("ask worker %s: %w", worker, err)
	}
	return answer, nil
}

// ping returns when the guest of a sandbox answers.
func (t *Tunnels) ping(ctx context.Context, worker, sandbox, ticket string) error {
	status, err := t.ask(ctx, worker, sandbox, ticket, http.MethodGet, pingPath, "")
	if err == nil && status != http.StatusNoContent {
		err = fmt.Errorf("ping sandbox %s: status %d: %w", sandbox, status, ErrNotReached)
	}
	return err
}

// setExpiry tells a worker when a sandbox expires.
func (t *Tunnels) setExpiry(ctx context.Context, worker, sandbox, ticket string, at time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, setTimeout)
	defer cancel()
	status, err := t.ask(ctx, worker, sandbox, ticket, http.MethodPut, proto.ExpiryPath, at.Format(time.RFC3339Nano))
	if err == nil && status != http.StatusNoContent {
		err = fmt.Errorf("extend sandbox %s: status %d: %w", sandbox, status, ErrNotReached)
	}
	return err
}

// save has a worker save the home of a sandbox.
func (t *Tunnels) save(ctx context.Context, worker, sandbox, ticket string) (saved proto.SandboxSave, err error) {
	answer, err := t.send(ctx, worker, sandbox, ticket, http.MethodPost, proto.SavePath, "")
	if err != nil {
		return saved, err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	switch answer.StatusCode {
	case http.StatusOK:
		err = json.NewDecoder(answer.Body).Decode(&saved)
	case proto.StatusNoSandbox:
		err = ErrNotReached
	default:
		err = fmt.Errorf("status %d", answer.StatusCode)
	}
	if err != nil {
		return saved, fmt.Errorf("save sandbox %s: %w", sandbox, err)
	}
	return saved, nil
}

// proxy passes a request on to the guest of a sandbox, and calls unreachable if it is not there.
func (t *Tunnels) proxy(
	w http.ResponseWriter, r *http.Request, worker, ticket string, to Target, unreachable func(error),
) {
	if proto.AnsweredByWorker(to.Path) { // which the worker would take for a request of the gateway's own
		unreachable(ErrNotReached)
		return
	}
	transport, err := t.transport(r.Context(), worker)
	if err != nil {
		unreachable(err)
		return
	}
	// A guest answers before the request has ended. Without this, the server would then close the body
	// that the proxy still reads, and the proxy would cut the answer off.
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
		unreachable(fmt.Errorf("answer while a request is read: %w", err))
		return
	}
	proxy := &httputil.ReverseProxy{
		Transport: finalAnswers{transport}, FlushInterval: -1,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), // tenants can cause any number
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = "https", "worker"
			p.Out.URL.Path, p.Out.URL.RawPath = to.Path, to.RawPath
			p.Out.Host = p.In.Host
			for _, h := range []http.Header{p.Out.Header, p.Out.Trailer} {
				for name := range h {
					if private(name) {
						delete(h, name)
					}
				}
			}
			// Only now, since a client may name headers in Connection, which are removed before.
			identify(p.Out.Header, to.ID, ticket)
			if to.UntilStop {
				p.Out.Header.Set(proto.HeaderUntilStop, "1")
			}
			if to.Port != 0 {
				p.Out.Header.Set(proto.HeaderSandboxID, to.ID)
				p.Out.Header.Set(proto.HeaderSandboxPort, strconv.Itoa(to.Port))
			}
		},
		ModifyResponse: func(answer *http.Response) error {
			if answer.StatusCode == proto.StatusNoSandbox {
				return ErrNotReached
			}
			removeHeaders(answer.Header, nil)
			if answer.StatusCode == http.StatusSwitchingProtocols {
				return nil // its body is the connection
			}
			own := maps.Clone(w.Header())
			removeHeaders(answer.Header, own)
			removeHeaders(answer.Trailer, own) // those that are announced
			answer.Body = &trailerFilter{answer.Body, answer, own}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) { unreachable(err) },
	}
	proxy.ServeHTTP(w, r)
}

// removeHeaders removes what a sandbox must not tell a client, and the names of own, which this server sets.
func removeHeaders(h, own http.Header) {
	for name := range h {
		if _, set := own[name]; set || private(name) || ofOrigin(name) {
			delete(h, name)
		}
	}
}

// trailerFilter is the body of an answer. At its end, when the trailers are known, it removes some of them
// as removeHeaders does.
type trailerFilter struct {
	io.ReadCloser
	answer *http.Response
	own    http.Header
}

func (f *trailerFilter) Read(p []byte) (int, error) {
	n, err := f.ReadCloser.Read(p)
	if err != nil {
		removeHeaders(f.answer.Trailer, f.own)
	}
	return n, err
}

// finalAnswers hides interim answers, such as 103, from [httputil.ReverseProxy]. It would pass them on with
// all their headers and in any number, and drop the headers that this server has set. Without it, the
// transport reads at most maxHeader bytes of them.
type finalAnswers struct{ http.RoundTripper }

func (f finalAnswers) RoundTrip(r *http.Request) (*http.Response, error) {
	return f.RoundTripper.RoundTrip(r.WithContext(untraced{r.Context()}))
}

// untraced is a context without hooks for the steps of a request.
type untraced struct{ context.Context }

func (c untraced) Value(key any) any {
	value := c.Context.Value(key)
	if _, ok := value.(*httptrace.ClientTrace); ok {
		return nil
	}
	return value
}

// ofOrigin reports whether a header of an answer has an effect on everything that has the same origin in a
// browser, this server's own pages included.
func ofOrigin(name string) bool {
	switch http.CanonicalHeaderKey(name) {
	case "Set-Cookie", "Clear-Site-Data", "Alt-Svc", "Strict-Transport-Security", "Service-Worker-Allowed":
		return true
	default:
		return false
	}
}

// private reports whether a header is between the client and the gateway alone, or between the gateway
// and the worker.
func private(name string) bool {
	switch name = http.CanonicalHeaderKey(name); name {
	case "Cookie", "X-Api-Key", "X-Access-Token", "E2b-Traffic-Access-Token", proto.HeaderSandboxID,
		proto.HeaderSandboxPort:
		return true
	default:
		return strings.HasPrefix(name, proto.HeaderPrefix)
	}
}

// dialTLS returns the function that connects to an address, whatever the address of a request.
func dialTLS(dialer *tls.Dialer, address string) func(ctx context.Context, network, _ string) (net.Conn, error) {
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return dialer.DialContext(ctx, network, address)
	}
}
