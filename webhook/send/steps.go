package send

import (
	"crypto/tls"
	"net/http/httptrace"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// steps notes when the steps of an attempt began and ended. A connection that is no longer waited for may still be on its way when the
// attempt is over, so that what it notes then must be harmless.
type steps struct {
	tooMany func() // is called when the attempt has used all the connections it may use

	mu         sync.Mutex
	asked      int // for connections
	dns        span
	connect    span
	tls        span
	wrote      time.Time // the last byte of the request
	firstByte  time.Time // of the answer
	remote     string
	got, fresh bool  // there is a connection, and it was made for this attempt
	tlsErr     error // of the handshake
}

type span struct{ from, to time.Time }

// length is how long a step took, up to now if it has not ended, in milliseconds; 0 if it never began.
func (s span) length(now time.Time) float64 {
	if s.from.IsZero() {
		return 0
	}
	if s.to.IsZero() {
		s.to = now
	}
	return milliseconds(s.to.Sub(s.from))
}

func milliseconds(d time.Duration) float64 { return float64(max(d, 0).Microseconds()) / 1000 }

// hooks gives what makes net/http tell the steps.
func (s *steps) hooks() *httptrace.ClientTrace {
	note := func(f func(now time.Time)) {
		now := time.Now()
		s.mu.Lock()
		defer s.mu.Unlock()
		f(now)
	}
	return &httptrace.ClientTrace{
		GetConn: func(string) {
			note(func(time.Time) { // once more where a kept connection turned out to be dead, or a new one to be of no use
				if s.asked++; s.asked > maxConnections {
					s.tooMany()
				}
				s.dns, s.connect, s.tls, s.wrote, s.firstByte = span{}, span{}, span{}, time.Time{}, time.Time{}
				s.remote, s.got, s.fresh, s.tlsErr = "", false, false, nil
			})
		},
		DNSStart: func(httptrace.DNSStartInfo) { note(func(now time.Time) { s.dns.from = now }) },
		DNSDone:  func(httptrace.DNSDoneInfo) { note(func(now time.Time) { s.dns.to = now }) },
		ConnectStart: func(string, string) { // of several addresses perhaps
			note(func(now time.Time) {
				if s.connect.from.IsZero() {
					s.connect.from = now
				}
			})
		},
		ConnectDone: func(_, addr string, err error) {
			note(func(now time.Time) {
				if err == nil && !s.got {
					s.connect.to, s.remote = now, addr
				}
			})
		},
		TLSHandshakeStart: func() { note(func(now time.Time) { s.tls.from = now }) },
		TLSHandshakeDone: func(_ tls.ConnectionState, err error) {
			note(func(now time.Time) { s.tls.to, s.tlsErr = now, err })
		},
		GotConn: func(info httptrace.GotConnInfo) {
			remote := info.Conn.RemoteAddr().String()
			note(func(time.Time) { s.got, s.fresh, s.remote = true, !info.Reused, remote })
		},
		WroteRequest:         func(httptrace.WroteRequestInfo) { note(func(now time.Time) { s.wrote = now }) },
		GotFirstResponseByte: func() { note(func(now time.Time) { s.firstByte = now }) },
	}
}

// timings gives the steps' durations. Those of making a connection are 0 where a kept one served.
func (s *steps) timings(now time.Time) (timings proto.DeliveryTimings, remote string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.got || s.fresh {
		timings.DNS, timings.Connect, timings.TLS = s.dns.length(now), s.connect.length(now), s.tls.length(now)
	}
	if !s.wrote.IsZero() {
		timings.FirstByte = span{s.wrote, s.firstByte}.length(now)
	}
	return timings, s.remote
}

// doing says what an attempt was about when it was broken off, and whether a TLS handshake has failed.
func (s *steps) doing() (what string, handshake error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.firstByte.IsZero():
		what = "while the answer came"
	case !s.wrote.IsZero():
		what = "while waiting for an answer"
	case s.got:
		what = "while the request was sent"
	case !s.tls.from.IsZero():
		what = "in the TLS handshake"
	case !s.connect.from.IsZero():
		what = "while connecting"
	case !s.dns.from.IsZero():
		what = "while resolving the host's name"
	default:
		what = "before there was a connection"
	}
	return what, s.tlsErr
}
