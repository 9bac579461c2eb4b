package web

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// statusClientGone is logged for requests whose client disconnected before the answer. It is never
// sent.
const statusClientGone = 499

const maxRequestID = 128

// Info collects the data of a request for its answer and its log line.
type Info struct {
	RequestID string
	Key       proto.Key
	Session   *proto.Session // nil for a request with an API key
	// ModelsOnly means that the request comes from a sandbox, see [FromSandbox].
	ModelsOnly bool
	Plan       proto.Entitlement
	Trace      proto.TraceID
	Err        error
	Reported   bool // err is part of an answer of status 200
	Relayed    bool // the answer is that of a program in a sandbox, unless Err is set
	Rec        *recorder
	reserved   int64 // bytes of the budget
	// read is the part of the budget reserved for data read from the store, in bytes.
	read atomic.Int64
	act  *act // nil unless the audit log records the request
	// Calls is whether the request has submitted an execution, or an agent has changed a file for
	// it.
	Calls atomic.Bool
	// WriteError, if not nil, writes an error's answer instead of [Core.writeError].
	WriteError func(w http.ResponseWriter, e *api.Error)
}

// Request is a request with what this server knows of it.
type Request struct {
	*http.Request
	*Info
}

// RequestOf returns the request that observe has prepared.
func RequestOf(r *http.Request) *Request { return &Request{r, infoOf(r.Context())} }

// WhileConnected returns r with a context that is also done when the client closes its side of the
// connection.
func (r *Request) WhileConnected() (connected *Request, release func()) {
	request, release := r.Rec.client.whileConnected(r.Request)
	return &Request{request, r.Info}, release
}

// LongBody returns a body without a total time limit that must not stall. limit is its largest size
// in bytes, for messages.
func (r *Request) LongBody(from io.Reader, limit int64) *LongBody {
	return &LongBody{from: from, control: r.Rec.control, limit: limit}
}

// Status returns the status of the answer, 0 before it.
func (i *Info) Status() int { return i.Rec.status }

// AnswerHeader returns the headers of the answer. Those of work without a client are lost.
func (i *Info) AnswerHeader() http.Header {
	if i.Rec == nil {
		return http.Header{}
	}
	return i.Rec.Header()
}

// WithContext returns r with another context.
func (r *Request) WithContext(ctx context.Context) *Request {
	return &Request{r.Request.WithContext(ctx), r.Info}
}

type infoKey struct{}

// infoOf returns the info that observe adds to the context of every request, for middleware.
func infoOf(ctx context.Context) *Info {
	i, ok := ctx.Value(infoKey{}).(*Info)
	if !ok {
		panic("gateway: a handler was called without the middleware")
	}
	return i
}

// recorder records the status and the size of an answer, and sets a deadline for each write.
type recorder struct {
	http.ResponseWriter
	control *http.ResponseController
	client  *presence
	status  int
	bytes   int64
}

// Unwrap is for http.ResponseController.
func (rec *recorder) Unwrap() http.ResponseWriter { return rec.ResponseWriter }

func (rec *recorder) WriteHeader(status int) {
	if rec.status == 0 && status >= http.StatusOK {
		rec.status = status
	}
	rec.extend()
	rec.ResponseWriter.WriteHeader(status)
}

func (rec *recorder) Write(p []byte) (written int, err error) {
	if rec.status == 0 {
		rec.status = http.StatusOK
	}
	for len(p) > 0 && err == nil {
		rec.extend()
		var n int
		n, err = rec.ResponseWriter.Write(p[:min(len(p), writePiece)])
		p = p[n:]
		written += n
	}
	rec.bytes += int64(written)
	return written, err
}

// FlushError is for http.ResponseController.
func (rec *recorder) FlushError() error {
	rec.extend()
	return rec.control.Flush()
}

// extend prepares a write and sets its deadline, if the connection supports deadlines. Only those
// that cannot stall do not.
func (rec *recorder) extend() {
	rec.client.begin()
	_ = rec.control.SetWriteDeadline(time.Now().Add(WriteTimeout))
}

// Observe wraps every request: it assigns the id, writes the log line, and recovers from panics.
func (c *Core) Observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		r, client := watchClient(r)
		defer client.end()
		rec := &recorder{ResponseWriter: w, control: http.NewResponseController(w), client: client}
		_ = rec.control.SetWriteDeadline(time.Time{}) // of the previous request on the connection
		i := &Info{RequestID: requestID(r), Rec: rec}
		w.Header().Set("X-Request-Id", i.RequestID)
		c.secure(w.Header(), r)
		if ambiguousEnd(r) {
			w.Header().Set("Connection", "close")
		}
		r = r.WithContext(context.WithValue(r.Context(), infoKey{}, i))
		defer func() {
			failure := recover()
			switch failure {
			case nil:
			case http.ErrAbortHandler:
				if i.Rec.status == 0 {
					i.Rec.status = statusClientGone
				}
			default:
				i.Err = fmt.Errorf("panic: %v\n%s", failure, debug.Stack())
				if rec.status == 0 {
					panicked := i.Err
					c.writeError(rec, r, panicked)
					failure = nil
				}
			}
			c.logRequest(r, i, time.Since(start))
			if failure != nil {
				panic(http.ErrAbortHandler)
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

// secure sets headers that restrict browsers to displaying an answer. Handlers of pages replace
// some. No referrer is sent, since the address may be a signed URL.
func (c *Core) secure(h http.Header, r *http.Request) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", ContentPolicy)
	h.Set("Referrer-Policy", "no-referrer")
	if r.TLS != nil || c.proxiedTLS(r) {
		h.Set("Strict-Transport-Security", "max-age=31536000")
	}
}

// ambiguousEnd reports whether a proxy in front may see another end of the request than this
// server, so that the rest of the connection could be a smuggled request. Such a connection must
// not be kept alive (RFC 9112, 6.1). net/http removes the Content-Length of a chunked request, so
// any chunked request may have had one; in HTTP/1.0 it removes Transfer-Encoding.
func ambiguousEnd(r *http.Request) bool {
	return r.ProtoMajor == 1 && (len(r.TransferEncoding) > 0 || r.ProtoMinor == 0)
}

func (c *Core) logRequest(r *http.Request, i *Info, took time.Duration) {
	status := i.Rec.status
	if status == 0 {
		status = http.StatusOK
	}
	route := chi.RouteContext(r.Context()).RoutePattern()
	if c.Done != nil {
		c.Done(route, r.Method, status, took)
	}
	level := slog.LevelInfo
	switch {
	case status == http.StatusInternalServerError && (!i.Relayed || i.Err != nil):
		level = slog.LevelError
	case i.Reported && api.NewError(i.Err).Code == api.CodeInternal:
		level = slog.LevelError
	case i.Err != nil && !i.Reported && status == http.StatusOK && r.Context().Err() == nil:
		level = slog.LevelWarn // broken off
	case route == "/healthz" || route == "/readyz" || route == "/metrics":
		level = slog.LevelDebug
	}
	attrs := []slog.Attr{
		slog.String("method", r.Method),
		slog.String("route", route),
		slog.Int("status", status),
		slog.Float64("duration_ms", float64(took.Microseconds())/1000),
		slog.Int64("bytes", i.Rec.bytes),
		slog.String("request_id", i.RequestID),
	}
	if i.Key.ID != "" {
		attrs = append(attrs, slog.String("org", i.Key.Org), slog.String("key", i.Key.ID))
	}
	if i.Session != nil {
		attrs = append(attrs, slog.String("session", i.Session.ID))
	}
	if i.Trace != "" {
		attrs = append(attrs, slog.String("trace_id", string(i.Trace)))
	}
	if i.Err != nil {
		attrs = append(attrs, slog.String("error", i.Err.Error()))
	}
	c.Log.LogAttrs(r.Context(), level, "request", attrs...)
}

// requestID returns the client's id if it is valid in headers and logs, otherwise a new one.
func requestID(r *http.Request) string {
	if id := r.Header.Get("X-Request-Id"); id != "" && len(id) <= maxRequestID && printable(id) {
		return id
	}
	return "req_" + rand.Text()
}

// printable reports whether s consists of printable ASCII characters.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
