package e2e

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

// load is a set of clients that constantly run executions in every mode. It records what each must
// print.
type load struct {
	sys  *system
	stop context.CancelFunc
	done sync.WaitGroup

	mu       sync.Mutex
	accepted map[string]string // expected output by execution id
	unknown  map[string]string // the same, if the server did not know whether it accepted them
	// From submission to end, as the clients saw it, in the order of the ends.
	finished  []span
	refused   int // rejected submissions
	errors    []string
	mayBeLost []span        // when renewals may have failed long enough to lose leases
	beat      chan struct{} // closed at the next end of an execution
}

// span is a time interval.
type span struct{ from, to time.Time }

func (s span) endsAt(t time.Time) int { return s.to.Compare(t) }

const (
	loadClients = 2 // per mode
	// again is how long a rejected client waits. It ignores Retry-After, because the test measures
	// the server.
	again = 100 * time.Millisecond
)

// startLoad starts the clients. They stop when the test ends.
func startLoad(t *testing.T, sys *system) *load {
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	l := &load{
		sys: sys, stop: cancel, accepted: map[string]string{}, unknown: map[string]string{},
		beat: make(chan struct{}),
	}
	for mode, run := range []func(context.Context, string) error{l.inline, l.threaded, l.async, l.streaming} {
		for i := range loadClients {
			name := fmt.Sprintf("client-%d-%d", mode, i)
			l.done.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					if err := run(ctx, fmt.Sprintf("%s %d", name, n)); err != nil {
						l.addError(err)
					}
				}
			})
		}
	}
	t.Cleanup(l.end)
	return l
}

// end stops the clients and waits for their last responses.
func (l *load) end() {
	l.stop()
	l.done.Wait()
}

func (l *load) addError(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errors = append(l.errors, time.Now().Format("15:04:05.000 ")+err.Error())
}

// submit submits a program that prints word. It returns nil if the program was not accepted. A
// documented rejection is not an error.
func (l *load) submit(ctx context.Context, word string, body request, headers ...string) (*reply, error) {
	r, err := l.sys.try(context.WithoutCancel(ctx), http.MethodPost, executePath, body, headers...)
	if err != nil {
		return nil, fmt.Errorf("submit: %w", err)
	}
	id, after := r.header.Get("X-Trace-Id"), r.header.Get("Retry-After")
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case r.status == http.StatusOK || r.status == http.StatusAccepted:
		l.accepted[id] = word + "\n"
		return r, nil
	case r.status == http.StatusGatewayTimeout && id != "": // it was accepted and will still end
		l.accepted[id] = word + "\n"
	case r.status == http.StatusInternalServerError && id != "":
		l.unknown[id] = word + "\n"
	case (r.status == http.StatusServiceUnavailable || r.status == http.StatusConflict && body["thread_id"] != nil) &&
		!isPositive(after, r.status):
		return nil, fmt.Errorf("%s refused with Retry-After %q: %s", id, after, r)
	case r.status == http.StatusServiceUnavailable || r.status == http.StatusConflict && body["thread_id"] != nil:
		l.refused++
	default:
		return nil, fmt.Errorf("%s refused: %s", id, r)
	}
	l.mu.Unlock()
	defer l.mu.Lock()
	select {
	case <-ctx.Done():
	case <-time.After(again):
	}
	return nil, nil
}

// isPositive reports whether a rejection has a Retry-After header, as every temporary rejection
// must.
func isPositive(after string, status int) bool {
	n, err := strconv.Atoi(after)
	return err == nil && n > 0 || status == http.StatusConflict
}

func program(word string) request { return bash("echo '"+word+"'").and("timeout", 30) }

// ended records that a client saw the end of an execution submitted at the given time.
func (l *load) ended(submitted time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.finished = append(l.finished, span{submitted, time.Now()})
	close(l.beat)
	l.beat = make(chan struct{})
}

func (l *load) inline(ctx context.Context, word string) error {
	submitted := time.Now()
	r, err := l.submit(ctx, word, program(word))
	if r != nil {
		l.ended(submitted)
	}
	return err
}

// threaded sometimes switches to a new thread, because a thread is busy while its execution hangs.
func (l *load) threaded(ctx context.Context, word string) error {
	submitted := time.Now()
	thread := "thread-" + strconv.FormatInt(time.Now().Unix()/10, 10) + word[:len("client-0-0")]
	r, err := l.submit(ctx, word, program(word).and("thread_id", thread))
	if r != nil {
		l.ended(submitted)
	}
	return err
}

func (l *load) streaming(ctx context.Context, word string) error {
	submitted := time.Now()
	r, err := l.submit(ctx, word, program(word), accept, ndjson)
	if r != nil {
		l.ended(submitted)
	}
	return err
}

func (l *load) async(ctx context.Context, word string) error {
	submitted := time.Now()
	r, err := l.submit(ctx, word, program(word), "Prefer", "respond-async", "Idempotency-Key", word)
	if r == nil {
		return err
	}
	id := r.header.Get("X-Trace-Id")
	for deadline := time.Now().Add(patience); ; {
		r, err := l.sys.try(context.WithoutCancel(ctx), http.MethodGet, execution(id)+"?wait=5", nil)
		if err != nil {
			return fmt.Errorf("%s: %w", id, err)
		}
		if r.status == http.StatusOK {
			var rec record
			r.into(l.sys.t, &rec)
			if proto.Status(rec.Status).Terminal() {
				l.ended(submitted)
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

// since waits until clients have seen n executions end after from, and returns them.
func (l *load) since(t testing.TB, from time.Time, n int) []span {
	t.Helper()
	var ends []span
	l.await(t, fmt.Sprintf("%d executions that end", n), func() bool {
		first, _ := slices.BinarySearchFunc(l.finished, from, span.endsAt)
		ends = slices.Clone(l.finished[first:])
		return len(ends) >= n
	})
	return ends[:n]
}

// renewed waits until a client sees the end of an execution that was submitted after from. It
// returns the time of that end.
func (l *load) renewed(t testing.TB, from time.Time) (at time.Time) {
	t.Helper()
	l.await(t, "an execution that is submitted and ends", func() bool {
		i := slices.IndexFunc(l.finished, func(s span) bool { return s.from.After(from) })
		if i >= 0 {
			at = l.finished[i].to
		}
		return i >= 0
	})
	return at
}

// await calls done at every end of an execution until it returns true. l.mu is held during the
// call.
func (l *load) await(t testing.TB, what string, done func() bool) {
	t.Helper()
	limit := time.NewTimer(2 * patience)
	defer limit.Stop()
	for {
		l.mu.Lock()
		ok, beat := done(), l.beat
		l.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-beat:
		case <-limit.C:
			t.Fatalf("%s: not within %s; %s", what, 2*patience, l)
		}
	}
}

// longest returns the longest gap between two ends, or from the beginning to the first end.
func longest(from time.Time, ends []span) (gap time.Duration) {
	for _, s := range ends {
		gap, from = max(gap, s.to.Sub(from)), s.to
	}
	return gap
}

func (l *load) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprintf("%d accepted, %d refused, %d unknown, %d wrong: %q", len(l.accepted), l.refused, len(l.unknown),
		len(l.errors),
		l.errors[max(0, len(l.errors)-5):])
}

// check stops the load. It reports errors in what the clients saw and in the executions as recorded
// now.
func (l *load) check(t *testing.T) {
	t.Helper()
	l.end()
	for _, w := range l.errors {
		t.Error(w)
	}
	for id, want := range l.accepted {
		if err := l.checkRecord(t, id, want); err != nil {
			t.Error(err)
		}
	}
	for id, want := range l.unknown {
		if r := l.sys.get(execution(id)); r.status == http.StatusNotFound {
			continue
		}
		rec := l.sys.in(t).ended(id)
		if rec.ErrorCode != nil && *rec.ErrorCode == string(proto.CodeExpiredInQueue) && rec.Attempt == 0 {
			continue
		}
		if err := l.checkRecord(t, id, want); err != nil {
			t.Error(err)
		}
	}
	t.Log(l)
}

// renewalsMissed is the shortest store outage that can cost an execution its lease. A lease lasts
// 10 s and may have been renewed 3 s before the outage.
const renewalsMissed = 7 * time.Second

// outage records that no execution ended for a time, at some point since from.
func (l *load) outage(from time.Time, gap time.Duration) {
	if gap > renewalsMissed {
		l.mayBeLost = append(l.mayBeLost, span{from, time.Now()})
	}
}

// lost reports whether the loss of an execution was inevitable: its worker could not renew the
// lease while it ran.
func (l *load) lost(rec record) bool {
	return rec.ErrorCode != nil && *rec.ErrorCode == string(proto.CodeWorkerLost) &&
		slices.ContainsFunc(l.mayBeLost, func(s span) bool {
			return rec.CreatedAt.Before(s.to) && rec.CompletedAt.After(s.from)
		})
}

// checkRecord reports whether an execution succeeded once and has the same result in its record and
// its stream.
func (l *load) checkRecord(t *testing.T, id, want string) error {
	t.Helper()
	a := l.sys.in(t)
	rec := a.ended(id)
	if l.lost(rec) {
		t.Logf("lost while the store was away: %s", rec)
		return nil
	}
	if rec.Status != "success" || rec.Stdout == nil || *rec.Stdout != want || rec.Attempt != 1 {
		return errors.New(rec.String())
	}
	events := a.output(id, 0)
	last := events[len(events)-1]
	if last.Type != "result" || last.Result == nil || last.OutputTruncated == nil || last.Result.Stdout != want ||
		!last.Result.Success {
		return fmt.Errorf("%s: its stream ends with %+v", id, last)
	}
	if *last.OutputTruncated { // the store was away for longer than output waits for it
		t.Logf("%s: its stream is not whole", id)
		return nil
	}
	if stdout, _, _ := checkEvents(t, events, 0); stdout != want {
		return fmt.Errorf("%s: its stream has %q", id, stdout)
	}
	return nil
}
