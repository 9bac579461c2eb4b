package thread

import (
	"cmp"
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

const (
	// What is made for a staged file, and what a home is before its first version.
	newFileMode = 0o644
	newDirMode  = 0o755
	// maxPath is how long the path of a staged file may be, in bytes: about as long as a program can give it.
	maxPath = 4096
)

// node is a directory, file or symlink of a version. One that has several names is the same node under each.
type node struct {
	kind   layer.Kind // Dir, File or Symlink
	mode   uint32
	sec    int64 // modification time, seconds since 1970
	nsec   uint32
	xattrs []layer.Xattr

	names map[string]*node // of a directory

	size    int64 // of a file, bytes
	extents []layer.Extent
	content content
	linked  bool // it may have further names

	target string // of a symlink
}

// content is where that of a file is, without its holes: in a layer's pack, in an object, or in a staged file.
type content struct {
	layer    int   // index in the tree's layers
	position int64 // in its pack, unpacked
	object   *layer.Digest
	staged   *proto.Blob
}

// pack is a layer of which content can be read.
type pack struct {
	blob   proto.Blob
	frames []layer.Frame
}

// tree is a version of a home. It does not change once it is made.
type tree struct {
	org     string
	limits  layer.Limits
	root    *node
	packs   []pack
	entries int64 // names, the root included
	cost    int64 // bytes of memory, about
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

func (n *node) set(name string, child *node) {
	if n.names == nil {
		n.names = make(map[string]*node)
	}
	n.names[name] = child
}

// bytes is about what a node takes in memory, without what is below it.
func (n *node) bytes() int64 {
	size := 320 + len(n.target) + 16*len(n.extents)
	for _, x := range n.xattrs {
		size += 64 + len(x.Name) + len(x.Value)
	}
	return int64(size)
}

// apply makes the next version, of a layer of that organisation.
func (t *tree) apply(blob proto.Blob, in *layer.Index) error {
	a := &applier{tree: t, in: in, pack: len(t.packs)}
	t.packs = append(t.packs, pack{blob: blob, frames: in.Frames()})
	t.cost += 80 * int64(len(in.Frames()))
	if err := a.run(); err != nil {
		return fmt.Errorf("%s: %w", a.where(), err)
	}
	return nil
}

// applier does to a tree what home.Apply does to a directory.
type applier struct {
	*tree
	in     *layer.Index
	pack   int
	aside  []*node // what moves
	stack  []*node // directories that are open
	path   []string
	groups []*node
}

func (a *applier) where() string {
	path := "/" + strings.Join(a.path, "/")
	if len(path) > 200 {
		path = "…" + path[len(path)-200:]
	}
	return fmt.Sprintf("in %q", path)
}

func (a *applier) run() error {
	if err := a.setAside(); err != nil {
		return err
	}
	for {
		e, err := a.in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := a.entry(e); err != nil {
			return fmt.Errorf("%.300q: %w", e.Name, err)
		}
	}
}

// setAside takes all directories that move from where they are, those in others first.
func (a *applier) setAside() error {
	moves := a.in.Moves()
	order := make([]int, len(moves))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		return cmp.Compare(strings.Count(moves[j], "/"), strings.Count(moves[i], "/"))
	})
	a.aside = make([]*node, len(moves))
	for _, i := range order {
		dir, name := a.root, moves[i]
		if cut := strings.LastIndexByte(moves[i], '/'); cut >= 0 {
			dir, name = a.root.find(moves[i][:cut]), moves[i][cut+1:]
		}
		if dir == nil || dir.names[name] == nil || dir.names[name].kind != layer.Dir {
			return fmt.Errorf("move %.300q: there is no such directory in the version before", moves[i])
		}
		a.aside[i] = dir.names[name]
		delete(dir.names, name)
	}
	return nil
}

// find walks down from a directory, through directories alone. It is nil where nothing is.
func (n *node) find(path string) *node {
	if path == "" {
		return n
	}
	for name := range strings.SplitSeq(path, "/") {
		if n = n.names[name]; n == nil {
			return nil
		}
	}
	return n
}

func (a *applier) entry(e *layer.Entry) error {
	if len(a.stack) == 0 {
		if e.Base == layer.Fresh {
			a.drop(a.root)
			a.root.names = nil
			a.count(a.root, 1)
		}
		a.meta(a.root, e)
		a.stack = append(a.stack, a.root)
		return nil
	}
	dir := a.stack[len(a.stack)-1]
	if e.Kind == layer.Leave {
		a.stack = a.stack[:len(a.stack)-1]
		a.path = a.path[:max(len(a.path)-1, 0)]
		return nil
	}
	old := dir.names[e.Name]
	if e.Kind == layer.Dir && e.Base == layer.Merge {
		if old == nil || old.kind != layer.Dir {
			return errors.New("there is no such directory in the version before")
		}
		a.meta(old, e)
		a.stack, a.path = append(a.stack, old), append(a.path, e.Name)
		return nil
	}
	if old != nil {
		a.drop(old)
		delete(dir.names, e.Name)
	}
	if e.Kind == layer.Delete {
		return nil
	}
	n, err := a.make(e)
	if err != nil {
		return err
	}
	dir.set(e.Name, n)
	if e.Kind != layer.Dir || e.Base != layer.Moved { // which was counted
		a.count(n, 1)
	}
	if a.entries > a.limits.Entries {
		return fmt.Errorf("the home has more than %d files and directories: %w", a.limits.Entries, layer.ErrLimit)
	}
	if e.Kind == layer.Dir {
		a.stack, a.path = append(a.stack, n), append(a.path, e.Name)
	}
	return nil
}

func (n *node) meta(e *layer.Entry) {
	n.mode, n.sec, n.nsec, n.xattrs = e.Mode, e.Sec, e.Nsec, e.Xattrs
}

// meta changes that of a directory that was counted.
func (a *applier) meta(n *node, e *layer.Entry) {
	a.cost -= n.bytes()
	n.meta(e)
	a.cost += n.bytes()
}

// make gives the node that an entry makes anew.
func (a *applier) make(e *layer.Entry) (*node, error) {
	n := &node{kind: e.Kind}
	switch {
	case e.Kind == layer.Link:
		return a.groups[e.Group-1], nil
	case e.Kind == layer.Dir && e.Base == layer.Moved:
		n = a.aside[e.Move]
		a.meta(n, e)
		return n, n.checkHeight(len(a.stack) + 1)
	case e.Kind == layer.File:
		n.size, n.extents, n.content = e.Size, e.Extents, content{layer: a.pack, position: a.in.Position()}
		if !e.Inline() {
			object := e.Object
			n.content.object = &object
		}
	case e.Kind == layer.Symlink:
		n.target = e.Target
	}
	n.meta(e)
	if e.Group > 0 {
		n.linked = true
		a.groups = append(a.groups, n)
	}
	return n, nil
}

func (n *node) checkHeight(depth int) error {
	if depth > layer.MaxDepth {
		return layer.ErrDepth
	}
	for _, child := range n.names {
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
	t.cost += times * n.bytes()
}

// drop counts off what is removed.
func (t *tree) drop(n *node) {
	t.count(n, -1)
	for _, child := range n.names {
		t.drop(child)
	}
}

// with gives the tree with staged files in it. What is not on the way to them is shared.
func (t *tree) with(staged []proto.StagedFile) (*tree, error) {
	if len(staged) == 0 {
		return t, nil
	}
	next := *t
	own := make(map[*node]bool)
	mine := func(n *node) *node {
		if own[n] {
			return n
		}
		c := *n
		c.names = maps.Clone(n.names)
		own[&c] = true
		return &c
	}
	next.root = mine(t.root)
	for i := range staged {
		f := &staged[i]
		if err := checkPath(f.Path); err != nil {
			return nil, fmt.Errorf("staged file %q: %w", f.Key, err)
		}
		dir, parts := next.root, strings.Split(f.Path, "/")
		last := len(parts) - 1
		for _, name := range parts[:last] {
			sub := dir.names[name]
			if sub == nil || sub.kind != layer.Dir {
				sub = newDir(f.At)
				own[sub] = true
			} else {
				sub = mine(sub)
			}
			dir.set(name, sub)
			dir = sub
		}
		n := newDir(f.At)
		n.kind, n.mode, n.size, n.content = layer.File, newFileMode, f.Size, content{staged: &f.Blob}
		if f.Size > 0 {
			n.extents = []layer.Extent{{Len: f.Size}}
		}
		dir.set(parts[last], n)
	}
	return &next, nil
}

// inTheWay is what files take, counted as negative, that staged files take the place of. Directories, and files that may have other names, are
// not counted: removing those can take as much room as they have.
func (t *tree) inTheWay(staged []proto.StagedFile) proto.Room {
	var r proto.Room
	for i := range staged {
		if n := t.root.find(staged[i].Path); n != nil && n.kind == layer.File && !n.linked {
			r = r.Add(proto.Room{Bytes: -n.dense(n.size), Files: -1})
		}
	}
	return r
}

// checkPath checks that a path is relative to a home, cleaned, not the home itself, and not longer or deeper than a layer can hold. Its error is
// a [*proto.FieldError].
func checkPath(path string) error {
	depth := 1
	for name := range strings.SplitSeq(path, "/") {
		if depth++; name == "" || name == "." || name == ".." || len(name) > layer.MaxName || strings.ContainsRune(name, 0) {
			return &proto.FieldError{Field: "path", Message: fmt.Sprintf("path must be relative to the home, of names of up to %d bytes, without . and ..", layer.MaxName)}
		}
	}
	if depth-1 > layer.MaxDepth || len(path) > maxPath {
		return &proto.FieldError{Field: "path", Message: fmt.Sprintf("path must be of at most %d bytes and %d names", maxPath, layer.MaxDepth)}
	}
	return nil
}
