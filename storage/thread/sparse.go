package thread

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// tarBlock is the unit of everything in a tar, in bytes.
const tarBlock = 512

// sparseMap describes a file with holes in a tar, as in "PAX Format, Version 1.0" of the manual of
// GNU tar, "Storing Sparse Files".
type sparseMap struct {
	encoded []byte         // whole blocks
	extents []layer.Extent // they begin, and except for the end of the file end, with a block
	length  int64          // of encoded and the extents, in bytes
}

func newSparseMap(n *node) sparseMap {
	var m sparseMap
	for _, x := range n.extents {
		start := x.Offset / tarBlock * tarBlock
		end := min(n.size, padded(x.Offset+x.Len))
		last := len(m.extents) - 1
		if last >= 0 && start <= m.extents[last].Offset+m.extents[last].Len {
			m.extents[last].Len = end - m.extents[last].Offset
		} else {
			m.extents = append(m.extents, layer.Extent{Offset: start, Len: end - start})
		}
	}
	regions := m.extents
	if last := len(regions) - 1; last < 0 || regions[last].Offset+regions[last].Len < n.size {
		regions = append(regions[:last+1:last+1], layer.Extent{Offset: n.size}) // a hole at the end
	}
	m.encoded = fmt.Appendln(nil, len(regions))
	for _, x := range regions {
		m.encoded = fmt.Appendf(m.encoded, "%d\n%d\n", x.Offset, x.Len)
		m.length += x.Len
	}
	m.encoded = append(m.encoded, padding(int64(len(m.encoded)))...)
	m.length += int64(len(m.encoded))
	return m
}

// padded rounds a number of bytes up to whole blocks.
func padded(n int64) int64 { return n + int64(len(padding(n))) }

// padding returns the padding after n bytes up to the end of their last block.
func padding(n int64) []byte { return make([]byte, -n&(tarBlock-1)) }

// writeSparse writes a file without its holes.
func (a *archive) writeSparse(h *tar.Header, n *node, m sparseMap) error {
	header, err := sparseHeader(h, n.size, m.length)
	if err != nil {
		return err
	}
	if err := a.out.Flush(); err != nil { // the padding of the file before
		return err
	}
	for _, b := range [][]byte{header, m.encoded} {
		if _, err := a.raw.Write(b); err != nil {
			return err
		}
	}
	r, err := a.open(a.ctx, n, 0, n.size, a.frames)
	if err != nil {
		return err
	}
	for _, x := range m.extents {
		r.at = x.Offset // only a hole is left out
		if _, err = io.CopyN(a.raw, r, x.Len); err != nil {
			break
		}
	}
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	_, err = a.raw.Write(padding(m.length))
	return err
}

// sparseHeader returns the header of a file of size bytes with holes, of which the tar holds length
// bytes. Package tar drops the records of sparse files. So they get unknown names of the same
// length, which are replaced afterwards.
func sparseHeader(h *tar.Header, size, length int64) ([]byte, error) {
	const prefix = "GNU.sparse."
	unknown := rand.Text()[:len(prefix)]
	sparse := *h
	sparse.Name, sparse.Size = "GNUSparseFile/file", length // for programs that do not know the records
	sparse.PAXRecords = map[string]string{
		unknown + "major": "1", unknown + "minor": "0", unknown + "name": h.Name,
		unknown + "realsize": strconv.FormatInt(size, 10),
	}
	maps.Copy(sparse.PAXRecords, h.PAXRecords)
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(&sparse); err != nil {
		return nil, err
	}
	return bytes.ReplaceAll(b.Bytes(), []byte(unknown), []byte(prefix)), nil
}
