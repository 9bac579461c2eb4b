package home

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// extents returns the ranges of a file that are not holes, at most one more than a layer may have.
func extents(ctx context.Context, f *os.File, size int64) ([]layer.Extent, error) {
	var all []layer.Extent
	for at := int64(0); at < size; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		start, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && start >= size {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("find the holes: %w", err)
		}
		end, err := f.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("find the holes: %w", err)
		}
		end = min(end, size)
		if len(all) > layer.MaxExtents {
			return all, nil
		}
		if n := len(all); n > 0 && all[n-1].Offset+all[n-1].Len == start {
			all[n-1].Len += end - start
		} else if end > start {
			all = append(all, layer.Extent{Offset: start, Len: end - start})
		} else {
			return nil, errChanged
		}
		at = end
	}
	return all, nil
}

// denseReader reads a file without its holes.
type denseReader struct {
	f       *os.File
	extents []layer.Extent
	ends    []int64 // end of each extent in the dense content
}

func newDenseReader(f *os.File, extents []layer.Extent) *denseReader {
	d := &denseReader{f: f, extents: extents, ends: make([]int64, len(extents))}
	var n int64
	for i, x := range extents {
		n += x.Len
		d.ends[i] = n
	}
	return d
}

func (d *denseReader) size() int64 {
	if len(d.ends) == 0 {
		return 0
	}
	return d.ends[len(d.ends)-1]
}

func (d *denseReader) ReadAt(b []byte, at int64) (int, error) {
	if at < 0 {
		return 0, errors.New("negative offset")
	}
	read := 0
	for i := sort.Search(len(d.ends), func(i int) bool { return d.ends[i] > at }); i < len(d.ends) && read < len(b); i++ {
		left := d.ends[i] - at
		n, err := d.f.ReadAt(b[read:min(int64(len(b)), int64(read)+left)], d.extents[i].Offset+d.extents[i].Len-left)
		read += n
		at += int64(n)
		if int64(n) < left && read < len(b) {
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return read, err
		}
	}
	if read < len(b) {
		return read, io.EOF
	}
	return read, nil
}
