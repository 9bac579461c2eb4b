package thread

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

// currentTree returns the newest version of a home with the staged files in it.
func (v *Versions) currentTree(ctx context.Context, head *proto.Thread) (*tree, error) {
	t := newTree(head.Org, head.CreatedAt, v.Limits)
	if head.Version != nil {
		var err error
		if t, err = v.tree(ctx, head.Org, head.Version); err != nil {
			return nil, err
		}
	}
	return t.with(head.Staged)
}

// List calls f for every name in a directory of a version of a home, or with recursive for
// everything below it, in ascending order. It stops at the first error of f and returns it. The
// path is relative to the home and clean; the empty path is the home. Number 0 is the current home
// including staged files, and empty for an unknown thread. If there is no such version, the error
// is a [*proto.NoVersionError]. If the path is not a directory, the error wraps
// [proto.ErrNotFound].
func (v *Versions) List(
	ctx context.Context, org, thread string, number int64, path string, recursive bool, f func(proto.File) error,
) error {
	t, err := v.numberedTree(ctx, org, thread, number)
	if number == 0 && errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list files of thread %s: %w", thread, err)
	}
	dir := t.root.find(path)
	if dir == nil || dir.kind != layer.Dir {
		return fmt.Errorf("list files of thread %s: %.300q is not a directory: %w", thread, path, proto.ErrNotFound)
	}
	var at *layer.Path
	if path != "" {
		at = at.Child(path)
	}
	return dir.walk(at, recursive, func(at *layer.Path, n *node) error { return f(n.file(at.String())) })
}

// walk calls f for everything in a directory, and if recursive for everything below that.
func (n *node) walk(at *layer.Path, recursive bool, f func(at *layer.Path, n *node) error) error {
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		child, at := n.children[name], at.Child(name)
		if err := f(at, child); err != nil {
			return err
		}
		if recursive && child.kind == layer.Dir {
			if err := child.walk(at, recursive, f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *node) file(path string) proto.File {
	f := proto.File{
		Path: path, Size: n.size, Modified: n.modified(), IsDirectory: n.kind == layer.Dir,
		Link: n.kind == layer.Symlink,
	}
	f.Executable = n.kind == layer.File && n.mode&0o100 != 0
	if n.kind == layer.Symlink {
		f.Size = int64(len(n.target))
	}
	return f
}

// Open opens a file in a version of a home. Number 0 is the current home including staged files. It
// does not follow symlinks. If there is no such version, the error is a [*proto.NoVersionError]. If
// the path is not a regular file, the error wraps [proto.ErrNotFound].
func (v *Versions) Open(
	ctx context.Context, org, thread string, number int64, path string,
) (*proto.FileContent, error) {
	t, err := v.numberedTree(ctx, org, thread, number)
	if err != nil {
		return nil, fmt.Errorf("open a file of thread %s: %w", thread, err)
	}
	n := t.root.find(path)
	switch {
	case n == nil:
		return nil, fmt.Errorf("open a file of thread %s: %.300q: %w", thread, path, proto.ErrNotFound)
	case n.kind == layer.Dir:
		return nil, fmt.Errorf("open a file of thread %s: %.300q is a directory: %w", thread, path, proto.ErrNotFound)
	case n.kind == layer.Symlink:
		return nil, fmt.Errorf("open a file of thread %s: %.300q is a symlink, which is not followed: %w", thread, path,
			proto.ErrNotFound)
	}
	t = &tree{org: t.org, packs: t.packs} // a slow download must not keep the nodes in memory
	return &proto.FileContent{
		File: n.file(path), Tag: t.tag(n),
		Read: func(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
			r, err := t.open(ctx, n, offset, length, v.newFrameReader())
			if err != nil {
				return nil, fmt.Errorf("read %.300q of thread %s: %w", path, thread, err)
			}
			return r, nil
		},
	}, nil
}

// Archive writes a directory of a version of a home as a tar in PAX format: modification times in nanoseconds,
// extended attributes as SCHILY.xattr.user, hard links, symlinks, modes, empty directories, and the
// directory itself as "./". Files with holes are written as GNU tar does (GNU.sparse 1.0), without
// the holes. The path is relative to the home and clean; the empty path is the home. Number 0 is
// the current home including staged files. If the version is unknown or no longer available, the
// error wraps [proto.ErrNotFound]; if it has no such directory, the error is a
// [*proto.NoFileError]. After an error the tar is incomplete.
func (v *Versions) Archive(ctx context.Context, org, thread string, number int64, path string, w io.Writer) error {
	t, err := v.numberedTree(ctx, org, thread, number)
	if err != nil {
		return fmt.Errorf("archive thread %s: %w", thread, err)
	}
	part := *t
	if part.root = t.root.find(path); part.root == nil || part.root.kind != layer.Dir {
		return fmt.Errorf("archive thread %s: %w", thread, &proto.NoFileError{Path: path, Directory: true})
	}
	return v.archive(ctx, &part, thread, w)
}

// archive writes a tree of a thread as a tar.
func (v *Versions) archive(ctx context.Context, t *tree, thread string, w io.Writer) error {
	a := &archive{
		tree: t, ctx: ctx, raw: w, out: tar.NewWriter(w), frames: v.newFrameReader(),
		first: make(map[*node]*layer.Path),
	}
	if err := a.write(); err != nil {
		return fmt.Errorf("archive thread %s: %w", thread, err)
	}
	return nil
}

// numberedTree returns the tree of a version, or with number 0 of the current home.
func (v *Versions) numberedTree(ctx context.Context, org, thread string, number int64) (*tree, error) {
	head, err := v.Heads.Get(ctx, org, thread)
	if number > 0 && errors.Is(err, proto.ErrNotFound) {
		return nil, &proto.NoVersionError{Number: number}
	}
	if err != nil {
		return nil, err
	}
	if number == 0 {
		return v.currentTree(ctx, head)
	}
	version, err := v.version(ctx, head, number)
	if err != nil {
		return nil, err
	}
	return v.tree(ctx, org, version)
}

// version returns a version of a thread with its layers.
func (v *Versions) version(ctx context.Context, head *proto.Thread, number int64) (*proto.Version, error) {
	if head.Version != nil && head.Version.Number == number {
		return head.Version, nil
	}
	for i := range head.History {
		if head.History[i].Number != number {
			continue
		}
		m, err := v.ReadManifest(ctx, head.History[i].Manifest)
		if err != nil {
			return nil, hideNotFound(err)
		}
		return &m.Version, nil
	}
	return nil, fmt.Errorf("%w (the newest is %d; %d before it are stored)", &proto.NoVersionError{Number: number},
		head.Number(), len(head.History))
}

// archive writes a tree as a tar.
type archive struct {
	*tree
	ctx    context.Context // of the request
	raw    io.Writer       // below out
	out    *tar.Writer
	frames *frameReader
	first  map[*node]*layer.Path // the first name of each linked node
}

func (a *archive) write() error {
	if err := a.writeNode(nil, a.root); err != nil {
		return err
	}
	if err := a.root.walk(nil, true, a.writeNode); err != nil {
		return err
	}
	return a.out.Close()
}

func (a *archive) writeNode(at *layer.Path, n *node) error {
	if a.ctx.Err() != nil {
		return context.Cause(a.ctx)
	}
	path := at.String()
	if path == "" {
		path = "."
	}
	h := &tar.Header{Name: path, Mode: int64(n.mode), ModTime: n.modified(), Format: tar.FormatPAX}
	first, again := a.first[n]
	switch {
	case again:
		h.Typeflag, h.Linkname = tar.TypeLink, first.String()
		return a.out.WriteHeader(h)
	case n.linked:
		a.first[n] = at
	}
	if len(n.xattrs) > 0 {
		h.PAXRecords = make(map[string]string, len(n.xattrs))
	}
	for _, x := range n.xattrs {
		// The name ends at the first =. GNU tar escapes it in the same way.
		h.PAXRecords["SCHILY.xattr.user."+strings.NewReplacer("%", "%25", "=", "%3D").Replace(x.Name)] = string(x.Value)
	}
	switch n.kind {
	case layer.Dir:
		h.Typeflag, h.Name = tar.TypeDir, path+"/"
	case layer.Symlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.target
	default:
		h.Typeflag, h.Size = tar.TypeReg, n.size
		if m := newSparseMap(n); m.length < n.size {
			if err := a.writeSparse(h, n, m); err != nil {
				return fmt.Errorf("%.300q: %w", path, err)
			}
			return nil
		}
	}
	if err := a.out.WriteHeader(h); err != nil {
		return fmt.Errorf("%.300q: %w", path, err)
	}
	if n.kind != layer.File {
		return nil
	}
	r, err := a.open(a.ctx, n, 0, n.size, a.frames)
	if err != nil {
		return fmt.Errorf("%.300q: %w", path, err)
	}
	_, err = io.Copy(a.out, r)
	if err := errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("%.300q: %w", path, err)
	}
	return nil
}
