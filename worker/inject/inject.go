// Package inject adds the secrets of an execution to its HTTP requests, as headers, so that the
// program uses them without having them.
//
// A [Proxy] serves the connections of one program to the hosts of its secrets, which package egress
// passes to it instead of relaying them. It ends TLS with a certificate of its own authority, which
// only the jail of this program trusts, sends each request on to the address that the program chose
// and that the network's policy has allowed, and adds the header if the request is for a host of the
// secret. The server proves its name to the proxy with a certificate, against the roots of the
// worker's system. Without TLS, the host is the name for which the jail's resolver answered with the
// address. Everything else that a program sends to these addresses is relayed unchanged.
//
// The proxy speaks HTTP/1.1. It masks the values in what servers answer, see [Proxy.Interception].
package inject

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/guest/mask"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// Limits of a connection.
const (
	maxHeader       = 64 << 10         // bytes of the headers of a request, and of an answer
	headerWithin    = time.Minute      // for the headers of a request
	idleWithin      = 5 * time.Minute  // without a request
	handshakeWithin = 30 * time.Second // of TLS, on either side
	continueWithin  = time.Second      // until a body is sent without "100 Continue"
	upstreamIdle    = time.Minute      // of the connection to the server
)

// Secret is a secret to add to requests.
type Secret struct {
	proto.Injection
	Value string
}

// Proxy adds secrets to the requests of one program.
type Proxy struct {
	hosts     []host
	roots     *x509.CertPool
	authority *authority
	masks     *mask.Masks
}

// host is a host of a secret.
type host struct {
	proto.InjectionHost
	header, value string
}

// New returns a proxy for a program that runs at most for lifetime. If two secrets set the same
// header of a request, the earlier one wins. roots verify servers.
func New(secrets []Secret, lifetime time.Duration, roots *x509.CertPool) (*Proxy, error) {
	p := &Proxy{roots: roots}
	var values []string
	for i := range secrets {
		s := &secrets[i]
		values = append(values, s.Value)
		for _, text := range s.Hosts {
			parsed, err := proto.ParseInjectionHost(text)
			if err != nil {
				return nil, err
			}
			p.hosts = append(p.hosts, host{parsed, http.CanonicalHeaderKey(s.Header), s.Fill(s.Value)})
		}
	}
	p.masks = mask.New(values)
	var err error
	p.authority, err = newAuthority(lifetime)
	return p, err
}

// Certificate returns the certificate of the proxy's authority in PEM.
func (p *Proxy) Certificate() []byte { return p.authority.pem }

// Interception returns the handler of the program's connections. In response headers, *** replaces
// a value. In bodies it is as many asterisks as the value has bytes, so that the length stays
// correct. The proxy asks servers for uncompressed bodies. It does not mask bodies that are
// compressed nevertheless, or connections that have switched to another protocol.
func (p *Proxy) Interception() *jail.Interception {
	i := &jail.Interception{Serve: p.serve}
	for _, h := range p.hosts {
		i.Hosts = append(i.Hosts, h.NetworkRule)
	}
	return i
}

// serve serves a connection; see [jail.Interception]. The first bytes decide what it is.
func (p *Proxy) serve(
	ctx context.Context, conn net.Conn, matched []int, dial func() (net.Conn, error),
) (read []byte, served bool) {
	s := &session{proxy: p, dial: dial}
	for _, i := range matched {
		s.hosts = append(s.hosts, p.hosts[i])
	}
	name, isTLS, read := peek(ctx, conn)
	s.keep(func(h *host) bool { return h.Plain != isTLS && (!isTLS || h.Matches(name)) })
	if len(s.hosts) == 0 || len(read) == 0 {
		return read, false
	}
	s.address = conn.LocalAddr().String()
	_, s.port = splitHost(s.address)
	conn = &replayConn{Conn: conn, rest: read}
	if isTLS {
		s.name = name
		secured := tls.Server(conn, &tls.Config{
			MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.authority.certificate(name) },
		})
		within, cancel := context.WithTimeout(ctx, handshakeWithin)
		defer cancel()
		if err := secured.HandshakeContext(within); err != nil {
			return nil, true
		}
		conn = secured
	}
	s.run(ctx, conn)
	return nil, true
}

// session is one connection of the program.
type session struct {
	proxy   *Proxy
	hosts   []host // those that requests may be for
	name    string // of the server, which its certificate must prove; empty without TLS
	address string // of the server, with the port
	port    string
	dial    func() (net.Conn, error)

	transport *http.Transport
	handlers  sync.WaitGroup
}

// keep removes the hosts that are not to be kept.
func (s *session) keep(wanted func(*host) bool) {
	s.hosts = slices.DeleteFunc(s.hosts, func(h host) bool { return !wanted(&h) })
}

// run serves the requests of a connection until it is closed.
func (s *session) run(ctx context.Context, conn net.Conn) {
	dial := func(context.Context, string, string) (net.Conn, error) { return s.dial() }
	s.transport = &http.Transport{
		DialContext: dial, DisableCompression: true, MaxConnsPerHost: 1, MaxResponseHeaderBytes: maxHeader,
		IdleConnTimeout: upstreamIdle, TLSHandshakeTimeout: handshakeWithin, ExpectContinueTimeout: continueWithin,
		TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, ServerName: s.name, RootCAs: s.proxy.roots,
			NextProtos: []string{"http/1.1"},
		},
	}
	defer s.transport.CloseIdleConnections()
	server := &http.Server{
		Handler: s, MaxHeaderBytes: maxHeader, ReadHeaderTimeout: headerWithin, IdleTimeout: idleWithin,
		ErrorLog: log.New(io.Discard, "", 0), BaseContext: func(net.Listener) context.Context { return ctx },
	}
	l := &oneConn{conn: conn, done: make(chan struct{})}
	_ = server.Serve(l) // ends when the connection is closed
	s.handlers.Wait()
}

// ServeHTTP sends a request on.
func (s *session) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.handlers.Add(1)
	defer s.handlers.Done()
	name, port := splitHost(r.Host)
	if port == "" {
		port = "80"
		if s.name != "" {
			port = "443"
		}
	}
	switch {
	case r.Method == http.MethodConnect || r.Method == http.MethodTrace:
		http.Error(w, "This host gets a secret, so that "+r.Method+" is not sent to it.", http.StatusMethodNotAllowed)
		return
	case s.name != "" && (name != s.name || port != s.port):
		http.Error(w, "The connection is to "+s.name+" at port "+s.port+", and the request is for another host.",
			http.StatusMisdirectedRequest)
		return
	}
	headers := map[string]string{}
	for _, h := range s.hosts {
		if _, ok := headers[h.header]; !ok && h.Matches(name) && port == s.port {
			headers[h.header] = h.value
		}
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:        func(p *httputil.ProxyRequest) { s.rewrite(p, headers) },
		ModifyResponse: s.modify, ErrorHandler: s.failed,
		Transport: s.transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}
	proxy.ServeHTTP(&maskedHeaders{w, s.proxy}, r)
}

// rewrite changes only the headers of secrets. Hop-by-hop and proxy headers, including those that
// the program declares as such, have already been removed.
func (s *session) rewrite(p *httputil.ProxyRequest, headers map[string]string) {
	u := p.Out.URL
	u.Scheme, u.Host, u.User, u.RawQuery = "http", s.address, nil, p.In.URL.RawQuery
	if s.name != "" {
		u.Scheme, u.Host = "https", net.JoinHostPort(s.name, s.port)
	}
	p.Out.Host = p.In.Host
	for name, value := range headers {
		p.Out.Header.Set(name, value)
		p.Out.Header.Set("Accept-Encoding", "identity")
	}
}

// modify masks the body and the trailer of an answer.
func (s *session) modify(r *http.Response) error {
	// Over QUIC, the program would not meet the proxy.
	r.Header.Del("Alt-Svc")
	if r.StatusCode == http.StatusSwitchingProtocols { // the headers are not written with WriteHeader
		s.proxy.maskHeader(r.Header)
		return nil
	}
	r.Body = &maskedBody{body: r.Body, response: r, proxy: s.proxy}
	return nil
}

// failed answers a request that could not be forwarded. The program does not get the cause, which
// may have addresses of the worker.
func (s *session) failed(w http.ResponseWriter, _ *http.Request, err error) {
	why := "The server could not be reached, or has ended the connection without an answer."
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		why = "The server has no certificate for " + s.name + " that the worker trusts, so the secret was not sent."
	}
	http.Error(w, why, http.StatusBadGateway)
}

// splitHost splits the target of a request. The name is in lower case, without a final dot.
func splitHost(target string) (name, port string) {
	name = target
	if h, p, err := net.SplitHostPort(target); err == nil {
		name, port = h, p
	}
	return strings.ToLower(strings.TrimSuffix(name, ".")), port
}

// text masks the values in a text.
func (p *Proxy) text(s string) string {
	var out bytes.Buffer
	w := p.masks.Writer(&out)
	_, _ = w.Write([]byte(s))
	w.Flush()
	return out.String()
}

func (p *Proxy) maskHeader(h http.Header) {
	for _, values := range h {
		for i, v := range values {
			values[i] = p.text(v)
		}
	}
}

// maskedHeaders masks the headers of responses, including provisional ones, and adds no type.
type maskedHeaders struct {
	http.ResponseWriter
	proxy *Proxy
}

func (w *maskedHeaders) WriteHeader(status int) {
	h := w.Header()
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // or it would be guessed
	}
	w.proxy.maskHeader(h)
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for [http.ResponseController].
func (w *maskedHeaders) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// maskedBody masks a body, and at its end the trailer.
type maskedBody struct {
	body     io.ReadCloser
	response *http.Response
	proxy    *Proxy
	writer   *mask.Writer // writes to ready; nil before the first read
	ready    bytes.Buffer
	err      error // what follows ready
}

func (b *maskedBody) Read(p []byte) (int, error) {
	if b.writer == nil {
		b.writer = b.proxy.masks.Writer(&b.ready)
		b.writer.KeepLength = true
	}
	for b.ready.Len() == 0 {
		if b.err != nil {
			return 0, b.err
		}
		n, err := b.body.Read(p)
		_, _ = b.writer.Write(p[:n])
		if b.err = err; err != nil {
			b.writer.Flush()
			b.proxy.maskHeader(b.response.Trailer)
		}
	}
	return b.ready.Read(p)
}

func (b *maskedBody) Close() error { return b.body.Close() }
