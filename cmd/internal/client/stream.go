package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
)

// silence is the longest pause of a stream before it counts as broken. The server sends a keepalive
// every 15 s.
const silence = time.Minute

// Event is one event of an execution. Its type decides which fields are set.
type Event struct {
	Type      proto.EventType `json:"type"`
	Seq       int64           `json:"seq"`
	TraceID   proto.TraceID   `json:"trace_id"`
	Status    proto.Status    `json:"status"`
	Stream    proto.Stream    `json:"stream"`
	Data      string          `json:"data"`
	Result    *proto.Result   `json:"result"`
	Truncated bool            `json:"output_truncated"`
	// Line is the event as it came, with its newline.
	Line []byte `json:"-"`
}

// Stream runs a program and calls sink with its events, each once and in order, without keepalives,
// the result last. It resumes after a broken connection. It returns after the result, or with the
// first error of sink.
func (c *Client) Stream(ctx context.Context, req Request, sink func(*Event) error) error {
	s := &stream{client: c, sink: sink}
	return s.run(ctx, call{
		method: http.MethodPost, path: executePath, body: req, resend: true,
		header: map[string]string{"Accept": ndjson, "Idempotency-Key": newIdempotencyKey()},
	})
}

// Follow calls sink with the events of an execution with numbers above after, as Stream does.
func (c *Client) Follow(ctx context.Context, id proto.TraceID, after int64, sink func(*Event) error) error {
	s := &stream{client: c, sink: sink, id: id, after: after}
	return s.run(ctx, s.resumption(false))
}

// Output calls sink with the present events of an execution with numbers above after, and does not
// wait for more.
func (c *Client) Output(ctx context.Context, id proto.TraceID, after int64, sink func(*Event) error) error {
	s := &stream{client: c, sink: sink, id: id, after: after, snapshot: true}
	return s.run(ctx, s.resumption(false))
}

// LostError is returned if the server became unreachable while an execution was followed. The
// execution may go on.
type LostError struct {
	ID    proto.TraceID
	After int64 // number of the last event that sink got
	Err   error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("lost the server while following %s: %v", e.ID, e.Err)
}

// Unwrap returns the cause.
func (e *LostError) Unwrap() error { return e.Err }

var errBrokenOff = errors.New("the stream broke off")

// stream is a sequence of connections that carry the events of one execution.
type stream struct {
	snapshot bool // ends with the present last event
	client   *Client
	sink     func(*Event) error
	id       proto.TraceID
	after    int64 // number of the last event that sink got
}

// run reconnects until all events have come.
func (s *stream) run(ctx context.Context, next call) error {
	wait := s.client.newBackOff()
	for {
		last, began := s.after, time.Now()
		done, err := s.connect(ctx, next)
		if done || err != nil {
			return err
		}
		if s.id == "" {
			return errors.New("the stream broke off before it named its execution: whether the program ran is not known")
		}
		if s.after > last || time.Since(began) > longestPause {
			wait.Reset() // the connection worked; Patience is for connections that do not
		}
		pause := wait.NextBackOff()
		if pause == backoff.Stop {
			return &LostError{s.id, s.after, errors.New("its streams break off again and again")}
		}
		s.client.retrying(&LostError{s.id, s.after, errBrokenOff})
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
		next = s.resumption(true)
	}
}

func (s *stream) resumption(redial bool) call {
	path := executionPath(s.id) + "/output?after_seq=" + strconv.FormatInt(s.after, 10)
	if s.snapshot {
		path += "&follow=false"
	}
	return call{
		method: http.MethodGet, path: path,
		header: map[string]string{"Accept": ndjson}, resend: true, redial: redial,
	}
}

// connect reads events from one connection. It reports whether all events have come; a broken
// connection is no error.
func (s *stream) connect(ctx context.Context, next call) (done bool, err error) {
	lineCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp, err := s.client.do(lineCtx, next)
	switch {
	case err == nil:
	case next.redial && ctx.Err() == nil:
		return false, &LostError{s.id, s.after, err}
	default:
		return false, err
	}
	defer func() { _ = resp.Body.Close() }() // the rest is not needed
	if s.id == "" {
		s.id = proto.TraceID(resp.Header.Get("X-Trace-Id"))
	}
	watchdog := time.AfterFunc(silence, cancel)
	defer watchdog.Stop()
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		switch {
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case s.snapshot && errors.Is(err, io.EOF) && len(line) == 0:
			return true, nil
		case err != nil:
			return false, nil // the rest of the line comes with the next connection
		}
		watchdog.Reset(silence)
		if done, err := s.handle(line); done || err != nil {
			return done, err
		}
	}
}

// handle calls sink with the event in line, unless it came before.
func (s *stream) handle(line []byte) (done bool, err error) {
	e := &Event{Line: line}
	if err := json.Unmarshal(line, e); err != nil {
		return false, fmt.Errorf("decode an event of %s: %w", s.id, err)
	}
	switch {
	case e.Type == proto.EventKeepalive:
		return false, nil
	case e.Type == proto.EventResult && e.Result == nil:
		return false, fmt.Errorf("the result of %s has no content", s.id)
	case e.Type != proto.EventResult && e.Seq <= s.after:
		return false, nil
	}
	if e.TraceID != "" {
		s.id = e.TraceID
	}
	s.after = max(s.after, e.Seq)
	return e.Type == proto.EventResult, s.sink(e)
}
