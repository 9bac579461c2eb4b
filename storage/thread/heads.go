package thread

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Heads are the heads of all threads. The error of what needs a thread that there is none of is [proto.ErrNotFound], and of what needs one
// that an execution holds a [*proto.BusyError].
type Heads interface {
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// Lock gives a thread to trace, as to an execution, and returns the head as it is then. One that does not exist is made.
	Lock(ctx context.Context, org, id string, trace proto.TraceID) (head *proto.Thread, worker string, err error)
	// Unlock takes it away again.
	Unlock(ctx context.Context, org, id string, trace proto.TraceID) error
	// Stage adds an uploaded file; a [*proto.StagedError] refuses it, and so does an error of may, which is asked of the head as it would be.
	Stage(ctx context.Context, org, id string, f proto.StagedFile, may func(before []proto.StagedFile, next *proto.Thread) error) error
	// Create stores a new head; where there is one it is [proto.ErrExists].
	Create(ctx context.Context, head *proto.Thread) error
	Remove(ctx context.Context, org, id string) error
	// All gives all heads in the order in which they were changed. One that changes meanwhile comes after what was changed before that, for
	// the second time if it came before.
	All(ctx context.Context) iter.Seq2[*proto.Thread, error]
}

const (
	// forkTries is how often a fork begins again because its source changed meanwhile.
	forkTries = 10
	// undoTimeout is the time for what is to be undone after ctx has ended.
	undoTimeout = 10 * time.Second
)

// StageFile stores an uploaded file of size bytes and stages it, so that it is in the thread's home from then on. The thread is made where
// there is none. The path is relative to the home and cleaned; another one is a [*proto.FieldError]. A [*proto.StagedError] says that too many
// files wait already, and a [*proto.RoomError] that the home would be more than most.
func (v *Versions) StageFile(ctx context.Context, org, thread, path string, size int64, most proto.Room, body io.Reader) error {
	if err := v.CheckRoom(ctx, org, thread, path, size, most); err != nil {
		return err
	}
	b, err := v.Blobs.PutStream(ctx, uploadsPrefix+org+"/"+random(), size, body)
	if err != nil {
		return fmt.Errorf("stage a file of thread %s: %w", thread, err)
	}
	f := proto.StagedFile{Path: path, At: time.Now().UTC(), Blob: b}
	refused := false
	err = v.Heads.Stage(ctx, org, thread, f, func(before []proto.StagedFile, next *proto.Thread) error {
		err := v.checkRoom(ctx, before, next, most)
		refused = err != nil
		return err
	})
	if _, full := errors.AsType[*proto.StagedError](err); full || refused {
		// After any other error it may be staged after all, and what is not Collect removes.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = errors.Join(err, v.Blobs.Delete(undo, b.Key))
	}
	if err != nil {
		return fmt.Errorf("stage a file of thread %s: %w", thread, err)
	}
	return nil
}

// CheckRoom gives the error with which StageFile would refuse a file as the thread is now, before anything of it is there.
func (v *Versions) CheckRoom(ctx context.Context, org, thread, path string, size int64, most proto.Room) error {
	err := checkPath(path)
	var head *proto.Thread
	if err == nil {
		head, err = v.Heads.Get(ctx, org, thread)
	}
	if errors.Is(err, proto.ErrNotFound) {
		head, err = &proto.Thread{Org: org, ID: thread}, nil
	}
	if err == nil {
		before := head.Staged
		staged := slices.DeleteFunc(slices.Clone(before), func(f proto.StagedFile) bool { return f.Path == path })
		head.Staged = append(staged, proto.StagedFile{Path: path, Blob: proto.Blob{Size: size}})
		err = v.checkRoom(ctx, before, head, most)
	}
	if err != nil {
		return fmt.Errorf("stage a file of thread %s: %w", thread, err)
	}
	return nil
}

// checkRoom is a [*proto.RoomError] where a home with its staged files, the last of which is new, would be more than most. What takes no more
// than those that were staged before it is let through: that is how to make room.
func (v *Versions) checkRoom(ctx context.Context, before []proto.StagedFile, head *proto.Thread, most proto.Room) error {
	var home proto.Room
	if head.Version != nil {
		home = proto.Room{Bytes: head.Version.Bytes, Files: head.Version.Files}
	}
	staged := proto.StagedRoom(head.Staged)
	if !home.Add(staged).Over(most) || !staged.Over(proto.StagedRoom(before)) {
		return nil
	}
	if head.Version != nil {
		t, err := v.tree(ctx, head.Org, head.Version)
		if err != nil {
			return err
		}
		home = home.Add(t.inTheWay(head.Staged))
	}
	if !home.Add(staged).Over(most) {
		return nil
	}
	e := &proto.RoomError{Thread: head.ID, Home: home, Waiting: proto.StagedRoom(head.Staged[:len(head.Staged)-1]), Most: most}
	e.New = proto.Room{Bytes: staged.Bytes - e.Waiting.Bytes, Files: staged.Files - e.Waiting.Files}
	return e
}

// Fork makes a thread that begins with a version of another one, and returns its head. No blob is copied. Number 0 is the home of the other
// one as it is, with what is staged. The new thread's first version has number 1, and so have all its layers, as whoever makes a home applies
// those over the number that he has. The error is [proto.ErrNotFound] where there is no such thread or version, and [proto.ErrExists] where
// there is a thread to already.
func (v *Versions) Fork(ctx context.Context, org, from string, number int64, to string) (*proto.Thread, error) {
	for range forkTries {
		head, err := v.fork(ctx, org, from, number, to)
		if errors.Is(err, errAgain) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("fork thread %s: %w", from, err)
		}
		return head, nil
	}
	return nil, fmt.Errorf("fork thread %s: %w %d times meanwhile: try again", from, proto.ErrConflict, forkTries)
}

// errAgain says that what was forked is not sure to be there any more.
var errAgain = errors.New("the source changed")

func (v *Versions) fork(ctx context.Context, org, from string, number int64, to string) (*proto.Thread, error) {
	switch _, err := v.Heads.Get(ctx, org, to); {
	case err == nil:
		return nil, fmt.Errorf("thread %s: %w", to, proto.ErrExists)
	case !errors.Is(err, proto.ErrNotFound):
		return nil, err
	}
	source, err := v.Heads.Get(ctx, org, from)
	if err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	head := &proto.Thread{Org: org, ID: to, CreatedAt: now, UsedAt: now}
	if number == 0 {
		head.Staged = source.Staged
	}
	if number != 0 || source.Version != nil {
		if head.Version, err = v.forkVersion(ctx, source, number, head); err != nil {
			return nil, err
		}
	}
	if err := v.Heads.Create(ctx, head); err != nil {
		if errors.Is(err, proto.ErrExists) && head.Version != nil {
			err = errors.Join(err, v.Blobs.Delete(ctx, head.Version.Manifest.Key))
		}
		return nil, err
	}
	if len(head.Staged) == 0 {
		return head, nil
	}
	// Staged files have no manifest that keeps them.
	after, err := v.Heads.Get(ctx, org, from)
	if err == nil && kept(after.Staged, head.Staged) {
		return head, nil
	}
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return nil, errors.Join(err, v.Remove(ctx, org, to))
	}
	if err := v.Remove(ctx, org, to); err != nil {
		return nil, fmt.Errorf("its staged files went while they were forked: take back the fork: %w", err)
	}
	return nil, errAgain
}

// forkVersion makes the first version of a fork and writes its manifest. When it returns, the source had what it takes after the manifest
// was there, so that it stays.
func (v *Versions) forkVersion(ctx context.Context, source *proto.Thread, number int64, head *proto.Thread) (*proto.Version, error) {
	if number == 0 {
		number = source.Number()
	}
	old, err := v.version(ctx, source, number)
	if err != nil {
		return nil, err
	}
	version := &proto.Version{
		Number: 1, CreatedAt: head.CreatedAt, Bytes: old.Bytes, Files: old.Files, Attributes: old.Attributes, Layers: slices.Clone(old.Layers),
	}
	for i := range version.Layers {
		version.Layers[i].Version = 1
	}
	if *version, err = v.WriteManifest(ctx, head.Org, head.ID, *version, nil); err != nil {
		return nil, err
	}
	after, err := v.Heads.Get(ctx, source.Org, source.ID)
	if err == nil && has(after, old, old == source.Version) {
		return version, nil
	}
	if err == nil || errors.Is(err, proto.ErrNotFound) {
		err = errAgain
	}
	return nil, errors.Join(err, v.Blobs.Delete(ctx, version.Manifest.Key))
}

// has reports whether a head still refers to the layers of a version: one that was the newest, or one of its history.
func has(head *proto.Thread, version *proto.Version, newest bool) bool {
	if !newest {
		return refers(head, version.Manifest.Key)
	}
	n := len(version.Layers)
	return head.Version != nil && len(head.Version.Layers) >= n && slices.Equal(head.Version.Layers[:n], version.Layers)
}

// refers reports whether a head refers to a manifest.
func refers(head *proto.Thread, manifest string) bool {
	return head.Version != nil && head.Version.Manifest.Key == manifest ||
		slices.ContainsFunc(head.History, func(h proto.Version) bool { return h.Manifest.Key == manifest })
}

func kept(all, some []proto.StagedFile) bool {
	for i := range some {
		if !slices.ContainsFunc(all, func(f proto.StagedFile) bool { return f.Key == some[i].Key }) {
			return false
		}
	}
	return true
}

// Remove removes a thread: its manifests, so that a rebuild does not bring it back, and then its head. Its blobs are left to Collect. Nobody
// can take the thread meanwhile. Manifests without a head are removed too; where there is nothing it is [proto.ErrNotFound].
func (v *Versions) Remove(ctx context.Context, org, thread string) error {
	_, err := v.Heads.Get(ctx, org, thread)
	if errors.Is(err, proto.ErrNotFound) {
		n, removing := v.removeManifests(ctx, org, thread)
		if n > 0 || removing != nil {
			err = removing
		}
	} else if err == nil {
		err = v.remove(ctx, org, thread, func(*proto.Thread) error { return nil })
	}
	if err != nil {
		return fmt.Errorf("remove thread %s: %w", thread, err)
	}
	return nil
}

// remove removes a thread that exists, if may says so of its head.
func (v *Versions) remove(ctx context.Context, org, thread string, may func(*proto.Thread) error) error {
	us := proto.NewTraceID()
	head, _, err := v.Heads.Lock(ctx, org, thread, us)
	if err != nil {
		return err
	}
	if err = may(head); err == nil {
		_, err = v.removeManifests(ctx, org, thread)
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := errors.Join(err, v.Heads.Unlock(undo, org, thread, us)); err != nil {
		return err
	}
	// Unlock itself removes one that was empty.
	if err := v.Heads.Remove(ctx, org, thread); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	return nil
}

func (v *Versions) removeManifests(ctx context.Context, org, thread string) (int, error) {
	n := 0
	for e, err := range v.Blobs.List(ctx, manifestPrefix(org, thread)) {
		if err == nil {
			err = v.Blobs.Delete(ctx, e.Key)
		}
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// Expire removes threads that were not used for idle and that no execution holds, and returns how many. The error joins those of threads
// that could not be removed.
func (v *Versions) Expire(ctx context.Context, idle time.Duration) (int, error) {
	since := time.Now().Add(-idle)
	n := 0
	var failed []error
	for head, err := range v.Heads.All(ctx) {
		if err != nil {
			failed = append(failed, err)
			continue
		}
		if !head.UsedAt.Before(since) {
			continue
		}
		var busy *proto.BusyError
		switch err := v.remove(ctx, head.Org, head.ID, func(now *proto.Thread) error { return unused(head, now) }); {
		case err == nil:
			n++
		case errors.As(err, &busy), errors.Is(err, errUsed):
		default:
			failed = append(failed, fmt.Errorf("expire thread %s of %s: %w", head.ID, head.Org, err))
		}
	}
	return n, errors.Join(failed...)
}

var errUsed = errors.New("it was used meanwhile")

// unused is an error if a thread was used between a head and a lock.
func unused(before, locked *proto.Thread) error {
	same := func(a, b proto.StagedFile) bool { return a.Key == b.Key }
	if locked.Fence != before.Fence+1 || !slices.EqualFunc(locked.Staged, before.Staged, same) {
		return errUsed
	}
	return nil
}
