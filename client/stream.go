package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// silence is the longest pause of a stream before it counts as broken. The server sends a keepalive
// every 15 s.
const silence = time.Minute

// lineBuffer is the size of the read buffer of a stream, in bytes.
const lineBuffer = 64 << 10

// Event is one event of an execution. Its type decides which fields are set.
type Event struct {
	Type    proto.EventType `json:"type"`     // status, output, display or result
	Seq     int64           `json:"seq"`      // its number; a stream can be resumed after it
	TraceID proto.TraceID   `json:"trace_id"` // of status and result
	Status  proto.Status    `json:"status"`   // of status and result

	Stream proto.Stream `json:"stream"` // of output: stdout or stderr
	Data   string       `json:"data"`   // of output, with U+FFFD for bytes that are not UTF-8
	Base64 []byte       `json:"base64"` // of output: the exact bytes of Data, if they are not UTF-8

	Index   int            `json:"index"`   // of display: its index in the results
	Display *proto.Display `json:"display"` // of display
	Omitted []string       `json:"omitted"` // of display: what only the result has, such as image/png

	Result    *proto.Result `json:"result"`           // of result
	Truncated bool          `json:"output_truncated"` // of result: it has less than the program wrote
	// Line is the event as it came: JSON with a line break.
	Line []byte `json:"-"`
}

// Bytes returns the bytes that the program wrote.
func (e *Event) Bytes() []byte {
	if e.Base64 != nil {
		return e.Base64
	}
	return []byte(e.Data)
}

// Stream runs a program and returns its events, each once and in order, without keepalives, the
// result last. It resumes after a broken connection. An error is the last value. The program
// continues if the caller stops reading or the context is done: see [Client.Cancel]. Each use of
// the returned iterator runs the program.
func (c *Client) Stream(ctx context.Context, req api.ExecuteRequest) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		s := &stream{client: c, yield: yield}
		s.run(ctx, call{
			method: http.MethodPost, path: executePath, body: req, resend: true,
			header: c.idempotent(map[string]string{"Accept": ndjson}),
		})
	}
}

// Follow returns the events of an execution with numbers above after, as Stream does: all of them if
// after is 0.
func (c *Client) Follow(ctx context.Context, id proto.TraceID, after int64) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		s := &stream{client: c, yield: yield, id: id, after: after}
		s.run(ctx, s.resumption(false))
	}
}

// Output returns the current events of an execution with numbers above after, without waiting for
// more.
func (c *Client) Output(ctx context.Context, id proto.TraceID, after int64) iter.Seq2[*Event, error] {
	return func(yield func(*Event, error) bool) {
		s := &stream{client: c, yield: yield, id: id, after: after, snapshot: true}
		s.run(ctx, s.resumption(false))
	}
}

var (
	errBrokenOff = errors.New("the stream broke off")
	errUnnamed   = fmt.Errorf("the stream broke off before it named its execution: %w", ErrUnknownOutcome)
	errBreaks    = errors.New("its streams break off again and again")
)

// stream is a sequence of connections that carry the events of one execution.
type stream struct {
	snapshot bool // ends with the present last event
	client   *Client
	yield    func(*Event, error) bool
	id       proto.TraceID
	after    int64 // number of the last event that was returned
}

// run reconnects until all events have come, or the caller wants no more.
func (s *stream) run(ctx context.Context, next call) {
	if err := s.connections(ctx, next); err != nil {
		s.yield(nil, err)
	}
}

func (s *stream) connections(ctx context.Context, next call) error {
	retry := s.client.newRetry()
	for {
		last, began := s.after, time.Now()
		done, err := s.connect(ctx, next)
		switch {
		case done || err != nil:
			return err
		case s.id == "":
			return errUnnamed
		case s.client.cfg.NoRetry:
			return &LostError{s.id, s.after, errBrokenOff}
		}
		again, err := retry.wait(ctx, s.after > last, began, &LostError{s.id, s.after, errBrokenOff})
		switch {
		case err != nil:
			return err
		case !again:
			return &LostError{s.id, s.after, errBreaks}
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

// connect reads events from one connection. It reports whether all events have arrived, or the
// caller wants no more; a broken connection is no error.
func (s *stream) connect(ctx context.Context, next call) (done bool, err error) {
	l, err := s.client.lines(ctx, next)
	switch {
	case err == nil:
	case next.redial && ctx.Err() == nil:
		return false, &LostError{s.id, s.after, err}
	default:
		return false, err
	}
	defer l.close()
	if s.id == "" {
		s.id = proto.TraceID(l.header.Get("X-Trace-Id"))
	}
	for {
		line, err := l.next()
		switch {
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case s.snapshot && errors.Is(err, io.EOF) && len(line) == 0:
			return true, nil
		case err != nil:
			return false, nil // the rest of the line comes with the next connection
		}
		if done, err := s.handle(line); done || err != nil {
			return done, err
		}
	}
}

// handle returns the event in line to the caller, unless it came before.
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
	return !s.yield(e, nil) || e.Type == proto.EventResult, nil
}

// lines is an answer that arrives line by line, as long as the server has something to send.
type lines struct {
	header   http.Header
	body     io.Closer
	read     *bufio.Reader
	watchdog *time.Timer
	cancel   context.CancelFunc
}

// lines sends a request whose answer is read with [lines.next].
func (c *Client) lines(ctx context.Context, call call) (*lines, error) {
	ctx, cancel := context.WithCancel(ctx)
	resp, err := c.do(ctx, call) //nolint:bodyclose // lines.close closes it
	if err != nil {
		cancel()
		return nil, err
	}
	read := bufio.NewReaderSize(resp.Body, lineBuffer)
	return &lines{resp.Header, resp.Body, read, time.AfterFunc(silence, cancel), cancel}, nil
}

// next returns the next line with its line break. A connection that is silent for [silence] counts
// as broken.
func (l *lines) next() ([]byte, error) {
	line, err := l.read.ReadBytes('\n')
	if err == nil {
		l.watchdog.Reset(silence)
	}
	return line, err
}

func (l *lines) close() {
	l.watchdog.Stop()
	l.cancel()
	_ = l.body.Close() // the rest is not needed
}

// eachLine calls handle with each line of one answer until handle is done or returns an error. It
// reports whether handle is done. A broken connection is not an error.
func (c *Client) eachLine(
	ctx context.Context, call call, handle func(line []byte) (done bool, err error),
) (done bool, err error) {
	l, err := c.lines(ctx, call)
	if err != nil {
		return false, err
	}
	defer l.close()
	for {
		line, err := l.next()
		switch {
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case err != nil:
			return false, nil // the next connection continues
		}
		if done, err := handle(line); done || err != nil {
			return done, err
		}
	}
}

// retry waits between connections that carry one stream.
type retry struct {
	client *Client
	pause  *backoff.ExponentialBackOff
}

func (c *Client) newRetry() *retry { return &retry{c, c.newBackOff()} }

// wait blocks until it is time for the next connection. It reports whether there should be one. progress
// and began describe the last connection: [Config.Patience] is for those that do not work.
func (r *retry) wait(ctx context.Context, progress bool, began time.Time, cause error) (again bool, err error) {
	if progress || time.Since(began) > longestPause {
		r.pause.Reset()
	}
	pause := r.pause.NextBackOff()
	if pause == backoff.Stop {
		return false, nil
	}
	r.client.cfg.OnRetry(cause)
	select {
	case <-ctx.Done():
		return false, context.Cause(ctx)
	case <-time.After(pause):
		return true, nil
	}
}
