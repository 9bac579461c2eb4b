package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/bullpen-run/bullpen/guest/answer"
	"github.com/bullpen-run/bullpen/guest/channel"
	"github.com/bullpen-run/bullpen/guest/contexts"
	"github.com/bullpen-run/bullpen/guest/files"
	"github.com/bullpen-run/bullpen/guest/filesystempb"
	"github.com/bullpen-run/bullpen/guest/ports"
	"github.com/bullpen-run/bullpen/guest/process"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// Limits of requests.
const (
	maxMessage       = 4 << 20  // bytes of a message
	maxStreamMessage = 1 << 20  // of a stream of messages
	smallBody        = 64 << 10 // bytes of a body that do not count as large
	maxInFlight      = 8 << 20  // bytes of large bodies that are read at a time
	maxTransfers     = 64       // uploads and downloads at a time
)

// routes returns the handler of all requests.
func routes(table *process.Table, tree *files.Tree, all *contexts.Contexts, c config) http.Handler {
	options := []connect.HandlerOption{
		connect.WithConditionalHandlerOptions(func(spec connect.Spec) []connect.HandlerOption {
			if spec.StreamType == connect.StreamTypeClient {
				return []connect.HandlerOption{connect.WithReadMaxBytes(maxStreamMessage)}
			}
			return []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage)}
		}),
		connect.WithCompression("gzip", nil, nil), // takes more memory than it is worth
	}
	mux := http.NewServeMux()
	rpc := &rpcHandler{}
	path, handler := processpb.NewProcessHandler(process.Service{Table: table}, options...)
	mux.Handle(path, rpc.wrap(handler))
	path, handler = filesystempb.NewFilesystemHandler(files.Service{Tree: tree}, options...)
	mux.Handle(path, rpc.wrap(tree.Hold(handler)))
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
	})
	mux.Handle("/files", limitTransfers(tree))
	env := c.Env
	if env == nil {
		env = map[string]string{}
	}
	mux.HandleFunc("GET /envs", func(w http.ResponseWriter, _ *http.Request) { answer.JSON(w, http.StatusOK, env) })
	mux.Handle("GET /metrics", newMetrics(c))
	models := channel.New()
	mux.HandleFunc("POST /channel", models.Open)
	mux.HandleFunc("POST /channel/accept", models.Accept)
	cells := all.Handler()
	mux.Handle("/contexts", cells)
	mux.Handle("/contexts/", cells)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		answer.Error(w, http.StatusNotFound, "there is no route "+r.Method+" "+r.URL.Path)
	})
	return ports.New(mux, map[int]http.Handler{contexts.E2BPort: all.E2B()})
}

// limitTransfers refuses requests beyond maxTransfers.
func limitTransfers(next http.Handler) http.Handler {
	slots := make(chan struct{}, maxTransfers)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
			next.ServeHTTP(w, r)
		default:
			answer.Error(w, http.StatusTooManyRequests,
				fmt.Sprintf("the sandbox has %d uploads and downloads, the most it can have at a time", maxTransfers))
		}
	})
}

// rpcHandler limits the memory of the requests of remote procedure calls.
type rpcHandler struct{ inFlight atomic.Int64 }

func (h *rpcHandler) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !known(r.URL.Path) {
			answer.Error(w, http.StatusNotFound, "there is no route "+r.Method+" "+r.URL.Path)
			return
		}
		if r.Header.Get("Connect-Timeout-Ms") == "0" { // clients mean no timeout
			r.Header.Del("Connect-Timeout-Ms")
		}
		if r.URL.Path != processpb.ProcessStreamInputProcedure { // whose messages are short-lived
			body := &countedBody{ReadCloser: r.Body, inFlight: &h.inFlight}
			defer body.release()
			r.Body = body
		}
		next.ServeHTTP(w, r)
	})
}

// known reports whether a path is that of a procedure.
func known(path string) bool {
	service, method, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	var file protoreflect.FileDescriptor
	switch service {
	case processpb.ProcessName:
		file = processpb.File_process_proto
	case filesystempb.FilesystemName:
		file = filesystempb.File_filesystem_proto
	default:
		return false
	}
	return file.Services().Get(0).Methods().ByName(protoreflect.Name(method)) != nil
}

var errInFlight = fmt.Errorf("requests of more than %d bytes take more than %d bytes together", smallBody, maxInFlight)

// countedBody counts the bytes of a large body as long as its request lasts.
type countedBody struct {
	io.ReadCloser
	inFlight *atomic.Int64
	read     int64
	counted  int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.read += int64(n)
	if more := b.read - smallBody - b.counted; more > 0 {
		b.counted += more
		if b.inFlight.Add(more) > maxInFlight {
			return n, connect.NewError(connect.CodeResourceExhausted, errInFlight)
		}
	}
	return n, err
}

func (b *countedBody) release() { b.inFlight.Add(-b.counted) }
