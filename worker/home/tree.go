package home

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// tree is a directory that is read, or an upper directory and what is below it.
// It is read twice: scan finds what must be known from the start, write writes.
type tree struct {
	ctx     context.Context
	limits  Limits
	overlay bool
	upper   int
	lower   int // of an overlay; else -1
	index   int // of an overlay: its directory of files with several names in lower; else -1

	// indexed are the files in index: by the handle of the lower file.
	indexed map[string]indexed

	meter *meter // of lower

	at []string // the names on the way to where it is read, for people

	// What scan finds.
	seen    int64              // names in upper
	moves   []string           // paths in lower of what was renamed
	paths   int                // bytes that moves have
	moveOf  map[string]int     // index in moves
	links   map[uint64]int     // names of each file in upper that has several, by inode number
	aliases map[uint64]indexed // what files in lower are shown as, by inode number
	holders map[uint64]bool    // directories of lower that are not in upper and have aliases below, by inode number
}

// indexed is a file with several names in lower, of which at least one was
// written to or removed. The others show the same file, with no trace of that
// where they are.
type indexed struct {
	name string // in index
	ino  uint64
}

func (t *tree) close() {
	closeFD(t.upper)
	closeFD(t.lower)
	closeFD(t.index)
}

// where is for people.
func (t *tree) where() string {
	path := "/" + strings.Join(t.at, "/")
	if len(path) > 200 {
		path = "…" + path[len(path)-200:]
	}
	return fmt.Sprintf("in %q", path)
}

// node is a directory as a jail saw it: of upper, of lower, or of both.
type node struct {
	upper int // -1 if there is none
	lower int // -1 if there is none, or it does not shine through
	path  string
}

func (n node) close() {
	closeFD(n.upper)
	closeFD(n.lower)
}

// root is not to be closed.
func (t *tree) root() node { return node{upper: t.upper, lower: t.lower} }

// readIndex reads which files in lower are known by several names and have been
// copied. Without one, nothing needs to be looked for in lower.
func (t *tree) readIndex() error {
	dir, err := openAt(t.index, ".", readDir, 0)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	all, err := names(dir)
	if err != nil {
		return err
	}
	t.indexed = make(map[string]indexed)
	t.aliases = make(map[uint64]indexed)
	t.holders = make(map[uint64]bool)
	for _, name := range all {
		st, err := lstat(t.index, name)
		if err != nil {
			return err
		}
		if st == nil || kind(st) != unix.S_IFREG && kind(st) != unix.S_IFLNK {
			continue
		}
		handle, err := indexHandle(name)
		if err != nil {
			return err
		}
		t.indexed[handle] = indexed{name, st.Ino}
	}
	return nil
}

// indexHandle takes the handle out of a name in the index: in hexadecimal digits
// version, magic, length, flags, type, 16 bytes of UUID and the handle.
func indexHandle(name string) (string, error) {
	b, err := hex.DecodeString(name)
	if err != nil || len(b) <= 21 || b[0] != 0 || b[1] != 0xfb || int(b[2]) != len(b) {
		return "", fmt.Errorf("the overlay's index has the name %q, which is none that is known", name)
	}
	return handleKey(int32(b[4]), b[21:]), nil
}

func handleOf(dir int, name string) (string, error) {
	h, _, err := unix.NameToHandleAt(dir, name, 0)
	if err != nil {
		return "", fmt.Errorf("get the handle of %.300q: %w", name, err)
	}
	return handleKey(h.Type(), h.Bytes()), nil
}

func handleKey(kind int32, handle []byte) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(kind))) + string(handle)
}

// child is a name in a node.
type child struct {
	name  string
	lower bool // in lower only, and not hidden
}

// children lists a node, by name. Names in lower are of interest only where files
// with several names are.
func (t *tree) children(n node) ([]child, error) {
	var all []child
	taken := make(map[string]bool)
	if n.upper >= 0 {
		list, err := list(n.upper)
		if err != nil {
			return nil, err
		}
		for _, name := range list {
			all = append(all, child{name: name})
		}
		if n.lower < 0 || len(t.indexed) == 0 {
			return all, nil
		}
		for _, name := range list {
			taken[name] = true
		}
	}
	if n.lower < 0 || len(t.indexed) == 0 {
		return all, nil
	}
	list, err := list(n.lower)
	if err != nil {
		return nil, err
	}
	for _, name := range list {
		if !taken[name] {
			all = append(all, child{name: name, lower: true})
		}
	}
	slices.SortFunc(all, func(a, b child) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// list is names for a directory that was read before.
func list(dir int) ([]string, error) {
	fd, err := openAt(dir, ".", readDir, 0)
	if err != nil {
		return nil, err
	}
	defer closeFD(fd)
	return names(fd)
}

// found is a child that was looked at.
type found struct {
	st       *unix.Stat_t
	whiteout bool
}

func (t *tree) look(n node, c child) (found, error) {
	dir := n.upper
	if c.lower {
		dir = n.lower
	}
	st, err := lstat(dir, c.name)
	if err == nil && st == nil {
		err = fmt.Errorf("%.300q: %w", c.name, errMoved)
	}
	if err != nil {
		return found{}, err
	}
	return found{st, t.overlay && !c.lower && kind(st) == unix.S_IFCHR && st.Rdev == 0}, nil
}

// below opens a directory of a node, and says what it is made of.
func (t *tree) below(n node, c child) (node, layer.Base, error) {
	if c.lower {
		fd, err := openAt(n.lower, c.name, readDir, 0)
		return node{upper: -1, lower: fd, path: join(n.path, c.name)}, layer.Merge, err
	}
	fd, err := openAt(n.upper, c.name, readDir, 0)
	if err != nil {
		return node{}, 0, err
	}
	sub := node{upper: fd, lower: -1}
	base := layer.Fresh
	if t.overlay {
		base, err = t.resolve(n, c.name, &sub)
	}
	if err != nil {
		sub.close()
		return node{}, 0, fmt.Errorf("%.300q: %w", c.name, err)
	}
	return sub, base, nil
}

// resolve finds the directory of lower that shines through one of upper.
func (t *tree) resolve(n node, name string, sub *node) (layer.Base, error) {
	opaque, err := xattr(sub.upper, "trusted.overlay.opaque")
	if err != nil {
		return 0, err
	}
	if opaque != nil {
		if string(opaque) != "y" {
			return 0, fmt.Errorf("the overlay's mark for an opaque directory is %q, which is not known", opaque)
		}
		return layer.Fresh, nil
	}
	redirect, err := xattr(sub.upper, "trusted.overlay.redirect")
	if err != nil {
		return 0, err
	}
	if redirect == nil {
		return t.same(n, name, sub)
	}
	path := strings.TrimPrefix(string(redirect), "/")
	if path == string(redirect) {
		// A name beside it. Without a directory below the parent it could mean
		// nothing.
		if n.lower < 0 {
			return 0, fmt.Errorf("it was renamed from %q, which does not exist", path)
		}
		path = join(n.path, path)
	}
	if n.lower >= 0 && path == join(n.path, name) {
		return t.same(n, name, sub) // it was renamed, and back
	}
	if sub.lower, err = walkTo(t.lower, path); err != nil {
		return 0, fmt.Errorf("it was renamed from %.300q: %w", path, err)
	}
	sub.path = path
	return layer.Moved, nil
}

// same lets the directory of the same name shine through, if there is one.
func (t *tree) same(n node, name string, sub *node) (layer.Base, error) {
	if n.lower < 0 {
		return layer.Fresh, nil
	}
	st, err := lstat(n.lower, name)
	if err != nil {
		return 0, err
	}
	if st == nil || kind(st) != unix.S_IFDIR {
		return layer.Fresh, nil
	}
	sub.lower, err = openAt(n.lower, name, readDir, 0)
	sub.path = join(n.path, name)
	return layer.Merge, err
}

func (t *tree) scan(root node, depth int) error {
	t.moveOf = make(map[string]int)
	t.links = make(map[uint64]int)
	if _, err := t.scanNode(root, depth); err != nil {
		return fmt.Errorf("%s: %w", t.where(), err)
	}
	return nil
}

// scanNode reports whether there are aliases below.
func (t *tree) scanNode(n node, depth int) (bool, error) {
	if depth > layer.MaxDepth {
		return false, layer.ErrDepth
	}
	if t.ctx.Err() != nil {
		return false, context.Cause(t.ctx)
	}
	all, err := t.children(n)
	if err != nil {
		return false, err
	}
	some := false
	for _, c := range all {
		has, err := t.scanChild(n, c, depth)
		if err != nil {
			return false, err
		}
		some = some || has
	}
	return some, nil
}

func (t *tree) scanChild(n node, c child, depth int) (bool, error) {
	f, err := t.look(n, c)
	if err != nil {
		return false, err
	}
	if !c.lower {
		if t.seen++; t.seen > t.limits.Entries {
			return false, fmt.Errorf("more than %d files, directories and deletions: %w", t.limits.Entries, ErrLimit)
		}
	}
	switch kind(f.st) {
	case unix.S_IFDIR:
		return t.scanDir(n, c, f, depth)
	case unix.S_IFREG, unix.S_IFLNK:
		if c.lower {
			return t.alias(n, c, f)
		}
		if f.st.Nlink > 1 {
			t.links[f.st.Ino]++
		}
	}
	return false, nil
}

func (t *tree) scanDir(n node, c child, f found, depth int) (bool, error) {
	sub, base, err := t.below(n, c)
	if err != nil {
		return false, err
	}
	defer sub.close()
	if base == layer.Moved {
		if _, ok := t.moveOf[sub.path]; ok {
			return false, fmt.Errorf("%.300q is shown twice", sub.path)
		}
		if t.paths += len(sub.path); t.paths > layer.MaxMoves {
			return false, fmt.Errorf("the paths of renamed directories take more than %d bytes together: %w", layer.MaxMoves, ErrLimit)
		}
		t.moveOf[sub.path] = len(t.moves)
		t.moves = append(t.moves, sub.path)
		came, err := t.meter.below(sub.lower)
		if err != nil {
			return false, err
		}
		if depth+1+came.height > layer.MaxDepth {
			return false, layer.ErrDepth
		}
	}
	t.at = append(t.at, c.name)
	has, err := t.scanNode(sub, depth+1)
	if err != nil {
		return false, err
	}
	t.at = t.at[:len(t.at)-1]
	if c.lower && has {
		t.holders[f.st.Ino] = true
	}
	return has, nil
}

// alias finds out whether a name in lower shows a file in index.
func (t *tree) alias(n node, c child, f found) (bool, error) {
	if f.st.Nlink < 2 {
		return false, nil
	}
	handle, err := handleOf(n.lower, c.name)
	if err != nil {
		return false, err
	}
	file, ok := t.indexed[handle]
	if !ok {
		return false, nil
	}
	t.aliases[f.st.Ino] = file
	t.links[file.ino]++
	return true, nil
}
