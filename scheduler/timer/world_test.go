package timer_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/timer"
)

func TestMain(m *testing.M) {
	// The tests wait for timers rather than for a processor.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	// go-redis retries a lost server every second, and notices only then that the client is closed.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

// patience bounds how long a test waits for an event.
const patience = 60 * time.Second

// proxy forwards connections to a Redis, and injects faults.
type proxy struct {
	listener     net.Listener
	delay        atomic.Int64 // of each answer, in nanoseconds
	unresponsive atomic.Bool  // nothing is answered
	done         chan struct{}
	all          sync.WaitGroup

	mu     sync.Mutex
	target string
	conns  map[net.Conn]struct{}
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, target: target, conns: map[net.Conn]struct{}{}, done: make(chan struct{})}
	p.all.Go(p.accept)
	t.Cleanup(func() {
		close(p.done)
		_ = p.listener.Close()
		p.to(p.target)
		p.all.Wait()
	})
	return p
}

func (p *proxy) url() string { return "redis://" + p.listener.Addr().String() + "/0" }

// to redirects connections to target, and closes the open ones.
func (p *proxy) to(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
	for conn := range p.conns {
		_ = conn.Close()
	}
}

func (p *proxy) keep(conn net.Conn) (target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[conn] = struct{}{}
	return p.target
}

func (p *proxy) drop(conn net.Conn) {
	_ = conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.all.Go(func() {
			target := p.keep(client)
			defer p.drop(client)
			server, err := net.Dial("tcp", target)
			if err != nil {
				return
			}
			p.keep(server)
			defer p.drop(server)
			p.all.Go(func() {
				_, _ = io.Copy(server, client)
				_ = server.Close()
			})
			p.answers(client, server)
		})
	}
}

func (p *proxy) answers(client, server net.Conn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := server.Read(buffer)
		if err != nil {
			return
		}
		if p.unresponsive.Load() {
			continue
		}
		select {
		case <-p.done:
			return
		case <-time.After(time.Duration(p.delay.Load())):
		}
		if _, err := client.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// logs is a log that a test can wait for.
type logs struct {
	mu    sync.Mutex
	text  strings.Builder
	wrote chan struct{}
}

func (l *logs) Write(line []byte) (int, error) {
	l.mu.Lock()
	l.text.Write(line)
	l.mu.Unlock()
	select {
	case l.wrote <- struct{}{}:
	default:
	}
	return len(line), nil
}

// waitFor waits until the log contains text.
func (l *logs) waitFor(t *testing.T, text string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		l.mu.Lock()
		all := l.text.String()
		l.mu.Unlock()
		if strings.Contains(all, text) {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("the log does not contain %q:\n%s", text, all)
		case <-l.wrote:
		}
	}
}

// world is running timers.
type world struct {
	*timer.Timers
	log   *logs
	woken chan string
	stop  func() // Run has returned when it does
}

func open(t *testing.T, url string) *world {
	t.Helper()
	w := &world{woken: make(chan string, 100_000)}
	w.openWith(t, url)
	w.run(t, func(key string) { w.woken <- key })
	return w
}

func (w *world) openWith(t *testing.T, url string) {
	t.Helper()
	w.log = &logs{wrote: make(chan struct{}, 1)}
	timers, err := timer.Open(t.Context(), timer.Config{URL: url, Log: slog.New(slog.NewTextHandler(w.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	w.Timers = timers
	t.Cleanup(timers.Close)
}

func (w *world) run(t *testing.T, wake func(key string)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx, wake) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("Run does not return")
		}
	})
	t.Cleanup(w.stop)
}

// setIn sets a timer and returns its time.
func (w *world) setIn(t *testing.T, key string, d time.Duration) time.Time {
	t.Helper()
	at := time.Now().Add(d)
	if err := w.Set(t.Context(), key, at); err != nil {
		t.Fatal(err)
	}
	return at
}

// awaitWake waits until key is woken.
func (w *world) awaitWake(t *testing.T, key string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case <-deadline:
			t.Fatalf("%s is not woken", key)
		case got := <-w.woken:
			if got == key {
				return
			}
		}
	}
}

// setWhenPossible sets the timer of key to d from now until Redis confirms it.
func (w *world) setWhenPossible(t *testing.T, key string, d time.Duration) {
	t.Helper()
	eventually(t, "a timer can be set", func() bool { return w.Set(t.Context(), key, time.Now().Add(d)) == nil })
}

// eventually waits until is returns true.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !is() {
		select {
		case <-deadline:
			t.Fatalf("not within %s: %s", patience, what)
		case <-tick.C:
		}
	}
}

// timersIn returns the keys in redis that belong to timers, and the archive.
func timersIn(redis *miniredis.Miniredis) (keys []string) {
	for _, key := range redis.Keys() {
		if strings.Contains(key, ":t:") || strings.HasSuffix(key, ":archived") || strings.HasSuffix(key, ":completed") {
			keys = append(keys, key)
		}
	}
	return keys
}

// certificate creates a self-signed certificate for 127.0.0.1, and returns its file.
func certificate(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, file
}
