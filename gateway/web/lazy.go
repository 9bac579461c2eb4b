package web

import (
	"mime"
	"net/http"
	"strings"
	"unicode"
)

// LazyWriter begins an answer at its first byte, so that an earlier error can still be answered.
type LazyWriter struct {
	w     http.ResponseWriter
	begin func(http.Header)
	begun bool
	head  bool // the request is HEAD
}

// NewLazyWriter returns the writer of the answer to a request. begin sets its headers. Writing the answer
// to a HEAD request ends with [ErrHeadOnly] once it has begun.
func NewLazyWriter(w http.ResponseWriter, r *Request, begin func(http.Header)) *LazyWriter {
	return &LazyWriter{w: w, begin: begin, head: r.Method == http.MethodHead}
}

// Write implements [io.Writer].
func (l *LazyWriter) Write(p []byte) (int, error) {
	if !l.begun {
		l.begun = true
		l.begin(l.w.Header())
	}
	if l.head {
		l.w.WriteHeader(http.StatusOK)
		return 0, ErrHeadOnly
	}
	return l.w.Write(p)
}

// Begin begins the answer if nothing was written yet.
func (l *LazyWriter) Begin() error {
	if l.begun {
		return nil
	}
	_, err := l.Write(nil)
	return err
}

// Attachment returns the Content-Disposition of a file to save. Its name may have any characters.
func Attachment(name string) string { return disposition("attachment", name) }

// disposition returns the Content-Disposition of a file. It replaces characters in its name that
// some browsers do not accept, and those that change the order in which a name is shown.
func disposition(kind, name string) string {
	name = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\\' || r == '"' || unicode.Is(unicode.Bidi_Control, r) {
			return '_'
		}
		return r
	}, name)
	return mime.FormatMediaType(kind, map[string]string{"filename": name})
}

// TarAnswer returns a writer that answers a request with a tar. Before the first write, the answer
// can still be an error.
func TarAnswer(w http.ResponseWriter, r *Request, name string) *LazyWriter {
	return NewLazyWriter(w, r, func(h http.Header) {
		h.Set("Content-Type", "application/x-tar")
		h.Set("Content-Disposition", Attachment(name+".tar"))
		h.Set("Cache-Control", "private, no-store")
	})
}
