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
	"github.com/bullpen-run/bullpen/proto/layer"
)

// Heads stores the heads of all threads. Methods return [proto.ErrNotFound] if the thread does not
// exist. A tombstone reads as no thread, but Stage and Create then return a [*proto.RemovingError].
type Heads interface {
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// Stage adds an uploaded file. check is called with the previously staged files and the new
	// head. Stage fails with the error of check or a [*proto.StagedError].
	Stage(ctx context.Context, org, id string, f proto.StagedFile,
		check func(before []proto.StagedFile, next *proto.Thread) error) error
	// Edit replaces the staged files of a thread and, if c is not nil, adds its version. before is
	// the head on which the change is based; its CreatedAt is zero if there was no thread. Edit
	// fails with a [*proto.BusyError], a [*proto.StagedError], or [proto.ErrConflict] if the head
	// has changed.
	Edit(ctx context.Context, before *proto.Thread, c *proto.Commit, staged []proto.StagedFile) error
	// Create stores a new head. It returns [proto.ErrExists] if the thread exists.
	Create(ctx context.Context, head *proto.Thread) error
	// Tombstone replaces the head of a thread by a tombstone, unless check returns an error, and
	// returns the tombstone's name. check is called with the head, or nil if there is none. If the
	// thread already has a tombstone, Tombstone returns its name. It returns a [*proto.BusyError]
	// if an execution holds the thread.
	Tombstone(ctx context.Context, org, id string, check func(*proto.Thread) error) (removal string, err error)
	// Removal returns the name of a thread's tombstone, or "".
	Removal(ctx context.Context, org, id string) (string, error)
	// Purge removes a tombstone if it has that name.
	Purge(ctx context.Context, org, id, removal string) error
	// All yields all heads and tombstones in the order of their last change. A head that changes
	// during the iteration is yielded again, after all heads that changed before it.
	All(ctx context.Context) iter.Seq2[*proto.Thread, error]
}

const (
	// maxForkAttempts limits how often a fork is repeated because its source changed.
	maxForkAttempts = 10
	// undoTimeout limits clean-up after the context is done.
	undoTimeout = 10 * time.Second
)

// Stage stores an uploaded file of size bytes and adds it to the thread's home, creating the thread
// if necessary. The path is relative to the home and clean; otherwise the error is a
// [*proto.FieldError]. The error is a [*proto.StagedError] if too many files are staged already,
// and a [*proto.SpaceError] if the home would exceed limit.
func (v *Versions) Stage(
	ctx context.Context, org, thread, path string, size int64, limit proto.Space, body io.Reader,
) error {
	return v.stage(ctx, org, thread, path, nil, size, limit, body)
}

// StageIfUnchanged is Stage if the file at the path still has the tag returned by Open, or does not
// exist for an empty tag. Otherwise the error is a [*proto.FileChangedError]. Writes by an
// execution that holds the thread are not compared: they are not in the home until the execution
// has ended.
func (v *Versions) StageIfUnchanged(
	ctx context.Context, org, thread, path, tag string, size int64, limit proto.Space, body io.Reader,
) error {
	return v.stage(ctx, org, thread, path, &tag, size, limit, body)
}

// stage stages a file if the file at the path has a tag, or unconditionally if tag is nil.
func (v *Versions) stage(
	ctx context.Context, org, thread, path string, tag *string, size int64, limit proto.Space, body io.Reader,
) error {
	if err := v.CheckSpace(ctx, org, thread, path, size, limit); err != nil {
		return err
	}
	b, err := v.Blobs.PutStream(ctx, uploadsPrefix+org+"/"+random(), size, body)
	if err != nil {
		return fmt.Errorf("stage a file of thread %s: %w", thread, err)
	}
	f := proto.StagedFile{Path: path, At: time.Now().UTC(), Blob: b}
	calls, rejected := 0, false
	err = v.Heads.Stage(ctx, org, thread, f, func(before []proto.StagedFile, next *proto.Thread) error {
		var err error
		if tag != nil {
			err = v.checkTag(ctx, before, next, *tag)
		}
		if err == nil {
			err = v.checkSpace(ctx, before, next, limit)
		}
		calls++
		rejected = err != nil && calls == 1 // an earlier call may belong to a write whose answer was lost
		return err
	})
	if _, full := errors.AsType[*proto.StagedError](err); full || rejected {
		// After any other error the file may have been staged. If not, Collect removes the blob.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = errors.Join(err, v.Blobs.Delete(undo, b.Key))
	}
	if err != nil {
		return fmt.Errorf("stage a file of thread %s: %w", thread, err)
	}
	return nil
}

// checkTag returns a [*proto.FileChangedError] unless the last staged file of next replaces a file
// with that tag, or no file if tag is empty. before are the staged files without it.
func (v *Versions) checkTag(ctx context.Context, before []proto.StagedFile, next *proto.Thread, tag string) error {
	f := &next.Staged[len(next.Staged)-1]
	if slices.ContainsFunc(before, func(s proto.StagedFile) bool { return s.Key == f.Key }) {
		return nil // staged by a write whose answer was lost
	}
	head := *next
	head.Staged = before
	t, err := v.currentTree(ctx, &head)
	if err != nil {
		return err
	}
	current := ""
	if n := t.root.find(f.Path); n != nil && n.kind == layer.File {
		current = t.tag(n)
	}
	if current != tag {
		return &proto.FileChangedError{}
	}
	return nil
}

// CheckSpace returns the error with which Stage would currently reject a file, before it is
// uploaded.
func (v *Versions) CheckSpace(ctx context.Context, org, thread, path string, size int64, limit proto.Space) error {
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
		err = v.checkSpace(ctx, before, head, limit)
	}
	if err != nil {
		return fmt.Errorf("stage a file of thread %s: %w", thread, err)
	}
	return nil
}

// checkSpace returns a [*proto.SpaceError] if a home with its staged files exceeds limit. The last
// staged file is new. checkSpace accepts staged files that need no more space than those before, so
// that users can replace large files by smaller ones.
func (v *Versions) checkSpace(
	ctx context.Context, before []proto.StagedFile, head *proto.Thread, limit proto.Space,
) error {
	var home proto.Space
	if head.Version != nil {
		home = proto.Space{Bytes: head.Version.Bytes, Files: head.Version.Files}
	}
	staged := proto.StagedSpace(head.Staged)
	if !home.Add(staged).Over(limit) || !staged.Over(proto.StagedSpace(before)) {
		return nil
	}
	if head.Version != nil {
		t, err := v.tree(ctx, head.Org, head.Version)
		if err != nil {
			return err
		}
		home = home.Add(t.replacedBy(head.Staged))
	}
	if !home.Add(staged).Over(limit) {
		return nil
	}
	e := &proto.SpaceError{
		Thread: head.ID, Home: home, Waiting: proto.StagedSpace(head.Staged[:len(head.Staged)-1]),
		Most: limit,
	}
	e.New = proto.Space{Bytes: staged.Bytes - e.Waiting.Bytes, Files: staged.Files - e.Waiting.Files}
	return e
}

// Fork creates a thread from a version of another one and returns its head. It copies no blobs. Number
// 0 is the current home including staged files, which become a version of a new volume. The first
// version of the new thread and all of its layers have number 1, since caches apply the layers with
// numbers above their version. The error wraps [proto.ErrNotFound] if the thread or version does not
// exist, and [proto.ErrExists] if the new thread does.
func (v *Versions) Fork(ctx context.Context, org, from string, number int64, to string) (*proto.Thread, error) {
	for range maxForkAttempts {
		head, err := v.fork(ctx, org, from, number, to)
		if errors.Is(err, errSourceChanged) {
			continue
		}
		if _, volume := proto.VolumeOf(to); volume && err == nil && len(head.Staged) > 0 {
			head, err = v.forkStaged(ctx, head)
		}
		if err != nil {
			return nil, fmt.Errorf("fork thread %s: %w", from, err)
		}
		return head, nil
	}
	return nil, fmt.Errorf("fork thread %s: %w: it changed during each of %d attempts: try again", from, proto.ErrConflict,
		maxForkAttempts)
}

// errSourceChanged means that blobs of the fork may have been removed.
var errSourceChanged = errors.New("the source changed")

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
		_, removing := errors.AsType[*proto.RemovingError](err)
		if (removing || errors.Is(err, proto.ErrExists)) && head.Version != nil {
			err = errors.Join(err, v.Blobs.Delete(ctx, head.Version.Manifest.Key))
		}
		return nil, err
	}
	if len(head.Staged) == 0 {
		return head, nil
	}
	// No manifest protects staged files from garbage collection.
	after, err := v.Heads.Get(ctx, org, from)
	if err == nil && containsAll(after.Staged, head.Staged) {
		return head, nil
	}
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return nil, errors.Join(err, v.Remove(ctx, org, to))
	}
	if err := v.Remove(ctx, org, to); err != nil {
		return nil, fmt.Errorf("its staged files were removed during the fork: remove the fork: %w", err)
	}
	return nil, errSourceChanged
}

// forkStaged makes the staged files of a new fork part of its version, and returns its head,
// because readers of a volume only see versions. After an error there is no fork.
func (v *Versions) forkStaged(ctx context.Context, head *proto.Thread) (*proto.Thread, error) {
	_, err := v.edit(ctx, head.Org, head.ID, false, unlimited, func(*edit) error { return nil })
	if err == nil {
		var now *proto.Thread
		if now, err = v.Heads.Get(ctx, head.Org, head.ID); err == nil {
			return now, nil
		}
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return nil, errors.Join(err, v.Remove(undo, head.Org, head.ID))
}

// forkVersion returns the first version of a fork after writing its manifest. The source still
// referred to the layers after the manifest was stored, so Collect retains them.
func (v *Versions) forkVersion(
	ctx context.Context, source *proto.Thread, number int64, head *proto.Thread,
) (*proto.Version, error) {
	if number == 0 {
		number = source.Number()
	}
	old, err := v.version(ctx, source, number)
	if err != nil {
		return nil, err
	}
	version := &proto.Version{
		Number: 1, CreatedAt: head.CreatedAt, Bytes: old.Bytes, Files: old.Files, Attributes: old.Attributes,
		Layers: slices.Clone(old.Layers),
	}
	for i := range version.Layers {
		version.Layers[i].Version = 1
	}
	if *version, err = v.WriteManifest(ctx, head.Org, head.ID, *version, nil); err != nil {
		return nil, err
	}
	after, err := v.Heads.Get(ctx, source.Org, source.ID)
	if err == nil && refersToLayers(after, old, old == source.Version) {
		return version, nil
	}
	if err == nil || errors.Is(err, proto.ErrNotFound) {
		err = errSourceChanged
	}
	return nil, errors.Join(err, v.Blobs.Delete(ctx, version.Manifest.Key))
}

// refersToLayers reports whether a head still refers to the layers of a version, which was either
// the newest one or in the history.
func refersToLayers(head *proto.Thread, version *proto.Version, newest bool) bool {
	if !newest {
		return refersTo(head, version.Manifest.Key)
	}
	n := len(version.Layers)
	return head.Version != nil && len(head.Version.Layers) >= n && slices.Equal(head.Version.Layers[:n], version.Layers)
}

// refersTo reports whether a head refers to a manifest.
func refersTo(head *proto.Thread, manifest string) bool {
	return head.Version != nil && head.Version.Manifest.Key == manifest ||
		slices.ContainsFunc(head.History, func(h proto.Version) bool { return h.Manifest.Key == manifest })
}

func containsAll(all, some []proto.StagedFile) bool {
	for i := range some {
		if !slices.ContainsFunc(all, func(f proto.StagedFile) bool { return f.Key == some[i].Key }) {
			return false
		}
	}
	return true
}

// Remove removes a thread: first its head, which a tombstone replaces, then its manifests, so that
// Rebuild does not restore it, then the tombstone. Collect removes its blobs later. If Remove is
// interrupted, the thread is gone, and the next Remove or Collect completes the removal. Remove also
// removes manifests without a head. The error wraps [proto.ErrNotFound] if there is neither, and is a
// [*proto.BusyError] if an execution holds the thread.
func (v *Versions) Remove(ctx context.Context, org, thread string) error {
	err := v.remove(ctx, org, thread, func(head *proto.Thread) error {
		if head != nil {
			return nil
		}
		for _, err := range v.Blobs.List(ctx, manifestPrefix(org, thread)) {
			return err
		}
		return proto.ErrNotFound
	})
	if err != nil {
		return fmt.Errorf("remove thread %s: %w", thread, err)
	}
	return nil
}

// remove removes a thread unless check returns an error, see Heads.Tombstone.
func (v *Versions) remove(ctx context.Context, org, thread string, check func(*proto.Thread) error) error {
	removal, err := v.Heads.Tombstone(ctx, org, thread, check)
	if err != nil {
		return err
	}
	return v.completeRemoval(ctx, org, thread, removal)
}

// completeRemoval removes the manifests of a thread with a tombstone, then the tombstone.
func (v *Versions) completeRemoval(ctx context.Context, org, thread, removal string) error {
	var keys []string
	for e, err := range v.Blobs.List(ctx, manifestPrefix(org, thread)) {
		if err != nil {
			return err
		}
		keys = append(keys, e.Key)
	}
	// While the tombstone exists, there are no manifests of a new thread with the same id. Another
	// process may have removed the tombstone. Since keys are used once, the listed ones can be
	// removed at any later time.
	if current, err := v.Heads.Removal(ctx, org, thread); err != nil || current != removal {
		return err
	}
	if err := forEach(ctx, keys, v.Blobs.Delete); err != nil {
		return err
	}
	return v.Heads.Purge(ctx, org, thread, removal)
}

// Expire removes the threads that have not been used for the duration idle and that no execution
// holds. Threads of volumes and of agents' files never expire.
// It returns the number of removed threads. The error joins the errors of failed removals.
func (v *Versions) Expire(ctx context.Context, idle time.Duration) (int, error) {
	since := time.Now().Add(-idle)
	n := 0
	var failed []error
	for head, err := range v.Heads.All(ctx) {
		if err != nil {
			failed = append(failed, err)
			continue
		}
		if !head.Expires() || head.Removal != "" || !head.UsedAt.Before(since) {
			continue
		}
		var busy *proto.BusyError
		switch err := v.remove(ctx, head.Org, head.ID, func(now *proto.Thread) error { return checkUnused(head, now) }); {
		case err == nil:
			n++
		case errors.As(err, &busy), errors.Is(err, errUsed):
		default:
			failed = append(failed, fmt.Errorf("expire thread %s of %s: %w", head.ID, head.Org, err))
		}
	}
	return n, errors.Join(failed...)
}

var errUsed = errors.New("the thread was used")

// checkUnused returns errUsed if a thread was used after its head was read.
func checkUnused(before, now *proto.Thread) error {
	same := func(a, b proto.StagedFile) bool { return a.Key == b.Key }
	if now == nil || now.Fence != before.Fence || !slices.EqualFunc(now.Staged, before.Staged, same) {
		return errUsed
	}
	return nil
}
