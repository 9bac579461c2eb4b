package gateway

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// firstRead is the size of the first buffer for a body, in bytes. It is covered by requestCost.
const firstRead = 4 << 10

// requireIdentity rejects a compressed body: its real size would be unknown until it is unpacked.
func requireIdentity(w http.ResponseWriter, r *http.Request) error {
	for _, coding := range listItems(r.Header.Values("Content-Encoding")) {
		if coding != "" && !strings.EqualFold(coding, "identity") {
			w.Header().Set("Accept-Encoding", "identity")
			w.Header().Set("Connection", "close")
			return api.Errorf(api.CodeUnsupportedMedia, "a body with a Content-Encoding is not read; send it as it is")
		}
	}
	return nil
}

// maxWindow bounds the memory of a zstd decoder, in bytes. It suffices for every level of zstd
// without --ultra and --long.
const maxWindow = 8 << 20

// decompressed returns the body of a request without its Content-Encoding. end must be called when
// it is not read any more.
func decompressed(w http.ResponseWriter, r *http.Request, body io.Reader) (plain io.Reader, end func(), err error) {
	switch coding := strings.ToLower(strings.Join(listItems(r.Header.Values("Content-Encoding")), ",")); coding {
	case "", "identity":
		return body, func() {}, nil
	case "gzip":
		return &decoded{body: body, open: func(from io.Reader) (io.Reader, error) { return gzip.NewReader(from) }}, func() {}, nil
	case "zstd":
		z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, nil, fmt.Errorf("decompress the body: %w", err)
		}
		return &decoded{body: body, open: func(from io.Reader) (io.Reader, error) { return z, z.Reset(from) }}, z.Close, nil
	default:
		w.Header().Set("Accept-Encoding", "gzip, zstd")
		return nil, nil, api.Errorf(api.CodeUnsupportedMedia, "the Content-Encoding of this body must be gzip or zstd, or absent")
	}
}

// decoded is a compressed body. Its errors are those of the body, or tell the client that it is
// malformed.
type decoded struct {
	body  io.Reader
	open  func(from io.Reader) (io.Reader, error)
	plain io.Reader // nil before the first byte is read
	err   error     // of body, but io.EOF
}

// Read implements [io.Reader].
func (d *decoded) Read(p []byte) (n int, err error) {
	if d.plain == nil {
		plain, err := d.open(readerFunc(d.readBody))
		if err != nil {
			return 0, d.wrap(noEOF(err))
		}
		d.plain = plain
	}
	n, err = d.plain.Read(p)
	return n, d.wrap(err)
}

// wrap returns the error for the client.
func (d *decoded) wrap(err error) error {
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return err
	case d.err != nil:
		return d.err
	default:
		return proto.FieldErrorf("body", "cannot be decompressed: %v", err)
	}
}

func (d *decoded) readBody(p []byte) (int, error) {
	n, err := d.body.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		d.err = err
	}
	return n, err
}

type readerFunc func([]byte) (int, error)

// Read implements [io.Reader].
func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// decodeBody reads and decodes the body of a request.
func decodeBody[T any](s *Server, w http.ResponseWriter, r *http.Request) (*T, error) {
	body, err := s.readBody(w, r)
	if err != nil {
		return nil, err
	}
	return api.Decode[T](body)
}

// decodeOptionalBody is decodeBody for requests that may have no body.
func decodeOptionalBody[T any](s *Server, w http.ResponseWriter, r *http.Request) (*T, error) {
	body, err := s.readBody(w, r)
	if err != nil {
		return nil, err
	}
	if len(bytes.TrimSpace(body)) == 0 {
		body = []byte("{}")
	}
	return api.Decode[T](body)
}

// readBody reads the body of a request, at most s.MaxBody bytes, within bodyTimeout.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if err := requireIdentity(w, r); err != nil {
		return nil, err
	}
	if r.ContentLength > s.MaxBody {
		return nil, bodyTooLarge(s.MaxBody)
	}
	control := infoOf(r.Context()).rec.control
	_ = control.SetReadDeadline(time.Now().Add(bodyTimeout)) // unsupported by connections that cannot stall
	body, err := s.readAll(infoOf(r.Context()), http.MaxBytesReader(w, r.Body, s.MaxBody))
	if err == nil {
		// Now, because the server goes on reading to notice that the client leaves.
		_ = control.SetReadDeadline(time.Time{})
		return body, nil
	}
	w.Header().Set("Connection", "close")
	return nil, bodyError(err, s.MaxBody)
}

// readAll reads a body to its end. Memory is reserved as data arrives, so that an announced length
// alone keeps nobody out.
func (s *Server) readAll(i *info, body io.Reader) ([]byte, error) {
	read := make([]byte, 0, firstRead)
	for {
		if len(read) == cap(read) {
			more := min(cap(read), int(s.MaxBody)+1-len(read)) // one byte more, to find the end
			if !s.reserve(i, int64(more)*bodyCost) {
				return nil, errOverloaded
			}
			read = append(make([]byte, 0, len(read)+more), read...)
		}
		n, err := body.Read(read[len(read):cap(read)])
		read = read[:len(read)+n]
		switch {
		case errors.Is(err, io.EOF):
			return read, nil
		case err != nil:
			return nil, err
		}
	}
}

// bodyError returns the error for a client whose body was not read to its end.
func bodyError(err error, limit int64) error {
	var tooLarge *http.MaxBytesError
	_, refused := errors.AsType[*api.Error](err)
	switch {
	case refused:
		return err
	case errors.As(err, &tooLarge):
		return bodyTooLarge(limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return api.Errorf(api.CodeRequestTimeout, "body did not arrive within %s", bodyTimeout)
	default:
		return proto.FieldErrorf("body", "ended before it was complete")
	}
}

// longBody is a body that may take any time in total, but must not stall for bodyTimeout.
type longBody struct {
	from    io.Reader
	control *http.ResponseController
	limit   int64 // the largest size in bytes, for messages
}

func (b *longBody) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(time.Now().Add(bodyTimeout)) // unsupported by connections that cannot stall
	n, err := b.from.Read(p)
	switch {
	case errors.Is(err, io.EOF): // the rest of the request may take its time, and the server goes on reading
		b.clearDeadline()
		return n, io.EOF
	case err != nil:
		err = bodyError(err, b.limit)
	}
	return n, err
}

func (b *longBody) clearDeadline() { _ = b.control.SetReadDeadline(time.Time{}) }
