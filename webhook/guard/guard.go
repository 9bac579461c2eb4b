// Package guard decides where webhooks may go, so that nobody can have the server send requests into the networks it is in: it checks
// the URLs that people give, and every connection when it is made. It sends nothing itself.
//
// What counts is the address that is connected to. A name is checked when a URL is accepted only to tell people early: it may lead
// elsewhere later.
package guard

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"code.dny.dev/ssrf"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// lookupWithin is how long a check waits for a name's addresses.
	lookupWithin = time.Second
	// idleFor is how long a connection is kept without a request.
	idleFor = 30 * time.Second
	// maxIdle and maxIdlePerHost bound the kept HTTP/1 connections. HTTP/2 ones, one a host, are bounded by idleFor alone.
	maxIdle        = 1024
	maxIdlePerHost = 8
	// maxHeader is how large the headers of an answer may be, in bytes.
	maxHeader = 64 << 10
	// streamBuffer and connBuffer are how much of answers over HTTP/2 receivers may send ahead, in bytes.
	streamBuffer = 64 << 10
	connBuffer   = 512 << 10
	// pingAfter is the silence on an HTTP/2 connection with requests after which it is asked for a sign of life, within pingWithin.
	pingAfter  = 10 * time.Second
	pingWithin = 5 * time.Second
)

// azureHost is where Azure's virtual machines reach the services of their host, in the middle of public address space.
var azureHost = netip.MustParsePrefix("168.63.129.16/32")

// Config is what is open besides the public Internet over https on the ports 443 and 8443. The zero value opens nothing.
type Config struct {
	// AllowCIDRs are ranges of addresses that are open although they are not public, or the host's own. Their addresses may also stand
	// in URLs. For development and tests.
	AllowCIDRs []netip.Prefix
	// AllowHTTP opens plain http, and port 80.
	AllowHTTP bool
	// AllowPorts are ports open besides.
	AllowPorts []int
	// CAFile has certificates of authorities, PEM, that are trusted besides the system's; empty for none.
	CAFile string
	// Resolver resolves names; nil for the system's.
	Resolver *net.Resolver
}

// Guard decides where webhooks may go. Make one with [New].
type Guard struct {
	config    Config
	ports     []uint16
	ranges    *ssrf.Guardian
	resolver  *net.Resolver
	dialer    net.Dialer
	transport *http.Transport
}

// RefusedError says that webhooks may not go where one was about to.
type RefusedError struct {
	// Reason is a clause for whoever chose the URL. It does not name addresses, which would tell what names mean inside our networks.
	Reason string
}

func (e *RefusedError) Error() string { return e.Reason }

// New makes a guard. Its errors name what is wrong in the configuration.
func New(c Config) (*Guard, error) {
	g := &Guard{config: c, ports: []uint16{443, 8443}, resolver: c.Resolver}
	if g.resolver == nil {
		g.resolver = net.DefaultResolver
	}
	if c.AllowHTTP {
		g.ports = append(g.ports, 80)
	}
	for _, port := range c.AllowPorts {
		if port < 1 || port > 65535 {
			return nil, fmt.Errorf("port %d that webhooks may go to: must be 1 to 65535", port)
		}
		g.ports = append(g.ports, uint16(port))
	}
	slices.Sort(g.ports)
	g.ports = slices.Compact(g.ports)
	var allow4, allow6 []netip.Prefix
	for _, p := range c.AllowCIDRs {
		switch {
		case !p.IsValid() || p.Addr().Is4In6():
			return nil, fmt.Errorf("range %s that webhooks may go to: must be like 10.1.0.0/16 or fd00:1::/32", p)
		case p.Addr().Is4():
			allow4 = append(allow4, p)
		default:
			allow6 = append(allow6, p)
		}
	}
	g.ranges = ssrf.New(ssrf.WithPorts(g.ports...), ssrf.WithDeniedV4Prefixes(azureHost),
		ssrf.WithAllowedV4Prefixes(allow4...), ssrf.WithAllowedV6Prefixes(allow6...))
	roots, err := rootsWith(c.CAFile)
	if err != nil {
		return nil, err
	}
	g.dialer = net.Dialer{Timeout: time.Duration(proto.MaxWebhookTimeout), Resolver: g.resolver, Control: g.control}
	g.transport = &http.Transport{
		Proxy:                  nil, // a proxy would connect where we cannot see
		DialContext:            g.dial,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		TLSHandshakeTimeout:    time.Duration(proto.MaxWebhookTimeout),
		DisableCompression:     true, // what a few bytes unfold to would have to be bounded
		MaxResponseHeaderBytes: maxHeader,
		IdleConnTimeout:        idleFor,
		MaxIdleConns:           maxIdle,
		MaxIdleConnsPerHost:    maxIdlePerHost,
		ForceAttemptHTTP2:      true,
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream: streamBuffer, MaxReceiveBufferPerConnection: connBuffer,
			SendPingTimeout: pingAfter, PingTimeout: pingWithin,
		},
	}
	return g, nil
}

// rootsWith gives the system's certificate authorities and those of the file; nil, which stands for the system's, without a file.
func rootsWith(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read certificate authorities for webhooks: %w", err)
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("read the system's certificate authorities: %w", err)
	}
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("read certificate authorities for webhooks: %s holds no certificate in PEM form", file)
	}
	return roots, nil
}

// Transport gives the one transport of this guard, for all requests to receivers: it connects to nothing that is not open, and knows
// no proxies. An error for what it refuses wraps a [*RefusedError]. Schemes, and public addresses written in URLs, are not its business:
// [Guard.CheckForm] comes first. A connection is kept for the next request to the same host and port, and was judged when it was made.
func (g *Guard) Transport() *http.Transport { return g.transport }

// dial connects to HOST:PORT.
func (g *Guard) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("dial a receiver: %w", err)
	}
	return g.dialer.DialContext(ctx, network, net.JoinHostPort(absolute(host), port))
}

// absolute makes a name absolute: the search list of this machine is nothing to people outside, and its entries might be asked for
// first. Names without a dot are this machine's affair anyway.
func absolute(host string) string {
	if _, err := netip.ParseAddr(host); err == nil || !strings.Contains(host, ".") {
		return host
	}
	return host + "."
}

// control judges the very address that a socket is about to be connected to.
func (g *Guard) control(network, address string, conn syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("read the address to dial: %w", err)
	}
	switch err := g.ranges.Safe(network, address, conn); {
	case errors.Is(err, ssrf.ErrProhibitedPort):
		return &RefusedError{Reason: fmt.Sprintf("port %d is not open to webhooks: %s", to.Port(), g.openPorts())}
	case err != nil:
		return errAddress()
	}
	return g.judge(to.Addr())
}

func errAddress() *RefusedError {
	return &RefusedError{Reason: "the host has an address that is not open to webhooks: it is not public"}
}

// judge tells whether webhooks may go to an address: nil, a [*RefusedError], or that it cannot be told.
func (g *Guard) judge(addr netip.Addr) error {
	if g.allowed(addr) {
		return nil
	}
	if g.ranges.SafeAddr(addr) != nil {
		return errAddress()
	}
	// Asked afresh each time: a machine gets and loses addresses while it runs.
	own, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list the host's addresses: %w", err)
	}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err != nil || p.Addr().Unmap() == addr {
			return errAddress()
		}
	}
	return nil
}

// allowed reports whether an address is in a range that the operator opened.
func (g *Guard) allowed(addr netip.Addr) bool {
	return slices.ContainsFunc(g.config.AllowCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
}

func (g *Guard) openPorts() string {
	words := make([]string, len(g.ports))
	for i, port := range g.ports {
		words[i] = fmt.Sprint(port)
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last] + " are"
}

// Warnings tells what is open that is closed by default, a clause each.
func (g *Guard) Warnings() []string {
	var warnings []string
	for _, p := range g.config.AllowCIDRs {
		warnings = append(warnings, fmt.Sprintf("webhooks may go to addresses in %s, also where they are not public", p))
	}
	if g.config.AllowHTTP {
		warnings = append(warnings, "webhooks may go over plain http, where others can read and change them")
	}
	if len(g.config.AllowPorts) > 0 {
		warnings = append(warnings, fmt.Sprintf("webhooks may go to ports besides 443 and 8443: %s", strings.Trim(fmt.Sprint(g.config.AllowPorts), "[]")))
	}
	return warnings
}
