// Package ports passes requests on to servers in the sandbox.
package ports

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/guest/answer"
)

// Daemon is the port that means the guest itself.
const Daemon = 49983

// Headers that say where a request goes.
const (
	SandboxHeader = "E2b-Sandbox-Id"
	PortHeader    = "E2b-Sandbox-Port"
)

const (
	maxRequests = 512      // that are passed on at a time
	maxHeader   = 64 << 10 // bytes of the header of an answer
	dialTimeout = 10 * time.Second
)

// errClosed means that nothing listens.
var errClosed = errors.New("the port is not open")

// Handler answers requests for ports of the sandbox, and has Next answer those for the guest.
type Handler struct {
	Next http.Handler
	Own  map[int]http.Handler // of other ports on which the guest itself answers

	proxy    *httputil.ReverseProxy
	requests atomic.Int64
}

// New returns a handler.
func New(next http.Handler, own map[int]http.Handler) *Handler {
	transport := &http.Transport{
		DialContext: dial,
		// A connection for each request: a server may go away at any time, and another one come.
		MaxIdleConnsPerHost: -1,
		DisableCompression:  true, MaxResponseHeaderBytes: maxHeader,
	}
	return &Handler{Next: next, Own: own, proxy: &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     transport,
		FlushInterval: -1,
		ErrorHandler:  fail,
	}}
}

// target is the port that a request is for.
type target struct {
	port    int
	sandbox string
}

type targetKey struct{}

// ServeHTTP answers a request.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	value := r.Header.Get(PortHeader)
	if value == "" {
		h.Next.ServeHTTP(w, r)
		return
	}
	port, err := strconv.ParseUint(value, 10, 16)
	if err != nil || port == 0 {
		answer.Error(w, http.StatusBadRequest, PortHeader+" must be a number from 1 to 65535")
		return
	}
	if port == Daemon {
		h.Next.ServeHTTP(w, r)
		return
	}
	if own := h.Own[int(port)]; own != nil {
		own.ServeHTTP(w, r)
		return
	}
	if h.requests.Add(1) > maxRequests {
		h.requests.Add(-1)
		answer.Error(w, http.StatusServiceUnavailable,
			"the sandbox has "+strconv.Itoa(maxRequests)+" requests to its ports, the most it can have")
		return
	}
	defer h.requests.Add(-1)
	t := target{int(port), r.Header.Get(SandboxHeader)}
	// A server may answer before the request has ended, which would otherwise cut its answer off.
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
		panic(http.ErrAbortHandler) // no server of this program refuses it
	}
	h.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), targetKey{}, t)))
}

// rewrite makes the request to the server of the one to the guest. The host stays that of the client.
func rewrite(r *httputil.ProxyRequest) {
	t, _ := r.In.Context().Value(targetKey{}).(target)
	r.Out.URL = &url.URL{
		Scheme: "http", Host: net.JoinHostPort("localhost", strconv.Itoa(t.port)),
		Path: r.In.URL.Path, RawPath: r.In.URL.RawPath, RawQuery: r.In.URL.RawQuery, ForceQuery: r.In.URL.ForceQuery,
	}
	r.Out.Host = r.In.Host
	for _, name := range []string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded"} {
		if values := r.In.Header.Values(name); len(values) > 0 {
			r.Out.Header[name] = values
		}
	}
	r.Out.Header.Del(SandboxHeader)
	r.Out.Header.Del(PortHeader)
}

// dial connects to a port of the loopback interface.
func dial(ctx context.Context, network, address string) (net.Conn, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, network, net.JoinHostPort("127.0.0.1", port))
	if err != nil && ctx.Err() == nil {
		conn, err = dialer.DialContext(ctx, network, net.JoinHostPort("::1", port))
	}
	if err != nil {
		return nil, errors.Join(errClosed, err)
	}
	return conn, nil
}

// fail answers a request that could not be passed on. Clients recognise a port on which nothing listens by
// the words of the message.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	t, _ := r.Context().Value(targetKey{}).(target)
	message := "The sandbox is running but port is not open"
	if !errors.Is(err, errClosed) {
		message = "The sandbox is running but the server on the port did not answer: " + err.Error()
	}
	answer.JSON(w, http.StatusBadGateway, struct {
		Sandbox string `json:"sandboxId"`
		Message string `json:"message"`
		Port    int    `json:"port"`
		Code    int    `json:"code"`
	}{t.sandbox, message, t.port, http.StatusBadGateway})
}
