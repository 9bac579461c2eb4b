package image

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// metadataRecord is the PAX record with the metadata of an image.
const metadataRecord = "BULLPEN.image"

const digestPrefix = "sha256:"

// metadata is the value of that record.
type metadata struct {
	Env map[string]string `json:"env"`
}

const (
	dirMode  = 0o755
	fileMode = 0o644
	execMode = 0o755
	linkMode = 0o777

	// window bounds the memory for decompression, in bytes.
	window = 8 << 20
)

// Pack writes the tree in the normal form and returns its description without name and time. It
// returns [ErrNoLanguage] if the tree contains no interpreter, and [ErrArchitecture] if no worker
// can run all of them.
func (t *Tree) Pack(w io.Writer) (*proto.Image, error) {
	env := CleanEnv(t.Env)
	img, err := t.describe(env)
	if err != nil {
		return nil, err
	}
	sum := newMeter(w, t.limits.Stored)
	z, err := newFrameWriter(sum)
	if err != nil {
		return nil, fmt.Errorf("compress the image: %w", err)
	}
	p := &packer{tree: t, packed: map[*file]string{}, frames: z, out: tar.NewWriter(z)}
	if err := errors.Join(p.all(env), z.Close()); err != nil {
		return nil, fmt.Errorf("write the image: %w", err)
	}
	img.Digest, img.Size, img.UnpackedSize = sum.digest(), sum.n, p.bytes
	return img, nil
}

type packer struct {
	tree   *Tree
	frames *frameWriter
	out    *tar.Writer
	packed map[*file]string // paths of the files that have been written
	bytes  int64
}

func (p *packer) all(env map[string]string) error {
	value, err := json.Marshal(metadata{Env: env})
	if err != nil {
		return err
	}
	err = p.out.WriteHeader(&tar.Header{
		Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{
			metadataRecord: string(value),
		},
	})
	if err != nil {
		return err
	}
	if err := p.dir(p.tree.root, ""); err != nil {
		return err
	}
	return p.out.Close()
}

func (p *packer) dir(d *node, at string) error {
	for _, name := range slices.Sorted(maps.Keys(d.children)) {
		n := d.children[name]
		if err := p.node(n, at+name); err != nil {
			return fmt.Errorf("%s: %w", at+name, err)
		}
		if n.kind == isDir {
			if err := p.dir(n, at+name+"/"); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *packer) node(n *node, path string) error {
	if err := p.out.Flush(); err != nil {
		return err
	}
	var size int64
	if n.kind == isFile {
		size = n.file.size
	}
	p.frames.begin(path, size)
	h := &tar.Header{Format: tar.FormatPAX, Name: path}
	switch n.kind {
	case isDir:
		h.Typeflag, h.Name, h.Mode, h.ModTime = tar.TypeDir, path+"/", dirMode, time.Unix(n.mtime, 0)
	case isSymlink:
		h.Typeflag, h.Linkname, h.Mode, h.ModTime = tar.TypeSymlink, n.target, linkMode, time.Unix(n.mtime, 0)
	case isFile:
		f := n.file
		h.Mode, h.ModTime = modeOf(f), time.Unix(f.mtime, 0)
		if first, ok := p.packed[f]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			break
		}
		p.packed[f] = path
		h.Typeflag, h.Size = tar.TypeReg, f.size
		if err := p.out.WriteHeader(h); err != nil {
			return err
		}
		p.bytes += f.size
		_, err := io.Copy(p.out, io.NewSectionReader(p.tree.spool, f.at, f.size))
		return err
	}
	return p.out.WriteHeader(h)
}

func modeOf(f *file) int64 {
	if f.exec {
		return execMode
	}
	return fileMode
}

// meter computes the digest and the size of a stream and enforces a limit.
type meter struct {
	sum   hash.Hash
	to    io.Writer // nil for a reader
	from  io.Reader
	n     int64
	limit int64

	mu  sync.Mutex
	err error // of from, or of the limit
}

func newMeter(to io.Writer, limit int64) *meter {
	return &meter{sum: sha256.New(), to: to, limit: limit}
}

func (m *meter) count(b []byte) error {
	m.sum.Write(b)
	if m.n += int64(len(b)); m.n > m.limit {
		return fmt.Errorf("%w: it is stored as more than %d bytes", ErrTooLarge, m.limit)
	}
	return nil
}

func (m *meter) Write(b []byte) (int, error) {
	if err := m.count(b); err != nil {
		return 0, err
	}
	return m.to.Write(b)
}

func (m *meter) Read(b []byte) (int, error) {
	n, err := m.from.Read(b)
	if over := m.count(b[:n]); over != nil {
		err = over
	}
	if err != nil && !errors.Is(err, io.EOF) {
		m.mu.Lock()
		m.err = err
		m.mu.Unlock()
	}
	return n, err
}

// failure returns the error of the reader. Another goroutine may be reading.
func (m *meter) failure() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

func (m *meter) digest() string { return digestPrefix + hex.EncodeToString(m.sum.Sum(nil)) }
