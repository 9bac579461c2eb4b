package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// load is clients that run executions all the time, in every mode, and know what each has to print.
type load struct {
	w    *world
	stop context.CancelFunc
	done sync.WaitGroup

	mu       sync.Mutex
	accepted map[string]string // what an execution prints, by its id
	finished []time.Time       // of executions, as their clients saw it
	refused  int               // submissions that were not taken
	wrong    []string
	beat     chan struct{} // closed at the next end of an execution
}

const (
	loadClients = 2 // of each mode
	// again is how long a client waits that was refused, whatever it is told: what is measured is the server.
	again = 100 * time.Millisecond
)

// startLoad starts the clients, which the end of the test stops.
func startLoad(t *testing.T, w *world) *load {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	l := &load{w: w, stop: cancel, accepted: map[string]string{}, beat: make(chan struct{})}
	for _, run := range []func(context.Context, string) error{l.inline, l.async, l.streaming} {
		for range loadClients {
			l.done.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					if err := run(ctx, fmt.Sprintf("%p %d", &n, n)); err != nil {
						l.complain(err.Error())
					}
				}
			})
		}
	}
	t.Cleanup(l.end)
	return l
}

// end stops the clients, and returns when they have had their last answers.
func (l *load) end() {
	l.stop()
	l.done.Wait()
}

func (l *load) complain(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wrong = append(l.wrong, time.Now().Format("15:04:05.000 ")+what)
}

// submit has a program accepted. It gives nil when it was refused as it should be, which counts.
func (l *load) submit(ctx context.Context, word string, headers ...string) (*reply, error) {
	r, err := l.w.try(context.WithoutCancel(ctx), http.MethodPost, executePath, bash("echo '"+word+"'").and("timeout", 30), headers...)
	if err != nil {
		return nil, fmt.Errorf("submit: %w", err)
	}
	id := r.header.Get("X-Trace-Id")
	if r.status == http.StatusOK || r.status == http.StatusAccepted {
		l.mu.Lock()
		l.accepted[id] = word + "\n"
		l.mu.Unlock()
		return r, nil
	}
	if after, err := strconv.Atoi(r.header.Get("Retry-After")); r.status != http.StatusServiceUnavailable || err != nil || after < 1 {
		return nil, fmt.Errorf("%s: refused with %s, Retry-After %q", id, r, r.header.Get("Retry-After"))
	}
	l.mu.Lock()
	l.refused++
	l.mu.Unlock()
	select {
	case <-ctx.Done():
	case <-time.After(again):
	}
	return nil, nil
}

// ended takes in an execution that its client has seen the end of.
func (l *load) ended() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = append(l.finished, time.Now())
	close(l.beat)
	l.beat = make(chan struct{})
}

func (l *load) inline(ctx context.Context, word string) error {
	r, err := l.submit(ctx, word)
	if r == nil {
		return err
	}
	l.ended()
	return nil
}

func (l *load) async(ctx context.Context, word string) error {
	r, err := l.submit(ctx, word, "Prefer", "respond-async")
	if r == nil {
		return err
	}
	id := r.header.Get("X-Trace-Id")
	for deadline := time.Now().Add(patience); ; {
		r, err := l.w.try(context.WithoutCancel(ctx), http.MethodGet, execution(id)+"?wait=5", nil)
		if err != nil {
			return fmt.Errorf("%s: %w", id, err)
		}
		if r.status == http.StatusOK {
			var rec record
			r.into(l.w.t, &rec)
			if proto.Status(rec.Status).Terminal() {
				l.ended()
				return nil
			}
		} else if r.status != http.StatusServiceUnavailable {
			return fmt.Errorf("%s: its record: %s", id, r)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not end: %s", id, r)
		}
	}
}

func (l *load) streaming(ctx context.Context, word string) error {
	r, err := l.submit(ctx, word, accept, ndjson)
	if r == nil {
		return err
	}
	l.ended()
	return nil
}

// since waits until every client has seen n executions end, and gives the longest time without one from a moment on.
func (l *load) since(t testing.TB, from time.Time, n int) time.Duration {
	t.Helper()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for {
		l.mu.Lock()
		first, _ := slices.BinarySearchFunc(l.finished, from, time.Time.Compare)
		ends, beat := slices.Clone(l.finished[first:]), l.beat
		l.mu.Unlock()
		if len(ends) >= n {
			return longest(from, ends)
		}
		select {
		case <-beat:
		case <-limit.C:
			t.Fatalf("%d executions ended within %s, want %d; %s", len(ends), patience, n, l.tail())
		}
	}
}

// longest gives the longest time between two ends, or from the beginning to the first.
func longest(from time.Time, ends []time.Time) (gap time.Duration) {
	for _, at := range ends {
		gap, from = max(gap, at.Sub(from)), at
	}
	return gap
}

func (l *load) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprintf("%d accepted, %d refused, %d wrong: %q", len(l.accepted), l.refused, len(l.wrong), l.wrong[max(0, len(l.wrong)-5):])
}

// check says what is wrong with what the clients saw, and with the executions as they are told now.
func (l *load) check(t *testing.T) {
	t.Helper()
	l.end()
	for _, w := range l.wrong {
		t.Error(w)
	}
	for id, want := range l.accepted {
		if err := l.isRight(id, want); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d executions, %d refused", len(l.accepted), l.refused)
}

func (l *load) isRight(id, want string) error {
	rec := l.w.ended(id)
	if rec.Status != "success" || rec.Stdout == nil || *rec.Stdout != want || rec.Attempt != 1 {
		return errors.New(rec.String())
	}
	return nil
}
