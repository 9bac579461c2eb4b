package live

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	maxIdleConns    = 4
	idleConnTimeout = 90 * time.Second
	maxHeader       = 64 << 10 // bytes of the header of an answer
	// maxOpen is how many requests to a sandbox may be open. Each has a connection to the gateway
	// and one to the guest, of which all sandboxes of the worker share the most that there can be.
	maxOpen = 512
)

// Handler serves gateways. A request names its sandbox in the header [proto.HeaderSandbox] and has
// the sandbox's ticket in [proto.HeaderTicket]. The guest answers it, without these headers. With
// [proto.HeaderUntilStop] the worker aborts the response when the sandbox begins to stop. The
// worker itself serves the paths [proto.ExpiryPath] and [proto.SavePath].
func (s *Sandboxes) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := s.get(r.Header.Get(proto.HeaderSandbox))
		ticket := sha256.Sum256([]byte(r.Header.Get(proto.HeaderTicket)))
		if x == nil || subtle.ConstantTimeCompare(ticket[:], x.job.TicketHash[:]) == 0 {
			refuse(w)
			return
		}
		switch r.URL.Path {
		case proto.ExpiryPath:
			x.serveExpiry(w, r)
			return
		case proto.SavePath:
			x.serveSave(w, r)
			return
		}
		var abort context.CancelCauseFunc
		if r.Header.Get(proto.HeaderUntilStop) != "" {
			var ctx context.Context
			ctx, abort = context.WithCancelCause(r.Context())
			defer abort(nil)
			r = r.WithContext(ctx)
		}
		done, ok := x.admit(w, r, abort)
		if !ok {
			return
		}
		defer done()
		// A guest answers before the request has ended. Without this, the server would then close
		// the body that the proxy still reads, and the proxy would cut the answer off.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		x.proxy.ServeHTTP(w, r)
	})
}

// admit is beginRequest, and answers a request that is refused.
func (x *Sandbox) admit(w http.ResponseWriter, r *http.Request, abort context.CancelCauseFunc) (done func(), ok bool) {
	done, err := x.beginRequest(r, abort)
	switch {
	case errors.Is(err, errStopped):
		w.WriteHeader(proto.StatusNoSandbox)
	case err != nil:
		refuseMore(w)
	}
	return done, err == nil
}

// refuse answers a request that no gateway has sent, or that comes too late.
func refuse(w http.ResponseWriter) {
	closeConnection(w)
	w.WriteHeader(proto.StatusNoSandbox)
}

// refuseMore answers a request beyond maxOpen, in the form of the guest's errors.
func refuseMore(w http.ResponseWriter) {
	closeConnection(w)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusTooManyRequests)
	_, _ = fmt.Fprintf(w, `{"code":429,"message":"too many requests to this sandbox are open (%d)"}`+"\n", maxOpen)
}

// closeConnection has the server close the connection after the answer, without reading the rest of
// the request. Whoever reaches the port could otherwise keep connections open by bodies that never
// end.
func closeConnection(w http.ResponseWriter) {
	w.Header().Set("Connection", "close")
	_ = http.NewResponseController(w).SetReadDeadline(time.Now())
}

// serveExpiry sets when the sandbox expires.
func (x *Sandbox) serveExpiry(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64))
	var at time.Time
	if err == nil {
		at, err = time.Parse(time.RFC3339Nano, string(text))
	}
	switch {
	case r.Method != http.MethodPut || err != nil:
		w.WriteHeader(http.StatusBadRequest)
	case x.Why() != NotStopped:
		w.WriteHeader(proto.StatusNoSandbox)
	default:
		x.extend(at)
		w.WriteHeader(http.StatusNoContent)
	}
}

// serveSave saves the home of the sandbox.
func (x *Sandbox) serveSave(w http.ResponseWriter, r *http.Request) {
	ctx, abort := context.WithCancelCause(r.Context())
	defer abort(nil)
	done, ok := x.admit(w, r, abort)
	if !ok {
		return
	}
	defer done()
	save := x.saver()
	if r.Method != http.MethodPost || save == nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	saved := save(ctx)
	if saved.Refused != "" && ctx.Err() != nil { // by the stop, which saves the home too
		w.WriteHeader(proto.StatusNoSandbox)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(saved)
}

// newProxy returns the handler that passes requests on to the guest.
func newProxy(x *Sandbox) http.Handler {
	return &httputil.ReverseProxy{
		Transport: x.transport, FlushInterval: -1, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", "guest"
			r.Out.Host = r.In.Host
			for _, name := range []string{proto.HeaderSandbox, proto.HeaderTicket, proto.HeaderUntilStop} {
				r.Out.Header.Del(name)
			}
			for name, values := range r.In.Header {
				if strings.HasPrefix(name, "X-Forwarded-") || name == "Forwarded" {
					r.Out.Header[name] = values
				}
			}
		},
		ModifyResponse: func(r *http.Response) error {
			if r.StatusCode == proto.StatusNoSandbox { // only the worker says so
				r.StatusCode = http.StatusBadGateway
			}
			if r.StatusCode != http.StatusSwitchingProtocols { // its body must remain the connection
				r.Body = &abortableBody{r.Body, r.Request.Context()}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			gone := errors.Is(err, context.Canceled) || r.Context().Err() != nil
			if gone && !errors.Is(context.Cause(r.Context()), errStopped) {
				panic(http.ErrAbortHandler)
			}
			w.WriteHeader(proto.StatusNoSandbox)
		},
	}
}

// abortableBody is the body of a response. Reads fail once ctx is done, even if more data has
// arrived.
type abortableBody struct {
	io.ReadCloser
	ctx context.Context
}

func (b *abortableBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.ctx.Err() != nil {
		return 0, context.Cause(b.ctx)
	}
	return n, err
}
