package storagetest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
)

// Proxy forwards requests to a [Server] with the faults of its [Injector].
type Proxy struct {
	*Injector
	Endpoint string // http://127.0.0.1:PORT
	server   *httptest.Server
	forward  *http.Transport
}

// Proxy starts a proxy with an injector, which other proxies may share.
func (s *Server) Proxy(faults *Injector) *Proxy {
	p := &Proxy{Injector: faults, forward: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", s.socket())
		},
		DisableCompression: true,
	}}
	next := &httputil.ReverseProxy{
		Transport: p.forward,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "s3"})
			r.Out.Host = r.In.Host // part of the signature
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	p.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen := r.Clone(context.Background())
		kind := p.record(seen)
		p.notify(seen, false)
		defer p.notify(seen, true) // also if the handler panics
		serve(kind, next, w, r)
	}))
	p.Endpoint = p.server.URL
	return p
}

// Close stops the proxy when its requests are answered. Requests that get no response end at once.
func (p *Proxy) Close() {
	p.server.CloseClientConnections()
	p.server.Close()
	p.forward.CloseIdleConnections()
}

// StoreURL returns the URL of a blob store with a prefix, through the proxy.
func (p *Proxy) StoreURL(prefix string) string { return StoreURL(p.Endpoint, prefix) }

// Operation returns what a request asks of a blob store: put, get, stat, delete or list.
func Operation(r *http.Request) string {
	switch r.Method {
	case http.MethodPut, http.MethodPost:
		return "put"
	case http.MethodHead:
		return "stat"
	case http.MethodDelete:
		return "delete"
	}
	if r.URL.Query().Has("list-type") {
		return "list"
	}
	return "get"
}

func serve(kind Fault, next http.Handler, w http.ResponseWriter, r *http.Request) {
	refuse := func(status int, code string) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code><Message>a fault of the test</Message></Error>", code)
	}
	switch kind {
	case Broken:
		refuse(http.StatusInternalServerError, "InternalError")
	case Throttled:
		refuse(http.StatusServiceUnavailable, "SlowDown")
	case Silent:
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	case Reset:
		_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
		reset(w)
	case Lost:
		next.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	case Cut, Wrong, Slow:
		if r.ContentLength > 0 {
			damageRequest(kind, next, w, r)
		} else {
			damageResponse(kind, next, w, r)
		}
	default:
		next.ServeHTTP(w, r)
	}
}

// reset ends a connection with a TCP reset.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	if c, ok := conn.(*net.TCPConn); ok {
		_ = c.SetLinger(0)
	}
	_ = conn.Close()
}

func damageRequest(kind Fault, next http.Handler, w http.ResponseWriter, r *http.Request) {
	if kind == Cut {
		_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
		panic(http.ErrAbortHandler)
	}
	r.Body = &FaultyReader{ReadCloser: r.Body, Kind: kind, Size: r.ContentLength}
	next.ServeHTTP(w, r)
}

func damageResponse(kind Fault, next http.Handler, w http.ResponseWriter, r *http.Request) {
	response := httptest.NewRecorder()
	next.ServeHTTP(response, r)
	maps.Copy(w.Header(), response.Header())
	w.WriteHeader(response.Code)
	body := response.Body.Bytes()
	if len(body) > 0 {
		damaged := &FaultyReader{ReadCloser: io.NopCloser(bytes.NewReader(body)), Kind: kind, Size: int64(len(body))}
		if _, err := io.Copy(flushing{w}, damaged); err != nil {
			return
		}
	}
	if kind == Cut {
		panic(http.ErrAbortHandler)
	}
}

// flushing sends each write separately.
type flushing struct{ http.ResponseWriter }

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.ResponseWriter.Write(p)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}
