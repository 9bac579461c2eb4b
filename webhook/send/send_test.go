package send_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"golang.org/x/net/http2"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/send"
)

func TestSend(t *testing.T) {
	w := newWorld(t)
	requests := make(chan *http.Request, 1)
	bodies := make(chan []byte, 1)
	w.serve(w.valid(), func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		requests <- r
		bodies <- body
		rw.Header().Set("X-Two", "2")
		rw.Header().Set("X-One", "1")
		rw.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(rw, "thank you\xff")
	})
	before := time.Now()
	o := w.send()
	if o.Error != "" || o.Detail != "" || o.Status != 202 || o.RetryAfter != 0 || o.Number != 0 {
		t.Errorf("got %+v", o)
	}
	if !strings.HasPrefix(o.Response, "HTTP/1.1 202 Accepted\r\n") ||
		!strings.Contains(o.Response, "\r\nX-One: 1\r\nX-Two: 2\r\n\r\nthank you\uFFFD") {
		t.Errorf("the response head is %q", o.Response)
	}
	if o.RemoteAddr != w.listener.Addr().String() || o.At.Before(before.Add(-time.Second)) {
		t.Errorf("sent to %s at %s", o.RemoteAddr, o.At)
	}
	if d := o.Timings; d.Connect <= 0 || d.TLS <= 0 || d.DNS != 0 || d.Total < d.Connect+d.TLS+d.FirstByte {
		t.Errorf("timings are %+v", d)
	}
	r := <-requests
	if body := <-bodies; string(body) != `{"a":1}` {
		t.Errorf("got the body %q", body)
	}
	if r.Method != http.MethodPost || r.RequestURI != "/hook?a=b" || r.ContentLength != 7 {
		t.Errorf("got %s %s of %d bytes", r.Method, r.RequestURI, r.ContentLength)
	}
	want := map[string]string{
		"Content-Type": "application/json", "User-Agent": "bullpen/test", "Webhook-Id": "msg_1",
		"Webhook-Timestamp": r.Header.Get("Webhook-Timestamp"),
	}
	if !maps.Equal(o.Headers, want) {
		t.Errorf("the outcome has the headers %v, want %v", o.Headers, want)
	}
	want["Content-Length"] = "7"
	for name, values := range r.Header {
		if len(values) != 1 || values[0] != want[name] {
			t.Errorf("got %s: %q, want %q", name, values, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("headers are missing: %v", want)
	}
	again := w.send()
	if d := again.Timings; again.Error != "" || d.Connect != 0 || d.TLS != 0 || again.RemoteAddr != o.RemoteAddr {
		t.Errorf("over the reused connection: %+v", again)
	}
	<-requests
	<-bodies
}

// Generated and custom secrets, verified with the library of Standard Webhooks.
func TestSignatures(t *testing.T) {
	now := time.Now()
	whsec, old := proto.NewWebhookSecret(), proto.NewWebhookSecret()
	const plain = "correct horse battery staple"
	for name, test := range map[string]struct {
		settings proto.Webhook
		verify   []string
		refuse   []string
		hex      string
	}{
		"generated": {proto.Webhook{Secret: whsec}, []string{whsec}, []string{old}, whsec},
		"custom":    {proto.Webhook{Secret: plain}, []string{plain}, []string{whsec}, plain},
		"rotated": {
			proto.Webhook{Secret: whsec, OldSecret: old, OldUntil: now.Add(time.Hour)},
			[]string{whsec, old},
			[]string{plain},
			whsec,
		},
		"mixed": {
			proto.Webhook{Secret: plain, OldSecret: old, OldUntil: now.Add(time.Hour)},
			[]string{plain, old},
			[]string{whsec},
			plain,
		},
		"rotation over": {
			proto.Webhook{Secret: whsec, OldSecret: old, OldUntil: now.Add(-time.Hour)}, []string{whsec}, []string{old}, whsec,
		},
		"removed": {proto.Webhook{OldSecret: old, OldUntil: now.Add(-time.Hour)}, nil, []string{whsec, old}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			headers := make(chan http.Header, 1)
			w.serve(w.valid(), func(_ http.ResponseWriter, r *http.Request) { headers <- r.Header })
			w.settings.Secret, w.settings.OldSecret, w.settings.OldUntil = test.settings.Secret, test.settings.OldSecret,
				test.settings.OldUntil
			if o := w.send(); o.Error != "" {
				t.Fatalf("got %+v", o)
			}
			h := <-headers
			for _, secret := range append(test.verify, test.refuse...) {
				receiver, err := standardwebhooks.NewWebhookRaw([]byte(secret))
				if strings.HasPrefix(secret, "whsec_") {
					receiver, err = standardwebhooks.NewWebhook(secret)
				}
				if err != nil {
					t.Fatal(err)
				}
				want := slices.Contains(test.verify, secret)
				if err := receiver.Verify([]byte(`{"a":1}`), h); (err == nil) != want {
					t.Errorf("verified with %s: %v", secret, err)
				}
				if receiver.Verify([]byte(`{"a":2}`), h) == nil {
					t.Error("another body verifies")
				}
			}
			if n := strings.Count(h.Get("Webhook-Signature"), "v1,"); n != len(test.verify) {
				t.Errorf("%q has %d signatures", h.Get("Webhook-Signature"), n)
			}
			want := ""
			if test.hex != "" {
				mac := hmac.New(sha256.New, []byte(test.hex))
				mac.Write([]byte(`{"a":1}`))
				want = "sha256=" + hex.EncodeToString(mac.Sum(nil))
			}
			for _, name := range w.settings.SignatureHeaders {
				if got := h.Get(name); got != want {
					t.Errorf("%s is %q, want %q", name, got, want)
				}
			}
			if h.Get("Webhook-Id") != "msg_1" || h.Get("Webhook-Timestamp") == "" {
				t.Errorf("got %v", h)
			}
		})
	}
}

func TestInvalidSecretSendsNothing(t *testing.T) {
	w := newWorld(t)
	w.settings.Secret = "whsec_short"
	o := w.send()
	w.wantError(o, proto.DeliveryInternal, "set it anew")
	if o.Headers != nil {
		t.Errorf("recorded %v", o.Headers)
	}
}

func TestSignatureHeadersAreConfigurable(t *testing.T) {
	w := newWorld(t)
	headers := make(chan http.Header, 1)
	w.serve(w.valid(), func(_ http.ResponseWriter, r *http.Request) { headers <- r.Header })
	w.settings.Secret, w.settings.SignatureHeaders = proto.NewWebhookSecret(), []string{"X-Hub-Signature-256"}
	o := w.send()
	if o.Error != "" {
		t.Fatalf("got %+v", o)
	}
	h := <-headers
	// What is recorded has no signature.
	if o.Headers["X-Hub-Signature-256"] != "[redacted]" || o.Headers["Webhook-Signature"] != "[redacted]" ||
		o.Headers["Webhook-Id"] != "msg_1" || len(o.Headers) != len(h)-1 { // Content-Length
		t.Errorf("recorded %v of %v", o.Headers, h)
	}
	if !strings.HasPrefix(h.Get("X-Hub-Signature-256"), "sha256=") || h.Get("X-Bullpen-Signature") != "" ||
		h.Get("X-Baponi-Signature") != "" {
		t.Errorf("got %v", h)
	}
}

func TestHTTP2(t *testing.T) {
	w := newWorld(t)
	config := w.valid()
	config.NextProtos = nil
	long := make(chan bool, 1)
	w.serve(config, func(rw http.ResponseWriter, _ *http.Request) {
		select {
		case <-long:
			for {
				if _, err := rw.Write(make([]byte, 32<<10)); err != nil {
					return
				}
			}
		default:
		}
	})
	for range 2 {
		if o := w.send(); o.Error != "" || !strings.HasPrefix(o.Response, "HTTP/2.0 200 OK\r\n") || o.RemoteAddr == "" {
			t.Errorf("got %+v", o)
		}
	}
	long <- true
	if o := w.send(); o.Error != "" || !strings.Contains(o.Detail, "longer than 64 KiB") {
		t.Errorf("an endless body: %+v", o)
	}
}

// A receiver that answers every request with GOAWAY gets maxConnections connections.
func TestGoAwayOnEveryConnection(t *testing.T) {
	w := newWorld(t)
	config := w.valid()
	config.NextProtos = []string{"h2"}
	var connections atomic.Int32
	w.acceptRaw(func(conn net.Conn) {
		connections.Add(1)
		secure := tls.Server(conn, config)
		framer := http2.NewFramer(secure, secure)
		if _, err := io.ReadFull(secure, make([]byte, len(http2.ClientPreface))); err != nil ||
			framer.WriteSettings() != nil {
			return
		}
		for {
			frame, err := framer.ReadFrame()
			if err != nil {
				return
			}
			if _, ok := frame.(*http2.HeadersFrame); ok {
				_ = framer.WriteGoAway(0, http2.ErrCodeNo, nil)
				_, _ = io.Copy(io.Discard, secure) // else the sender may notice the closed connection first
				return
			}
		}
	})
	w.wantError(w.send(), proto.DeliveryBroken, "on every connection")
	if n := connections.Load(); n > 10 {
		t.Errorf("%d connections", n)
	}
}

// Responses other than 2xx are failures, and redirects are not followed.
func TestStatusCodes(t *testing.T) {
	var elsewhere atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	date := time.Now().Add(90 * time.Second)
	for name, test := range map[string]struct {
		status int
		header map[string]string
		failed bool
		after  [2]time.Duration
	}{
		"200":           {status: 200},
		"204":           {status: 204},
		"299":           {status: 299, header: map[string]string{"Retry-After": "7"}},
		"300":           {status: 300, failed: true},
		"301":           {status: 301, header: map[string]string{"Location": other.URL}, failed: true},
		"302":           {status: 302, header: map[string]string{"Location": other.URL}, failed: true},
		"303":           {status: 303, header: map[string]string{"Location": other.URL}, failed: true},
		"307":           {status: 307, header: map[string]string{"Location": other.URL}, failed: true},
		"308":           {status: 308, header: map[string]string{"Location": other.URL}, failed: true},
		"308 to itself": {status: 308, header: map[string]string{"Location": "/hook?a=b"}, failed: true},
		"401":           {status: 401, header: map[string]string{"WWW-Authenticate": "Basic"}, failed: true},
		"410":           {status: 410, failed: true},
		"429, seconds": {
			status: 429, header: map[string]string{"Retry-After": "120"}, failed: true,
			after: [2]time.Duration{2 * time.Minute, 2 * time.Minute},
		},
		"429, date": {
			status: 429, header: map[string]string{"Retry-After": date.UTC().Format(http.TimeFormat)},
			failed: true, after: [2]time.Duration{1, 91 * time.Second},
		},
		"429, date in the past": {
			status: 429, header: map[string]string{"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"},
			failed: true,
		},
		"429, for ever": {
			status: 429, header: map[string]string{"Retry-After": "99999999999999999999999"},
			failed: true, after: [2]time.Duration{math.MaxInt64, math.MaxInt64},
		},
		"429, 300 years": {
			status: 429, header: map[string]string{"Retry-After": "9467280000"}, failed: true,
			after: [2]time.Duration{math.MaxInt64, math.MaxInt64},
		},
		"429, negative": {status: 429, header: map[string]string{"Retry-After": "-5"}, failed: true},
		"429, nonsense": {status: 429, header: map[string]string{"Retry-After": "soon"}, failed: true},
		"500":           {status: 500, failed: true},
		"503":           {status: 503, header: map[string]string{"Retry-After": "0"}, failed: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			var asked atomic.Int32
			w.serve(w.valid(), func(rw http.ResponseWriter, _ *http.Request) {
				asked.Add(1)
				for name, value := range test.header {
					rw.Header().Set(name, value)
				}
				rw.WriteHeader(test.status)
			})
			o := w.send()
			if test.failed {
				w.wantError(o, proto.DeliveryRejected, "the receiver answered "+strconv.Itoa(test.status))
			} else if o.Error != "" || o.Detail != "" {
				t.Errorf("got %+v", o)
			}
			if o.Status != test.status || !strings.HasPrefix(o.Response, "HTTP/1.1 "+strconv.Itoa(test.status)) {
				t.Errorf("got status %d, %q", o.Status, o.Response)
			}
			if o.RetryAfter < test.after[0] || o.RetryAfter > test.after[1] {
				t.Errorf("Retry-After is %s, want %s", o.RetryAfter, test.after)
			}
			if asked.Load() != 1 {
				t.Errorf("%d requests", asked.Load())
			}
		})
	}
	if n := elsewhere.Load(); n > 0 {
		t.Errorf("%d redirects were followed", n)
	}
}

func TestBodiesStayCompressed(t *testing.T) {
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	for range 8 {
		if _, err := z.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	asked := make(chan string, 1)
	w.serve(w.valid(), func(rw http.ResponseWriter, r *http.Request) {
		asked <- r.Header.Get("Accept-Encoding")
		rw.Header().Set("Content-Encoding", "gzip")
		_, _ = rw.Write(bomb.Bytes())
	})
	o := w.send()
	if o.Error != "" || !strings.Contains(o.Response, "Content-Encoding: gzip\r\n") ||
		!strings.Contains(o.Response, "\r\n\r\n\x1f\uFFFD\x08") || len(o.Response) > proto.MaxResponseHead {
		t.Errorf("got %+v", o)
	}
	if encoding := <-asked; encoding != "" {
		t.Errorf("asked for %q", encoding)
	}
}

// The recorded head is valid UTF-8 of bounded length, wherever it is cut.
func TestLongResponsesAreTruncated(t *testing.T) {
	for _, text := range []string{
		strings.Repeat("é", 10_000), "x" + strings.Repeat("€", 10_000),
		strings.Repeat("\xffa", 10_000), strings.Repeat("😀", 10_000),
	} {
		w := newWorld(t)
		w.serve(w.valid(), func(rw http.ResponseWriter, _ *http.Request) {
			rw.WriteHeader(http.StatusTeapot)
			_, _ = io.WriteString(rw, text)
		})
		o := w.send()
		if n := len(o.Response); n > proto.MaxResponseHead || n < proto.MaxResponseHead-utf8.UTFMax ||
			!utf8.ValidString(o.Response) {
			t.Errorf("got %d bytes: %+v", n, o)
		}
	}
}

// A 2xx status is a success, whatever happens to the body.
func TestBrokenBodiesOfSuccesses(t *testing.T) {
	for name, test := range map[string]struct {
		receive func(ctx context.Context, conn net.Conn)
		detail  string
	}{
		"cut off": {func(_ context.Context, conn net.Conn) {
			write(conn, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegin")
		}, "the body of the answer did not end: the receiver closed"},
		"reset": {func(_ context.Context, conn net.Conn) {
			resetAfter(conn, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegin")
		}, "the body of the answer did not end"},
		"no chunks": {
			func(_ context.Context, conn net.Conn) {
				write(conn, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegin\r\nZZ\r\n")
			}, "the body of the answer did not end: invalid byte in chunk length",
		},
		"endless": {func(_ context.Context, conn net.Conn) {
			write(conn, "HTTP/1.1 200 OK\r\n\r\nbegin")
			for {
				if _, err := conn.Write(make([]byte, 8<<10)); err != nil {
					return
				}
			}
		}, "longer than 64 KiB"},
		"byte by byte": {func(ctx context.Context, conn net.Conn) {
			write(conn, "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nbegin")
			drip(ctx, conn)
		}, "the body of the answer did not end: the time for the attempt was over while the answer came"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			if name == "byte by byte" {
				w.settings.Timeout = proto.Seconds(3 * time.Second)
			}
			w.accept(func(conn net.Conn) { test.receive(t.Context(), conn) })
			o := w.send()
			w.wantError(o, "", test.detail)
			if o.Status != 200 || !strings.HasPrefix(o.Response, "HTTP/1.1 200 OK\r\n") ||
				!strings.Contains(o.Response, "begin") {
				t.Errorf("got %+v", o)
			}
		})
	}
}

// resetAfter writes and then resets the connection.
func resetAfter(conn net.Conn, text string) {
	write(conn, text)
	inner := conn
	if secure, ok := conn.(interface{ NetConn() net.Conn }); ok {
		inner = secure.NetConn()
	}
	_ = inner.(*net.TCPConn).SetLinger(0)
	_ = inner.Close()
}

// drip writes a byte every 50 ms until the sender closes the connection.
func drip(ctx context.Context, conn net.Conn) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if _, err := conn.Write([]byte("x")); err != nil {
				return
			}
		}
	}
}

// wait keeps a connection open until the sender closes it.
func wait(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }

func TestBadReceivers(t *testing.T) {
	long := proto.DefaultWebhook().Timeout
	short := proto.Seconds(300 * time.Millisecond)
	for name, test := range map[string]struct {
		timeout proto.Seconds
		receive func(w *world)
		class   proto.DeliveryError
		detail  string
	}{
		"not listening": {long, func(w *world) { _ = w.listener.Close() }, proto.DeliveryConnect, "connection refused"},
		"never accepts": {short, func(*world) {}, proto.DeliveryTimeout, "in the TLS handshake"},
		"never answers": {
			proto.Seconds(3 * time.Second), func(w *world) { w.accept(wait) }, proto.DeliveryTimeout,
			"while waiting for an answer",
		},
		"byte by byte": {short, func(w *world) {
			w.accept(func(conn net.Conn) {
				write(conn, "HTTP/1.1 200 OK\r\nX-Slow: ")
				drip(w.t.Context(), conn)
			})
		}, proto.DeliveryTimeout, ""},
		"early hints only": {short, func(w *world) {
			w.accept(func(conn net.Conn) {
				write(conn, "HTTP/1.1 103 Early Hints\r\n\r\n")
				wait(conn)
			})
		}, proto.DeliveryTimeout, ""},
		"reset": {
			long, func(w *world) { w.accept(func(conn net.Conn) { resetAfter(conn, "") }) },
			proto.DeliveryBroken, "while waiting for an answer",
		},
		"reset in the head": {long, func(w *world) {
			w.accept(func(conn net.Conn) { resetAfter(conn, "HTTP/1.1 200 OK\r\nX-") })
		}, proto.DeliveryBroken, ""},
		"closed": {
			long, func(w *world) { w.accept(func(net.Conn) {}) }, proto.DeliveryBroken,
			"the receiver closed the connection",
		},
		"not HTTP": {long, func(w *world) {
			w.accept(func(conn net.Conn) { write(conn, "SSH-2.0-OpenSSH_9.9\r\n\r\n") })
		}, proto.DeliveryBroken, "malformed HTTP"},
		"endless head": {long, func(w *world) { w.accept(endlessHead) }, proto.DeliveryBroken, "exceeded"},
		"long head line": {long, func(w *world) {
			w.accept(func(conn net.Conn) { write(conn, "HTTP/1.1 200 "+strings.Repeat("x", 1<<20)) })
		}, proto.DeliveryBroken, ""},
		"switches protocols": {
			long, func(w *world) { w.accept(switches) }, proto.DeliveryRejected,
			"101 Switching Protocols",
		},
		"no TLS": {long, func(w *world) {
			w.acceptRaw(func(conn net.Conn) { write(conn, "HTTP/1.1 200 OK\r\n\r\n") })
		}, proto.DeliveryTLS, ""},
		"TLS fault": {
			long, func(w *world) { w.acceptRaw(func(conn net.Conn) { write(conn, "\x15\x03\x01\x00\x02\x02\x28") }) },
			proto.DeliveryTLS, "handshake failure",
		},
		"closed in TLS":   {long, func(w *world) { w.acceptRaw(func(net.Conn) {}) }, proto.DeliveryTLS, ""},
		"old certificate": {long, func(w *world) { w.serveTLS("127.0.0.1", -time.Hour) }, proto.DeliveryTLS, "expired"},
		"another's certificate": {
			long, func(w *world) { w.serveTLS("127.0.0.9", time.Hour) }, proto.DeliveryTLS,
			"127.0.0.9",
		},
		"unknown authority": {long, func(w *world) {
			w.authority = newAuthority(w.t)
			w.serveTLS("127.0.0.1", time.Hour)
		}, proto.DeliveryTLS, "unknown authority"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.settings.Timeout = test.timeout
			test.receive(w)
			o := w.send()
			w.wantError(o, test.class, test.detail)
			if (o.Status != 0) != (test.class == proto.DeliveryRejected) || o.Timings.Total <= 0 {
				t.Errorf("got %+v", o)
			}
			if waited := strings.Contains(o.Detail, "while waiting"); waited && test.class == proto.DeliveryTimeout &&
				o.Timings.FirstByte <= 0 {
				t.Errorf("timings are %+v", o.Timings)
			}
			if strings.Contains(o.Detail, "->") || !utf8.ValidString(o.Detail) || len(o.Detail) > 500 {
				t.Errorf("the detail is %q", o.Detail)
			}
			if want := w.listener.Addr().String(); test.class != proto.DeliveryConnect && test.class != proto.DeliveryTimeout &&
				o.RemoteAddr != want {
				t.Errorf("the remote address is %q, want %q", o.RemoteAddr, want)
			}
		})
	}
}

func (w *world) serveTLS(addr string, valid time.Duration) {
	config := w.authority.server(addr, time.Now().Add(valid))
	w.acceptRaw(func(conn net.Conn) { wait(tls.Server(conn, config)) })
}

func endlessHead(conn net.Conn) {
	write(conn, "HTTP/1.1 200 OK\r\n")
	for {
		if _, err := io.WriteString(conn, "X-More: "+strings.Repeat("x", 1000)+"\r\n"); err != nil {
			return
		}
	}
}

func switches(conn net.Conn) {
	write(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
	wait(conn)
}

func TestRefusedURLs(t *testing.T) {
	w := newWorld(t)
	for url, want := range map[string]string{
		"https://10.0.0.1/":   "must name a host",
		"https://127.0.0.1:1": "must not name port 1",
		"ftp://127.0.0.1/":    "must be an absolute https URL",
	} {
		o := w.sender.Send(t.Context(), send.Post{URL: url, ID: "msg_1", Settings: w.settings})
		w.wantError(o, proto.DeliveryRefused, want)
	}
	g := newWorld(t)
	o := g.sender.Send(t.Context(), send.Post{URL: "https://hooks.test/", ID: "msg_1", Settings: w.settings})
	w.wantError(o, proto.DeliveryDNS, "could not be resolved")
	if strings.Contains(o.Detail, "10.9.8.7") || o.Timings.DNS <= 0 {
		t.Errorf("got %+v", o)
	}
}

func TestCancelledAttemptIsInternal(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	w.serve(w.valid(), func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		cancel()
		<-r.Context().Done()
		panic(http.ErrAbortHandler) // the sender may still read an answer after its close_notify
	})
	o := w.sender.Send(ctx, send.Post{URL: w.url("https"), ID: "msg_1", Body: []byte(`{}`), Settings: w.settings})
	w.wantError(o, proto.DeliveryInternal, "broken off while")
}

// If an idle connection is dead, the request is repeated on a new connection.
func TestDeadIdleConnection(t *testing.T) {
	w := newWorld(t)
	var connections atomic.Int32
	w.accept(func(conn net.Conn) {
		first := connections.Add(1) == 1
		write(conn, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		if first { // reads the next request without answering it
			_, _ = io.ReadFull(conn, make([]byte, 1))
			return
		}
		wait(conn)
	})
	for range 2 {
		if o := w.send(); o.Error != "" || o.Timings.Connect <= 0 {
			t.Errorf("got %+v", o)
		}
	}
	if connections.Load() != 2 {
		t.Errorf("%d connections were made", connections.Load())
	}
}
