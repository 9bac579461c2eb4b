package thread

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
)

const (
	// newFileMode and newDirMode are the modes of staged files and their directories. An empty home
	// has newDirMode, too.
	newFileMode = 0o644
	newDirMode  = 0o755
	// maxPath is the maximal length of the path of a staged file in bytes, which is about the
	// longest path that a program can use.
	maxPath = 4096
)

// node is a directory, file or symlink. A file with several names is one node.
type node struct {
	kind   layer.Kind // Dir, File or Symlink
	mode   uint32
	sec    int64 // modification time, seconds since 1970
	nsec   uint32
	xattrs []layer.Xattr

	children map[string]*node // of a directory

	size    int64 // of a file, bytes
	extents []layer.Extent
	content content
	linked  bool // the node may have several names

	target string // of a symlink
}

// content locates a file's content without its holes: in a layer's pack, in an object, in a staged
// file or in a file being stored.
type content struct {
	pack     int   // index in tree.packs
	position int64 // in the unpacked pack
	object   *layer.Digest
	staged   *proto.Blob
	spooled  func() io.Reader // returns the whole content
}

// pack is the pack of a layer.
type pack struct {
	blob   proto.Blob // the layer
	frames []codec.Frame
}

// tree is a version of a home. It is immutable once it is built.
type tree struct {
	org     string
	limits  layer.Limits
	root    *node
	packs   []pack
	entries int64 // names, including the root
	cost    int64 // approximate memory in bytes
}

func newTree(org string, at time.Time, limits layer.Limits) *tree {
	t := &tree{org: org, limits: limits, root: newDir(at)}
	t.count(t.root, 1)
	return t
}

func newDir(at time.Time) *node {
	return &node{kind: layer.Dir, mode: newDirMode, sec: at.Unix(), nsec: uint32(at.Nanosecond())}
}

func (n *node) modified() time.Time { return time.Unix(n.sec, int64(n.nsec)).UTC() }

func (n *node) setChild(name string, child *node) {
	if n.children == nil {
		n.children = make(map[string]*node)
	}
	n.children[name] = child
}

// cost returns the approximate memory of a node without its children, in bytes.
func (n *node) cost() int64 {
	size := 320 + len(n.target) + 16*len(n.extents)
	for _, x := range n.xattrs {
		size += 64 + len(x.Name) + len(x.Value)
	}
	return int64(size)
}

// find returns the node at path, or nil if there is none. It does not follow symlinks.
func (n *node) find(path string) *node {
	if path == "" {
		return n
	}
	for name := range strings.SplitSeq(path, "/") {
		if n = n.children[name]; n == nil {
			return nil
		}
	}
	return n
}

// apply applies a layer of the tree's organisation.
func (t *tree) apply(ctx context.Context, blob proto.Blob, in *codec.Index) error {
	b := &builder{tree: t, in: in, pack: len(t.packs), detached: make([]*node, len(in.Moves()))}
	t.packs = append(t.packs, pack{blob: blob, frames: in.Frames()})
	t.cost += 80 * int64(len(in.Frames()))
	return layer.Apply(ctx, in, b)
}

// builder is the [layer.Target] that changes a tree.
type builder struct {
	*tree
	in       *codec.Index
	pack     int
	detached []*node
	stack    []*node // open directories
}

var errNoDirectory = errors.New("the previous version has no such directory")

// Detach implements [layer.Target].
func (b *builder) Detach(move int, path string) error {
	dir, name := b.root, path
	if cut := strings.LastIndexByte(path, '/'); cut >= 0 {
		dir, name = b.root.find(path[:cut]), path[cut+1:]
	}
	if dir == nil || dir.children[name] == nil || dir.children[name].kind != layer.Dir {
		return errNoDirectory
	}
	b.detached[move] = dir.children[name]
	delete(dir.children, name)
	return nil
}

func (b *builder) current() *node { return b.stack[len(b.stack)-1] }

// Enter implements [layer.Target].
func (b *builder) Enter(at *layer.Path, e *layer.Entry) error {
	var dir *node
	switch {
	case at == nil:
		dir = b.root
		if e.Base == layer.Fresh {
			b.drop(dir)
			dir.children = nil
			b.count(dir, 1)
		}
		b.setMetadata(dir, e)
	case e.Base == layer.Merge:
		dir = b.current().children[e.Name]
		if dir == nil || dir.kind != layer.Dir {
			return errNoDirectory
		}
		b.setMetadata(dir, e)
	case e.Base == layer.Moved:
		dir = b.detached[e.Move]
		b.setMetadata(dir, e)
		b.current().setChild(e.Name, dir)
		if err := dir.checkHeight(len(b.stack) + 1); err != nil {
			return err
		}
	default:
		dir = &node{kind: layer.Dir}
		dir.setMetadata(e)
		if err := b.add(e.Name, dir); err != nil {
			return err
		}
	}
	b.stack = append(b.stack, dir)
	return nil
}

// Leave implements [layer.Target].
func (b *builder) Leave() error {
	b.stack = b.stack[:len(b.stack)-1]
	return nil
}

// Remove implements [layer.Target].
func (b *builder) Remove(name string) error {
	if old := b.current().children[name]; old != nil {
		b.drop(old)
		delete(b.current().children, name)
	}
	return nil
}

// Create implements [layer.Target].
func (b *builder) Create(_ *layer.Path, e *layer.Entry) (*node, error) {
	n := &node{kind: e.Kind, target: e.Target, linked: e.Group > 0}
	n.setMetadata(e)
	if e.Kind == layer.File {
		n.size, n.extents, n.content = e.Size, e.Extents, content{pack: b.pack, position: b.in.Position()}
		if !e.Inline() {
			object := e.Object
			n.content.object = &object
		}
	}
	return n, b.add(e.Name, n)
}

// Link implements [layer.Target].
func (b *builder) Link(name string, to *node) error { return b.add(name, to) }

// add adds a name to the current directory.
func (b *builder) add(name string, n *node) error {
	b.current().setChild(name, n)
	b.count(n, 1)
	if b.entries > b.limits.Entries {
		return fmt.Errorf("the home has more than %d files and directories: %w", b.limits.Entries, layer.ErrLimit)
	}
	return nil
}

func (n *node) setMetadata(e *layer.Entry) {
	n.mode, n.sec, n.nsec, n.xattrs = e.Mode, e.Sec, e.Nsec, e.Xattrs
}

// setMetadata changes the metadata of a directory that is already counted.
func (b *builder) setMetadata(n *node, e *layer.Entry) {
	b.cost -= n.cost()
	n.setMetadata(e)
	b.cost += n.cost()
}

// checkHeight returns [layer.ErrDepth] if n, which is nested depth levels deep, contains
// directories that are nested too deeply.
func (n *node) checkHeight(depth int) error {
	if depth > layer.MaxDepth {
		return layer.ErrDepth
	}
	for _, child := range n.children {
		if child.kind == layer.Dir {
			if err := child.checkHeight(depth + 1); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *tree) count(n *node, times int64) {
	t.entries += times
	t.cost += times * n.cost()
}

// drop subtracts a node and everything below it from the counts.
func (t *tree) drop(n *node) {
	t.count(n, -1)
	for _, child := range n.children {
		t.drop(child)
	}
}

// with returns a copy of the tree with staged files in it. The copy shares all unchanged nodes.
func (t *tree) with(staged []proto.StagedFile) (*tree, error) {
	if len(staged) == 0 {
		return t, nil
	}
	e := t.edit()
	if err := e.stage(staged); err != nil {
		return nil, err
	}
	return e.tree, nil
}

// editor changes a copy of a tree, which shares all unchanged nodes with the original. It does not
// maintain the counts of the tree.
type editor struct {
	*tree
	own map[*node]bool // directories that the original does not have
}

func (t *tree) edit() *editor {
	next := *t
	e := &editor{tree: &next, own: make(map[*node]bool)}
	next.root = e.mutable(t.root)
	return e
}

// mutable returns the copy's own directory that replaces n.
func (e *editor) mutable(n *node) *node {
	if e.own[n] {
		return n
	}
	c := *n
	c.children = maps.Clone(n.children)
	e.own[&c] = true
	return &c
}

// makeDir returns the directory with that name in dir, creating it if necessary. A new directory
// replaces a file or symlink.
func (e *editor) makeDir(dir *node, name string, at time.Time) *node {
	sub := dir.children[name]
	if sub == nil || sub.kind != layer.Dir {
		sub = newDir(at)
		e.own[sub] = true
	} else {
		sub = e.mutable(sub)
	}
	dir.setChild(name, sub)
	return sub
}

// makeParent returns the parent directory of a path, creating it if necessary, and the last name of
// the path.
func (e *editor) makeParent(path string, at time.Time) (dir *node, name string) {
	dir, parts := e.root, strings.Split(path, "/")
	last := len(parts) - 1
	for _, name := range parts[:last] {
		dir = e.makeDir(dir, name, at)
	}
	return dir, parts[last]
}

// stage adds staged files.
func (e *editor) stage(staged []proto.StagedFile) error {
	for i := range staged {
		f := &staged[i]
		if err := checkPath(f.Path); err != nil {
			return fmt.Errorf("staged file %q: %w", f.Key, err)
		}
		dir, name := e.makeParent(f.Path, f.At)
		n := newDir(f.At)
		n.kind, n.mode, n.size, n.content = layer.File, newFileMode, f.Size, content{staged: &f.Blob}
		if f.Size > 0 {
			n.extents = []layer.Extent{{Len: f.Size}}
		}
		dir.setChild(name, n)
	}
	return nil
}

// replacedBy returns, as negative numbers, the space of the files that staged files replace. It
// ignores directories and files that may have other names, because replacing those may not free any
// space.
func (t *tree) replacedBy(staged []proto.StagedFile) proto.Space {
	var r proto.Space
	for i := range staged {
		if n := t.root.find(staged[i].Path); n != nil && n.kind == layer.File && !n.linked {
			r = r.Add(proto.Space{Bytes: -n.dense(n.size), Files: -1})
		}
	}
	return r
}

// checkPath returns a [*proto.FieldError] unless path is a clean relative path that a layer can
// represent.
func checkPath(path string) error {
	depth := 1
	for name := range strings.SplitSeq(path, "/") {
		if depth++; !layer.ValidName(name) {
			return &proto.FieldError{
				Field: "path", Message: fmt.Sprintf(
					"path must be relative to the home, of names of up to %d bytes, without . and ..", layer.MaxName),
			}
		}
	}
	if depth-1 > layer.MaxDepth || len(path) > maxPath {
		return &proto.FieldError{
			Field: "path", Message: fmt.Sprintf("path must be of at most %d bytes and %d names", maxPath, layer.MaxDepth),
		}
	}
	return nil
}
