package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	resolvConf = "/etc/resolv.conf"

	queryLimit, queryLimitBurst = 100, 200 // queries of a link, per second and in a burst
	maxQueries                  = 64       // queries of a link in flight
	maxDNSConns                 = 8        // TCP connections of a link to the resolver
	maxConnQueries              = 128      // queries over one of them
	maxRecords                  = 128      // in an answer, which a tenant may have crafted

	upstreamWithin = 2 * time.Second // timeout of one upstream
	answerWithin   = 6 * time.Second // timeout of all upstreams
	ednsSize       = 1232            // bytes of a UDP answer, unless the query allows less
)

// resolver answers the jails' DNS queries.
type resolver struct {
	network   *Network
	upstreams []netip.AddrPort
	servers   []*dns.Server
}

// questionTypes are the answered types: those that programs need, and none that can carry much
// data.
var questionTypes = map[uint16]bool{
	dns.TypeA: true, dns.TypeAAAA: true, dns.TypeCNAME: true, dns.TypeMX: true, dns.TypeTXT: true, dns.TypeSRV: true,
	dns.TypePTR: true,
	dns.TypeNS:  true, dns.TypeSOA: true, dns.TypeCAA: true, dns.TypeNAPTR: true, dns.TypeHTTPS: true, dns.TypeSVCB: true,
}

// hiddenDomains are never public. The host's resolvers may know such names, which must stay hidden
// from programs.
var hiddenDomains = []string{"localhost", "local", "internal", "home.arpa", "test", "invalid", "onion", "alt"}

func systemResolvers() ([]netip.AddrPort, error) {
	const remedy = "name a DNS server there: sandboxes' names are asked of it"
	conf, err := dns.ClientConfigFromFile(resolvConf)
	if err != nil {
		return nil, fmt.Errorf("find the host's DNS servers: %w; %s", err, remedy)
	}
	var list []netip.AddrPort
	for _, server := range conf.Servers {
		addr, err := netip.ParseAddrPort(net.JoinHostPort(server, conf.Port))
		if err != nil {
			return nil, fmt.Errorf("read %s: %w; %s", resolvConf, err, remedy)
		}
		list = append(list, addr)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s has no nameserver; %s", resolvConf, remedy)
	}
	return list, nil
}

func openResolver(n *Network, upstreams []netip.AddrPort) (*resolver, error) {
	r := &resolver{network: n, upstreams: upstreams}
	err := InNamespace(n.namespace.ns, func() error {
		for _, addr := range []netip.Addr{ResolverIPv4, ResolverIPv6} {
			at := netip.AddrPortFrom(addr, 53)
			packets, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			r.servers = append(r.servers, &dns.Server{PacketConn: packets, Handler: r, UDPSize: ednsSize})
			conns, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			r.servers = append(r.servers, &dns.Server{Listener: &listener{conns, n}, Handler: r, MaxTCPQueries: maxConnQueries})
		}
		return nil
	})
	if err != nil {
		for _, s := range r.servers {
			if s.Listener != nil {
				_ = s.Listener.Close()
			} else {
				_ = s.PacketConn.Close()
			}
		}
		return nil, fmt.Errorf("listen as resolver in the egress namespace: %w; the worker needs CAP_NET_BIND_SERVICE", err)
	}
	return r, nil
}

// serve starts the servers and returns when they are ready.
func (r *resolver) serve(wg *sync.WaitGroup) {
	for _, s := range r.servers {
		ready := make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		wg.Go(func() { _ = s.ActivateAndServe() })
		<-ready
	}
}

func (r *resolver) close() {
	for _, s := range r.servers {
		_ = s.Shutdown()
	}
}

// listener limits the connections of each link and closes them with the link.
type listener struct {
	net.Listener
	network *Network
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // Close does not wait for unsent data
		}
		from := l.network.linkAt(remote(conn.RemoteAddr()))
		if from == nil || from.dnsConns.Add(1) > maxDNSConns {
			if from != nil {
				from.dnsConns.Add(-1)
			}
			_ = conn.Close()
			continue
		}
		end := sync.OnceFunc(func() {
			from.dnsConns.Add(-1)
			_ = conn.Close()
		})
		stop := context.AfterFunc(from.ctx, end)
		return &linkConn{Conn: conn, end: func() { stop(); end() }}, nil
	}
}

type linkConn struct {
	net.Conn
	end func()
}

func (c *linkConn) Close() error {
	c.end()
	return nil
}

func remote(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// ServeDNS answers a query.
func (r *resolver) ServeDNS(w dns.ResponseWriter, query *dns.Msg) {
	l := r.network.linkAt(remote(w.RemoteAddr()))
	if l == nil || !l.start() {
		return
	}
	defer l.done()
	answer := new(dns.Msg)
	answer.SetReply(query)
	answer.RecursionAvailable = true
	r.answer(l, query, answer)
	size := dns.MaxMsgSize
	if _, ok := w.RemoteAddr().(*net.UDPAddr); ok {
		size = dns.MinMsgSize
	}
	if opt := query.IsEdns0(); opt != nil {
		answer.SetEdns0(ednsSize, false)
		if size == dns.MinMsgSize {
			size = min(max(int(opt.UDPSize()), dns.MinMsgSize), ednsSize)
		}
	}
	answer.Truncate(size)
	_ = w.WriteMsg(answer) // fails if the program is gone
}

// answer sets the code and the records.
func (r *resolver) answer(l *Link, query, answer *dns.Msg) {
	answer.Rcode = dns.RcodeRefused
	q := query.Question[0] // the server rejects messages with several questions
	name := canonicalName(q.Name)
	refuse := func(reason proto.BlockReason) {
		l.block(proto.BlockedConnection{Host: name, Protocol: "dns", Reason: reason, At: time.Now()})
	}
	defer l.inFlight.Add(-1)
	switch {
	case l.inFlight.Add(1) > maxQueries, !l.queries.Allow():
		refuse(proto.BlockedLimit)
		return
	case q.Qclass != dns.ClassINET || !questionTypes[q.Qtype]:
		answer.Rcode = dns.RcodeNotImplemented
		return
	case !isPublicName(name) && !l.permits.listsPrivate(name):
		refuse(proto.BlockedName)
		return
	case !l.permits.mayResolve(name):
		refuse(proto.BlockedNotAllowed)
		return
	}
	found, err := r.forward(l.ctx, q)
	if err != nil {
		answer.Rcode = dns.RcodeServerFailure
		return
	}
	records, stripped, err := r.filterRecords(l, name, q.Qtype, found.Answer)
	if err != nil {
		answer.Rcode = dns.RcodeServerFailure
		if errors.Is(err, errPrivateFull) { // a program can repeat it, so that it must not fill the log
			refuse(proto.BlockedLimit)
		} else {
			r.network.log.Error("private destination not opened", "name", name, "error", err)
		}
		return
	}
	if stripped && !hasType(records, q.Qtype) {
		return
	}
	answer.Rcode, answer.Answer = found.Rcode, records
}

// filterRecords returns the records that answer the question, without refused addresses, and
// remembers the addresses. It returns an error if the firewall cannot be opened for a private one.
func (r *resolver) filterRecords(l *Link, name string, kind uint16, found []dns.RR) (
	kept []dns.RR, stripped bool, err error,
) {
	owners := map[string]bool{name: true}
	for before := 0; before < len(owners); { // aliases may be in any order
		before = len(owners)
		for _, rr := range found {
			if alias, ok := rr.(*dns.CNAME); ok && owners[canonicalName(alias.Hdr.Name)] {
				owners[canonicalName(alias.Target)] = true
			}
		}
	}
	var granted []netip.Addr
	var private []netip.AddrPort
	ttl := uint32(maxGrant / time.Second)
	for _, rr := range found {
		header := rr.Header()
		if header.Rrtype != kind && header.Rrtype != dns.TypeCNAME || !owners[canonicalName(header.Name)] {
			continue
		}
		if addr, ok := recordAddr(rr); ok {
			at := l.permits.privateAt(name, addr)
			if refusedRange(addr) && len(at) == 0 || r.network.host.isKnown(addr) {
				stripped = true
				l.block(proto.BlockedConnection{
					Host: name, Address: addr.String(), Protocol: "dns", Reason: proto.BlockedAddress, At: time.Now(),
				})
				continue
			}
			granted, private = append(granted, addr), append(private, at...)
		}
		ttl = min(ttl, header.Ttl)
		kept = append(kept, rr)
	}
	for _, addr := range granted {
		l.permits.learn(name, addr, time.Duration(ttl)*time.Second, time.Now())
	}
	if err := l.openPrivate(private); err != nil { // after learn: what has no permit may be closed
		return nil, false, err
	}
	return kept, stripped, nil
}

func recordAddr(rr dns.RR) (addr netip.Addr, ok bool) {
	switch rr := rr.(type) {
	case *dns.A:
		addr, _ = netip.AddrFromSlice(rr.A.To4())
	case *dns.AAAA:
		addr, _ = netip.AddrFromSlice(rr.AAAA.To16())
	default:
		return addr, false
	}
	return addr, true
}

func hasType(records []dns.RR, kind uint16) bool {
	for _, rr := range records {
		if rr.Header().Rrtype == kind {
			return true
		}
	}
	return false
}

// forward forwards only a question's name and type, nothing else that the program sent.
func (r *resolver) forward(ctx context.Context, q dns.Question) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	m := new(dns.Msg)
	m.SetQuestion(q.Name, q.Qtype)
	m.SetEdns0(ednsSize, false)
	var failed error
	for _, upstream := range r.upstreams {
		found, err := exchange(ctx, m, upstream.String())
		if err == nil {
			return found, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, failed
}

func exchange(ctx context.Context, m *dns.Msg, upstream string) (*dns.Msg, error) {
	var found *dns.Msg
	for _, network := range []string{"udp", "tcp"} {
		m.Id = dns.Id()
		c := dns.Client{Net: network, Timeout: upstreamWithin}
		var err error
		if found, _, err = c.ExchangeContext(ctx, m, upstream); err != nil {
			return nil, err
		}
		if !found.Truncated {
			break
		}
	}
	if len(found.Question) != 1 || !strings.EqualFold(found.Question[0].Name, m.Question[0].Name) ||
		found.Question[0].Qtype != m.Question[0].Qtype {
		return nil, errors.New("the answer is for another question")
	}
	if found.Rcode != dns.RcodeSuccess && found.Rcode != dns.RcodeNameError {
		return nil, fmt.Errorf("the upstream returned %s", dns.RcodeToString[found.Rcode])
	}
	if len(found.Answer) > maxRecords {
		return nil, fmt.Errorf("the answer has %d records, more than %d", len(found.Answer), maxRecords)
	}
	return found, nil
}

// canonicalName returns a name in lower case without the final dot.
func canonicalName(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// isPublicName reports whether a name may belong to the public internet: it has a domain that is
// not reserved for private use, and if it is a reverse name, its address is not refused. It rejects
// labels with a dot, which would make a name look like one of another domain.
func isPublicName(name string) bool {
	if !strings.Contains(name, ".") || strings.Contains(name, `\.`) {
		return false
	}
	for _, domain := range hiddenDomains {
		if strings.HasSuffix(name, "."+domain) {
			return false
		}
	}
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		return publicReverse(rest, 4)
	}
	if rest, ok := strings.CutSuffix(name, ".ip6.arpa"); ok {
		return publicReverse(rest, 32)
	}
	return !strings.HasSuffix(name, ".arpa")
}

// publicReverse reports whether the address of a reverse name is not refused.
func publicReverse(labels string, count int) bool {
	parts := strings.Split(labels, ".")
	if len(parts) != count {
		return false
	}
	slices.Reverse(parts)
	text := strings.Join(parts, ".")
	if count == 32 {
		var groups []string
		for group := range slices.Chunk(parts, 4) {
			groups = append(groups, strings.Join(group, ""))
		}
		text = strings.Join(groups, ":")
	}
	addr, err := netip.ParseAddr(text)
	return err == nil && !refusedRange(addr)
}
