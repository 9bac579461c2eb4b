package sandboxes

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxCellText is how much of each output an inline result keeps, in bytes.
	maxCellText = 1 << 20
	// maxCellLine is the size of an event, in bytes. Guests keep 6 MiB of a run.
	maxCellLine = 8 << 20
	// maxContextAnswer is the size of any other answer of a guest about contexts, in bytes.
	maxContextAnswer = 1 << 20
)

// Contexts are the contexts of a running sandbox. Their errors are for clients.
type Contexts struct {
	Service *Service
	Org, ID string // of the sandbox
}

// guestError is an error of a guest.
type guestError struct {
	Code    int    `json:"code"`
	Error   string `json:"error"`
	Message string `json:"message"`
}

// call sends a request to the guest. The caller closes the body of the answer, which is a success.
func (c *Contexts) call(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var sent io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode a request about contexts: %w", err)
		}
		sent = bytes.NewReader(encoded)
	}
	r, err := http.NewRequestWithContext(ctx, method, "http://guest/contexts"+path, sent)
	if err != nil {
		return nil, fmt.Errorf("request contexts: %w", err)
	}
	answer, err := (&Transport{Service: c.Service, Org: c.Org, ID: c.ID}).RoundTrip(r)
	if errors.Is(err, ErrNotReached) {
		return nil, api.Errorf(api.CodeConflict, "the sandbox is not running; look at it for the reason")
	}
	if err != nil || answer.StatusCode < http.StatusBadRequest {
		return answer, err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	var refused guestError
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxContextAnswer)).Decode(&refused); err != nil {
		return nil, fmt.Errorf("read an error about contexts, of status %d: %w", answer.StatusCode, err)
	}
	code := api.CodeInternal
	switch answer.StatusCode {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		code = api.CodeValidation
	case http.StatusNotFound:
		code = api.CodeNotFound
	case http.StatusGone:
		code = api.CodeContextLost
	case http.StatusTooManyRequests:
		code = api.CodeRateLimited
	case http.StatusServiceUnavailable:
		code = api.CodeServiceUnavailable
	}
	return nil, api.Errorf(code, "%s", refused.Message)
}

// read reads the answer to a request into a value.
func (c *Contexts) read(ctx context.Context, method, path string, body, into any) error {
	answer, err := c.call(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxContextAnswer)).Decode(into); err != nil {
		return fmt.Errorf("read an answer about contexts: %w", err)
	}
	return nil
}

// Create starts a context.
func (c *Contexts) Create(ctx context.Context, r *api.ContextRequest) (x api.Context, err error) {
	return x, c.read(ctx, http.MethodPost, "", r, &x)
}

// Default returns the context of a language that belongs to no client, and starts its interpreter at its first use.
func (c *Contexts) Default(ctx context.Context, language string) (x api.Context, err error) {
	return x, c.read(ctx, http.MethodPost, "", map[string]any{"language": language, "default": true}, &x)
}

// Interrupt interrupts the cell that runs in a context.
func (c *Contexts) Interrupt(ctx context.Context, id string) error {
	return c.read(ctx, http.MethodPost, "/"+id+"/interrupt", nil, nil)
}

// Restart starts the interpreter of a context again.
func (c *Contexts) Restart(ctx context.Context, id string) (x api.Context, err error) {
	return x, c.read(ctx, http.MethodPost, "/"+id+"/restart", nil, &x)
}

// Execute runs a cell and returns its result.
func (c *Contexts) Execute(ctx context.Context, id string, r *api.CellRequest) (*api.CellResult, error) {
	answer, err := c.call(ctx, http.MethodPost, "/"+id+"/execute", r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	result := &api.CellResult{Results: []api.Display{}}
	lines := newLines(answer.Body)
	for ended := false; ; {
		line, err := lines.next()
		switch {
		case err != nil && ended: // it is read to its end, so that the connection is used again
			return result, nil
		case err != nil:
			return nil, cut(err)
		}
		if ended, err = addEvent(result, line); err != nil {
			return nil, fmt.Errorf("read the events of a run: %w", err)
		}
	}
}

// cut returns the error for a stream that has ended before the run.
func cut(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return api.Errorf(api.CodeConflict, "the sandbox stopped while the cell was running; look at it for the reason")
}

// addEvent adds an event to a result. It reports whether that was the last one.
func addEvent(result *api.CellResult, line []byte) (ended bool, err error) {
	var e struct {
		Type string `json:"type"`
		Run  int64  `json:"run"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return false, err
	}
	switch e.Type {
	case "start":
		result.Run = e.Run
	case "stdout":
		result.Stdout, result.StdoutTruncated = extend(result.Stdout, e.Text, result.StdoutTruncated)
	case "stderr":
		result.Stderr, result.StderrTruncated = extend(result.Stderr, e.Text, result.StderrTruncated)
	case "gap":
		result.StdoutTruncated, result.StderrTruncated = true, true
	case "display":
		var d api.Display
		if err := json.Unmarshal(line, &d); err != nil {
			return false, err
		}
		result.Results = append(result.Results, d)
	case "error":
		result.Error = &api.CellError{}
		return false, json.Unmarshal(line, result.Error)
	case "end":
		return true, json.Unmarshal(line, result)
	}
	return false, nil
}

// extend appends a piece to a text that has a limit.
func extend(text, piece string, truncated bool) (extended string, cut bool) {
	if truncated {
		return text, true
	}
	if left := maxCellText - len(text); len(piece) > left {
		piece = piece[:left]
		for !utf8.ValidString(piece) && piece != "" {
			piece = piece[:len(piece)-1]
		}
		truncated = true
	}
	return text + piece, truncated
}

// lines reads the lines of an answer.
type lines struct{ from *bufio.Reader }

func newLines(from io.Reader) *lines { return &lines{bufio.NewReaderSize(from, 32<<10)} }

// next returns the next line, with its end.
func (l *lines) next() ([]byte, error) {
	var line []byte
	for {
		piece, err := l.from.ReadSlice('\n')
		line = append(line, piece...)
		switch {
		case len(line) > maxCellLine:
			return nil, errors.New("an event is too large")
		case err == nil:
			return line, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}

// contexts returns the contexts of the sandbox in a path.
func (s *Routes) contexts(r *web.Request) (*Contexts, error) {
	id, err := s.resource.ID(r)
	if err != nil {
		return nil, err
	}
	if _, err := s.Store.Find(r.Context(), r.Key.Org, id); err != nil {
		return nil, s.resource.Error(id, err)
	}
	return &Contexts{s.Service, r.Key.Org, id}, nil
}

// contextPath returns the path of the context in a request's path.
func contextPath(r *web.Request) (string, error) {
	id := chi.URLParam(r.Request, "context")
	for _, c := range id {
		if c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return "", api.Errorf(api.CodeNotFound, "there is no context of that id in this sandbox")
		}
	}
	return "/" + id, nil
}

// contextCall answers with what the guest answers to a request.
func contextCall[In, Out any](s *Routes, method, action string, status int) web.Handle {
	return func(w http.ResponseWriter, r *web.Request) error {
		path, body, err := "", any(nil), error(nil)
		if chi.URLParam(r.Request, "context") != "" {
			path, err = contextPath(r)
		} else if method == http.MethodPost {
			body, err = web.DecodeOptionalBody[In](s.Core, w, r)
		}
		if err != nil {
			return err
		}
		all, err := s.contexts(r)
		if err != nil {
			return err
		}
		r, release := r.WhileConnected()
		defer release()
		if status == http.StatusNoContent {
			if err := all.read(r.Context(), method, path+action, body, nil); err != nil {
				return err
			}
			w.WriteHeader(status)
			return nil
		}
		var out Out
		if err := all.read(r.Context(), method, path+action, body, &out); err != nil {
			return err
		}
		return web.WriteValue(w, status, out)
	}
}

func (s *Routes) executeCell(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeBody[api.CellRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	all, err := s.contexts(r)
	if err != nil {
		return err
	}
	path, err := contextPath(r)
	if err != nil {
		return err
	}
	kind := web.Preferred(r.Header, web.TypeJSON, web.TypeNDJSON, web.TypeSSE)
	r, release := r.WhileConnected()
	defer release()
	ctx, stop := s.UntilLeave(r.Context())
	defer stop()
	if kind != web.TypeJSON {
		return all.relay(ctx, w, r, kind, http.MethodPost, path+"/execute", request)
	}
	result, err := all.Execute(ctx, strings.TrimPrefix(path, "/"), request)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, result)
}

func (s *Routes) readRun(w http.ResponseWriter, r *web.Request) error {
	after := int64(0)
	for _, text := range []string{r.URL.Query().Get("after_seq"), r.Header.Get("Last-Event-ID")} {
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 || n > api.MaxWhole {
			return proto.FieldErrorf("after_seq", "must be the seq of an event of this run")
		}
		after = n
	}
	number, err := strconv.ParseInt(chi.URLParam(r.Request, "run"), 10, 64)
	if err != nil {
		return api.Errorf(api.CodeNotFound, "there is no run of that number")
	}
	all, err := s.contexts(r)
	if err != nil {
		return err
	}
	path, err := contextPath(r)
	if err != nil {
		return err
	}
	kind := web.Preferred(r.Header, web.TypeNDJSON, web.TypeSSE)
	r, release := r.WhileConnected()
	defer release()
	ctx, stop := s.UntilLeave(r.Context())
	defer stop()
	return all.relay(ctx, w, r, kind, http.MethodGet, fmt.Sprintf("%s/runs/%d?after=%d", path, number, after), nil)
}

// relay passes the events of a run on to a client. A stream that ends before the run has no event end.
func (c *Contexts) relay(
	ctx context.Context, w http.ResponseWriter, r *web.Request, kind, method, path string, body any,
) error {
	answer, err := c.call(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	type read struct {
		line []byte
		err  error
	}
	arrived := make(chan read)
	reading, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		lines := newLines(answer.Body)
		for {
			line, err := lines.next()
			select {
			case arrived <- read{line, err}:
			case <-reading.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	web.StreamHeader(w.Header(), kind)
	w.WriteHeader(http.StatusOK)
	if err := r.Rec.FlushError(); err != nil {
		return err
	}
	idle := time.NewTicker(web.Keepalive)
	defer idle.Stop()
	last := int64(0)
	for {
		var line []byte
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-idle.C:
			line = proto.AppendKeepaliveEvent(nil, last)
		case event := <-arrived:
			if errors.Is(event.err, io.EOF) {
				return nil
			}
			if event.err != nil {
				return fmt.Errorf("stream the events of a run: %w", event.err)
			}
			idle.Reset(web.Keepalive)
			line = event.line
			var numbered struct {
				Seq int64 `json:"seq"`
			}
			if err := json.Unmarshal(line, &numbered); err != nil {
				return fmt.Errorf("stream the events of a run: %w", err)
			}
			last = numbered.Seq
		}
		if kind == web.TypeSSE {
			line = fmt.Appendf(nil, "id: %d\ndata: %s\n", last, line)
		}
		if _, err := w.Write(line); err != nil {
			return err
		}
		if err := r.Rec.FlushError(); err != nil {
			return err
		}
	}
}
