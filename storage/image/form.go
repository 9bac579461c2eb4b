package image

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
)

// Inspect reads an image to its end, checks that it is in the normal form and within limits, and tells what it is, but for a name and
// a time. Its errors are [ErrForm], [ErrTooLarge], and those of r.
func Inspect(r io.Reader, limits Limits) (*proto.Image, error) { return readForm(r, limits, discard{}) }

// A sink is told of the entries of an image in their order. Every path is relative and clean, its directory has been named before,
// and no link is on its way.
type sink interface {
	dir(path string, mtime time.Time) error
	file(path string, content io.Reader, exec bool, mtime time.Time) error
	symlink(path, target string) error
	link(path, to string) error
}

type discard struct{}

func (discard) dir(string, time.Time) error  { return nil }
func (discard) symlink(string, string) error { return nil }
func (discard) link(string, string) error    { return nil }

func (discard) file(_ string, content io.Reader, _ bool, _ time.Time) error {
	_, err := io.Copy(io.Discard, content)
	return err
}

// readForm reads an image and hands what it holds to a sink. That it was the right image is known only when readForm returns.
func readForm(r io.Reader, limits Limits, to sink) (*proto.Image, error) {
	in := newMeter(nil, limits.Stored)
	in.from = r
	z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window))
	if err != nil {
		return nil, fmt.Errorf("decompress the image: %w", err)
	}
	defer z.Close()
	f := &form{tree: newTree(limits), stored: in, in: tar.NewReader(z), to: to}
	img, err := f.read()
	if err != nil {
		return nil, err
	}
	// The decompressor reads all that is stored.
	if n, err := io.Copy(io.Discard, io.LimitReader(z, 1)); err != nil {
		return nil, f.broken(err)
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
	tree   *Tree
	stored *meter
	in     *tar.Reader
	to     sink
	at     []*node  // the directories on the way to the last entry, itself included if it is one, without the root
	last   []string // its path
}

func (f *form) read() (*proto.Image, error) {
	h, err := f.in.Next()
	if err != nil {
		return nil, f.broken(err) // the end of the file, too
	}
	env, err := readAbout(h)
	if err != nil {
		return nil, err
	}
	for {
		h, err := f.in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, f.broken(err)
		}
		if err := f.entry(h); err != nil {
			return nil, err
		}
	}
	img := &proto.Image{Languages: f.tree.discover(env), Env: env}
	if len(img.Languages) == 0 {
		return nil, ErrNoLanguage
	}
	return img, nil
}

// readAbout reads the record with which an image begins.
func readAbout(h *tar.Header) (env map[string]string, err error) {
	wrong := malformed("it does not begin with a record %s", record)
	value := h.PAXRecords[record]
	var a about
	if h.Typeflag != tar.TypeXGlobalHeader || len(h.PAXRecords) != 1 || json.Unmarshal([]byte(value), &a) != nil {
		return nil, wrong
	}
	a.Env = CleanEnv(a.Env)
	if again, err := json.Marshal(a); err != nil || string(again) != value {
		return nil, wrong
	}
	return a.Env, nil
}

// broken tells errors of what is stored from those of reading it.
func (f *form) broken(err error) error {
	if f.stored.err != nil {
		return fmt.Errorf("read the image: %w", f.stored.err)
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
	if slices.Compare(f.last, parts) >= 0 {
		return malformed("entry %.200q is out of order", h.Name)
	}
	up := len(parts) - 1
	if up > len(f.at) || !slices.Equal(parts[:up], f.last[:up]) {
		return malformed("the directory of entry %.200q does not precede it", h.Name)
	}
	dir := f.tree.root
	if up > 0 {
		dir = f.at[up-1]
	}
	f.at, f.last = f.at[:up], parts
	return f.take(h, dir, name, parts[up])
}

// take puts an entry into the tree, so that the entries after it can be checked, and hands it on.
func (f *form) take(h *tar.Header, dir *node, path, name string) error {
	n := &node{mtime: h.ModTime.Unix()}
	hand := func() error { return nil }
	switch h.Typeflag {
	case tar.TypeDir:
		n.kind, n.children = isDir, map[string]*node{}
		hand = func() error { return f.to.dir(path, h.ModTime) }
	case tar.TypeReg:
		if err := f.tree.room(h.Size); err != nil {
			return err
		}
		f.tree.spooled += h.Size
		n.kind, n.file = isFile, &file{size: h.Size, mtime: n.mtime, exec: h.Mode == execMode}
		hand = func() error {
			return f.to.file(path, &contentReader{f}, n.file.exec, h.ModTime)
		}
	case tar.TypeSymlink:
		n.kind, n.target = isSymlink, h.Linkname
		if checkTarget(path, n.target) != nil {
			return malformed("entry %.200q is a symbolic link to nothing", h.Name)
		}
		hand = func() error { return f.to.symlink(path, n.target) }
	case tar.TypeLink:
		to := f.tree.plain(h.Linkname)
		if to == nil || to.kind != isFile || modeOf(to.file) != h.Mode || to.file.mtime != n.mtime {
			return malformed("entry %.200q is a hard link to no file before it", h.Name)
		}
		n.kind, n.file = isFile, to.file
		hand = func() error { return f.to.link(path, h.Linkname) }
	}
	n, err := f.tree.put(dir, name, n)
	if errors.Is(err, ErrHostile) {
		return malformed("%v", err)
	}
	if err != nil {
		return err
	}
	if n.kind == isDir {
		f.at = append(f.at, n)
	}
	return hand()
}

// contentReader reads the content of the present file.
type contentReader struct{ of *form }

func (c *contentReader) Read(b []byte) (int, error) {
	n, err := c.of.in.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = c.of.broken(err)
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

// plain finds a path without following links.
func (t *Tree) plain(path string) *node {
	n := t.root
	for part := range strings.SplitSeq(path, "/") {
		if n = n.children[part]; n == nil {
			return nil
		}
	}
	return n
}
