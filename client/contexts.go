package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

func contextPath(sandbox, id string) string {
	return sandboxPath(sandbox) + "/contexts/" + url.PathEscape(id)
}

// CreateContext starts an interpreter in a running sandbox that keeps its state.
func (c *Client) CreateContext(ctx context.Context, sandbox string, r *api.ContextRequest) (*api.Context, error) {
	return get[api.Context](ctx, c, call{method: http.MethodPost, path: sandboxPath(sandbox) + "/contexts", body: r})
}

// Contexts returns the contexts of a running sandbox.
func (c *Client) Contexts(ctx context.Context, sandbox string) (*api.Contexts, error) {
	return read[api.Contexts](ctx, c, sandboxPath(sandbox)+"/contexts")
}

// Context returns a context of a running sandbox.
func (c *Client) Context(ctx context.Context, sandbox, id string) (*api.Context, error) {
	return read[api.Context](ctx, c, contextPath(sandbox, id))
}

// RestartContext starts the interpreter of a context again, without its variables.
func (c *Client) RestartContext(ctx context.Context, sandbox, id string) (*api.Context, error) {
	return get[api.Context](ctx, c, call{method: http.MethodPost, path: contextPath(sandbox, id) + "/restart"})
}

// InterruptContext interrupts the cell that runs in a context. It reports whether there was one.
func (c *Client) InterruptContext(ctx context.Context, sandbox, id string) (bool, error) {
	answer, err := get[api.ContextInterrupt](ctx, c,
		call{method: http.MethodPost, path: contextPath(sandbox, id) + "/interrupt", resend: true})
	return err == nil && answer.Interrupted, err
}

// DeleteContext ends a context.
func (c *Client) DeleteContext(ctx context.Context, sandbox, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: contextPath(sandbox, id)})
}

// RunCell runs a cell in a context and returns its result. It is not sent again when the connection
// breaks, since the cell would run twice.
func (c *Client) RunCell(ctx context.Context, sandbox, id string, r *api.CellRequest) (*api.CellResult, error) {
	return get[api.CellResult](ctx, c, call{method: http.MethodPost, path: contextPath(sandbox, id) + "/execute", body: r})
}

// CellEvent is an event of the run of a cell.
type CellEvent struct {
	Type string // start, stdout, stderr, display, error, end, or gap for events that are no longer kept
	Seq  int64  // its number
	Run  int64  // of start: the number of the run
	Text string // of stdout and stderr

	Display *api.Display    // of display
	Error   *api.CellError  // of error
	End     *api.CellResult // of end, without outputs, results and error
}

// StreamCell runs a cell in a context and returns its events, each once and in order, the end last. It
// reads on after a broken connection. An error is the last value. The cell runs on if the caller stops
// reading or ctx is done, unless r asks to interrupt it: see [Client.InterruptContext]. Each use of
// the returned iterator runs the cell.
func (c *Client) StreamCell(
	ctx context.Context, sandbox, id string, r *api.CellRequest,
) iter.Seq2[*CellEvent, error] {
	return func(yield func(*CellEvent, error) bool) {
		s := &cellStream{client: c, path: contextPath(sandbox, id), yield: yield}
		s.run(ctx, call{
			method: http.MethodPost, path: s.path + "/execute", body: r, header: map[string]string{"Accept": ndjson},
		})
	}
}

// FollowRun returns the events of a run with numbers above after, as StreamCell does.
func (c *Client) FollowRun(
	ctx context.Context, sandbox, id string, run, after int64,
) iter.Seq2[*CellEvent, error] {
	return func(yield func(*CellEvent, error) bool) {
		s := &cellStream{client: c, path: contextPath(sandbox, id), yield: yield, number: run, after: after}
		s.run(ctx, s.remaining())
	}
}

// cellStream is a sequence of connections that carry the events of one run.
type cellStream struct {
	client *Client
	path   string // of the context
	yield  func(*CellEvent, error) bool
	number int64 // of the run; 0 before its first event
	after  int64 // number of the last event that was returned
}

// remaining returns the request for the events after the last one.
func (s *cellStream) remaining() call {
	return call{
		method: http.MethodGet, resend: true, header: map[string]string{"Accept": ndjson},
		path: s.path + "/runs/" + strconv.FormatInt(s.number, 10) + "?after_seq=" + strconv.FormatInt(s.after, 10),
	}
}

// run reconnects until all events have arrived or the caller stops.
func (s *cellStream) run(ctx context.Context, next call) {
	retry := s.client.newRetry()
	for {
		last, began := s.after, time.Now()
		done, err := s.client.eachLine(ctx, next, s.handle)
		if done {
			return
		}
		if err == nil && (s.number == 0 || s.client.cfg.NoRetry) {
			err = fmt.Errorf("%w: %w", errBrokenOff, ErrUnknownOutcome)
		}
		if err != nil {
			s.yield(nil, err)
			return
		}
		again, err := retry.wait(ctx, s.after > last, began, errBrokenOff)
		if err == nil && !again {
			err = errBreaks
		}
		if err != nil {
			s.yield(nil, err)
			return
		}
		next = s.remaining()
		next.redial = true
	}
}

// handle returns the event in line to the caller, unless it came before. It reports whether it is the last.
func (s *cellStream) handle(line []byte) (done bool, err error) {
	e, err := decodeCellEvent(line)
	if err != nil || e.Seq <= s.after { // a keepalive has the number of the last event
		return false, err
	}
	s.after = e.Seq
	if e.Type == "start" {
		s.number = e.Run
	}
	return !s.yield(e, nil) || e.Type == "end", nil
}

// decodeCellEvent decodes the line of an event.
func decodeCellEvent(line []byte) (*CellEvent, error) {
	var e struct {
		Type string `json:"type"`
		Seq  int64  `json:"seq"`
		Run  int64  `json:"run"`
		Text string `json:"text"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return nil, fmt.Errorf("decode an event of a run: %w", err)
	}
	event := &CellEvent{Type: e.Type, Seq: e.Seq, Run: e.Run, Text: e.Text}
	var into any
	switch e.Type {
	case "display":
		event.Display = &api.Display{}
		into = event.Display
	case "error":
		event.Error = &api.CellError{}
		into = event.Error
	case "end":
		event.End = &api.CellResult{}
		into = event.End
	default:
		return event, nil
	}
	if err := json.Unmarshal(line, into); err != nil {
		return nil, fmt.Errorf("decode an event of a run: %w", err)
	}
	return event, nil
}
