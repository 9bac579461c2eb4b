package live_test

import (
	"context"
	"crypto/sha256"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/live"
)

const ticket = "ticket"

// world is the live sandboxes of a worker with the server that gateways reach.
type world struct {
	*testing.T
	sandboxes *live.Sandboxes
	server    *httptest.Server
}

func newWorld(t *testing.T) *world {
	s, err := live.Open(filepath.Join(t.TempDir(), "sockets"))
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s.Handler())
	t.Cleanup(func() {
		server.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return &world{t, s, server}
}

// add adds a sandbox whose guest is a handler.
func (w *world) add(id string, lives, idle time.Duration, guest http.HandlerFunc) *live.Sandbox {
	w.Helper()
	x, err := w.sandboxes.Add(&proto.Live{
		Sandbox: id, TicketHash: sha256.Sum256([]byte(ticket)), ExpiresAt: time.Now().Add(lives),
		IdleTimeout: proto.Seconds(idle),
	})
	if err != nil {
		w.Fatal(err)
	}
	listener, err := net.FileListener(x.Listener)
	if err != nil {
		w.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: guest}}
	server.Start()
	w.Cleanup(func() {
		server.Close()
		if err := x.Remove(); err != nil {
			w.Error(err)
		}
	})
	return x
}

// ask sends a request as a gateway does, and returns the status and the body of the answer.
func (w *world) ask(method, path, sandbox, ticket string, body io.Reader) (int, string) {
	w.Helper()
	r, err := http.NewRequestWithContext(w.Context(), method, w.server.URL+path, body)
	if err != nil {
		w.Fatal(err)
	}
	r.Header.Set(proto.HeaderSandbox, sandbox)
	r.Header.Set(proto.HeaderTicket, ticket)
	answer, err := w.server.Client().Do(r)
	if err != nil {
		w.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		w.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

// Only a gateway with the ticket of a sandbox reaches its guest, which does not see the ticket.
func TestTickets(t *testing.T) {
	w := newWorld(t)
	w.add("one", time.Hour, 0, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(proto.HeaderTicket) != "" || r.Header.Get(proto.HeaderSandbox) != "" {
			w.WriteHeader(http.StatusTeapot)
		}
		_, _ = io.WriteString(w, r.URL.Path)
	})
	for _, c := range []struct {
		sandbox, ticket string
		status          int
	}{
		{"one", ticket, http.StatusOK},
		{"one", "", proto.StatusNoSandbox},
		{"one", "other", proto.StatusNoSandbox},
		{"two", ticket, proto.StatusNoSandbox},
		{"", ticket, proto.StatusNoSandbox},
		{"../one", ticket, proto.StatusNoSandbox},
	} {
		for _, path := range []string{"/files", proto.ExpiryPath, proto.SavePath} {
			want := c.status
			if want == http.StatusOK && proto.AnsweredByWorker(path) {
				want = http.StatusBadRequest // GET
			}
			if status, _ := w.ask(http.MethodGet, path, c.sandbox, c.ticket, nil); status != want {
				t.Errorf("%s of %q with the ticket %q: status %d, want %d", path, c.sandbox, c.ticket, status, want)
			}
		}
	}
}

// A guest cannot answer as if its sandbox were not there.
func TestGuestCannotDenyItself(t *testing.T) {
	w := newWorld(t)
	w.add("one", time.Hour, 0, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(proto.StatusNoSandbox) })
	if status, _ := w.ask(http.MethodGet, "/", "one", ticket, nil); status != http.StatusBadGateway {
		t.Errorf("status %d", status)
	}
}

// awaits waits until a sandbox must stop, and checks why.
func awaits(t *testing.T, x *live.Sandbox, want live.Reason) {
	t.Helper()
	<-x.Stopped()
	if got := x.Why(); got != want {
		t.Errorf("stopped for reason %d, want %d", got, want)
	}
}

// The timeout passes when it was set last, sooner or later; a sandbox that stops takes no requests.
func TestExpiry(t *testing.T) {
	w := newWorld(t)
	x := w.add("one", time.Hour, 0, func(http.ResponseWriter, *http.Request) {})
	for _, bad := range []string{"", "tomorrow", strings.Repeat("0", 100)} {
		if status, _ := w.ask(http.MethodPut, proto.ExpiryPath, "one", ticket, strings.NewReader(bad)); status != 400 {
			t.Errorf("%q: status %d", bad, status)
		}
	}
	at := func(in time.Duration) io.Reader {
		return strings.NewReader(time.Now().Add(in).Format(time.RFC3339Nano))
	}
	if status, _ := w.ask(http.MethodPut, proto.ExpiryPath, "one", ticket, at(2*time.Hour)); status != 204 {
		t.Errorf("later: status %d", status)
	}
	if x.Why() != live.NotStopped {
		t.Error("it stopped")
	}
	if status, _ := w.ask(http.MethodPut, proto.ExpiryPath, "one", ticket, at(0)); status != 204 {
		t.Errorf("now: status %d", status)
	}
	awaits(t, x, live.Expired)
	for _, path := range []string{"/", proto.ExpiryPath} {
		if status, _ := w.ask(http.MethodPut, path, "one", ticket, at(time.Hour)); status != proto.StatusNoSandbox {
			t.Errorf("%s after its end: status %d", path, status)
		}
	}
	awaits(t, w.add("two", time.Millisecond, 0, nil), live.Expired)
}

// A save is answered by the worker, and ends when the sandbox stops.
func TestSave(t *testing.T) {
	w := newWorld(t)
	x := w.add("one", time.Hour, 0, func(http.ResponseWriter, *http.Request) { t.Error("the guest was asked") })
	save := func() (int, string) { return w.ask(http.MethodPost, proto.SavePath, "one", ticket, nil) }
	if status, _ := save(); status != http.StatusBadRequest {
		t.Errorf("before it runs: status %d", status)
	}
	for want, answer := range map[string]proto.SandboxSave{
		`{"version":7}` + "\n": {Version: 7}, "{}\n": {}, `{"refused":"it is large"}` + "\n": {Refused: "it is large"},
	} {
		x.OnSave(func(context.Context) proto.SandboxSave { return answer })
		if status, got := save(); status != http.StatusOK || got != want {
			t.Errorf("status %d, %q; want %q", status, got, want)
		}
	}
	begun := make(chan struct{})
	x.OnSave(func(ctx context.Context) proto.SandboxSave {
		close(begun)
		<-ctx.Done()
		return proto.SandboxSave{Refused: "stopped"}
	})
	answered := make(chan int)
	go func() {
		status, _ := save()
		answered <- status
	}()
	<-begun
	x.Cancel()
	if status := <-answered; status != proto.StatusNoSandbox {
		t.Errorf("a save during the stop: status %d", status)
	}
	if status, _ := save(); status != proto.StatusNoSandbox {
		t.Errorf("a save after the stop: status %d", status)
	}
}

// A request that lasts keeps a sandbox from being idle.
func TestIdle(t *testing.T) {
	w := newWorld(t)
	begun, end := make(chan struct{}), make(chan struct{})
	x := w.add("one", time.Hour, time.Millisecond, func(http.ResponseWriter, *http.Request) {
		close(begun)
		<-end
	})
	awaits(t, x, live.Idle)
	y := w.add("two", time.Hour, 50*time.Millisecond, func(http.ResponseWriter, *http.Request) {
		close(begun)
		<-end
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.ask(http.MethodGet, "/", "two", ticket, nil)
	}()
	select {
	case <-begun:
	case <-y.Stopped(): // the machine was too slow to send the request in time
		close(end)
		<-done
		return
	}
	idle := w.add("three", time.Hour, 100*time.Millisecond, nil) // which measures the time
	awaits(t, idle, live.Idle)
	if y.Why() != live.NotStopped {
		t.Error("it stopped during a request")
	}
	close(end)
	<-done
	awaits(t, y, live.Idle)
}

// An answer that ends with its sandbox breaks off at the stop, also if the guest sends more. Others go on.
func TestUntilStop(t *testing.T) {
	w := newWorld(t)
	begun, end := make(chan struct{}, 3), make(chan struct{})
	x := w.add("one", time.Hour, 0, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(proto.HeaderUntilStop) != "" {
			w.WriteHeader(http.StatusTeapot)
		}
		if r.URL.Path != "/late" {
			_, _ = io.WriteString(w, "before ")
			_ = http.NewResponseController(w).Flush()
		}
		begun <- struct{}{}
		<-end
		_, _ = io.WriteString(w, "after")
	})
	type result struct {
		status int
		body   string
		err    error
	}
	ask := func(path, until string) <-chan result {
		answered := make(chan result, 1)
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.server.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header = http.Header{proto.HeaderSandbox: {"one"}, proto.HeaderTicket: {ticket}, proto.HeaderUntilStop: {until}}
		headers := make(chan struct{})
		go func() {
			answer, err := w.server.Client().Do(r)
			close(headers)
			if err != nil {
				answered <- result{err: err}
				return
			}
			defer func() { _ = answer.Body.Close() }()
			text, err := io.ReadAll(answer.Body)
			answered <- result{answer.StatusCode, string(text), err}
		}()
		if <-begun; path != "/late" {
			<-headers
		}
		return answered
	}
	cut, late, whole := ask("/", "1"), ask("/late", "1"), ask("/", "")
	x.Cancel()
	awaits(t, x, live.Cancelled)
	if got := <-late; got.status != proto.StatusNoSandbox || got.err != nil {
		t.Errorf("before an answer: %+v", got)
	}
	if got := <-cut; got.status != http.StatusOK || !strings.HasPrefix("before ", got.body) || got.err == nil {
		t.Errorf("during an answer: %+v", got)
	}
	close(end)
	if got := <-whole; got.status != http.StatusOK || got.body != "before after" || got.err != nil {
		t.Errorf("without the header: %+v", got)
	}
}

// A worker that drains stops its sandboxes, and those that it still gets.
func TestDrain(t *testing.T) {
	w := newWorld(t)
	x := w.add("one", time.Hour, 0, nil)
	w.sandboxes.Drain()
	awaits(t, x, live.Drained)
	awaits(t, w.add("two", time.Hour, 0, nil), live.Drained)
}
