package rest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-chi/chi/v5"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/rest"
	"github.com/bullpen-run/bullpen/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory stores one session and its log.
type memory struct {
	sessions.Records // of which only Find is called

	mu       sync.Mutex
	session  proto.AgentSession
	messages [][]byte
	added    chan struct{}
	broken   error // of reading the log
}

func (m *memory) Find(_ context.Context, _, id string) (proto.AgentSession, error) {
	if m.session.ID != id {
		return proto.AgentSession{}, proto.ErrNotFound
	}
	return m.session, nil
}

func (m *memory) last() ([]byte, uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.messages[len(m.messages)-1], uint64(len(m.messages)), nil
}

// Next implements [sessions.Follower].
func (m *memory) Next(ctx context.Context, after uint64) ([]byte, uint64, error) {
	for {
		m.mu.Lock()
		if m.broken != nil {
			m.mu.Unlock()
			return nil, 0, m.broken
		}
		if int(after) < len(m.messages) {
			message := m.messages[after]
			m.mu.Unlock()
			return message, after + 1, nil
		}
		m.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, after, context.Cause(ctx)
		case <-m.added:
		}
	}
}

func (m *memory) Close() {}

// logs are the logs of a memory.
type logs struct {
	sessions.Logs
	*memory
}

func (l logs) Last(context.Context, string, string) ([]byte, uint64, error) { return l.last() }

func (l logs) Follow(string, string) (sessions.Follower, error) { return l.memory, nil }

// Next implements [sessions.Logs].
func (logs) Next(context.Context, string, string, uint64) ([]byte, uint64, error) { return nil, 0, nil }

// host is a host whose API key may become invalid.
type host struct {
	rest.Host
	revoked atomic.Pointer[error]
	checks  atomic.Int64
	answer  *answer
	seen    []string // the answer at each release of memory
}

func (*host) Caller() (org, key string) { return "acme", "key" }

func (*host) UntilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithCancel(ctx)
}

func (h *host) ReleaseMemory() { h.seen = append(h.seen, h.answer.String()) }

func (h *host) CheckCaller() error {
	h.checks.Add(1)
	if err := h.revoked.Load(); err != nil {
		return *err
	}
	return nil
}

// answer is an answer that is read while it is written.
type answer struct {
	header http.Header
	mu     sync.Mutex
	text   strings.Builder
}

func (a *answer) Header() http.Header { return a.header }
func (a *answer) WriteHeader(int)     {}
func (a *answer) Flush()              {}

func (a *answer) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.text.Write(p)
}

func (a *answer) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.text.String()
}

// follow serves the stream of a session's events until the context is done.
func follow(ctx context.Context, m *memory, h *host) (a *answer, ended chan error) {
	s := &rest.Server{
		Service: &sessions.Service{Records: m, Logs: logs{memory: m}}, Log: slog.New(slog.DiscardHandler),
		Host: func(*http.Request) rest.Host { return h },
	}
	a, ended = &answer{header: http.Header{}}, make(chan error, 1)
	h.answer = a
	router := chi.NewRouter()
	for _, route := range s.Routes(false) {
		if strings.HasSuffix(route.Path, "/events/sse") {
			router.Get(route.Path, func(w http.ResponseWriter, r *http.Request) { ended <- route.Handle(w, r) })
		}
	}
	r := httptest.NewRequest(http.MethodGet, "/sandbox-agent/v1/sessions/s/events/sse", nil)
	go router.ServeHTTP(a, r.WithContext(ctx))
	return a, ended
}

func newMemory() *memory {
	m := &memory{session: proto.AgentSession{Org: "acme", ID: "s", Agent: "x"}, added: make(chan struct{}, 1)}
	m.add(1)
	return m
}

// add adds an entry with an event.
func (m *memory) add(sequence int) {
	entry := fmt.Sprintf(`{"events":[{"event_id":"evt_%d","sequence":%d,"type":"turn.started","data":{}}],`+
		`"state":{"sequence":%d}}`, sequence, sequence, sequence)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.messages = append(m.messages, []byte(entry))
	select {
	case m.added <- struct{}{}:
	default:
	}
}

// A silent stream has a comment every 15 seconds, and goes on after it.
func TestSilentStreamsAreKeptAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		m, h := newMemory(), &host{}
		a, ended := follow(ctx, m, h)
		synctest.Wait()
		if got := a.String(); strings.Count(got, "id: 1\n") != 1 || strings.Contains(got, ":\n") {
			t.Errorf("%q", got)
		}
		time.Sleep(15*time.Second + time.Millisecond)
		synctest.Wait()
		time.Sleep(15 * time.Second)
		synctest.Wait()
		m.add(2)
		synctest.Wait()
		if got := a.String(); !strings.Contains(got, "\n\n: keep-alive\n\n: keep-alive\n\nid: 2\n") {
			t.Errorf("%q", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// A stream ends cleanly soon after its API key was revoked, also if it is never silent.
func TestStreamsEndWithTheirKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, h := newMemory(), &host{}
		_, ended := follow(t.Context(), m, h)
		for i := range 40 {
			time.Sleep(time.Second)
			m.add(i + 2)
			synctest.Wait()
		}
		if n := h.checks.Load(); n != 2 {
			t.Errorf("%d checks in 40 seconds", n)
		}
		h.revoked.Store(new(errors.New("revoked")))
		time.Sleep(16 * time.Second)
		synctest.Wait()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Error("the stream goes on")
		}
	})
}

// What a slow client has not read yet stays reserved.
func TestMemoryIsReleasedOnceSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		h := &host{}
		_, ended := follow(ctx, newMemory(), h)
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if len(h.seen) != 1 || !strings.Contains(h.seen[0], "id: 1\n") {
			t.Errorf("%q", h.seen)
		}
	})
}

// A stream ends cleanly if the store fails: then its client comes back.
func TestStreamsEndCleanlyIfTheStoreFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory()
		m.broken = errors.New("no store")
		_, ended := follow(t.Context(), m, &host{})
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
