// Package threads stores the heads of threads: which execution holds a thread, and which version of
// its home is the newest. A head is one value that is changed by compare-and-set. The contents of
// homes are in the blob store; a head contains only their names.
//
// A lock is not released explicitly: it counts only until its holder's execution has ended. So the
// write that publishes the result also frees the thread.
//
// All functions retry while JetStream does not answer, until ctx is done.
package threads

import (
	"context"
	"crypto/rand"
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
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// submitGrace is how long a lock is valid before its execution exists.
	submitGrace  = 30 * time.Second
	purgeTimeout = 2 * time.Second
	readTimeout  = 5 * time.Second
)

// ErrTooLarge is returned if a head has too many layers to fit into a message.
var ErrTooLarge = errors.New("the head of the thread is too large")

// Threads stores heads in JetStream.
type Threads struct{ Store *store.Store }

// Get returns the head of a thread, or [proto.ErrNotFound].
func (t *Threads) Get(ctx context.Context, org, id string) (*proto.Thread, error) {
	head, _, err := t.read(ctx, org, id)
	if err == nil && (head == nil || head.Removal != "") {
		return nil, fmt.Errorf("thread %s: %w", id, proto.ErrNotFound)
	}
	return head, err
}

// Lock locks a thread for the execution trace, and creates the thread if necessary. It returns the
// head and the worker that ran the previous holder, empty if unknown. It returns a
// [*proto.BusyError] if another execution holds the thread. Locking a thread twice for one
// execution is no error.
func (t *Threads) Lock(
	ctx context.Context, org, id string, trace proto.TraceID,
) (head *proto.Thread, worker string, err error) {
	head, err = t.update(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		now := time.Now().UTC()
		if old == nil {
			return &proto.Thread{Org: org, ID: id, CreatedAt: now, UsedAt: now, Holder: trace, HeldAt: now, Fence: 1}, nil
		}
		if old.Holder == trace {
			return nil, nil // by a write whose answer was lost
		}
		var err error
		if worker, err = t.checkFree(ctx, old); err != nil {
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

// checkFree returns a [*proto.BusyError] if an execution holds the thread. Otherwise it returns the
// worker that ran the last holder.
func (t *Threads) checkFree(ctx context.Context, head *proto.Thread) (worker string, err error) {
	if head.Holder == "" {
		return "", nil
	}
	status, worker, err := t.Store.Records.Status(ctx, head.Org, head.Holder)
	switch {
	case errors.Is(err, proto.ErrNotFound) && time.Since(head.HeldAt) > submitGrace:
		return "", nil // never submitted, or past its retention
	case errors.Is(err, proto.ErrNotFound) || err == nil && !status.Terminal():
		return "", &proto.BusyError{Thread: head.ID, Holder: head.Holder}
	default:
		return worker, err
	}
}

// Unlock unlocks a thread for the execution trace, which was not accepted. It does nothing if trace
// does not hold the thread. It removes a thread created by the lock.
func (t *Threads) Unlock(ctx context.Context, org, id string, trace proto.TraceID) error {
	_, err := t.update(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		if old == nil || old.Holder != trace {
			return nil, nil
		}
		if old.Fence == 1 && old.Version == nil && len(old.Staged) == 0 {
			return removed, nil
		}
		next := *old
		next.Holder, next.HeldAt = "", time.Time{}
		next.Fence++
		return &next, nil
	})
	return err
}

// Fence blocks all commits begun by attempts of the execution trace. It does nothing if trace does
// not hold the thread, since it cannot commit then.
func (t *Threads) Fence(ctx context.Context, org, id string, trace proto.TraceID) error {
	_, err := t.update(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		if old == nil || old.Holder != trace {
			return nil, nil
		}
		next := *old
		next.Fence++
		return &next, nil
	})
	return err
}

// Commit adds the version in c, made by the execution trace, to a thread. Committing it twice is no
// error. Commit returns [proto.ErrFenced] if the execution does not hold the thread with c's fence,
// and [ErrTooLarge]; both are final.
func (t *Threads) Commit(ctx context.Context, org, id string, trace proto.TraceID, c *proto.Commit) error {
	_, err := t.update(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
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

// Compact replaces the first layers of the newest version, which must be old, by one layer. It
// returns [proto.ErrConflict] if the first layers differ, and [proto.ErrNotFound] if there is no
// thread.
func (t *Threads) Compact(ctx context.Context, org, id string, old []proto.Layer, with proto.Layer) error {
	_, err := t.update(ctx, org, id, func(head *proto.Thread) (*proto.Thread, error) {
		if head == nil {
			return nil, proto.ErrNotFound
		}
		if len(old) == 0 || head.Version == nil || len(head.Version.Layers) < len(old) ||
			!slices.Equal(head.Version.Layers[:len(old)], old) {
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

// Stage adds an uploaded file for the next execution, replacing an earlier one with the same path.
// It creates the thread if necessary. check is called with the previously staged files and the next
// head; Stage returns its error, or a [*proto.StagedError] if too many files are staged.
func (t *Threads) Stage(
	ctx context.Context, org, id string, f proto.StagedFile,
	check func(before []proto.StagedFile, next *proto.Thread) error,
) error {
	_, err := t.update(ctx, org, id, func(old *proto.Thread) (*proto.Thread, error) {
		now := time.Now().UTC()
		next := proto.Thread{Org: org, ID: id, CreatedAt: now}
		if old != nil {
			next = *old
		}
		next.UsedAt = now
		before := next.Staged
		others := slices.DeleteFunc(slices.Clone(next.Staged), func(s proto.StagedFile) bool { return s.Path == f.Path })
		next.Staged = append(others, f)
		if err := checkStaged(&next, len(others)); err != nil {
			return nil, err
		}
		return &next, check(before, &next)
	})
	return err
}

// Edit changes an unlocked thread. It replaces the staged files and, if c is not nil, adds its
// version. before is the head on which the change is based; its CreatedAt is zero if there was no
// thread, which Edit then creates. Repeating a change is no error. Edit returns a
// [*proto.BusyError] if an execution holds the thread, [proto.ErrConflict] if the thread has
// changed since before, a [*proto.StagedError], and [ErrTooLarge].
func (t *Threads) Edit(ctx context.Context, before *proto.Thread, c *proto.Commit, staged []proto.StagedFile) error {
	sameFile := func(a, b proto.StagedFile) bool { return a.Key == b.Key && a.Path == b.Path }
	_, err := t.update(ctx, before.Org, before.ID, func(old *proto.Thread) (*proto.Thread, error) {
		now := time.Now().UTC()
		switch {
		case old == nil && before.CreatedAt.IsZero():
			old = &proto.Thread{Org: before.Org, ID: before.ID, CreatedAt: now}
		case old == nil:
			return nil, proto.ErrNotFound
		case old.Fence == before.Fence+1 && (c == nil || old.Committed(c)) && slices.EqualFunc(old.Staged, staged, sameFile):
			return nil, nil // by a write whose answer was lost
		}
		if _, err := t.checkFree(ctx, old); err != nil {
			return nil, err
		}
		if old.Fence != before.Fence || old.Number() != before.Number() ||
			!slices.EqualFunc(old.Staged, before.Staged, sameFile) {
			return nil, proto.ErrConflict
		}
		next := *old
		if c != nil {
			committed, err := old.Commit(c)
			if err != nil {
				return nil, err
			}
			next = *committed
		}
		next.Fence++ // an abandoned attempt of the last holder can no longer commit
		next.Staged, next.UsedAt = staged, now
		return &next, checkStaged(&next, len(staged))
	})
	if err != nil {
		return fmt.Errorf("change the files of thread %s: %w", before.ID, err)
	}
	return nil
}

// checkStaged returns a [*proto.StagedError] if head has too many staged files, of which there were
// files before.
func checkStaged(head *proto.Thread, files int) error {
	size, err := json.Marshal(head.Staged)
	if err != nil {
		return fmt.Errorf("encode the staged files of thread %s: %w", head.ID, err)
	}
	if len(head.Staged) > proto.MaxStaged || len(size) > proto.MaxStagedBytes {
		return &proto.StagedError{Thread: head.ID, Files: files}
	}
	return nil
}

// Create stores the head of a new thread. It returns [proto.ErrExists] if the thread exists.
func (t *Threads) Create(ctx context.Context, head *proto.Thread) error {
	_, err := t.update(ctx, head.Org, head.ID, func(old *proto.Thread) (*proto.Thread, error) {
		if old != nil {
			return nil, fmt.Errorf("thread %s: %w", head.ID, proto.ErrExists)
		}
		return head, nil
	})
	return err
}

// Tombstone replaces the head of a thread by a tombstone and returns its name. Until Purge the
// thread does not exist and its id is blocked: Lock, Stage and Create return a
// [*proto.RemovingError]. check is called with the head, nil if there is none; Tombstone returns
// its error, and a [*proto.BusyError] if an execution holds the thread. It returns the name of an
// existing tombstone. It replaces a malformed head without a check.
func (t *Threads) Tombstone(
	ctx context.Context, org, id string, check func(*proto.Thread) error,
) (removal string, err error) {
	err = store.Update(ctx, func() error {
		head, seq, err := t.read(ctx, org, id)
		switch {
		case errors.Is(err, store.ErrMalformed): // can only be removed
		case err != nil:
			return err
		case head != nil && head.Removal != "":
			removal = head.Removal
			return nil
		default:
			if err := check(head); err != nil {
				return err
			}
			if head == nil {
				break
			}
			if _, err := t.checkFree(ctx, head); err != nil {
				return err
			}
		}
		removal = rand.Text()
		return t.write(ctx, &proto.Thread{Org: org, ID: id, Removal: removal}, seq)
	})
	return removal, err
}

// Removal returns the name of a thread's tombstone, or "".
func (t *Threads) Removal(ctx context.Context, org, id string) (string, error) {
	head, _, err := t.read(ctx, org, id)
	if err != nil || head == nil {
		return "", err
	}
	return head.Removal, nil
}

// Purge removes the tombstone with that name, if it exists.
func (t *Threads) Purge(ctx context.Context, org, id, removal string) error {
	return store.Update(ctx, func() error {
		head, seq, err := t.read(ctx, org, id)
		if err != nil || head == nil || head.Removal != removal {
			return err
		}
		return t.delete(ctx, org, id, seq)
	})
}

// delete writes a deletion marker over a head, and purges it unless the head was written again.
func (t *Threads) delete(ctx context.Context, org, id string, seq uint64) error {
	subject := store.ThreadSubject(org, id)
	marker, err := t.Store.Threads.Write(ctx, subject, nats.Header{}, nil, seq)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, purgeTimeout)
	defer cancel()
	// A marker that remains reads as no thread.
	_ = t.Store.Threads.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(marker+1))
	return nil
}

// List returns at most limit threads of an organisation after a name, ordered by id: the users'
// threads, or those of an owner, for whom names replace ids.
func (t *Threads) List(
	ctx context.Context, org string, owner proto.ThreadOwner, after string, limit int,
) ([]proto.ThreadSummary, error) {
	if owner == "" {
		return t.list(ctx, org, after, limit, func(s *proto.ThreadSummary) bool { return !proto.ThreadOwned(s.ID) })
	}
	list, err := t.list(ctx, org, owner.Thread(after), limit, func(s *proto.ThreadSummary) bool {
		_, ok := owner.NameOf(s.ID)
		return ok
	})
	for i := range list {
		list[i].ID, _ = owner.NameOf(list[i].ID)
	}
	return list, err
}

// ListUsed returns at most limit threads of an organisation with an id prefix that were used since
// a time, ordered by id.
func (t *Threads) ListUsed(
	ctx context.Context, org, prefix string, since time.Time, limit int,
) ([]proto.ThreadSummary, error) {
	return t.list(ctx, org, prefix, limit, func(s *proto.ThreadSummary) bool {
		return strings.HasPrefix(s.ID, prefix) && !s.UsedAt.Before(since)
	})
}

func (t *Threads) list(
	ctx context.Context, org, after string, limit int, wanted func(*proto.ThreadSummary) bool,
) ([]proto.ThreadSummary, error) {
	if !isToken(org) {
		return nil, nil
	}
	var page []proto.ThreadSummary
	var errRead error
	err := t.Store.Threads.Read(ctx, store.Range{Subject: store.ThreadPatternOf(org)}, func(m *store.Message) {
		var s proto.ThreadSummary
		text := m.Header.Get(store.HeaderThread)
		if s.Org, s.ID = store.ParseThreadSubject(m.Subject); s.ID <= after || text == "" {
			return
		}
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			errRead = errors.Join(errRead, malformed(s.ID, err))
			return
		}
		if !wanted(&s) {
			return
		}
		at, found := slices.BinarySearchFunc(page, s.ID, func(s proto.ThreadSummary, id string) int {
			return strings.Compare(s.ID, id)
		})
		if found {
			page[at] = s
			return
		}
		page = slices.Insert(page, at, s)
		page = page[:min(len(page), limit)]
	})
	if err := errors.Join(err, errRead); err != nil {
		return nil, fmt.Errorf("list threads: %w", err)
	}
	return page, nil
}

// All returns the heads of all threads of all organisations, including tombstones, ordered by their
// last change. A head that changes meanwhile may be returned twice, the newer one later. An error
// is about a malformed head, or it is the last value.
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
			from = m.Seq + 1
			org, id := store.ParseThreadSubject(m.Subject)
			head, err := decode(org, id, m.Header, m.Data)
			if (head != nil || err != nil) && !yield(head, err) {
				return
			}
		}
	}
}

func (t *Threads) next(ctx context.Context, from uint64) (*store.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return t.Store.Threads.Next(ctx, from, store.ThreadPattern, store.WithoutBody)
}

// removed is returned by the function passed to update to remove the thread.
var removed = &proto.Thread{}

// update replaces the head of a thread by the result of next, and starts over after a conflict.
// next is called with nil if there is no thread, and returns nil to keep the head. update returns
// the head. It returns a [*proto.RemovingError] instead of replacing a tombstone.
func (t *Threads) update(
	ctx context.Context, org, id string, next func(old *proto.Thread) (*proto.Thread, error),
) (head *proto.Thread, err error) {
	err = store.Update(ctx, func() error {
		old, seq, err := t.read(ctx, org, id)
		if err != nil {
			return err
		}
		removing := old != nil && old.Removal != ""
		if removing {
			old = nil
		}
		head, err = next(old)
		switch {
		case err != nil:
			return err
		case head == nil:
			head = old
			return nil
		case removing:
			return &proto.RemovingError{Thread: id}
		case head == removed:
			return t.delete(ctx, org, id, seq)
		default:
			return t.write(ctx, head, seq)
		}
	})
	return head, err
}

// read returns the head or tombstone of a thread, nil if there is none, and its sequence number. If
// the head is malformed, it returns [store.ErrMalformed] and the sequence number.
func (t *Threads) read(ctx context.Context, org, id string) (*proto.Thread, uint64, error) {
	if !isToken(org) || !isToken(id) {
		return nil, 0, fmt.Errorf("thread %q: %w", id, proto.ErrNotFound)
	}
	m, err := t.Store.Threads.Last(ctx, store.ThreadSubject(org, id), store.FromLeader)
	if store.IsNotFound(err) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	head, err := decode(org, id, m.Header, m.Data)
	return head, m.Seq, err
}

// isToken reports whether name can be a token of a subject. Other names would be patterns or more
// than one token.
func isToken(name string) bool { return name != "" && !strings.ContainsAny(name, ".*> \t\r\n") }

// decode returns nil for the marker of a removed thread.
func decode(org, id string, h nats.Header, body []byte) (*proto.Thread, error) {
	if h.Get(store.HeaderThread) == "" && len(body) == 0 {
		return nil, nil
	}
	var head proto.Thread
	if err := json.Unmarshal(body, &head); err != nil {
		return nil, malformed(id, err)
	}
	if head.Org != org || head.ID != id {
		return nil, malformed(id, fmt.Errorf("it is the head of %q of %q", head.ID, head.Org))
	}
	return &head, nil
}

func malformed(id string, err error) error {
	return fmt.Errorf("head of thread %s: %w: %w: restore it from a backup, or remove the thread", id,
		store.ErrMalformed, err)
}

func (t *Threads) write(ctx context.Context, head *proto.Thread, seq uint64) error {
	body, err := json.Marshal(head)
	if err != nil {
		return fmt.Errorf("encode thread %s: %w", head.ID, err)
	}
	header := nats.Header{}
	if head.Removal == "" { // List omits heads without a summary
		summary, err := json.Marshal(head.Summary())
		if err != nil {
			return fmt.Errorf("encode thread %s: %w", head.ID, err)
		}
		header.Set(store.HeaderThread, string(summary))
	}
	if len(body) > t.Store.MaxInline { // a body that is stored apart would expire
		return fmt.Errorf("the head of thread %s has %d bytes, more than %d: %w", head.ID, len(body), t.Store.MaxInline,
			ErrTooLarge)
	}
	_, err = t.Store.Threads.Write(ctx, store.ThreadSubject(head.Org, head.ID), header, body, seq)
	return err
}
