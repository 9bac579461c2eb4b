package home

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// tree is a directory to be read: a plain one, or the upper directory of an overlay. It is read
// twice: scan collects what must be known before the first entry, write writes the entries.
type tree struct {
	ctx     context.Context
	overlay bool
	upper   int
	lower   int // of an overlay; otherwise -1
	index   int // of an overlay: its directory of files with several names in lower; otherwise -1

	// indexed holds the files in index by the handle of the lower file.
	indexed map[string]indexed

	meter  *meter // of lower
	limits layer.Limits

	at []string // path of the current directory, for errors

	// These are set by scan.
	seen      int64              // names in upper
	moves     []string           // paths in lower of renamed directories
	moveBytes int                // size of moves
	moveIndex map[string]int     // index in moves
	links     map[uint64]int     // by inode number of upper: number of names of files with several
	aliases   map[uint64]indexed // by inode number of lower: the file in index that is shown instead
	holders   map[uint64]bool    // by inode number: directories that are only in lower and contain aliases
}

// indexed is a file with several names in lower, at least one of which was written to or removed.
// The overlay shows the same file under its other names, although nothing in upper records that.
type indexed struct {
	name string // in index
	ino  uint64
}

func (t *tree) close() {
	closeFD(t.upper)
	closeFD(t.lower)
	closeFD(t.index)
}

// where describes the current directory in an error.
func (t *tree) where() string {
	path := "/" + strings.Join(t.at, "/")
	if len(path) > 200 {
		path = "…" + path[len(path)-200:]
	}
	return fmt.Sprintf("in %q", path)
}

// node is a directory as the jail saw it: from upper, from lower, or merged from both.
type node struct {
	upper int // -1 if there is none
	lower int // -1 if there is none or it is hidden
	path  string
}

func (n node) close() {
	closeFD(n.upper)
	closeFD(n.lower)
}

// root returns the root, which must not be closed.
func (t *tree) root() node { return node{upper: t.upper, lower: t.lower} }

// readIndex reads which files of lower with several names have been copied up. Without any, lower
// need not be scanned.
func (t *tree) readIndex() error {
	all, err := list(t.index)
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
		if st == nil || fileType(st) != unix.S_IFREG && fileType(st) != unix.S_IFLNK {
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

// indexHandle decodes the file handle in a name of the index, which consists of version, magic,
// length, flags, type, a UUID of 16 bytes and the handle in hexadecimal digits.
func indexHandle(name string) (string, error) {
	b, err := hex.DecodeString(name)
	if err != nil || len(b) <= 21 || b[0] != 0 || b[1] != 0xfb || int(b[2]) != len(b) {
		return "", fmt.Errorf("unknown name %q in the index of the overlay", name)
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

func handleKey(handleType int32, handle []byte) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(handleType))) + string(handle)
}

// child is a name in a node.
type child struct {
	name  string
	lower bool // only in lower, and not hidden
}

// children returns the names in a node in ascending order. Names in lower are only relevant if
// there are indexed files.
func (t *tree) children(n node) ([]child, error) {
	var all []child
	taken := make(map[string]bool)
	if n.upper >= 0 {
		names, err := list(n.upper)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			all = append(all, child{name: name})
			taken[name] = true
		}
	}
	if n.lower < 0 || len(t.indexed) == 0 {
		return all, nil
	}
	names, err := list(n.lower)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !taken[name] {
			all = append(all, child{name: name, lower: true})
		}
	}
	slices.SortFunc(all, func(a, b child) int { return strings.Compare(a.name, b.name) })
	return all, nil
}

// found is the status of a child.
type found struct {
	st       *unix.Stat_t
	whiteout bool
}

func (t *tree) stat(n node, c child) (found, error) {
	dir := n.upper
	if c.lower {
		dir = n.lower
	}
	st, err := lstat(dir, c.name)
	if err == nil && st == nil {
		err = fmt.Errorf("%.300q: %w", c.name, errChanged)
	}
	if err != nil {
		return found{}, err
	}
	return found{st, t.overlay && !c.lower && fileType(st) == unix.S_IFCHR && st.Rdev == 0}, nil
}

// open opens a subdirectory of a node and returns its base.
func (t *tree) open(n node, c child) (node, layer.Base, error) {
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

// resolve opens the directory of lower that a directory of upper is merged with.
func (t *tree) resolve(n node, name string, sub *node) (layer.Base, error) {
	opaque, err := xattr(sub.upper, "trusted.overlay.opaque")
	if err != nil {
		return 0, err
	}
	if opaque != nil {
		if string(opaque) != "y" {
			return 0, fmt.Errorf("unknown mark %q of an opaque directory in the overlay", opaque)
		}
		return layer.Fresh, nil
	}
	redirect, err := xattr(sub.upper, "trusted.overlay.redirect")
	if err != nil {
		return 0, err
	}
	if redirect == nil {
		return t.openSameName(n, name, sub)
	}
	path := strings.TrimPrefix(string(redirect), "/")
	if path == string(redirect) {
		// It is relative to the parent, which must be in lower, too.
		if n.lower < 0 {
			return 0, fmt.Errorf("it was renamed from %q, which does not exist", path)
		}
		path = join(n.path, path)
	}
	if n.lower >= 0 && path == join(n.path, name) {
		return t.openSameName(n, name, sub) // renamed and renamed back
	}
	if sub.lower, err = walkTo(t.lower, path); err != nil {
		return 0, fmt.Errorf("it was renamed from %.300q: %w", path, err)
	}
	sub.path = path
	return layer.Moved, nil
}

// openSameName merges sub with the directory of the same name in lower if there is one.
func (t *tree) openSameName(n node, name string, sub *node) (layer.Base, error) {
	if n.lower < 0 {
		return layer.Fresh, nil
	}
	st, err := lstat(n.lower, name)
	if err != nil {
		return 0, err
	}
	if st == nil || fileType(st) != unix.S_IFDIR {
		return layer.Fresh, nil
	}
	sub.lower, err = openAt(n.lower, name, readDir, 0)
	sub.path = join(n.path, name)
	return layer.Merge, err
}

func (t *tree) scan(root node) error {
	t.moveIndex = make(map[string]int)
	t.links = make(map[uint64]int)
	if _, err := t.scanNode(root, 1); err != nil {
		return fmt.Errorf("%s: %w", t.where(), err)
	}
	return nil
}

// scanNode reports whether the node contains aliases.
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
	f, err := t.stat(n, c)
	if err != nil {
		return false, err
	}
	if !c.lower {
		if t.seen++; t.seen > t.limits.Entries {
			return false, fmt.Errorf("more than %d files, directories and deletions: %w", t.limits.Entries, layer.ErrLimit)
		}
	}
	switch fileType(f.st) {
	case unix.S_IFDIR:
		return t.scanDir(n, c, f, depth)
	case unix.S_IFREG, unix.S_IFLNK:
		if c.lower {
			return t.scanAlias(n, c, f)
		}
		if f.st.Nlink > 1 {
			t.links[f.st.Ino]++
		}
	}
	return false, nil
}

func (t *tree) scanDir(n node, c child, f found, depth int) (bool, error) {
	sub, base, err := t.open(n, c)
	if err != nil {
		return false, err
	}
	defer sub.close()
	if base == layer.Moved {
		if _, ok := t.moveIndex[sub.path]; ok {
			return false, fmt.Errorf("%.300q has two places", sub.path)
		}
		if t.moveBytes += len(sub.path); t.moveBytes > layer.MaxMoves {
			return false, fmt.Errorf("the paths of renamed directories take more than %d bytes: %w", layer.MaxMoves,
				layer.ErrLimit)
		}
		t.moveIndex[sub.path] = len(t.moves)
		t.moves = append(t.moves, sub.path)
		moved, err := t.meter.contents(sub.lower)
		if err != nil {
			return false, err
		}
		if depth+1+moved.height > layer.MaxDepth {
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

// scanAlias reports whether the overlay shows a file in index under a name in lower.
func (t *tree) scanAlias(n node, c child, f found) (bool, error) {
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
