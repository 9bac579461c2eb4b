// Package threads keeps the heads of threads: who has a thread to itself, and which version of its home is the newest. A head is one value,
// changed by compare-and-set only. What a home holds is in the store, of which this package knows nothing but names.
//
// A holder is never written away when its execution ends: one whose execution has ended holds nothing. So a thread comes free with the very
// write that makes the result known.
//
// All functions ask again while the store does not answer, until their ctx ends.
package threads

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// submission is the time that a gateway has from the lock of a thread to the job that is to hold it.
	submission   = 30 * time.Second
	purgeTimeout = 2 * time.Second
	readTimeout  = 5 * time.Second
)

// ErrTooLarge says that a head would not fit into a message any more, because of its many layers.
var ErrTooLarge = errors.New("the head of the thread has no room left")

// Threads is the heads in JetStream.
type Threads struct{ Store *store.Store }

// Get gives the head of a thread. Its error is [proto.ErrNotFound] where there is none.
func (t *Threads) Get(ctx context.Context, org, id string) (*proto.Thread, error) {
	head, _, err := t.read(ctx, org, id)
	if err == nil && head == nil {
		return nil, fmt.Errorf("thread %s: %w", id, proto.ErrNotFound)
	}
	return head, err
}

// Lock gives a thread to the execution trace, and makes it where there is none. It returns the head as it is then, and the worker that had
// the execution which was its holder before, empty where that is not known. Its error is a [*proto.BusyError] at once where another
// execution holds the thread. That the execution has it already is none.
func (t *Threads) Lock(ctx context.Context, org, id string, trace proto.TraceID) (head *proto.Thread, worker string, err error) {
	head, err = t.change(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		now := time.Now().UTC()
		if old == nil {
			return &proto.Thread{Org: org, ID: id, CreatedAt: now, UsedAt: now, Holder: trace, HeldAt: now, Fence: 1}, nil
		}
		if old.Holder == trace {
			return nil, nil // by a write whose answer was lost, and on which somebody built
		}
		var err error
		if worker, err = t.free(ctx, old); err != nil {
			return nil, err
		}
		next := *old
		next.Holder, next.HeldAt, next.UsedAt = trace, now, now
		next.Fence++
		return &next, nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("lock thread %s: %w", id, err)
	}
	return head, worker, nil
}

// free finds out whether nobody holds head, and which worker had its last holder. Its error is a [*proto.BusyError] if somebody does.
func (t *Threads) free(ctx context.Context, head *proto.Thread) (worker string, err error) {
	if head.Holder == "" {
		return "", nil
	}
	status, worker, err := t.Store.Status(ctx, head.Holder)
	switch {
	case errors.Is(err, proto.ErrNotFound) && time.Since(head.HeldAt) > submission:
		return "", nil // who took it did not live to submit the job, or its record's retention is over
	case errors.Is(err, proto.ErrNotFound) || err == nil && !status.Terminal():
		return "", &proto.BusyError{Thread: head.ID, Holder: head.Holder}
	default:
		return worker, err
	}
}

// Unlock takes a thread from the execution trace, which was not accepted. Where trace does not hold it nothing is done. A thread that was
// made by the lock alone goes.
func (t *Threads) Unlock(ctx context.Context, org, id string, trace proto.TraceID) error {
	for {
		head, seq, err := t.read(ctx, org, id)
		if err != nil || head == nil || head.Holder != trace {
			return err
		}
		if head.Fence == 1 && head.Version == nil && len(head.Staged) == 0 {
			err = t.bury(ctx, org, id, seq)
		} else {
			next := *head
			next.Holder, next.HeldAt = "", time.Time{}
			next.Fence++
			err = t.write(ctx, &next, seq)
		}
		if !store.IsConflict(err) {
			return err
		}
	}
}

// Fence makes sure that no commit is made which the execution trace began before. Where trace does not hold the thread nothing is done: it
// can make none.
func (t *Threads) Fence(ctx context.Context, org, id string, trace proto.TraceID) error {
	_, err := t.change(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		if old == nil || old.Holder != trace || fault.Planted(fault.LeaseWithoutFencing) {
			return nil, nil
		}
		next := *old
		next.Fence++
		return &next, nil
	})
	return err
}

// Commit makes what the execution trace has saved the newest version of a thread. That it is so already is no error. Its error is
// [proto.ErrFenced] where the execution does not hold the thread under c's fence any more, and [ErrTooLarge]; both are final.
func (t *Threads) Commit(ctx context.Context, org, id string, trace proto.TraceID, c *proto.Commit) error {
	_, err := t.change(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		switch {
		case old == nil:
			return nil, fmt.Errorf("thread %s was removed: %w", id, proto.ErrFenced)
		case old.Committed(c):
			return nil, nil
		case old.Holder != trace:
			return nil, fmt.Errorf("execution %s: %w", old.Holder, proto.ErrFenced)
		default:
			return old.Commit(c)
		}
	})
	return err
}

// Compact puts one layer in place of those that the newest version of a thread begins with. Its error is [proto.ErrConflict] where it does
// not begin with old, and [proto.ErrNotFound] where there is no such thread.
func (t *Threads) Compact(ctx context.Context, org, id string, old []proto.Layer, with proto.Layer) error {
	_, err := t.change(ctx, org, id, func(head *proto.Thread) (*proto.Thread, error) {
		if head == nil {
			return nil, proto.ErrNotFound
		}
		if len(old) == 0 || head.Version == nil || len(head.Version.Layers) < len(old) || !slices.Equal(head.Version.Layers[:len(old)], old) {
			return nil, proto.ErrConflict
		}
		next, version := *head, *head.Version
		version.Layers = append([]proto.Layer{with}, version.Layers[len(old):]...)
		next.Version = &version
		return &next, nil
	})
	if err != nil {
		return fmt.Errorf("compact thread %s: %w", id, err)
	}
	return nil
}

// Stage adds an uploaded file to those that the next execution of a thread finds in its home, in place of an older one of the same path,
// and makes the thread where there is none. Its error is a [*proto.StagedError] where too many wait already, and that of may, which is asked
// of the head as it would be, and what was staged before.
func (t *Threads) Stage(ctx context.Context, org, id string, f proto.StagedFile, may func(before []proto.StagedFile, next *proto.Thread) error) error {
	_, err := t.change(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		now := time.Now().UTC()
		next := proto.Thread{Org: org, ID: id, CreatedAt: now}
		if old != nil {
			next = *old
		}
		next.UsedAt = now
		before := next.Staged
		waiting := slices.DeleteFunc(slices.Clone(next.Staged), func(s proto.StagedFile) bool { return s.Path == f.Path })
		next.Staged = append(waiting, f)
		size, err := json.Marshal(next.Staged)
		if err != nil {
			return nil, fmt.Errorf("encode the staged files of thread %s: %w", id, err)
		}
		if len(next.Staged) > proto.MaxStaged || len(size) > proto.MaxStagedBytes {
			return nil, &proto.StagedError{Thread: id, Files: len(waiting)}
		}
		return &next, may(before, &next)
	})
	return err
}

// Create stores the head of a thread that there is none of. Its error is [proto.ErrExists] where there is.
func (t *Threads) Create(ctx context.Context, head *proto.Thread) error {
	_, err := t.change(ctx, head.Org, head.ID, func(old *proto.Thread) (*proto.Thread, error) {
		if old != nil {
			return nil, fmt.Errorf("thread %s: %w", head.ID, proto.ErrExists)
		}
		return head, nil
	})
	return err
}

// Remove removes a thread. Its error is [proto.ErrNotFound] where there is none, and a [*proto.BusyError] where an execution holds it.
func (t *Threads) Remove(ctx context.Context, org, id string) error {
	return t.remove(ctx, org, id, func(*proto.Thread) error { return nil })
}

// Expire is Remove of a thread that was not used since a time; one that was is [proto.ErrConflict].
func (t *Threads) Expire(ctx context.Context, org, id string, since time.Time) error {
	return t.remove(ctx, org, id, func(head *proto.Thread) error {
		if head.UsedAt.Before(since) {
			return nil
		}
		return fmt.Errorf("thread %s was used on %s: %w", id, head.UsedAt.Format(time.RFC3339), proto.ErrConflict)
	})
}

func (t *Threads) remove(ctx context.Context, org, id string, may func(*proto.Thread) error) error {
	for {
		head, seq, err := t.read(ctx, org, id)
		switch {
		case errors.Is(err, store.ErrMalformed): // nobody can do anything else with it
		case err != nil:
			return err
		case head == nil:
			return fmt.Errorf("thread %s: %w", id, proto.ErrNotFound)
		default:
			if err := may(head); err != nil {
				return err
			}
			if _, err := t.free(ctx, head); err != nil {
				return err
			}
		}
		if err := t.bury(ctx, org, id, seq); !store.IsConflict(err) {
			return err
		}
	}
}

// bury writes a mark over a head, which says that there is no such thread, and removes it unless somebody wrote over it.
func (t *Threads) bury(ctx context.Context, org, id string, seq uint64) error {
	subject := store.ThreadSubject(org, id)
	mark, err := t.Store.Write(ctx, subject, nats.Header{}, nil, seq)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, purgeTimeout)
	defer cancel()
	// A mark that stays is shown to nobody.
	_ = t.Store.Threads.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(mark+1))
	return nil
}

// List gives an organisation's threads whose ids come after the one given, in their order, and at most limit of them.
func (t *Threads) List(ctx context.Context, org, after string, limit int) ([]proto.ThreadSummary, error) {
	if !token(org) {
		return nil, nil
	}
	var page []proto.ThreadSummary
	var wrong error
	err := t.Store.ReadHeaders(ctx, t.Store.Threads, store.ThreadPatternOf(org), func(m jetstream.Msg) {
		var s proto.ThreadSummary
		text := m.Headers().Get(store.HeaderThread)
		if s.Org, s.ID = store.ParseThreadSubject(m.Subject()); s.ID <= after || text == "" {
			return
		}
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			wrong = errors.Join(wrong, malformed(s.ID, err))
			return
		}
		at, again := slices.BinarySearchFunc(page, s.ID, func(s proto.ThreadSummary, id string) int { return strings.Compare(s.ID, id) })
		if again {
			page[at] = s
			return
		}
		page = slices.Insert(page, at, s)
		page = page[:min(len(page), limit)]
	})
	if err := errors.Join(err, wrong); err != nil {
		return nil, fmt.Errorf("list threads: %w", err)
	}
	return page, nil
}

// All gives the heads of all threads of all organisations, in the order in which they were changed. One that changes meanwhile may come
// twice, the newer one later; none is left out. An error in place of a head is that of one that cannot be read, or ends the reading.
func (t *Threads) All(ctx context.Context) iter.Seq2[*proto.Thread, error] {
	return func(yield func(*proto.Thread, error) bool) {
		for from := uint64(1); ; {
			m, err := t.next(ctx, from)
			if store.IsNotFound(err) {
				return
			}
			if err != nil {
				yield(nil, fmt.Errorf("read the heads of threads: %w", err))
				return
			}
			from = m.Sequence + 1
			org, id := store.ParseThreadSubject(m.Subject)
			head, err := decode(org, id, m.Header, m.Data)
			if (head != nil || err != nil) && !yield(head, err) {
				return
			}
		}
	}
}

func (t *Threads) next(ctx context.Context, from uint64) (*jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return t.Store.Next(ctx, t.Store.Threads, from, store.ThreadPattern)
}

// change writes what next makes of the head of a thread, and starts over when somebody else was faster. next gets nil where there is no
// thread, and gives nil to leave the head as it is. It returns the head that stands.
func (t *Threads) change(
	ctx context.Context, org, id string, next func(old *proto.Thread) (*proto.Thread, error),
) (*proto.Thread, error) {
	for {
		old, seq, err := t.read(ctx, org, id)
		if err != nil {
			return nil, err
		}
		head, err := next(old)
		if err != nil {
			return nil, err
		}
		if head == nil {
			return old, nil
		}
		if err := t.write(ctx, head, seq); !store.IsConflict(err) {
			return head, err
		}
	}
}

// read gives the head of a thread, nil where there is none, and the sequence number to change it by. Its error is [store.ErrMalformed], with
// that number, where something else lies there.
func (t *Threads) read(ctx context.Context, org, id string) (*proto.Thread, uint64, error) {
	if !token(org) || !token(id) {
		return nil, 0, fmt.Errorf("thread %q: %w", id, proto.ErrNotFound)
	}
	m, err := t.Store.LastFromLeader(ctx, t.Store.Threads, store.ThreadSubject(org, id))
	if store.IsNotFound(err) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	head, err := decode(org, id, m.Header, m.Data)
	return head, m.Seq, err
}

// token reports whether name can be a part of a subject: others would be patterns, or name something else.
func token(name string) bool { return name != "" && !strings.ContainsAny(name, ".*> \t\r\n") }

// decode gives nil for the mark of a removed thread.
func decode(org, id string, h nats.Header, body []byte) (*proto.Thread, error) {
	if h.Get(store.HeaderThread) == "" && len(body) == 0 {
		return nil, nil
	}
	var head proto.Thread
	if err := json.Unmarshal(body, &head); err != nil {
		return nil, malformed(id, err)
	}
	if head.Org != org || head.ID != id {
		return nil, malformed(id, fmt.Errorf("it says it is %q of %q", head.ID, head.Org))
	}
	return &head, nil
}

func malformed(id string, err error) error {
	return fmt.Errorf("head of thread %s: %w: %w: remove the thread and rebuild it", id, store.ErrMalformed, err)
}

func (t *Threads) write(ctx context.Context, head *proto.Thread, seq uint64) error {
	body, err := json.Marshal(head)
	if err != nil {
		return fmt.Errorf("encode thread %s: %w", head.ID, err)
	}
	summary, err := json.Marshal(head.Summary())
	if err != nil {
		return fmt.Errorf("encode thread %s: %w", head.ID, err)
	}
	if len(body) > t.Store.MaxInline() { // a body that is stored apart has a retention
		return fmt.Errorf("thread %s takes %d bytes of %d: %w", head.ID, len(body), t.Store.MaxInline(), ErrTooLarge)
	}
	_, err = t.Store.Write(ctx, store.ThreadSubject(head.Org, head.ID), nats.Header{store.HeaderThread: {string(summary)}}, body, seq)
	return err
}
