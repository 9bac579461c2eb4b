package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
)

// Prefixes of whiteouts, the names with which a layer hides entries of lower layers.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
	reserved = ".wh..wh." // other metadata of storage drivers
)

// AddLayer applies a layer of an OCI image: an uncompressed tar, in which names with the prefix
// .wh. hide entries of lower layers. Symbolic links in paths are followed as if the image were the
// root directory.
func (t *Tree) AddLayer(r io.Reader) error { return t.addTar(r, true) }

// AddTar adds the content of an uncompressed tar.
func (t *Tree) AddTar(r io.Reader) error { return t.addTar(r, false) }

func (t *Tree) addTar(r io.Reader, layered bool) error {
	t.layer++
	in := tar.NewReader(r)
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the archive: %w", err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if err := t.addEntry(h, in, layered); err != nil {
			return err
		}
	}
}

func (t *Tree) addEntry(h *tar.Header, content io.Reader, layered bool) error {
	parts, err := split(h.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		t.root.mtime = seconds(h.ModTime)
		return nil
	}
	dir, err := t.dir(parts[:len(parts)-1])
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	if layered && strings.HasPrefix(name, whiteout) {
		return t.whiteout(h.Name, dir, name)
	}
	n, err := t.node(h, content)
	if err != nil {
		return err
	}
	if n == nil {
		delete(dir.children, name) // an omitted entry still replaces the previous one
		return nil
	}
	_, err = t.put(dir, name, n)
	return err
}

// whiteout hides entries of lower layers in dir.
func (t *Tree) whiteout(full string, dir *node, name string) error {
	hidden := strings.TrimPrefix(name, whiteout)
	switch {
	case name == opaque:
		t.hideBelow(dir)
	case strings.HasPrefix(name, reserved):
	case hidden == "" || hidden == "." || hidden == "..":
		return hostile(full, "it hides no name")
	default:
		t.hide(dir, hidden)
	}
	return nil
}

// hide removes those parts of an entry that belong to lower layers.
func (t *Tree) hide(dir *node, name string) {
	n := dir.children[name]
	switch {
	case n == nil:
	case n.layer < t.layer:
		delete(dir.children, name)
	case n.kind == isDir:
		t.hideBelow(n)
	}
}

func (t *Tree) hideBelow(dir *node) {
	for name := range dir.children {
		t.hide(dir, name)
	}
}

// node converts a tar entry. It returns nil for an omitted one.
func (t *Tree) node(h *tar.Header, content io.Reader) (*node, error) {
	mode := h.FileInfo().Mode()
	if mode&(fs.ModeSetuid|fs.ModeSetgid) != 0 && h.Typeflag != tar.TypeDir {
		t.omitted.Setuid++
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "SCHILY.xattr.") || strings.HasPrefix(key, "LIBARCHIVE.xattr.") ||
			strings.HasPrefix(key, "SCHILY.acl.") {
			t.omitted.Attributes++
			break
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return &node{kind: isDir, children: map[string]*node{}, mtime: seconds(h.ModTime)}, nil
	case tar.TypeReg, tar.TypeRegA, tar.TypeCont, tar.TypeGNUSparse: //nolint:staticcheck // old archives have TypeRegA
		f, err := t.spoolContent(content, h.Size)
		if err != nil {
			return nil, fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
		f.exec, f.mtime = mode&0o111 != 0, seconds(h.ModTime)
		return &node{kind: isFile, file: f}, nil
	case tar.TypeSymlink:
		if err := checkTarget(h.Name, h.Linkname); err != nil {
			return nil, err
		}
		return &node{kind: isSymlink, target: h.Linkname, mtime: seconds(h.ModTime)}, nil
	case tar.TypeLink:
		return t.hardLink(h)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		t.omitted.Devices++
		return nil, nil
	default:
		return nil, hostile(h.Name, "its type is %q", h.Typeflag)
	}
}

func checkTarget(name, target string) error {
	if target == "" || len(target) > maxPath || strings.Contains(target, "\x00") {
		return hostile(name, "its link target is empty, longer than %d bytes, or has a NUL", maxPath)
	}
	return nil
}

func (t *Tree) hardLink(h *tar.Header) (*node, error) {
	if _, err := split(h.Linkname); err != nil {
		return nil, err
	}
	to, err := t.walk(t.root, h.Linkname, false, false)
	if err != nil {
		return nil, err
	}
	switch {
	case to == nil:
		return nil, hostile(h.Name, "it is a hard link to %.200q, which is not there", h.Linkname)
	case to.kind == isFile:
		return &node{kind: isFile, file: to.file}, nil
	case to.kind == isSymlink:
		return &node{kind: isSymlink, target: to.target, mtime: to.mtime}, nil
	default:
		return nil, hostile(h.Name, "it is a hard link to the directory %.200q", h.Linkname)
	}
}

// AddDir adds a copy of a directory. It stays on the directory's file system and follows no links.
func (t *Tree) AddDir(dir string) error {
	t.layer++
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("open the root file system: %w", err)
	}
	defer func() { _ = root.Close() }()
	top, err := root.Stat(".")
	if err != nil {
		return fmt.Errorf("read the root file system: %w", err)
	}
	t.root.mtime = seconds(top.ModTime())
	c := copier{t, root, sysOf(top).Dev, map[uint64]*file{}}
	return c.dir(t.root, ".")
}

type copier struct {
	tree   *Tree
	root   *os.Root
	device uint64
	linked map[uint64]*file // files with several links, by inode number
}

func sysOf(info fs.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }

func (c *copier) dir(to *node, from string) error {
	d, err := c.root.Open(from)
	if err != nil {
		return fmt.Errorf("read the root file system: %w", err)
	}
	names, err := d.Readdirnames(-1)
	if err := errors.Join(err, d.Close()); err != nil {
		return fmt.Errorf("read the root file system: %w", err)
	}
	for _, name := range names {
		if err := c.entry(to, name, path.Join(from, name)); err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) entry(to *node, name, from string) error {
	info, err := c.root.Lstat(from)
	if err != nil {
		return fmt.Errorf("read the root file system: %w", err)
	}
	n := &node{mtime: seconds(info.ModTime())}
	switch info.Mode().Type() {
	case fs.ModeDir:
		n.kind, n.children = isDir, map[string]*node{}
	case fs.ModeSymlink:
		n.kind = isSymlink
		if n.target, err = c.root.Readlink(from); err == nil {
			err = checkTarget(from, n.target)
		}
	case 0:
		n.kind = isFile
		n.file, err = c.file(from, info)
	default:
		c.tree.omitted.Devices++
		return nil
	}
	if err != nil {
		return err
	}
	if n, err = c.tree.put(to, name, n); err != nil || n.kind != isDir {
		return err
	}
	if sysOf(info).Dev != c.device {
		c.tree.omitted.Mounts++
		return nil
	}
	return c.dir(n, from)
}

func (c *copier) file(from string, info fs.FileInfo) (*file, error) {
	sys := sysOf(info)
	if f := c.linked[sys.Ino]; f != nil {
		return f, nil
	}
	in, err := c.root.OpenFile(from, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("read the root file system: %w", err)
	}
	defer func() { _ = in.Close() }()
	if now, err := in.Stat(); err != nil || !os.SameFile(now, info) || !now.Mode().IsRegular() {
		return nil, fmt.Errorf("read the root file system: %s changed meanwhile: %w", from, err)
	}
	f, err := c.tree.spoolContent(in, info.Size())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	if info.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
		c.tree.omitted.Setuid++
	}
	f.exec, f.mtime = info.Mode()&0o111 != 0, seconds(info.ModTime())
	if sys.Nlink > 1 {
		c.linked[sys.Ino] = f
	}
	return f, nil
}
