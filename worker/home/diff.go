package home

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// Store takes an object: size bytes of content, which can be read several times
// and at several places at once, until Store returns. It may know the digest
// already, since equal files are equal objects.
type Store func(ctx context.Context, digest Digest, size int64, content io.ReaderAt) error

// Object is a file's content that is not in the layer.
type Object struct {
	Digest Digest
	Size   int64 // bytes
}

// Stats says what a layer is.
type Stats struct {
	Layout  layer.Layout
	Entries int64    // as Limits count them
	Bytes   int64    // as Limits count them
	Objects []Object // of its files, one for each call of Store; equal files have equal ones
	// NotKept are FIFOs, sockets and devices, which are left out as if they had
	// been removed.
	NotKept int64
	Grown   Usage // how the home is larger than the last version; of a Full, the whole
	// Unchanged means that applying the layer would change nothing.
	Unchanged bool
}

// Diff writes what changed in the home as a layer. Nothing may write to it any
// more, but it may still be mounted. An error wraps ErrLimit if the change is too
// large, and says what it was otherwise that cannot be stored.
func (o *Overlay) Diff(ctx context.Context, w io.Writer, limits Limits, store Store) (Stats, error) {
	s, err := o.diff(ctx, w, limits, store)
	if err != nil {
		return Stats{}, fmt.Errorf("read the change of a home: %w", err)
	}
	return s, nil
}

func (o *Overlay) diff(ctx context.Context, w io.Writer, limits Limits, store Store) (Stats, error) {
	t := tree{ctx: ctx, limits: limits, meter: newMeter(ctx), overlay: true, lower: -1, index: -1}
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
	if err := t.scan(t.root(), 1); err != nil {
		return Stats{}, err
	}
	lw, err := layer.NewWriter(w, t.moves, limits)
	if err != nil {
		return Stats{}, err
	}
	return t.write(lw, store)
}

// Full writes a whole directory as a layer that makes it of any other, and is
// the first of a chain.
func Full(ctx context.Context, dir string, w io.Writer, limits Limits, store Store) (Stats, error) {
	lw, err := layer.NewWriter(w, nil, limits)
	if err != nil {
		return Stats{}, fmt.Errorf("read a home: %w", err)
	}
	s, err := full(ctx, dir, lw, limits, store)
	if err != nil {
		return Stats{}, fmt.Errorf("read a home: %w", err)
	}
	return s, nil
}

func full(ctx context.Context, dir string, lw *layer.Writer, limits Limits, store Store) (Stats, error) {
	t := tree{ctx: ctx, limits: limits, meter: newMeter(ctx), lower: -1, index: -1}
	defer t.close()
	var err error
	if t.upper, err = openRoot(dir); err != nil {
		return Stats{}, err
	}
	if err := t.scan(t.root(), 1); err != nil {
		return Stats{}, err
	}
	return t.write(lw, store)
}

// Fingerprint is a digest of all that is kept of a directory. Where the holes of
// files are is a part of it, for which different file systems may have different
// measures.
func Fingerprint(ctx context.Context, dir string) (Digest, error) {
	sum := sha256.New()
	all := Limits{Bytes: math.MaxInt64, Entries: math.MaxInt64}
	lw, err := layer.NewPlainWriter(sum, nil, all)
	if err != nil {
		return Digest{}, err
	}
	known := func(context.Context, Digest, int64, io.ReaderAt) error { return nil }
	if _, err := full(ctx, dir, lw, all, known); err != nil {
		return Digest{}, fmt.Errorf("fingerprint of %s: %w", dir, err)
	}
	return Digest(sum.Sum(nil)), nil
}

// metadata of an open file or directory.
func metadata(fd int) (*layer.Entry, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("look at a file: %w", err)
	}
	all, err := userXattrs(fd)
	if err != nil {
		return nil, err
	}
	return &layer.Entry{
		Mode: st.Mode & layer.ModeBits, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec), Xattrs: all, Size: st.Size,
	}, nil
}

// errMoved is about a file that was one thing, and then another.
var errMoved = errors.New("it changes while it is read")
