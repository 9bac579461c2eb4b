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
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// File is what is told of a file, directory or symlink in a home.
type File struct {
	Path        string // relative to the home, cleaned
	Size        int64  // bytes: of a file with its holes, of a symlink's target, 0 of a directory
	Modified    time.Time
	IsDirectory bool
	Target      string // of a symlink; empty for all else
}

// Content is a file of a home as it was when it was opened.
type Content struct {
	File
	// Tag names the content: whenever it is the same, the bytes are. It is of letters and digits.
	Tag string
	// Read opens length bytes from offset on, both within Size. Holes are zeros. The reader needs ctx and must be closed.
	Read func(ctx context.Context, offset, length int64) (io.ReadCloser, error)
}

// now gives a home as it is: the newest version, and in it what is staged.
func (v *Versions) now(ctx context.Context, head *proto.Thread) (*tree, error) {
	t := newTree(head.Org, head.CreatedAt, v.Limits)
	if head.Version != nil {
		var err error
		if t, err = v.tree(ctx, head.Org, head.Version); err != nil {
			return nil, err
		}
	}
	return t.with(head.Staged)
}

// List calls f for what is in a directory of a home, or with recursive for all that is below it, in the order of their paths' names, until f
// gives an error, which List returns. The path is relative to the home and cleaned; empty for the home itself. Staged files are as if they
// were in the home. A thread that is not known has none; a path that is not that of a directory is [proto.ErrNotFound].
func (v *Versions) List(ctx context.Context, org, thread, path string, recursive bool, f func(File) error) error {
	head, err := v.Heads.Get(ctx, org, thread)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	var t *tree
	if err == nil {
		t, err = v.now(ctx, head)
	}
	if err != nil {
		return fmt.Errorf("list files of thread %s: %w", thread, err)
	}
	dir := t.root.find(path)
	if dir == nil || dir.kind != layer.Dir {
		return fmt.Errorf("list files of thread %s: %.300q is no directory in it: %w", thread, path, proto.ErrNotFound)
	}
	// One by one: the paths of a home may be long, and all together more than its files.
	at := &place{}
	if path != "" {
		at = &place{at, path}
	}
	return dir.walk(at, recursive, func(at *place, n *node) error { return f(n.file(at.path())) })
}

// place is where something is in a home. A path in its stead would be of 131,072 bytes at worst, and an archive would keep one for each file
// that may have several names.
type place struct {
	in   *place // nil for the home itself
	name string
}

// path is relative to the home.
func (p *place) path() string {
	var names []string
	for ; p.in != nil; p = p.in {
		names = append(names, p.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

// walk calls f with what is in a directory, and with deep also with what is below that.
func (n *node) walk(at *place, deep bool, f func(at *place, n *node) error) error {
	for _, name := range slices.Sorted(maps.Keys(n.names)) {
		child, at := n.names[name], &place{at, name}
		if err := f(at, child); err != nil {
			return err
		}
		if deep && child.kind == layer.Dir {
			if err := child.walk(at, deep, f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *node) file(path string) File {
	f := File{Path: path, Size: n.size, Modified: n.modified(), IsDirectory: n.kind == layer.Dir, Target: n.target}
	if n.kind == layer.Symlink {
		f.Size = int64(len(n.target))
	}
	return f
}

// Open finds a file in a home, as List finds it. Symlinks are not followed, on the way and at its end. What is no file there is
// [proto.ErrNotFound].
func (v *Versions) Open(ctx context.Context, org, thread, path string) (*Content, error) {
	head, err := v.Heads.Get(ctx, org, thread)
	var t *tree
	if err == nil {
		t, err = v.now(ctx, head)
	}
	if err != nil {
		return nil, fmt.Errorf("open a file of thread %s: %w", thread, err)
	}
	switch n := t.root.find(path); {
	case n == nil:
		return nil, fmt.Errorf("open a file of thread %s: %.300q: %w", thread, path, proto.ErrNotFound)
	case n.kind == layer.Dir:
		return nil, fmt.Errorf("open a file of thread %s: %.300q is a directory, and no file: %w", thread, path, proto.ErrNotFound)
	case n.kind == layer.Symlink:
		return nil, fmt.Errorf("open a file of thread %s: %.300q is a symlink, and links are not followed: %w", thread, path, proto.ErrNotFound)
	default:
		own := &tree{org: t.org, packs: t.packs} // the rest is not kept as long as somebody takes to read a file
		return &Content{
			File: n.file(path), Tag: t.tag(n),
			Read: func(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
				r, err := own.read(ctx, n, offset, length, &frames{versions: v})
				if err != nil {
					return nil, fmt.Errorf("read %.300q of thread %s: %w", path, thread, err)
				}
				return r, nil
			},
		}, nil
	}
}

// Archive writes a version of a home as a tar in PAX format: modification times in nanoseconds, extended attributes as SCHILY.xattr.user,
// hard links, symlinks, modes, empty directories and the home itself, as "./". Sparse files are written whole. Number 0 is the home as it
// is, with what is staged. A version that cannot be gone back to is [proto.ErrNotFound]. After an error, what was written is not whole.
func (v *Versions) Archive(ctx context.Context, org, thread string, number int64, w io.Writer) error {
	t, err := v.at(ctx, org, thread, number)
	if err != nil {
		return fmt.Errorf("archive thread %s: %w", thread, err)
	}
	a := &archive{tree: t, ctx: ctx, out: tar.NewWriter(w), from: &frames{versions: v}, first: make(map[*node]*place)}
	if err := a.write(); err != nil {
		return fmt.Errorf("archive thread %s: %w", thread, err)
	}
	return nil
}

// at gives the tree of a version, or with number 0 of the home as it is.
func (v *Versions) at(ctx context.Context, org, thread string, number int64) (*tree, error) {
	head, err := v.Heads.Get(ctx, org, thread)
	if err != nil {
		return nil, err
	}
	if number == 0 {
		return v.now(ctx, head)
	}
	version, err := v.version(ctx, head, number)
	if err != nil {
		return nil, err
	}
	return v.tree(ctx, org, version)
}

// version gives a version of a thread with its layers.
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
			return nil, lost(err)
		}
		return &m.Version, nil
	}
	return nil, fmt.Errorf("version %d, of which the newest is %d and %d before it are kept: %w",
		number, head.Number(), len(head.History), proto.ErrNotFound)
}

// archive writes a tree as a tar.
type archive struct {
	*tree
	ctx   context.Context // of the request that it writes for
	out   *tar.Writer
	from  *frames
	first map[*node]*place // the first name of each that may have more
}

func (a *archive) write() error {
	if err := a.entry(&place{}, a.root); err != nil {
		return err
	}
	if err := a.root.walk(&place{}, true, a.entry); err != nil {
		return err
	}
	return a.out.Close()
}

func (a *archive) entry(at *place, n *node) error {
	if a.ctx.Err() != nil {
		return context.Cause(a.ctx)
	}
	path := at.path()
	if path == "" {
		path = "."
	}
	h := &tar.Header{Name: path, Mode: int64(n.mode), ModTime: n.modified(), Format: tar.FormatPAX}
	first, again := a.first[n]
	switch {
	case again:
		h.Typeflag, h.Linkname = tar.TypeLink, first.path()
		return a.out.WriteHeader(h)
	case n.linked:
		a.first[n] = at
	}
	if len(n.xattrs) > 0 {
		h.PAXRecords = make(map[string]string, len(n.xattrs))
	}
	for _, x := range n.xattrs {
		// As GNU tar does it, since = ends the name.
		h.PAXRecords["SCHILY.xattr.user."+strings.NewReplacer("%", "%25", "=", "%3D").Replace(x.Name)] = string(x.Value)
	}
	switch n.kind {
	case layer.Dir:
		h.Typeflag, h.Name = tar.TypeDir, path+"/"
	case layer.Symlink:
		h.Typeflag, h.Linkname = tar.TypeSymlink, n.target
	default:
		h.Typeflag, h.Size = tar.TypeReg, n.size
	}
	if err := a.out.WriteHeader(h); err != nil {
		return fmt.Errorf("%.300q: %w", path, err)
	}
	if n.kind != layer.File {
		return nil
	}
	r, err := a.read(a.ctx, n, 0, n.size, a.from)
	if err != nil {
		return fmt.Errorf("%.300q: %w", path, err)
	}
	_, err = io.Copy(a.out, r)
	if err := errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("%.300q: %w", path, err)
	}
	return nil
}
