package image

import (
	"debug/elf"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// Tree is a root file system being assembled. File contents are in one unnamed spool file. A Tree
// is not safe for concurrent use.
type Tree struct {
	// Env is the image's environment. [Tree.Pack] filters it with [CleanEnv].
	Env map[string]string

	limits  Limits
	spool   *os.File // nil in a tree that only checks
	spooled int64
	entries int
	text    int
	layer   int // number of the current layer, from 1
	root    *node
	omitted Omitted
}

// Omitted counts what was left out of a [Tree].
type Omitted struct {
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

// node is an entry of a tree.
type node struct {
	kind     kind
	layer    int // the last layer with the entry or something below it
	parent   *node
	pathLen  int // bytes of the whole path
	depth    int
	children map[string]*node // of a directory
	mtime    int64            // of a directory or symbolic link, in seconds
	target   string           // of a symbolic link
	file     *file            // of a file; shared by hard links
}

type file struct {
	at, size, mtime int64
	exec            bool
	machine         elf.Machine // EM_NONE if the content is not ELF
}

// NewTree creates an empty tree with a spool file in dir, or in the system's temporary directory if
// dir is empty.
func NewTree(dir string, limits Limits) (*Tree, error) {
	spool, err := os.CreateTemp(dir, "bullpen-image-*")
	if err != nil {
		return nil, fmt.Errorf("make a spool file: %w", err)
	}
	// An unnamed file disappears with the process.
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

// Close removes the spool file.
func (t *Tree) Close() error { return t.spool.Close() }

// Omitted returns what was left out so far.
func (t *Tree) Omitted() Omitted { return t.omitted }

// split returns the components of a path inside an image. A leading slash is ignored.
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

// walk resolves a path from at, as if the tree were the root directory. The last component is
// followed if it is a symbolic link and followLast is true. A missing component is created as a
// directory if mkdir is true; otherwise walk returns nil.
func (t *Tree) walk(at *node, path string, followLast, mkdir bool) (*node, error) {
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
		case next.kind == isSymlink && (followLast || !allBlank(todo)):
			if hops++; hops > maxHops {
				return nil, hostile(path, "its path has more than %d symbolic links", maxHops)
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

// allBlank reports whether no component is left to resolve.
func allBlank(parts []string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return p != "" })
}

// dir returns the directory at a path. It follows links and creates what is missing.
func (t *Tree) dir(parts []string) (*node, error) {
	d, err := t.walk(t.root, strings.Join(parts, "/"), true, true)
	if err != nil {
		return nil, err
	}
	if d == nil || d.kind != isDir {
		return nil, hostile(strings.Join(parts, "/"), "its path leads through something that is not a directory")
	}
	return d, nil
}

// put adds an entry to a directory. A directory that replaces a directory keeps its entries.
func (t *Tree) put(dir *node, name string, n *node) (*node, error) {
	n.parent, n.layer = dir, t.layer
	n.pathLen, n.depth = dir.pathLen+1+len(name), dir.depth+1
	if n.pathLen > maxPath {
		return nil, hostile(name, "its resolved path is longer than %d bytes", maxPath)
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

// spoolContent appends size bytes of content to the spool file.
func (t *Tree) spoolContent(r io.Reader, size int64) (*file, error) {
	if err := t.checkSpace(size); err != nil {
		return nil, err
	}
	f := &file{at: t.spooled, size: size}
	var header elfHeader
	n, err := io.Copy(io.NewOffsetWriter(t.spool, f.at), io.TeeReader(io.LimitReader(r, size), &header))
	if err != nil {
		return nil, fmt.Errorf("spool the image: %w", err)
	}
	if n < size {
		return nil, fmt.Errorf("spool the image: %w", io.ErrUnexpectedEOF)
	}
	t.spooled += size
	f.machine = header.machine()
	return f, nil
}

// checkSpace checks that size more bytes are within the limits.
func (t *Tree) checkSpace(size int64) error {
	if size < 0 || size > t.limits.Unpacked-t.spooled {
		return fmt.Errorf("%w: its files are more than %d bytes", ErrTooLarge, t.limits.Unpacked)
	}
	return nil
}

// AddFile adds a file of size bytes at an absolute path and creates missing directories.
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
	f, err := t.spoolContent(r, size)
	if err != nil {
		return err
	}
	f.exec, f.mtime = exec, seconds(mtime)
	_, err = t.put(dir, parts[len(parts)-1], &node{kind: isFile, file: f})
	return err
}

// ReplaceTimes replaces the times of entries that are not before since.
func (t *Tree) ReplaceTimes(since, with time.Time) {
	first, then := since.Unix(), seconds(with)
	var replace func(n *node)
	replace = func(n *node) {
		if n.mtime >= first {
			n.mtime = then
		}
		if n.file != nil && n.file.mtime >= first {
			n.file.mtime = then
		}
		for _, child := range n.children {
			replace(child)
		}
	}
	replace(t.root)
}

// lastSecond is the latest time that a tar header holds without an extension, in the year 2242.
const lastSecond = 1<<33 - 1

// seconds returns a time in whole seconds, or the epoch if it is out of range.
func seconds(t time.Time) int64 {
	if s := t.Unix(); s > 0 && s <= lastSecond {
		return s
	}
	return 0
}
