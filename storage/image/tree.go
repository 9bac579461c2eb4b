package image

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// Tree is a root file system being put together. Contents lie in one spool file, under no name that came from an image. A Tree is
// used by one goroutine at a time.
type Tree struct {
	// Env is the image's environment; [Tree.Pack] keeps what [CleanEnv] lets through.
	Env map[string]string

	limits  Limits
	spool   *os.File // nil for a tree without contents
	spooled int64
	entries int
	text    int
	layer   int // of what is being added; 1 for the first
	root    *node
	left    Left
}

// Left counts what an image had and a [Tree] has not.
type Left struct {
	Devices    int // device nodes, FIFOs and sockets
	Setuid     int // files whose setuid or setgid bit was cleared
	Attributes int // files whose extended attributes, such as capabilities, were dropped
	Mounts     int // directories whose content is on another file system
}

type kind uint8

const (
	isDir kind = iota
	isFile
	isSymlink
)

// node is a name in a tree.
type node struct {
	kind     kind
	layer    int // the last one that named it, or something below it
	parent   *node
	pathLen  int // of the whole path
	depth    int
	children map[string]*node // of a directory
	mtime    int64            // of a directory or symbolic link, in seconds
	target   string           // of a symbolic link
	file     *file            // of a file; hard links share it
}

type file struct {
	at, size, mtime int64
	exec            bool
}

// NewTree makes an empty tree that spools to a new file in dir, or in the system's directory for temporary files where dir is
// empty. Close removes it.
func NewTree(dir string, limits Limits) (*Tree, error) {
	spool, err := os.CreateTemp(dir, "bullpen-image-*")
	if err != nil {
		return nil, fmt.Errorf("make a spool file: %w", err)
	}
	// It goes with the process, however that ends.
	if err := os.Remove(spool.Name()); err != nil {
		_ = spool.Close()
		return nil, fmt.Errorf("make a spool file: %w", err)
	}
	t := newTree(limits)
	t.spool = spool
	return t, nil
}

func newTree(limits Limits) *Tree {
	return &Tree{limits: limits, root: &node{kind: isDir, children: map[string]*node{}}}
}

// Close frees what the tree holds.
func (t *Tree) Close() error { return t.spool.Close() }

// Left tells what was left out of the tree.
func (t *Tree) Left() Left { return t.left }

// split gives the components of a path inside an image; a leading slash makes no difference, as in a chroot.
func split(name string) ([]string, error) {
	if len(name) > maxPath {
		return nil, hostile(name, "its path is longer than %d bytes", maxPath)
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, hostile(name, "its path has ..")
		case strings.Contains(part, "\x00"):
			return nil, hostile(name, "its path has a NUL")
		case len(part) > maxName:
			return nil, hostile(name, "a name in its path is longer than %d bytes", maxName)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// walk goes from at along a path, as a process whose root directory is the tree's root would. Of the last component a symbolic
// link is followed only with last. Where something is missing it gives nil, or, with mkdir, makes a directory.
func (t *Tree) walk(at *node, path string, last, mkdir bool) (*node, error) {
	hops := 0
	todo := strings.Split(path, "/")
	for len(todo) > 0 {
		part := todo[0]
		todo = todo[1:]
		if part == "" || part == "." {
			continue
		}
		if at.kind != isDir {
			return nil, nil
		}
		if part == ".." {
			if at.parent != nil {
				at = at.parent
			}
			continue
		}
		next := at.children[part]
		switch {
		case next == nil && !mkdir:
			return nil, nil
		case next == nil:
			var err error
			if next, err = t.put(at, part, &node{kind: isDir, children: map[string]*node{}}); err != nil {
				return nil, err
			}
		case next.kind == isSymlink && (last || !blank(todo)):
			if hops++; hops > maxHops {
				return nil, hostile(path, "more than %d symbolic links are on its way", maxHops)
			}
			if strings.HasPrefix(next.target, "/") {
				at = t.root
			}
			todo = append(strings.Split(next.target, "/"), todo...)
			continue
		}
		if mkdir {
			next.layer = t.layer
		}
		at = next
	}
	return at, nil
}

// blank reports whether nothing is left to walk.
func blank(parts []string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return p != "" })
}

// dir gives the directory at a path, its links followed and what is missing made.
func (t *Tree) dir(parts []string) (*node, error) {
	d, err := t.walk(t.root, strings.Join(parts, "/"), true, true)
	if err != nil {
		return nil, err
	}
	if d == nil || d.kind != isDir {
		return nil, hostile(strings.Join(parts, "/"), "something that is no directory is on its way")
	}
	return d, nil
}

// put sets a name in a directory. A directory in the place of a directory keeps what is in it; otherwise what was there is gone.
func (t *Tree) put(dir *node, name string, n *node) (*node, error) {
	n.parent, n.layer = dir, t.layer
	n.pathLen, n.depth = dir.pathLen+1+len(name), dir.depth+1
	if n.pathLen > maxPath {
		return nil, hostile(name, "its whole path, links followed, is longer than %d bytes", maxPath)
	}
	if n.depth > maxDepth {
		return nil, hostile(name, "it is more than %d directories deep", maxDepth)
	}
	if t.entries++; t.entries > t.limits.Entries {
		return nil, fmt.Errorf("%w: it has more than %d entries", ErrTooLarge, t.limits.Entries)
	}
	if t.text += len(name) + len(n.target); t.text > maxText {
		return nil, fmt.Errorf("%w: its names and links are more than %d MiB", ErrTooLarge, maxText>>20)
	}
	if old := dir.children[name]; old != nil && old.kind == isDir && n.kind == isDir {
		old.layer, old.mtime = n.layer, n.mtime
		return old, nil
	}
	dir.children[name] = n
	return n, nil
}

// write spools a file's content of size bytes.
func (t *Tree) write(r io.Reader, size int64) (*file, error) {
	if err := t.room(size); err != nil {
		return nil, err
	}
	f := &file{at: t.spooled, size: size}
	n, err := io.Copy(io.NewOffsetWriter(t.spool, f.at), io.LimitReader(r, size))
	if err != nil {
		return nil, fmt.Errorf("spool the image: %w", err)
	}
	if n < size {
		return nil, fmt.Errorf("spool the image: %w", io.ErrUnexpectedEOF)
	}
	t.spooled += size
	return f, nil
}

// room checks that size more bytes may be unpacked.
func (t *Tree) room(size int64) error {
	if size < 0 || size > t.limits.Unpacked-t.spooled {
		return fmt.Errorf("%w: its files are more than %d bytes", ErrTooLarge, t.limits.Unpacked)
	}
	return nil
}

// AddFile puts one file of size bytes into the tree, under an absolute path, with what is missing of its directories.
func (t *Tree) AddFile(path string, r io.Reader, size int64, exec bool, mtime time.Time) error {
	t.layer++
	parts, err := split(path)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return hostile(path, "it names no file")
	}
	dir, err := t.dir(parts[:len(parts)-1])
	if err != nil {
		return err
	}
	f, err := t.write(r, size)
	if err != nil {
		return err
	}
	f.exec, f.mtime = exec, seconds(mtime)
	_, err = t.put(dir, parts[len(parts)-1], &node{kind: isFile, file: f})
	return err
}

// lastSecond is the largest time that a tar header holds without an extension, in the year 2242.
const lastSecond = 1<<33 - 1

// seconds gives a time in whole seconds; one that no file has is the epoch.
func seconds(t time.Time) int64 {
	if s := t.Unix(); s > 0 && s <= lastSecond {
		return s
	}
	return 0
}
