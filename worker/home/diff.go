package home

import (
	"context"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// Store stores an object: size bytes of content, which may be read repeatedly and concurrently
// until Store returns. It may be called several times with the same digest.
type Store func(ctx context.Context, digest layer.Digest, size int64, content io.ReaderAt) error

// Object is the content of a file that is not in the layer.
type Object struct {
	Digest layer.Digest
	Size   int64 // bytes
}

// Stats describes a layer.
type Stats struct {
	Entries int64    // as [layer.Limits] counts them
	Objects []Object // one for each call of Store; equal files have equal objects
	// Skipped counts FIFOs, sockets and devices. The layer treats them as removed.
	Skipped int64
	Growth  Usage // difference to the previous version; for Full, the whole home
	// Unchanged reports that applying the layer would change nothing.
	Unchanged bool
}

// Diff writes the changes in the home to out. The home must no longer change, but may still be
// mounted. The error wraps [layer.ErrLimit] if the change exceeds the limits of out, and a
// [*proto.FileError] if a file cannot be part of any layer.
func (o *Overlay) Diff(ctx context.Context, out layer.Writer, store Store) (Stats, error) {
	s, err := o.diff(ctx, out, store)
	if err != nil {
		return Stats{}, fmt.Errorf("read the changes of a home: %w", err)
	}
	return s, nil
}

func (o *Overlay) diff(ctx context.Context, out layer.Writer, store Store) (Stats, error) {
	t := tree{ctx: ctx, meter: newMeter(ctx), overlay: true, lower: -1, index: -1}
	defer t.close()
	var err error
	if t.upper, err = openRoot(o.upper()); err != nil {
		return Stats{}, err
	}
	if t.lower, err = openRoot(o.Lower); err != nil {
		return Stats{}, err
	}
	if t.index, err = openRoot(o.work() + "/index"); err != nil {
		return Stats{}, err
	}
	if err := t.readIndex(); err != nil {
		return Stats{}, err
	}
	return t.write(out, store)
}

// Full writes a whole directory to out as a layer that does not depend on a previous version.
func Full(ctx context.Context, dir string, out layer.Writer, store Store) (Stats, error) {
	t := tree{ctx: ctx, meter: newMeter(ctx), lower: -1, index: -1}
	defer t.close()
	var s Stats
	var err error
	if t.upper, err = openRoot(dir); err == nil {
		s, err = t.write(out, store)
	}
	if err != nil {
		return Stats{}, fmt.Errorf("read a home: %w", err)
	}
	return s, nil
}

// metadata returns the metadata and size of an open file or directory.
func metadata(fd int) (*layer.Entry, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("stat a file: %w", err)
	}
	all, err := userXattrs(fd)
	if err != nil {
		return nil, err
	}
	return &layer.Entry{
		Mode: st.Mode & layer.ModeBits, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec), Xattrs: all, Size: st.Size,
	}, nil
}

// rootMode are mode bits that the root of every version has. A program could otherwise bar all
// later ones from the home.
const rootMode = 0o700

// rootMetadata returns the metadata of a version whose root is an open directory.
func rootMetadata(fd int) (*layer.Entry, error) {
	e, err := metadata(fd)
	if err != nil {
		return nil, err
	}
	e.Mode |= rootMode
	return e, nil
}

// errChanged is returned when a file changes while it is read.
var errChanged = errors.New("the file changed while it was read")
