package blob

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// maxResumes limits how often one stream is reopened, each time after at least one byte of
// progress.
const maxResumes = 1000

// checkedReader checks content while it is read. It returns the last bytes only after all of the
// content was checked: a client that counts bytes, as HTTP clients do, cannot mistake a corrupt
// object for a complete one.
type checkedReader struct {
	from io.Reader
	blob proto.Blob // Digest is empty if it is not known
	op   string
	left int64
	sum  hash.Hash
	err  error // io.EOF after all of the content
}

func checked(from io.Reader, b proto.Blob, op string) *checkedReader {
	return &checkedReader{from: from, blob: b, op: op, left: b.Size, sum: sha256.New()}
}

func (c *checkedReader) Read(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	n := 0
	if c.left > 0 {
		n, c.err = c.from.Read(p[:min(int64(len(p)), c.left)])
		c.sum.Write(p[:n])
		if c.left -= int64(n); c.left > 0 {
			if errors.Is(c.err, io.EOF) {
				c.err = c.corrupt(fmt.Errorf("it ends %d bytes before its size of %d", c.left, c.blob.Size))
			}
			return n, c.err
		}
	}
	if c.err = c.checkEnd(); c.err != nil {
		return 0, c.err
	}
	c.err = io.EOF
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (c *checkedReader) digest() string { return "sha256:" + hex.EncodeToString(c.sum.Sum(nil)) }

// checkEnd checks the digest or, if that is unknown, that the content has ended.
func (c *checkedReader) checkEnd() error {
	if c.blob.Digest != "" {
		if digest := c.digest(); digest != c.blob.Digest {
			return c.corrupt(fmt.Errorf("its digest is %s and should be %s", digest, c.blob.Digest))
		}
		return nil
	}
	switch _, err := io.ReadFull(c.from, make([]byte, 1)); {
	case err == nil:
		return c.corrupt(fmt.Errorf("it is longer than its size of %d", c.blob.Size))
	case errors.Is(err, io.EOF):
		return nil
	default:
		return err
	}
}

func (c *checkedReader) corrupt(err error) error {
	e := &Error{Op: c.op, Key: c.blob.Key, Kind: proto.ErrCorrupt, Err: err}
	switch {
	case c.blob.Digest == "":
		e.Remedy = "nothing was stored; announce the size of the content"
	case c.op == "put":
		e.Remedy = "nothing was stored; see what changed the content after its digest was computed"
	}
	return e
}

// resumingReader reads a span of an object and reopens it where the stream broke.
type resumingReader struct {
	ctx          context.Context // of the request being served
	store        *Store
	key          string
	size         int64
	offset, left int64
	body         io.ReadCloser // nil while broken
	resumes      int
}

func (r *resumingReader) open() (err error) {
	r.body, err = r.store.Backend.Get(r.ctx, r.key, Span{Size: r.size, Offset: r.offset, Length: r.left})
	return err
}

func (r *resumingReader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	n, err := r.read(p)
	var e *Error
	if n > 0 || !errors.As(err, &e) || !e.Retryable || r.resumes == maxResumes {
		return n, err
	}
	r.resumes++
	err = r.store.Retry.Do(r.ctx, func() error {
		if r.body == nil {
			if err := r.open(); err != nil {
				return err
			}
		}
		n, err = r.read(p)
		return err
	})
	return n, err
}

// read reads from the open body. It returns either bytes or an error, never both.
func (r *resumingReader) read(p []byte) (int, error) {
	if r.body == nil {
		return 0, &Error{Op: "get", Key: r.key, Kind: ErrUnavailable, Retryable: true, Err: io.ErrUnexpectedEOF}
	}
	n, err := io.ReadAtLeast(r.body, p[:min(int64(len(p)), r.left)], 1)
	r.offset += int64(n)
	r.left -= int64(n)
	if err == nil || n > 0 {
		return n, nil
	}
	_ = r.body.Close()
	r.body = nil
	if errors.Is(err, io.EOF) {
		err = &Error{
			Op: "get", Key: r.key, Kind: ErrUnavailable, Retryable: true,
			Err: fmt.Errorf("the stream ended %d bytes early", r.left),
		}
	}
	return 0, err
}

func (r *resumingReader) Close() error {
	if r.body == nil {
		return nil
	}
	return r.body.Close()
}
