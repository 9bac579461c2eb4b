package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

// maxArtifactFile is the size of the largest file that is saved, in bytes. A file with holes can be of any
// size.
const maxArtifactFile = 64 << 30

const sparseBlock = 1 << 20 // bytes that are a hole if they are zeros

// saveArtifacts saves the artifacts of a run below a directory. It continues after an error.
func (f *ciFollower) saveArtifacts(ctx context.Context, run *api.WholePipeline, dir string) error {
	var errs []error
	for i := range run.Cells {
		c := &run.Cells[i]
		if !c.Kept {
			continue
		}
		to, matrix := c.Step, ""
		if c.Cell != nil {
			to, matrix = path.Join(c.Step, *c.Cell), *c.Cell
		}
		for _, a := range c.Artifacts {
			save := func(r io.Reader) error {
				return f.unpack(r, filepath.Join(dir, filepath.FromSlash(path.Join(to, a.Name))))
			}
			err := piped(save, func(w io.Writer) error { return f.api.PipelineArtifact(ctx, run.ID, c.Step, matrix, a.Name, w) })
			if err != nil {
				errs = append(errs, fmt.Errorf("artifact %s of %s: %w", a.Name, cellName(c), err))
			}
		}
	}
	return errors.Join(errs...)
}

// piped calls read with what write writes.
func piped(read func(io.Reader) error, write func(io.Writer) error) error {
	r, w := io.Pipe()
	written := make(chan struct{})
	go func() {
		defer close(written)
		_ = w.CloseWithError(write(w)) // read returns the error
	}()
	err := read(r)
	_ = r.Close() // after an error, what is left is not needed
	<-written
	return err
}

// unpack unpacks the tar of an artifact below a directory. It skips links, which may lead anywhere,
// and set-uid bits. If a file cannot be written, it continues with the others.
func (f *ciFollower) unpack(r io.Reader, dir string) error {
	u := &unpacker{ciFollower: f, block: make([]byte, sparseBlock), zeros: make([]byte, sparseBlock)}
	defer u.close()
	var errs []error
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			_, err := io.Copy(io.Discard, r) // the padding
			return errors.Join(append(errs, err, u.finish())...)
		}
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		name := path.Clean(h.Name)
		if name == "." {
			continue
		}
		if !filepath.IsLocal(filepath.FromSlash(name)) {
			return fmt.Errorf("the server sends %q, which is outside", h.Name)
		}
		err = u.entry(dir, name, h, in)
		if errors.Is(err, errArtifactBroken) {
			return errors.Join(append(errs, err)...)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
}

// errArtifactBroken marks an error of reading a tar.
var errArtifactBroken = errors.New("the download broke off")

// unpacker writes the files of an artifact.
type unpacker struct {
	*ciFollower
	root *os.Root // nil before the first entry
	dirs []*tar.Header

	block, zeros []byte // buffers of writeSparse
}

func (u *unpacker) close() {
	if u.root != nil {
		_ = u.root.Close() // only a handle
	}
}

// open opens the directory. An artifact without files does not create it.
func (u *unpacker) open(dir string) (err error) {
	if u.root == nil {
		if err = os.MkdirAll(dir, 0o755); err == nil { //nolint:gosec // what the umask leaves, as any program's files
			u.root, err = os.OpenRoot(dir)
		}
	}
	return err
}

func (u *unpacker) entry(dir, name string, h *tar.Header, content io.Reader) error {
	if err := u.open(dir); err != nil {
		return err
	}
	local := filepath.FromSlash(name)
	switch h.Typeflag {
	case tar.TypeDir:
		u.dirs = append(u.dirs, h)
		return u.root.MkdirAll(local, 0o755)
	case tar.TypeReg:
		if h.Size > maxArtifactFile {
			return fmt.Errorf("%q has %d bytes, more than %d: not saved", h.Name, h.Size, int64(maxArtifactFile))
		}
	case tar.TypeLink:
	default:
		u.errorf("%s is a link: left out", strings.Map(printableLine, path.Join(filepath.ToSlash(dir), name)))
		return nil
	}
	if err := u.root.MkdirAll(filepath.Dir(local), 0o755); err != nil {
		return err
	}
	if err := u.root.Remove(local); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if h.Typeflag == tar.TypeLink {
		first := path.Clean(h.Linkname)
		if !filepath.IsLocal(filepath.FromSlash(first)) {
			return fmt.Errorf("the server sends a link to %q, which is outside", h.Linkname)
		}
		return u.root.Link(filepath.FromSlash(first), local)
	}
	file, err := u.root.OpenFile(local, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = u.writeSparse(file, content, h.Size)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return errors.Join(u.root.Chtimes(local, h.ModTime, h.ModTime), u.root.Chmod(local, h.FileInfo().Mode().Perm()))
}

// finish sets the times and modes of directories, those below others first.
func (u *unpacker) finish() error {
	var errs []error
	for _, h := range slices.Backward(u.dirs) {
		local := filepath.FromSlash(path.Clean(h.Name))
		errs = append(errs, u.root.Chtimes(local, time.Time{}, h.ModTime), u.root.Chmod(local, h.FileInfo().Mode().Perm()))
	}
	return errors.Join(errs...)
}

// writeSparse writes size bytes to an empty file, replacing long runs of zeros by holes.
func (u *unpacker) writeSparse(file *os.File, content io.Reader, size int64) error {
	for left := size; left > 0; {
		part := u.block[:min(left, int64(len(u.block)))]
		if _, err := io.ReadFull(content, part); err != nil {
			return fmt.Errorf("%w: %w", errArtifactBroken, err)
		}
		left -= int64(len(part))
		var err error
		if bytes.Equal(part, u.zeros[:len(part)]) {
			_, err = file.Seek(int64(len(part)), io.SeekCurrent)
		} else {
			_, err = file.Write(part)
		}
		if err != nil {
			return err
		}
	}
	return file.Truncate(size)
}
