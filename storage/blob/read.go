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

// maxResumes bounds how often one stream is reopened, each time after at least one byte of
// progress.
const maxResumes = 1000

// verifyingReader returns the last bytes of a blob only after the digest of all of it has been
// verified. A client that counts bytes, as HTTP clients do, cannot mistake a corrupt object for a
// complete one.
type verifyingReader struct {
	from io.Reader
	blob proto.Blob
	op   string
	left int64
	sum  hash.Hash
	err  error
}

func verify(from io.Reader, b proto.Blob, op string) *verifyingReader {
	return &verifyingReader{from: from, blob: b, op: op, left: b.Size, sum: sha256.New()}
}

func (v *verifyingReader) Read(p []byte) (int, error) {
	if v.err != nil {
		return 0, v.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	n := 0
	if v.left > 0 {
		var err error
		n, err = v.from.Read(p[:min(int64(len(p)), v.left)])
		v.sum.Write(p[:n])
		v.left -= int64(n)
		if v.left > 0 {
			if errors.Is(err, io.EOF) {
				err = v.corrupt(fmt.Errorf("it ends %d bytes before its size of %d", v.left, v.blob.Size))
			}
			v.err = err
			return n, err
		}
	}
	if digest := "sha256:" + hex.EncodeToString(v.sum.Sum(nil)); digest != v.blob.Digest {
		v.err = v.corrupt(fmt.Errorf("its digest is %s and should be %s", digest, v.blob.Digest))
		return 0, v.err
	}
	v.err = io.EOF
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (v *verifyingReader) corrupt(err error) error {
	e := &Error{Op: v.op, Key: v.blob.Key, Kind: proto.ErrCorrupt, Err: err}
	if v.op == "put" {
		e.Remedy = "nothing was stored; see what changed the content after its digest was taken"
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
		err = &Error{Op: "get", Key: r.key, Kind: ErrUnavailable, Retryable: true, Err: fmt.Errorf("the stream ended %d bytes early", r.left)}
	}
	return 0, err
}

func (r *resumingReader) Close() error {
	if r.body == nil {
		return nil
	}
	return r.body.Close()
}
