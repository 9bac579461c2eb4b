package image

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Inspect reads an image to its end, checks its form and limits, and returns its description
// without name and time. Its parts are consecutive ranges of its bytes, which other images may have
// too. The errors are [ErrForm], [ErrTooLarge], [ErrNoLanguage], [ErrArchitecture], and those of r.
func Inspect(r io.Reader, limits Limits) (img *proto.Image, parts []proto.ImagePart, err error) {
	img, err = readForm(r, limits, discard{}, func(frame []byte) {
		sum := sha256.Sum256(frame)
		parts = append(parts, proto.ImagePart{Size: int64(len(frame)), Digest: digestPrefix + hex.EncodeToString(sum[:])})
	})
	if err != nil {
		return nil, nil, err
	}
	if len(parts) == 0 { // it is not in frames
		parts = []proto.ImagePart{{Size: img.Size, Digest: img.Digest}}
	}
	return img, parts, nil
}

// A sink receives the entries of an image in order. Paths are relative and clean. The directory of
// each entry precedes it, and no path contains a symbolic link.
type sink interface {
	dir(path string, mtime time.Time) error
	file(path string, content io.Reader, size int64, exec bool, mtime time.Time) error
	symlink(path, target string) error
	link(path, to string) error
}

type discard struct{}

func (discard) dir(string, time.Time) error  { return nil }
func (discard) symlink(string, string) error { return nil }
func (discard) link(string, string) error    { return nil }

func (discard) file(_ string, content io.Reader, _ int64, _ bool, _ time.Time) error {
	_, err := io.Copy(io.Discard, content)
	return err
}

// readForm reads an image and passes its entries to a sink, and its frames, if it has several, to
// onFrame unless that is nil. The digest is known only when readForm returns.
func readForm(r io.Reader, limits Limits, to sink, onFrame func(stored []byte)) (*proto.Image, error) {
	in := newMeter(nil, limits.Stored)
	in.from = r
	z, err := newFrameReader(in, onFrame)
	f := &form{tree: newTree(limits), stored: in, to: to}
	if err != nil {
		return nil, f.readError(err)
	}
	defer z.Close()
	f.in = tar.NewReader(z)
	img, err := f.read()
	if err != nil {
		return nil, err
	}
	// Nothing may follow the tar. Reading on also makes the decompressor read all stored bytes.
	if n, err := io.Copy(io.Discard, io.LimitReader(z, 1)); err != nil {
		return nil, f.readError(err)
	} else if n > 0 {
		return nil, malformed("something follows its end")
	}
	img.Digest, img.Size, img.UnpackedSize = in.digest(), in.n, f.tree.spooled
	return img, nil
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s: make it with `bullpen image`", ErrForm, fmt.Sprintf(format, args...))
}

type form struct {
	tree     *Tree
	stored   *meter
	in       *tar.Reader
	to       sink
	openDirs []*node  // the directories of the last entry's path, without the root but with the entry if it is one
	lastPath []string // of the last entry
}

func (f *form) read() (*proto.Image, error) {
	h, err := f.in.Next()
	if err != nil {
		return nil, f.readError(err) // includes an empty file
	}
	env, err := readMetadata(h)
	if err != nil {
		return nil, err
	}
	for {
		h, err := f.in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, f.readError(err)
		}
		if err := f.entry(h); err != nil {
			return nil, err
		}
	}
	return f.tree.describe(env)
}

// readMetadata reads the first record of an image.
func readMetadata(h *tar.Header) (env map[string]string, err error) {
	wrong := malformed("it does not begin with a record %s", metadataRecord)
	value := h.PAXRecords[metadataRecord]
	var m metadata
	if h.Typeflag != tar.TypeXGlobalHeader || len(h.PAXRecords) != 1 || json.Unmarshal([]byte(value), &m) != nil {
		return nil, wrong
	}
	m.Env = CleanEnv(m.Env)
	if again, err := json.Marshal(m); err != nil || string(again) != value {
		return nil, wrong
	}
	return m.Env, nil
}

// readError returns the reader's error if there was one, otherwise [ErrForm].
func (f *form) readError(err error) error {
	if failed := f.stored.failure(); failed != nil {
		return fmt.Errorf("read the image: %w", failed)
	}
	return malformed("%v", err)
}

func (f *form) entry(h *tar.Header) error {
	if err := checkHeader(h); err != nil {
		return err
	}
	name := strings.TrimSuffix(h.Name, "/")
	parts, err := split(name)
	if err != nil || len(parts) == 0 || strings.Join(parts, "/") != name {
		return malformed("entry %.200q has no plain path", h.Name)
	}
	if slices.Compare(f.lastPath, parts) >= 0 {
		return malformed("entry %.200q is out of order", h.Name)
	}
	up := len(parts) - 1
	if up > len(f.openDirs) || !slices.Equal(parts[:up], f.lastPath[:up]) {
		return malformed("the directory of entry %.200q does not precede it", h.Name)
	}
	dir := f.tree.root
	if up > 0 {
		dir = f.openDirs[up-1]
	}
	f.openDirs, f.lastPath = f.openDirs[:up], parts
	return f.add(h, dir, name, parts[up])
}

// add puts an entry into the tree, against which later entries are checked, and passes it to the
// sink.
func (f *form) add(h *tar.Header, dir *node, path, name string) error {
	n := &node{mtime: h.ModTime.Unix()}
	emit := func() error { return nil }
	switch h.Typeflag {
	case tar.TypeDir:
		n.kind, n.children = isDir, map[string]*node{}
		emit = func() error { return f.to.dir(path, h.ModTime) }
	case tar.TypeReg:
		if err := f.tree.checkSpace(h.Size); err != nil {
			return err
		}
		f.tree.spooled += h.Size
		n.kind, n.file = isFile, &file{size: h.Size, mtime: n.mtime, exec: h.Mode == execMode}
		emit = func() error {
			var header elfHeader
			err := f.to.file(path, io.TeeReader(&contentReader{f}, &header), h.Size, n.file.exec, h.ModTime)
			n.file.machine = header.machine()
			return err
		}
	case tar.TypeSymlink:
		n.kind, n.target = isSymlink, h.Linkname
		if checkTarget(path, n.target) != nil {
			return malformed("entry %.200q is a symbolic link to nothing", h.Name)
		}
		emit = func() error { return f.to.symlink(path, n.target) }
	case tar.TypeLink:
		to := f.tree.lookup(h.Linkname)
		if to == nil || to.kind != isFile || modeOf(to.file) != h.Mode || to.file.mtime != n.mtime {
			return malformed("entry %.200q is a hard link to no file before it", h.Name)
		}
		n.kind, n.file = isFile, to.file
		emit = func() error { return f.to.link(path, h.Linkname) }
	}
	n, err := f.tree.put(dir, name, n)
	if errors.Is(err, ErrHostile) {
		return malformed("%v", err)
	}
	if err != nil {
		return err
	}
	if n.kind == isDir {
		f.openDirs = append(f.openDirs, n)
	}
	return emit()
}

// contentReader reads the content of the current file.
type contentReader struct{ of *form }

func (c *contentReader) Read(b []byte) (int, error) {
	n, err := c.of.in.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = c.of.readError(err)
	}
	return n, err
}

// checkHeader checks what does not depend on other entries.
func checkHeader(h *tar.Header) error {
	var mode, size int64
	switch h.Typeflag {
	case tar.TypeDir:
		mode = dirMode
	case tar.TypeSymlink:
		mode = linkMode
	case tar.TypeReg, tar.TypeLink:
		if mode = fileMode; h.Mode == execMode {
			mode = execMode
		}
		if h.Typeflag == tar.TypeReg {
			size = h.Size
		}
	default:
		return malformed("entry %.200q is of type %q", h.Name, h.Typeflag)
	}
	if h.Mode != mode || h.Size != size || h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.Gname != "" ||
		strings.HasSuffix(h.Name, "/") != (h.Typeflag == tar.TypeDir) {
		return malformed("entry %.200q has another mode or owner", h.Name)
	}
	if !h.ModTime.Equal(time.Unix(seconds(h.ModTime), 0)) {
		return malformed("entry %.200q has a time that is no whole second", h.Name)
	}
	for key := range h.PAXRecords {
		if key != "path" && key != "linkpath" && key != "size" {
			return malformed("entry %.200q has the attribute %.100q", h.Name, key)
		}
	}
	return nil
}

// lookup finds a path without following links.
func (t *Tree) lookup(path string) *node {
	n := t.root
	for part := range strings.SplitSeq(path, "/") {
		if n = n.children[part]; n == nil {
			return nil
		}
	}
	return n
}
