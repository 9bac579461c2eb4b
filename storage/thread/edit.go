package thread

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

const (
	// maxEditAttempts limits how often an edit is repeated because the thread changed.
	maxEditAttempts = 10
	// maxEditLayers limits the layers of a version that an edit may follow. Only workers combine
	// layers, and a head with all its layers must fit into a message.
	maxEditLayers = 512
)

// unlimited is no limit of a home.
var unlimited = proto.Space{Bytes: math.MaxInt64, Files: math.MaxInt64}

// edit changes the current home of a thread.
type edit struct {
	*editor
	now time.Time
	// moved is a renamed file or directory, nil if there is none. from is its path in the newest
	// version, and to its path in the next.
	moved    *node
	from, to string
	sources  []source // of what was copied
}

// Delete removes the file, link or directory at a path from a thread's home. The path is relative
// to the home, clean and not empty. The change is a new version, unless only staged files are
// removed. If there is no such thread, the error wraps [proto.ErrNotFound]; if the path does not
// exist, it is a [*proto.NoFileError]. It is a [*proto.PathError] if the path is a non-empty
// directory and recursive is false, and a [*proto.BusyError] if an execution holds the thread.
func (v *Versions) Delete(ctx context.Context, org, thread, path string, recursive bool) (version int64, err error) {
	version, err = v.edit(ctx, org, thread, false, unlimited, func(e *edit) error {
		n := e.root.find(path)
		switch {
		case n == nil:
			return &proto.NoFileError{Path: path}
		case len(n.children) > 0 && !recursive:
			return &proto.PathError{
				Path:    path,
				Message: "is a directory that is not empty; send recursive to delete it with its content",
			}
		}
		e.remove(path)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("delete a file of thread %s: %w", thread, err)
	}
	return version, nil
}

// Rename moves the file, link or directory at a path of a thread's home to another path, creating
// its missing parent directories. Paths and errors are as with Delete. It returns a
// [*proto.PathError] if the new path exists, is below a file or link, or is below the old one, and
// a [*proto.SpaceError] if the home would exceed limit.
func (v *Versions) Rename(
	ctx context.Context, org, thread, from, to string, limit proto.Space,
) (version int64, err error) {
	version, err = v.edit(ctx, org, thread, false, limit, func(e *edit) error { return e.rename(from, to) })
	if err != nil {
		return 0, fmt.Errorf("rename a file of thread %s: %w", thread, err)
	}
	return version, nil
}

// Put stores size bytes of body as a file of a volume, in a new version, and creates the thread of
// the volume if necessary. The errors are those of Stage, and a [*proto.BusyError] if an execution holds
// the volume once body is stored.
func (v *Versions) Put(
	ctx context.Context, org, thread, path string, size int64, limit proto.Space, body io.Reader,
) error {
	if err := v.put(ctx, org, thread, path, size, limit, body); err != nil {
		return fmt.Errorf("put a file into %s: %w", thread, err)
	}
	return nil
}

func (v *Versions) put(
	ctx context.Context, org, thread, path string, size int64, limit proto.Space, body io.Reader,
) (err error) {
	if err := v.CheckSpace(ctx, org, thread, path, size, limit); err != nil {
		return err
	}
	// The edit's spool file is created only after the body is stored: clients can be slow.
	b, err := v.Blobs.PutStream(ctx, uploadsPrefix+org+"/"+random(), size, body)
	if err != nil {
		return err
	}
	defer func() { // no head refers to it
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_ = v.Blobs.Delete(undo, b.Key) // what remains is removed by Collect
	}()
	object, err := v.putLarge(ctx, org, &b)
	if err != nil {
		return err
	}
	_, err = v.edit(ctx, org, thread, true, limit, func(e *edit) error {
		if err := e.stage([]proto.StagedFile{{Path: path, At: e.now, Blob: b}}); err != nil {
			return err
		}
		e.root.find(path).content.object = object
		return nil
	})
	return err
}

// putLarge stores the content of a staged file as an object. It returns nil if the file is small
// enough for layers to hold its content.
func (v *Versions) putLarge(ctx context.Context, org string, b *proto.Blob) (object *layer.Digest, err error) {
	if b.Size <= layer.MaxInline {
		return nil, nil
	}
	spool, err := v.Spool()
	if err != nil {
		return nil, err
	}
	defer func() { _ = spool.Close() }() // it has no name, and nobody reads it again
	in, err := v.Blobs.Get(ctx, *b)
	if err != nil {
		return nil, hideNotFound(err)
	}
	sum := sha256.New()
	_, err = io.Copy(io.MultiWriter(spool, sum), in)
	if err := errors.Join(err, in.Close()); err != nil {
		return nil, fmt.Errorf("copy a staged file: %w", err)
	}
	digest := layer.Digest(sum.Sum(nil))
	return &digest, v.PutObject(ctx, org, digest, b.Size, spool)
}

// keepStaged makes staged files a part of the next version.
func (v *Versions) keepStaged(ctx context.Context, org string, e *edit, staged []proto.StagedFile) error {
	for i := range staged {
		object, err := v.putLarge(ctx, org, &staged[i].Blob)
		if err != nil {
			return err
		}
		e.root.find(staged[i].Path).content.object = object
	}
	return nil
}

func (e *edit) rename(from, to string) error {
	n := e.root.find(from)
	switch {
	case n == nil:
		return &proto.NoFileError{Path: from}
	case from == to:
		return nil
	case isBelow(to, from):
		return &proto.PathError{Path: to, Message: "is below the directory to rename; choose another place"}
	case e.root.find(to) != nil:
		return &proto.PathError{Path: to, Message: "exists already; delete it first, or choose another name"}
	}
	if err := checkPath(to); err != nil {
		return err
	}
	for i := range to {
		if above := e.root.find(to[:i]); to[i] == '/' && above != nil && above.kind != layer.Dir {
			return &proto.PathError{Path: to[:i], Message: "is no directory; delete it first, or choose another place"}
		}
	}
	if n.kind == layer.Dir {
		if err := n.checkHeight(2 + strings.Count(to, "/")); err != nil {
			return &proto.PathError{
				Path:    to,
				Message: "would have directories that are nested too deeply; choose a place nearer to the home",
			}
		}
	}
	e.remove(from)
	dir, name := e.makeParent(to, e.now)
	dir.setChild(name, n)
	dir.touch(e.now)
	e.moved, e.from, e.to = n, from, to
	return nil
}

// remove removes whatever is at a path that exists.
func (e *edit) remove(path string) {
	dir, name := e.makeParent(path, e.now)
	delete(dir.children, name)
	dir.touch(e.now)
}

func (n *node) touch(at time.Time) { n.sec, n.nsec = at.Unix(), uint32(at.Nanosecond()) }

// isBelow reports whether path is below dir.
func isBelow(path, dir string) bool { return strings.HasPrefix(path, dir+"/") }

// edit changes the home of an unlocked thread, and returns the number of the newest version. change
// may be called more than once. With create, a missing thread is created.
func (v *Versions) edit(
	ctx context.Context, org, thread string, create bool, limit proto.Space, change func(*edit) error,
) (version int64, err error) {
	for range maxEditAttempts {
		head, err := v.Heads.Get(ctx, org, thread)
		if create && errors.Is(err, proto.ErrNotFound) {
			head, err = &proto.Thread{Org: org, ID: thread}, nil
		}
		if err == nil {
			version, err = v.editHead(ctx, head, limit, change)
		}
		if !errors.Is(err, proto.ErrConflict) {
			return version, err
		}
	}
	return 0, fmt.Errorf("%w: the thread changed during each of %d attempts: try again", proto.ErrConflict,
		maxEditAttempts)
}

// editHead changes the home that a head describes.
func (v *Versions) editHead(
	ctx context.Context, head *proto.Thread, limit proto.Space, change func(*edit) error,
) (int64, error) {
	now := time.Now().UTC()
	created := head.CreatedAt
	if created.IsZero() {
		created = now // of a new thread
	}
	old := newTree(head.Org, created, v.Limits)
	if head.Version != nil {
		var err error
		if old, err = v.tree(ctx, head.Org, head.Version); err != nil {
			return 0, err
		}
	}
	e := &edit{editor: old.edit(), now: now}
	if err := e.stage(head.Staged); err != nil {
		return 0, err
	}
	before := e.root.usage()
	effective := e.stagedIn(head.Staged)
	_, volume := proto.VolumeOf(head.ID)
	if volume { // whose readers have its versions only
		if err := v.keepStaged(ctx, head.Org, e, effective); err != nil {
			return 0, err
		}
	}
	if err := change(e); err != nil {
		return 0, err
	}
	after := e.root.usage()
	if more := (proto.Space{Bytes: after.Bytes - before.Bytes, Files: after.Files - before.Files}); after.Over(limit) &&
		after.Over(before.Space) {
		return 0, &proto.SpaceError{Thread: head.ID, Home: before.Space, New: more, Most: limit}
	}
	var staged []proto.StagedFile
	if !volume {
		staged = e.takeStaged(effective)
	}
	return v.commitEdit(ctx, head, old, e, staged)
}

// usage is the size of a home.
type usage struct {
	proto.Space
	attributes int64 // bytes
}

// usage returns the size of everything in a directory, and the attributes of the directory itself.
// A file counts once for each of its names.
func (n *node) usage() usage {
	u := usage{attributes: layer.AttributeBytes(n.xattrs)}
	_ = n.walk(nil, true, func(_ *layer.Path, n *node) error {
		u.Files++
		u.Bytes += n.dense(n.size)
		u.attributes += layer.AttributeBytes(n.xattrs)
		return nil
	})
	return u
}

// stagedIn returns those staged files that no later one has replaced.
func (e *edit) stagedIn(all []proto.StagedFile) []proto.StagedFile {
	return slices.DeleteFunc(slices.Clone(all), func(f proto.StagedFile) bool { return !e.hasStaged(&f) })
}

func (e *edit) hasStaged(f *proto.StagedFile) bool {
	n := e.root.find(f.Path)
	return n != nil && n.content.staged != nil && n.content.staged.Key == f.Key
}

// takeStaged removes the staged files from the tree and returns the kept ones with their new paths.
// The remaining tree is the next version: it includes the parent directories of staged files, and
// excludes what staged files replaced.
func (e *edit) takeStaged(before []proto.StagedFile) []proto.StagedFile {
	var kept []proto.StagedFile
	for _, f := range before {
		if e.moved != nil && f.Path == e.from {
			f.Path = e.to
		} else if e.moved != nil && isBelow(f.Path, e.from) {
			f.Path = e.to + strings.TrimPrefix(f.Path, e.from)
		}
		if e.hasStaged(&f) {
			kept = append(kept, f)
		}
	}
	for _, f := range kept {
		dir, name := e.makeParent(f.Path, e.now)
		delete(dir.children, name)
	}
	return kept
}

// commitEdit stores the next version of a thread, replaces its head, and returns the number of the
// newest version.
func (v *Versions) commitEdit(
	ctx context.Context, head *proto.Thread, old *tree, e *edit, staged []proto.StagedFile,
) (int64, error) {
	next, previous := e.root.usage(), head.Version
	if next.attributes > layer.MaxAttributes {
		return 0, &proto.PathError{Path: ".", Message: (&proto.AttributesError{Most: layer.MaxAttributes}).Error()}
	}
	if previous != nil && len(previous.Layers) >= maxEditLayers {
		return 0, &proto.LayersError{Thread: head.ID, Most: maxEditLayers}
	}
	spool, err := v.Spool()
	if err != nil {
		return 0, err
	}
	defer func() { _ = spool.Close() }() // it has no name, and nobody reads it again
	stored, err := v.storeEdit(ctx, head, old, e, spool)
	if err != nil {
		return 0, err
	}
	if stored == nil {
		if len(staged) == len(head.Staged) &&
			slices.EqualFunc(staged, head.Staged, func(a, b proto.StagedFile) bool { return a.Path == b.Path }) {
			return head.Number(), nil
		}
		return head.Number(), v.Heads.Edit(ctx, head, nil, staged)
	}
	whole := proto.Version{
		Number: head.Number() + 1, CreatedAt: e.now, Bytes: next.Bytes, Files: next.Files, Attributes: next.attributes,
	}
	if previous != nil {
		whole.Layers = slices.Clone(previous.Layers)
	}
	whole.Layers = append(whole.Layers, *stored)
	whole, err = v.WriteManifest(ctx, head.Org, head.ID, whole, previous)
	if err != nil {
		return 0, err
	}
	c := &proto.Commit{Fence: head.Fence, Version: whole}
	c.Version.Layers = []proto.Layer{*stored}
	if err = v.checkSources(ctx, e.sources); err == nil {
		err = v.Heads.Edit(ctx, head, c, staged)
	}
	_, busy := errors.AsType[*proto.BusyError](err)
	_, full := errors.AsType[*proto.StagedError](err)
	if busy || full || errors.Is(err, proto.ErrConflict) || errors.Is(err, proto.ErrNotFound) ||
		errors.Is(err, errSourceChanged) {
		// No head refers to the manifest, and Rebuild must not restore it. Collect removes the layer.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = errors.Join(err, v.Blobs.Delete(undo, whole.Manifest.Key))
	}
	return whole.Number, err
}

// storeEdit stores the layer of an edit. It returns nil if the version does not change.
func (v *Versions) storeEdit(
	ctx context.Context, head *proto.Thread, old *tree, e *edit, spool *os.File,
) (*proto.Layer, error) {
	draft, err := v.NewLayer(head.Org, spool)
	if err != nil {
		return nil, err
	}
	w := &layerWriter{ctx: ctx, tree: e.tree, out: draft, frames: v.newFrameReader(), groups: make(map[*node]int)}
	var moves []string
	if e.moved != nil {
		w.moved = e.moved
		if e.moved.kind == layer.Dir {
			w.moved = e.root.find(e.to) // a copy if it has staged files
			if w.source = old.root.find(e.from); w.source != nil && w.source.kind == layer.Dir {
				moves = []string{e.from}
			}
		} else if e.moved.linked {
			w.relink = make(map[*node]bool)
			w.findNames(e.root)
		}
	}
	if err := draft.Begin(moves); err != nil {
		return nil, err
	}
	base := layer.Merge
	if head.Version == nil {
		base = layer.Fresh
	}
	if err := w.writeDir(old.root, e.root, &layer.Entry{Base: base}); err != nil {
		return nil, err
	}
	if !w.changed && head.Version != nil || head.Version == nil && len(e.root.children) == 0 {
		return nil, nil
	}
	stored, err := draft.Store(ctx, head.Number()+1, w.objects)
	return &stored, err
}

// layerWriter writes the difference between two trees that share their unchanged nodes.
type layerWriter struct {
	ctx    context.Context // of the request
	tree   *tree           // with the content of nodes that are in an older layer, or are copied
	out    layer.Writer
	frames *frameReader
	// moved is the renamed node in the new tree. source is its former directory, nil if it is a
	// file or was in no version.
	moved, source *node
	relink        map[*node]bool // directories that contain a name of moved, if that has several
	groups        map[*node]int
	objects       int
	changed       bool
}

// findNames sets relink and reports whether dir contains a name of moved.
func (w *layerWriter) findNames(dir *node) bool {
	found := false
	for _, child := range dir.children {
		if child == w.moved || child.kind == layer.Dir && w.findNames(child) {
			found = true
		}
	}
	if found {
		w.relink[dir] = true
	}
	return found
}

func (w *layerWriter) write(e *layer.Entry, content io.Reader) error {
	w.changed = w.changed || e.Kind != layer.Leave && (e.Kind != layer.Dir || e.Base != layer.Merge)
	return w.out.Write(e, content)
}

// writeDir writes a directory. e has its name; the directory is based on old, or on nothing if old is nil.
func (w *layerWriter) writeDir(old, n *node, e *layer.Entry) error {
	if w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	e.Kind = layer.Dir
	setMetadata(e, n)
	if err := w.write(e, nil); err != nil {
		return err
	}
	names := make(map[string]bool)
	var before map[string]*node
	if old != nil {
		before = old.children
	}
	for name := range before {
		names[name] = true
	}
	for name := range n.children {
		names[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if err := w.writeChild(name, before[name], n.children[name]); err != nil {
			return fmt.Errorf("%.300q: %w", name, err)
		}
	}
	return w.write(&layer.Entry{Kind: layer.Leave}, nil)
}

func setMetadata(e *layer.Entry, n *node) {
	e.Mode, e.Sec, e.Nsec, e.Xattrs = n.mode, n.sec, n.nsec, n.xattrs
}

func (w *layerWriter) writeChild(name string, old, n *node) error {
	switch {
	case n == nil:
		return w.write(&layer.Entry{Kind: layer.Delete, Name: name}, nil)
	case n.kind == layer.Dir && n == w.moved && w.source != nil && w.source.kind == layer.Dir:
		return w.writeDir(w.source, n, &layer.Entry{Name: name, Base: layer.Moved})
	case n.kind == layer.Dir && old == n && !w.relink[n]:
		return nil
	case n.kind == layer.Dir && old != nil && old.kind == layer.Dir:
		return w.writeDir(old, n, &layer.Entry{Name: name, Base: layer.Merge})
	case n.kind == layer.Dir:
		return w.writeDir(nil, n, &layer.Entry{Name: name, Base: layer.Fresh})
	case old == n && (n != w.moved || w.relink == nil):
		return nil
	default:
		return w.writeFile(name, n)
	}
}

// writeFile writes a file or symlink.
func (w *layerWriter) writeFile(name string, n *node) error {
	if group, ok := w.groups[n]; ok {
		return w.write(&layer.Entry{Kind: layer.Link, Name: name, Group: group}, nil)
	}
	e := &layer.Entry{Kind: n.kind, Name: name, Size: n.size, Extents: n.extents, Target: n.target}
	setMetadata(e, n)
	if n.linked {
		w.groups[n] = len(w.groups) + 1
		e.Group = w.groups[n]
	}
	if n.content.object != nil {
		e.Object = *n.content.object
		w.objects++
		return w.write(e, nil)
	}
	switch {
	case n.kind != layer.File:
		return w.write(e, nil)
	case n.content.spooled != nil:
		return w.write(e, n.content.spooled())
	}
	r, err := w.tree.open(w.ctx, n, 0, n.size, w.frames)
	if err != nil {
		return err
	}
	return errors.Join(w.write(e, r.data), r.Close()) // the entry has the holes
}
