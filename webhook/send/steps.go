package send

import (
	"crypto/tls"
	"net/http/httptrace"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// steps records the start and end of an attempt's steps. An unneeded connection may still be
// dialled after the attempt, so the hooks may be called then.
type steps struct {
	onTooMany func() // called when the attempt asks for its connection number maxConnections

	mu         sync.Mutex
	conns      int // requested
	dns        span
	connect    span
	tls        span
	wrote      time.Time // the last byte of the request
	firstByte  time.Time // of the answer
	remote     string
	got, fresh bool  // a connection was obtained; it was dialled for this attempt
	tlsErr     error // of the handshake
}

type span struct{ from, to time.Time }

// milliseconds returns the duration of a step, up to now if it has not ended; 0 if it has not
// begun.
func (s span) milliseconds(now time.Time) float64 {
	if s.from.IsZero() {
		return 0
	}
	if s.to.IsZero() {
		s.to = now
	}
	return milliseconds(s.to.Sub(s.from))
}

func milliseconds(d time.Duration) float64 { return float64(max(d, 0).Microseconds()) / 1000 }

// connected reports whether the request got a connection to be sent on.
func (s *steps) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got
}

func (s *steps) clientTrace() *httptrace.ClientTrace {
	record := func(f func(now time.Time)) {
		now := time.Now()
		s.mu.Lock()
		defer s.mu.Unlock()
		f(now)
	}
	return &httptrace.ClientTrace{
		GetConn: func(string) {
			record(func(time.Time) { // again if an idle connection is dead, or a new one unusable
				// The transport still dials in the background for a request that was just
				// cancelled, so the last connection allowed is the one requested by the cancelled
				// attempt.
				if s.conns++; s.conns >= maxConnections {
					s.onTooMany()
				}
				s.dns, s.connect, s.tls, s.wrote, s.firstByte = span{}, span{}, span{}, time.Time{}, time.Time{}
				s.remote, s.got, s.fresh, s.tlsErr = "", false, false, nil
			})
		},
		DNSStart: func(httptrace.DNSStartInfo) { record(func(now time.Time) { s.dns.from = now }) },
		DNSDone:  func(httptrace.DNSDoneInfo) { record(func(now time.Time) { s.dns.to = now }) },
		ConnectStart: func(string, string) { // once per address
			record(func(now time.Time) {
				if s.connect.from.IsZero() {
					s.connect.from = now
				}
			})
		},
		ConnectDone: func(_, addr string, err error) {
			record(func(now time.Time) {
				if err == nil && !s.got {
					s.connect.to, s.remote = now, addr
				}
			})
		},
		TLSHandshakeStart: func() { record(func(now time.Time) { s.tls.from = now }) },
		TLSHandshakeDone: func(_ tls.ConnectionState, err error) {
			record(func(now time.Time) { s.tls.to, s.tlsErr = now, err })
		},
		GotConn: func(info httptrace.GotConnInfo) {
			remote := info.Conn.RemoteAddr().String()
			record(func(time.Time) { s.got, s.fresh, s.remote = true, !info.Reused, remote })
		},
		WroteRequest:         func(httptrace.WroteRequestInfo) { record(func(now time.Time) { s.wrote = now }) },
		GotFirstResponseByte: func() { record(func(now time.Time) { s.firstByte = now }) },
	}
}

// timings returns the durations of the steps. Those of a reused connection's set-up are 0.
func (s *steps) timings(now time.Time) (timings proto.DeliveryTimings, remote string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.got || s.fresh {
		timings.DNS, timings.Connect, timings.TLS = s.dns.milliseconds(now), s.connect.milliseconds(now),
			s.tls.milliseconds(now)
	}
	if !s.wrote.IsZero() {
		timings.FirstByte = span{s.wrote, s.firstByte}.milliseconds(now)
	}
	return timings, s.remote
}

// current describes the attempt's current step, and returns the error of a failed TLS handshake.
func (s *steps) current() (step string, errTLS error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.firstByte.IsZero():
		step = "while the answer came"
	case !s.wrote.IsZero():
		step = "while waiting for an answer"
	case s.got:
		step = "while the request was sent"
	case !s.tls.from.IsZero():
		step = "in the TLS handshake"
	case !s.connect.from.IsZero():
		step = "while connecting"
	case !s.dns.from.IsZero():
		step = "while resolving the host's name"
	default:
		step = "before there was a connection"
	}
	return step, s.tlsErr
}
