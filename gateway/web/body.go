package web

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// firstRead is the size of the first buffer for a body, in bytes. It is covered by requestCost.
const firstRead = 4 << 10

// RequireIdentity rejects a compressed body: its real size would be unknown until it is unpacked.
func RequireIdentity(w http.ResponseWriter, r *Request) error {
	for _, coding := range ListItems(r.Header.Values("Content-Encoding")) {
		if coding != "" && !strings.EqualFold(coding, "identity") {
			w.Header().Set("Accept-Encoding", "identity")
			w.Header().Set("Connection", "close")
			return api.Errorf(api.CodeUnsupportedMedia, "a body with a Content-Encoding is not read; send it as it is")
		}
	}
	return nil
}

// CloseOnError returns a handler that closes the connection if handle fails, because then the rest
// of the request's body is not read.
func CloseOnError(handle Handle) Handle {
	return func(w http.ResponseWriter, r *Request) error {
		err := handle(w, r)
		if err != nil {
			w.Header().Set("Connection", "close")
		}
		return err
	}
}

// maxWindow bounds the memory of a zstd decoder, in bytes. It suffices for every level of zstd
// without --ultra and --long.
const maxWindow = 8 << 20

// A body may be decompressed to maxExpansion times its size, which is gzip's maximum, plus
// freeExpansion bytes. zstd expands four bytes to 128 KiB.
const (
	maxExpansion  = 1032
	FreeExpansion = 16 << 20
)

// Decompressed returns the body of a request without its Content-Encoding. end must be called when
// it is no longer read.
func Decompressed(w http.ResponseWriter, r *Request, body io.Reader) (plain io.Reader, end func(), err error) {
	switch coding := strings.ToLower(strings.Join(ListItems(r.Header.Values("Content-Encoding")), ",")); coding {
	case "", "identity":
		return body, func() {}, nil
	case "gzip":
		open := func(from io.Reader) (io.Reader, error) { return gzip.NewReader(from) }
		return &decoded{body: body, open: open}, func() {}, nil
	case "zstd":
		z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, nil, fmt.Errorf("decompress the body: %w", err)
		}
		return &decoded{body: body, open: func(from io.Reader) (io.Reader, error) { return z, z.Reset(from) }}, z.Close, nil
	default:
		w.Header().Set("Accept-Encoding", "gzip, zstd")
		return nil, nil, api.Errorf(api.CodeUnsupportedMedia, "the Content-Encoding of this body must be gzip or zstd, "+
			"or absent")
	}
}

// decoded is a compressed body. Its errors are those of the body, or tell the client that it is
// malformed.
type decoded struct {
	body  io.Reader
	open  func(from io.Reader) (io.Reader, error)
	plain io.Reader // nil before the first byte is read
	err   error     // of body, but io.EOF
	// in and out are the body's bytes before and after decompression.
	in, out int64
}

// Read implements [io.Reader].
func (d *decoded) Read(p []byte) (n int, err error) {
	if d.plain == nil {
		plain, err := d.open(readerFunc(d.readBody))
		if err != nil {
			return 0, d.wrap(NoEOF(err))
		}
		d.plain = plain
	}
	n, err = d.plain.Read(p)
	if d.out += int64(n); d.out > d.in*maxExpansion+FreeExpansion {
		return 0, proto.FieldErrorf("body", "must not be decompressed to more than %d times its size; send it with "+
			"gzip, or without a Content-Encoding", maxExpansion)
	}
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
	d.in += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		d.err = err
	}
	return n, err
}

type readerFunc func([]byte) (int, error)

// Read implements [io.Reader].
func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// DecodeBody reads and decodes the body of a request.
func DecodeBody[T any](c *Core, w http.ResponseWriter, r *Request) (request *T, err error) {
	err = c.WithBody(w, r, func(body []byte) error {
		request, err = api.Decode[T](body)
		return err
	})
	return request, err
}

// WithBody reads and decodes the body of a request; a large one waits for its organisation's turn.
func (c *Core) WithBody(w http.ResponseWriter, r *Request, decode func(body []byte) error) error {
	body, err := c.ReadBody(w, r)
	if err != nil {
		return err
	}
	end, err := c.BeginTurn(r, body)
	if err != nil {
		return err
	}
	defer end()
	return decode(body)
}

// BeginTurn waits for the organisation's turn if body is large. end ends the turn, and may be
// called more than once.
func (c *Core) BeginTurn(r *Request, body []byte) (end func(), err error) {
	if len(body) <= FreeBody {
		return func() {}, nil
	}
	if err := c.Turns.Begin(r.Context(), r.Key.Org); err != nil {
		return nil, err
	}
	return sync.OnceFunc(c.Turns.End), nil
}

// DecodeOptionalBody is decodeBody for requests that may have no body.
func DecodeOptionalBody[T any](c *Core, w http.ResponseWriter, r *Request) (request *T, err error) {
	err = c.WithBody(w, r, func(body []byte) error {
		if len(bytes.TrimSpace(body)) == 0 {
			body = []byte("{}")
		}
		request, err = api.Decode[T](body)
		return err
	})
	return request, err
}

// ReadBody reads the body of a request without a byte order mark, at most s.MaxBody bytes, within bodyTimeout.
func (c *Core) ReadBody(w http.ResponseWriter, r *Request) ([]byte, error) {
	if err := RequireIdentity(w, r); err != nil {
		return nil, err
	}
	if r.ContentLength > c.MaxBody {
		return nil, BodyTooLarge(c.MaxBody)
	}
	control := r.Rec.control
	_ = control.SetReadDeadline(time.Now().Add(BodyTimeout)) // unsupported by connections that cannot stall
	body, err := c.readAll(r.Info, http.MaxBytesReader(w, r.Body, c.MaxBody))
	if err == nil {
		// Now, because the server keeps reading to notice that the client leaves.
		_ = control.SetReadDeadline(time.Time{})
		return api.TrimMark(body), nil
	}
	w.Header().Set("Connection", "close")
	return nil, bodyError(err, c.MaxBody)
}

// readAll reads a body to its end. It reserves memory as data arrives, so that merely announcing a
// length blocks no other request.
func (c *Core) readAll(i *Info, body io.Reader) ([]byte, error) {
	read := make([]byte, 0, firstRead)
	for {
		if len(read) == cap(read) {
			more := min(cap(read), int(c.MaxBody)+1-len(read)) // one byte more, to find the end
			if !c.Reserve(i, int64(more)*bodyCost) {
				return nil, ErrOverloaded
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
		return BodyTooLarge(limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return api.Errorf(api.CodeRequestTimeout, "body did not arrive within %s", BodyTimeout)
	default:
		return proto.FieldErrorf("body", "ended before it was complete")
	}
}

// LongBody is a body without a total time limit that must not stall for bodyTimeout.
type LongBody struct {
	from    io.Reader
	control *http.ResponseController
	limit   int64 // the largest size in bytes, for messages
}

func (b *LongBody) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(time.Now().Add(BodyTimeout)) // unsupported by connections that cannot stall
	n, err := b.from.Read(p)
	switch {
	case errors.Is(err, io.EOF): // the rest of the request may take its time, and the server goes on reading
		b.ClearDeadline()
		return n, io.EOF
	case err != nil:
		err = bodyError(err, b.limit)
	}
	return n, err
}

// ClearDeadline lets the connection wait again. The server keeps reading to notice that the client
// leaves.
func (b *LongBody) ClearDeadline() { _ = b.control.SetReadDeadline(time.Time{}) }

// NoEOF turns an unexpected io.EOF into io.ErrUnexpectedEOF.
func NoEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
