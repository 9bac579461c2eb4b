// Package guard protects the server's own networks from webhooks and from storage connections
// (server-side request forgery). It checks their URLs when they are configured, and the address of
// every connection when it is made.
//
// Only the check of the connected address is authoritative. The addresses of a host name are also
// checked when a URL is configured, to report mistakes early, but they may change later.
package guard

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
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
	lookupTimeout = time.Second
	idleTimeout   = 30 * time.Second
	// maxIdle and maxIdlePerHost bound idle HTTP/1 connections. HTTP/2 connections, one per host,
	// are bounded by idleTimeout alone.
	maxIdle        = 1024
	maxIdlePerHost = 8
	maxHeaderBytes = 64 << 10
	// streamBuffer and connBuffer are the HTTP/2 receive windows, in bytes.
	streamBuffer = 64 << 10
	connBuffer   = 512 << 10
	// pingAfter is the silence on an HTTP/2 connection with open requests after which it is pinged.
	pingAfter   = 10 * time.Second
	pingTimeout = 5 * time.Second
)

// azureHost is the address of host services on Azure's virtual machines. It lies in public address
// space.
var azureHost = netip.MustParsePrefix("168.63.129.16/32")

// Config allows more than https to public addresses on the ports 443 and 8443.
type Config struct {
	// For names the guarded URLs, in the plural, for messages; empty for webhooks.
	For string
	// AllowCIDRs are allowed address ranges that are not public or belong to this host. URLs may
	// contain their addresses. For development and tests.
	AllowCIDRs []netip.Prefix
	// AllowHTTP allows plain http, and port 80.
	AllowHTTP  bool
	AllowPorts []PortRange // more ports
	// CAFile is a PEM file of certificate authorities to trust in addition to the system's; empty for none.
	CAFile   string
	Resolver *net.Resolver // nil for the system's
}

// Guard checks the destinations of webhooks. Use [New] to create one.
type Guard struct {
	config    Config
	ports     []PortRange
	ranges    *ssrf.Guardian
	resolver  *net.Resolver
	dialer    net.Dialer
	transport *http.Transport
}

// RefusedError is returned for a destination that is not allowed.
type RefusedError struct {
	// Reason is a clause for the owner of the URL. It contains no addresses, which would disclose
	// how names resolve in the server's networks.
	Reason string
}

func (e *RefusedError) Error() string { return e.Reason }

// New returns a guard, or an error if the configuration is invalid.
func New(c Config) (*Guard, error) {
	c.For = cmp.Or(c.For, "webhooks")
	g := &Guard{config: c, ports: []PortRange{{443, 443}, {8443, 8443}}, resolver: c.Resolver}
	if g.resolver == nil {
		g.resolver = net.DefaultResolver
	}
	if c.AllowHTTP {
		g.ports = append(g.ports, PortRange{80, 80})
	}
	for _, ports := range c.AllowPorts {
		if ports.First < 1 || ports.Last > maxPort || ports.First > ports.Last {
			return nil, fmt.Errorf("port %s that %s may go to: must be 1 to %d", ports, c.For, maxPort)
		}
		g.ports = append(g.ports, ports)
	}
	slices.SortFunc(g.ports, func(a, b PortRange) int {
		return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last))
	})
	g.ports = slices.Compact(g.ports)
	var allow4, allow6 []netip.Prefix
	for _, p := range c.AllowCIDRs {
		switch {
		case !p.IsValid() || p.Addr().Is4In6():
			return nil, fmt.Errorf("range %s that %s may go to: must be like 10.1.0.0/16 or fd00:1::/32", p, c.For)
		case p.Addr().Is4():
			allow4 = append(allow4, p)
		default:
			allow6 = append(allow6, p)
		}
	}
	g.ranges = ssrf.New(ssrf.WithAnyPort(), ssrf.WithDeniedV4Prefixes(azureHost),
		ssrf.WithAllowedV4Prefixes(allow4...), ssrf.WithAllowedV6Prefixes(allow6...))
	roots, err := rootsWith(c.CAFile)
	if err != nil {
		return nil, err
	}
	g.dialer = net.Dialer{Timeout: time.Duration(proto.MaxWebhookTimeout), Resolver: g.resolver, Control: g.control}
	g.transport = &http.Transport{
		Proxy:                  nil, // a proxy's connections could not be checked
		DialContext:            g.Dial,
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		TLSHandshakeTimeout:    time.Duration(proto.MaxWebhookTimeout),
		DisableCompression:     true, // a decompressed body would need a limit of its own
		MaxResponseHeaderBytes: maxHeaderBytes,
		IdleConnTimeout:        idleTimeout,
		MaxIdleConns:           maxIdle,
		MaxIdleConnsPerHost:    maxIdlePerHost,
		ForceAttemptHTTP2:      true,
		HTTP2: &http.HTTP2Config{
			MaxReceiveBufferPerStream: streamBuffer, MaxReceiveBufferPerConnection: connBuffer,
			SendPingTimeout: pingAfter, PingTimeout: pingTimeout,
		},
	}
	return g, nil
}

// rootsWith returns the certificate authorities of the system and of the file. If file is empty, it returns nil, which
// means the system's.
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

// Transport returns the guard's transport. It connects only to allowed addresses and uses no
// proxies. Its error wraps a [*RefusedError] if the address is not allowed. Callers check the URL
// with [Guard.CheckURL] first, since the transport checks neither schemes nor literal public
// addresses. An idle connection is reused without another check.
func (g *Guard) Transport() *http.Transport { return g.transport }

// Dial connects to an allowed address, as the guard's transport does.
func (g *Guard) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("dial a receiver: %w", err)
	}
	return g.dialer.DialContext(ctx, network, net.JoinHostPort(absolute(host), port))
}

// absolute appends a dot to a host name, so that this machine's resolver does not apply its search
// list. Names without a dot are local to this machine, and stay unchanged.
func absolute(host string) string {
	if _, err := netip.ParseAddr(host); err == nil || !strings.Contains(host, ".") {
		return host
	}
	return host + "."
}

// control checks the address that a socket is about to be connected to.
func (g *Guard) control(network, address string, conn syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return fmt.Errorf("read the address to dial: %w", err)
	}
	if !g.openPort(to.Port()) {
		return &RefusedError{Reason: fmt.Sprintf("port %d is not open to %s: %s", to.Port(), g.config.For, g.openPorts())}
	}
	if g.ranges.Safe(network, address, conn) != nil {
		return g.addressError()
	}
	return g.checkAddr(to.Addr())
}

func (g *Guard) addressError() *RefusedError {
	return &RefusedError{Reason: "the host has an address that is not open to " + g.config.For + ": it is not public"}
}

// checkAddr returns a [*RefusedError] if addr is not allowed, and another error if that cannot be
// determined.
func (g *Guard) checkAddr(addr netip.Addr) error {
	if g.allowed(addr) {
		return nil
	}
	if g.ranges.SafeAddr(addr) != nil {
		return g.addressError()
	}
	// Not cached: a machine gains and loses addresses while it runs.
	own, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list the host's addresses: %w", err)
	}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err != nil || p.Addr().Unmap() == addr {
			return g.addressError()
		}
	}
	return nil
}

// allowed reports whether addr is in one of the allowed ranges.
func (g *Guard) allowed(addr netip.Addr) bool {
	return slices.ContainsFunc(g.config.AllowCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
}

func (g *Guard) openPort(port uint16) bool {
	return slices.ContainsFunc(g.ports, func(r PortRange) bool { return r.contains(int(port)) })
}

func (g *Guard) openPorts() string {
	ports := make([]string, len(g.ports))
	for i, r := range g.ports {
		ports[i] = r.String()
	}
	last := len(ports) - 1
	return strings.Join(ports[:last], ", ") + " and " + ports[last] + " are"
}

// Warnings returns a clause for each setting that allows more than the default.
func (g *Guard) Warnings() []string {
	var warnings []string
	for _, p := range g.config.AllowCIDRs {
		warnings = append(warnings,
			fmt.Sprintf("%s may go to addresses in %s, also where they are not public", g.config.For, p))
	}
	if g.config.AllowHTTP {
		warnings = append(warnings, g.config.For+" may go over plain http, where others can read and change them")
	}
	if len(g.config.AllowPorts) > 0 {
		warnings = append(warnings, fmt.Sprintf("%s may go to ports besides 443 and 8443: %s", g.config.For,
			strings.Trim(fmt.Sprint(g.config.AllowPorts), "[]")))
	}
	return warnings
}
