package egress_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

const patience = 20 * time.Second // timeout of the program

// runProgram runs orders as a program in a jail.
func runProgram() {
	p := &program{dialer: net.Dialer{Timeout: patience, Resolver: &net.Resolver{
		PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort(egress.ResolverIPv4.String(), "53"))
		},
	}}}
	orders := bufio.NewScanner(os.Stdin)
	orders.Buffer(nil, 1<<20)
	answers := json.NewEncoder(os.Stdout)
	for orders.Scan() {
		var o order
		if err := json.Unmarshal(orders.Bytes(), &o); err != nil {
			panic(err)
		}
		if err := answers.Encode(p.do(o)); err != nil {
			panic(err)
		}
	}
}

type program struct {
	dialer net.Dialer
	held   []net.Conn
}

func (p *program) do(o order) answer {
	switch o.Do {
	case "tcp":
		return p.tcp(o)
	case "udp":
		return p.udp(o)
	case "shout": // send without listening
		for range o.N {
			conn, err := p.dialer.Dial("udp", o.To)
			if err != nil {
				return answer{Error: errorName(err)}
			}
			_, _ = io.WriteString(conn, o.Data)
			_ = conn.Close()
		}
		return answer{}
	case "flood": // send datagrams as fast as possible
		conn, err := p.dialer.Dial("udp", o.To)
		if err != nil {
			return answer{Error: errorName(err)}
		}
		defer func() { _ = conn.Close() }()
		data := []byte(o.Data)
		if len(data) == 0 {
			data = make([]byte, 60000)
		}
		for range o.N {
			_, _ = conn.Write(data)
		}
		return answer{}
	case "crowd":
		return p.crowd(o)
	case "open_pending":
		return p.openPending(o)
	case "get":
		return p.get(o.To)
	case "raw":
		return p.raw(o)
	case "fetch":
		return p.fetch(o)
	case "resolve":
		return p.resolve(o)
	case "hold":
		return p.hold(o)
	case "begin": // send Data and go on without waiting, while all answers are read
		conn, err := p.dialer.Dial("tcp", o.To)
		if err != nil {
			return answer{Error: errorName(err)}
		}
		p.held = append(p.held, conn)
		go func() { _, _ = io.Copy(io.Discard, conn) }()
		_, err = io.WriteString(conn, o.Data)
		return answer{Error: errorName(err)}
	case "release":
		for _, conn := range p.held {
			_ = conn.Close()
		}
		p.held = nil
		return answer{}
	case "read": // read a held connection to its end
		_, err := io.Copy(io.Discard, p.held[0])
		return answer{Error: errorName(err)}
	case "ask": // send many queries
		return p.ask(o)
	case "bulk":
		return p.bulk(o)
	case "spoof":
		return answer{Error: errorName(spoof(o))}
	case "interfaces":
		addrs, err := net.InterfaceAddrs()
		var found []string
		for _, a := range addrs {
			found = append(found, a.String())
		}
		return answer{Found: found, Error: errorName(err)}
	case "ping":
		return answer{Error: errorName(ping(o.To))}
	}
	panic(o.Do)
}

// errorName returns the errno of an error, or its text.
func errorName(err error) string {
	var errno syscall.Errno
	var timeout net.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &errno):
		return unix.ErrnoName(errno)
	case errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	}
	return err.Error()
}

func (p *program) tcp(o order) answer {
	conn, err := p.dialer.Dial("tcp", o.To)
	if err != nil {
		return answer{Error: errorName(err)}
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, o.Data); err != nil {
		return answer{Error: errorName(err)}
	}
	_ = conn.(*net.TCPConn).CloseWrite() // a reset is reported by Read
	got, err := io.ReadAll(conn)
	return answer{Data: string(got), Error: errorName(err)}
}

func (p *program) udp(o order) answer {
	conn, err := p.dialer.Dial("udp", o.To)
	if err != nil {
		return answer{Error: errorName(err)}
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, o.Data); err != nil {
		return answer{Error: errorName(err)}
	}
	buf := make([]byte, 64<<10)
	n, err := conn.Read(buf)
	return answer{Data: string(buf[:n]), Error: errorName(err)}
}

func (p *program) get(url string) answer {
	c := http.Client{
		Timeout:   patience,
		Transport: &http.Transport{DialContext: p.dialer.DialContext, DisableKeepAlives: true},
	}
	resp, err := c.Get(url)
	if err != nil {
		return answer{Error: errorName(err)}
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return answer{Data: string(body), Error: errorName(err)}
}

// raw sends data, over TLS if the order has a name for it, and returns everything that comes back.
func (p *program) raw(o order) answer {
	conn, err := p.dialer.Dial("tcp", o.To)
	if err != nil {
		return answer{Error: errorName(err)}
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if o.Name != "" {
		conn = tls.Client(conn, &tls.Config{ServerName: o.Name, RootCAs: poolOf(o.CA)})
	}
	if _, err := io.WriteString(conn, o.Data); err != nil {
		return answer{Error: errorName(err)}
	}
	got, err := io.ReadAll(conn)
	return answer{Data: string(got), Error: errorName(err)}
}

func poolOf(pem string) *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(pem))
	return pool
}

// fetch sends N requests, with Data as the body, over one connection, and returns the last answer: its
// headers and trailers as found, and its body.
func (p *program) fetch(o order) answer {
	transport := &http.Transport{
		DialContext: p.dialer.DialContext, TLSClientConfig: &tls.Config{RootCAs: poolOf(o.CA)}, DisableCompression: true,
		MaxConnsPerHost: 1,
	}
	defer transport.CloseIdleConnections()
	var a answer
	for range max(o.N, 1) {
		a = answer{}
		trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			a.Found = append(a.Found, fmt.Sprint(code, " ", h.Get("Link")))
			return nil
		}}
		req, err := http.NewRequestWithContext(httptrace.WithClientTrace(context.Background(), trace), http.MethodPost, o.To,
			strings.NewReader(o.Data))
		if err != nil {
			return answer{Error: errorName(err)}
		}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			return answer{Error: errorName(err)}
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		a.Data, a.Error = string(body), errorName(err)
		a.Found = append(a.Found, resp.Header.Get("X-Received"), resp.Trailer.Get("X-Late"))
	}
	return a
}

// resolve queries our resolver, over UDP and IPv4 or as in Data: "A", "AAAA tcp", "A tcp6".
func (p *program) resolve(o order) answer {
	kind, network, _ := strings.Cut(o.Data, " ")
	server := egress.ResolverIPv4
	if strings.HasSuffix(network, "6") {
		server = egress.ResolverIPv6
	}
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(o.To), dns.StringToType[kind])
	c := dns.Client{Net: strings.TrimSuffix(network, "6"), Timeout: patience}
	reply, _, err := c.Exchange(m, netip.AddrPortFrom(server, 53).String())
	if err != nil {
		return answer{Error: errorName(err)}
	}
	a := answer{}
	if reply.Rcode != dns.RcodeSuccess {
		a.Error = dns.RcodeToString[reply.Rcode]
	}
	for _, rr := range reply.Answer {
		a.TTL = rr.Header().Ttl
		a.Found = append(a.Found, strings.TrimPrefix(rr.String(), rr.Header().String()))
	}
	return a
}

// hold opens and keeps connections, and counts the outcomes.
func (p *program) hold(o order) answer {
	count := map[string]int{}
	for range max(o.N, 1) {
		conn, err := p.dialer.Dial("tcp", o.To)
		count[errorName(err)]++
		if err == nil {
			p.held = append(p.held, conn)
		}
	}
	return answer{Count: count}
}

// openPending opens connections to an address that never answers, until all beyond the link's limit
// have been rejected.
func (p *program) openPending(o order) answer {
	ctx, cancel := context.WithCancel(context.Background())
	ends := make(chan string, o.N)
	for range o.N {
		go func() {
			_, err := p.dialer.DialContext(ctx, "tcp", o.To)
			ends <- errorName(err)
		}()
	}
	count := map[string]int{}
	for range o.N - egress.MaxConnections {
		count[<-ends]++
	}
	cancel()
	for range egress.MaxConnections {
		<-ends
	}
	return answer{Count: count}
}

// crowd opens N connections at once until the first is refused, and counts the outcomes.
func (p *program) crowd(o order) answer {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ends := make(chan string, o.N)
	for range o.N {
		go func() {
			_, err := p.dialer.DialContext(ctx, "tcp", o.To)
			ends <- errorName(err)
		}()
	}
	count := map[string]int{}
	for range o.N {
		end := <-ends
		count[end]++
		if end == "ECONNREFUSED" {
			cancel()
		}
	}
	return answer{Count: count}
}

func (p *program) ask(o order) answer {
	count := map[string]int{}
	conn, err := dns.Dial("udp", netip.AddrPortFrom(egress.ResolverIPv4, 53).String())
	if err != nil {
		return answer{Error: errorName(err)}
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(o.To), dns.TypeA)
	for range o.N {
		m.Id = dns.Id()
		if err := conn.WriteMsg(m); err != nil {
			count[errorName(err)]++
			continue
		}
		if reply, err := conn.ReadMsg(); err != nil {
			count[errorName(err)]++
		} else {
			count[dns.RcodeToString[reply.Rcode]]++
		}
	}
	return answer{Count: count}
}

// bulk sends N bytes to the echo service while reading them back.
func (p *program) bulk(o order) answer {
	conn, err := p.dialer.Dial("tcp", o.To)
	if err != nil {
		return answer{Error: errorName(err)}
	}
	defer func() { _ = conn.Close() }()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, io.LimitReader(pattern{new(byte)}, int64(o.N)))
		_ = conn.(*net.TCPConn).CloseWrite()
		sent <- err
	}()
	want := pattern{new(byte)}
	got, buf, expect := 0, make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := conn.Read(buf)
		_, _ = want.Read(expect[:n])
		if string(buf[:n]) != string(expect[:n]) {
			return answer{Error: fmt.Sprintf("other bytes after %d", got)}
		}
		got += n
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return answer{Error: errorName(err)}
			}
			break
		}
	}
	return answer{Error: errorName(<-sent), Count: map[string]int{"bytes": got}}
}

// pattern returns bytes that count up to 250, so that lost or moved data is detected.
type pattern struct{ next *byte }

func (p pattern) Read(buf []byte) (int, error) {
	for i := range buf {
		buf[i] = *p.next
		*p.next = (*p.next + 1) % 251
	}
	return len(buf), nil
}

// spoof sends a UDP packet with a forged source: "source destination", both with ports.
func spoof(o order) error {
	from, to, _ := strings.Cut(o.To, " ")
	src, dst := netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	udp := []byte{
		byte(src.Port() >> 8), byte(src.Port()), byte(dst.Port() >> 8), byte(dst.Port()), 0,
		byte(8 + len(o.Data)), 0, 0,
	}
	udp = append(udp, o.Data...)
	if src.Addr().Is4() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		head := []byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
		s, d := src.Addr().As4(), dst.Addr().As4()
		head = append(append(head, s[:]...), d[:]...)
		return unix.Sendto(fd, append(head, udp...), 0, &unix.SockaddrInet4{Addr: d})
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	s, d := src.Addr().As16(), dst.Addr().As16()
	sum := uint32(unix.IPPROTO_UDP) + uint32(len(udp))
	for _, part := range [][]byte{s[:], d[:], append(append([]byte{}, udp...), make([]byte, len(udp)%2)...)} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(part[i])<<8 | uint32(part[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	udp[6], udp[7] = byte(^sum>>8), byte(^sum)
	head := []byte{0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64}
	head = append(append(head, s[:]...), d[:]...)
	return unix.Sendto(fd, append(head, udp...), 0, &unix.SockaddrInet6{Addr: d})
}

func ping(to string) error {
	conn, err := net.Dial("ip4:icmp", to)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := conn.Write([]byte{8, 0, 0xf7, 0xfd, 0, 1, 0, 1}); err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, 64))
	return err
}

// runWorker opens a network, attaches the jail whose namespace is on descriptor 3, and reports
// that.
func runWorker() {
	n, err := egress.Open(context.Background(), config(os.Stderr))
	if err == nil {
		_, err = n.Attach(context.Background(), os.NewFile(3, "netns"), proto.Network{Policy: proto.NetworkUnrestricted}, 1)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("attached")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// runOpen tries to open a network without a TUN device.
func runOpen() {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount("/dev/null", "/dev/net/tun", "", unix.MS_BIND, "")
	}
	if err == nil {
		_, err = egress.Open(context.Background(), config(os.Stderr))
	}
	fmt.Println(err)
}
