package gateway

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

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
