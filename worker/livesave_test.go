package worker_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/live"
)

// exclusiveHome is a home whose saves must not overlap.
type exclusiveHome struct {
	fakeHome
	t       *testing.T
	busy    atomic.Bool
	version int64
	saving  func(ctx context.Context) error // is called during SaveLive, unless nil
}

func (h *exclusiveHome) CheckOut(context.Context, proto.CheckoutRequest) (worker.Home, error) {
	return h, nil
}

func (h *exclusiveHome) begin() (end func()) {
	if !h.busy.CompareAndSwap(false, true) {
		h.t.Error("two saves at a time")
	}
	return func() { h.busy.Store(false) }
}

func (h *exclusiveHome) SaveLive(
	ctx context.Context, freeze func(context.Context, func(context.Context) error) error,
	commit func(context.Context, *proto.Commit) error,
) (int64, error) {
	defer h.begin()()
	if h.saving != nil {
		if err := h.saving(ctx); err != nil {
			return 0, err
		}
	}
	h.version++
	return h.version, freeze(ctx, func(ctx context.Context) error { return commit(ctx, &proto.Commit{}) })
}

func (h *exclusiveHome) Save(ctx context.Context) (*proto.Commit, error) {
	defer h.begin()()
	return h.fakeHome.Save(ctx)
}

// liveWorker runs a worker with one live sandbox until during returns. save asks for a save of its home.
func liveWorker(t *testing.T, home *exclusiveHome, during func(save func() (int, string), stop func())) *lease {
	t.Helper()
	sandboxes, err := live.Open(filepath.Join(t.TempDir(), "sockets"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sandboxes.Close(); err != nil {
			t.Error(err)
		}
	}()
	const ticket = "ticket"
	l := newLease(func(j *proto.Job) {
		inThread(j)
		j.Live = &proto.Live{
			Sandbox: "one", TicketHash: sha256.Sum256([]byte(ticket)), ExpiresAt: time.Now().Add(time.Hour),
		}
	})
	running, stopped, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		<-running
		defer close(ended)
		handler := sandboxes.Handler()
		save := func() (int, string) {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, proto.SavePath, nil)
			r.Header.Set(proto.HeaderSandbox, "one")
			r.Header.Set(proto.HeaderTicket, ticket)
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			return w.Code, strings.TrimSpace(w.Body.String())
		}
		during(save, func() { close(stopped) })
	}()
	b := &fakeJail{run: func(context.Context, jail.Program) (jail.Outcome, error) {
		close(running)
		select {
		case <-stopped:
		case <-ended:
		}
		return jail.Outcome{Kind: jail.Exited}, nil
	}}
	ctx, stop := context.WithCancel(t.Context())
	w := &worker.Worker{
		Jobs: jobs{make(chan *lease, 1)}, Jails: b, Images: blockingImages{}, Homes: home, Home: "/home/u", Slots: 1,
		SaveTimeout: time.Minute, Live: sandboxes,
		Warm: worker.Warm{OnStart: func(proto.Language, worker.Start) {}},
		Log:  slog.New(slog.NewTextHandler(t.Output(), nil)), Done: func(*proto.Record) { stop() },
		OnHealth: func(error) {},
		Open:     func(context.Context, *proto.Job, int, int64) worker.Output { return output{} },
	}
	w.Jobs.(jobs).left <- l
	if err := w.Run(ctx, t.Context()); err != nil {
		t.Fatal(err)
	}
	<-ended
	return l
}

func TestSavesOfRunningSandbox(t *testing.T) {
	home := &exclusiveHome{t: t, fakeHome: fakeHome{commit: &proto.Commit{Fence: 7}}}
	l := liveWorker(t, home, func(save func() (int, string), _ func()) {
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				if status, body := save(); status != http.StatusOK || !strings.HasPrefix(body, `{"version":`) {
					t.Errorf("status %d, %s", status, body)
				}
			})
		}
		all.Wait()
		for _, c := range []struct {
			err  error
			want string
		}{
			{&proto.LimitError{Bytes: 3, Files: 1, MaxBytes: 2, MaxFiles: 1}, "the sandbox allows 2 bytes"},
			{jail.ErrFrozenTooLong, "longer than 2s"},
			{jail.ErrNotFrozen, "could not be stopped"},
			{errors.New("secret"), "the cause is in the worker's log"},
		} {
			home.saving = func(context.Context) error { return c.err }
			if status, body := save(); status != http.StatusOK || !strings.HasPrefix(body, `{"refused":`) ||
				!strings.Contains(body, c.want) || strings.Contains(body, "secret") {
				t.Errorf("%v: status %d, %s", c.err, status, body)
			}
		}
	})
	if home.version != 20 || l.outcome.Commit == nil || home.saves != 1 {
		t.Errorf("%d saves, %+v, and %d at the end", home.version, l.outcome, home.saves)
	}
}

// The end of a sandbox ends a save, and saves afterwards.
func TestSaveWhileSandboxEnds(t *testing.T) {
	begun := make(chan struct{})
	home := &exclusiveHome{
		t: t, fakeHome: fakeHome{commit: &proto.Commit{Fence: 7}}, saving: func(ctx context.Context) error {
			close(begun)
			<-ctx.Done()
			return context.Cause(ctx)
		},
	}
	l := liveWorker(t, home, func(save func() (int, string), stop func()) {
		go func() {
			<-begun
			stop()
		}()
		if status, body := save(); status != http.StatusOK || !strings.Contains(body, "the sandbox is stopping") {
			t.Errorf("status %d, %s", status, body)
		}
	})
	if l.outcome.Commit == nil || home.saves != 1 || !home.closed {
		t.Errorf("%+v, %+v", l.outcome, home)
	}
}
