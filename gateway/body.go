package gateway

import (
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// firstRead is how many bytes of a body are read before more is taken for it than any request is.
const firstRead = 4 << 10

// plainBody refuses a body that is compressed: what a few bytes unfold to is nothing to find out before knowing who sends them, and
// programs are short.
func plainBody(w http.ResponseWriter, r *http.Request) error {
	for _, coding := range listItems(r.Header.Values("Content-Encoding")) {
		if coding != "" && !strings.EqualFold(coding, "identity") {
			w.Header().Set("Accept-Encoding", "identity")
			w.Header().Set("Connection", "close")
			return errEncoded
		}
	}
	return nil
}

// readBody reads the body of a request, of at most s.MaxBody bytes and within bodyTimeout.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if err := plainBody(w, r); err != nil {
		return nil, err
	}
	if r.ContentLength > s.MaxBody {
		return nil, &bodyTooLargeError{s.MaxBody}
	}
	control := infoOf(r.Context()).rec.control
	_ = control.SetReadDeadline(time.Now().Add(bodyTimeout)) // not supported: no connection that could stall
	body, err := s.readAll(infoOf(r.Context()), http.MaxBytesReader(w, r.Body, s.MaxBody))
	if err == nil {
		// At once, because the server goes on reading to notice that the client leaves.
		_ = control.SetReadDeadline(time.Time{})
		return body, nil
	}
	w.Header().Set("Connection", "close")
	return nil, bodyError(err, s.MaxBody)
}

// readAll reads a body to its end, in memory that is taken as it comes: what a client announces and does not send keeps nobody out.
func (s *Server) readAll(i *info, body io.Reader) ([]byte, error) {
	read := make([]byte, 0, firstRead)
	for {
		if len(read) == cap(read) {
			more := min(cap(read), int(s.MaxBody)+1-len(read)) // one byte, to meet the end
			if !s.hold(i, int64(more)*bodyCost) {
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

// bodyError says to the client why its body was not read to its end.
func bodyError(err error, limit int64) error {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.Is(err, errOverloaded):
		return err
	case errors.As(err, &tooLarge):
		return &bodyTooLargeError{limit}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return &proto.FieldError{Field: "body", Message: "body must arrive within " + bodyTimeout.String()}
	default:
		return &proto.FieldError{Field: "body", Message: "body ended before it was complete"}
	}
}
