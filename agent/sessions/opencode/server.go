package opencode

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

const (
	startTimeout = 5 * time.Minute // until the program serves, on a busy host
	callTimeout  = 2 * time.Minute // of a request
	// silence is how long an event stream may send nothing. OpenCode sends a heartbeat every 10 seconds.
	silence  = time.Minute
	maxReply = 32 << 20 // bytes of a response
	maxEvent = 4 << 20  // bytes of an event
	maxError = 64 << 10 // bytes of an error response
)

// server is a process of opencode serve.
type server struct {
	process  sessions.Process
	model    string // that it is configured with
	password string
	dir      string      // the directory of the session
	port     chan int    // receives the port once the program listens
	base     string      // URL of the server; empty until it is known
	client   http.Client // of that port
	exited   chan struct{}
	exit     *sessions.Exit // set before exited is closed; nil if the process was lost
	streams  context.Context
	cancel   context.CancelFunc // ends the event stream
	stream   chan struct{}      // closed when the event stream's reader has returned; nil if there is none
}

// launch starts the program with a configuration.
func (c *conversation) launch(config string) (*server, error) {
	box, password := c.start.Sandbox, rand.Text()
	args := []string{c.agent.Installed().Dir + "/bin/opencode", "serve", "--hostname=127.0.0.1", "--port=0"}
	if dir := c.agent.Ripgrep; dir != "" {
		args = append([]string{"/bin/sh", "-c", `PATH="$PATH:$0" exec "$@"`, dir}, args...)
	}
	process, err := box.Start(c.context, &sessions.Program{Args: args, Env: c.env(password, config)})
	if err != nil {
		return nil, err
	}
	s := &server{
		process: process, password: password, dir: box.Dir(), port: make(chan int, 1), exited: make(chan struct{}),
	}
	s.streams, s.cancel = context.WithCancel(c.context)
	go s.readLines()
	return s, nil
}

// readLines reads the program's output until it ends. The only line of interest contains the port.
func (s *server) readLines() {
	defer close(s.exited)
	for {
		line, _, err := s.process.ReadLine()
		if errors.Is(err, io.EOF) {
			exit := s.process.Exit()
			s.exit = &exit
			return
		}
		if err != nil {
			return
		}
		_, address, ok := strings.Cut(string(line), "listening on http://127.0.0.1:")
		if port, err := strconv.ParseUint(strings.TrimSpace(address), 10, 16); ok && err == nil {
			select {
			case s.port <- int(port):
			default: // it was printed before
			}
		}
	}
}

// stop ends the program.
func (s *server) stop() {
	s.cancel()
	s.process.Close()
	<-s.exited
	if s.stream != nil {
		<-s.stream
	}
	s.client.CloseIdleConnections()
}

var errExited = errors.New("the program has ended")

// connect waits until the program serves. It returns errExited if the program has ended.
func (s *server) connect(ctx context.Context, box sessions.Sandbox) error {
	if s.base != "" {
		return nil
	}
	timer := time.NewTimer(startTimeout)
	defer timer.Stop()
	select {
	case port := <-s.port:
		s.client.Transport = box.Transport(port)
		s.base = fmt.Sprintf("http://127.0.0.1:%d", port)
		return nil
	case <-s.exited:
		return errExited
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return fmt.Errorf("it did not listen within %s", startTimeout)
	}
}

// statusError is an error response of OpenCode.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return fmt.Sprintf("status %d: %s", e.status, e.text) }

// isRefused reports whether OpenCode has answered a request with an error.
func isRefused(err error) bool {
	_, ok := errors.AsType[*statusError](err)
	return ok
}

func isNotFound(err error) bool {
	e, ok := errors.AsType[*statusError](err)
	return ok && e.status == http.StatusNotFound
}

// request returns a request. The path may end with a query.
func (s *server) request(ctx context.Context, method, path string, in any) (*http.Request, error) {
	body := io.Reader(http.NoBody)
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode a request: %w", err)
		}
		body = bytes.NewReader(text)
	}
	separator := "?"
	if strings.Contains(path, "?") {
		separator = "&"
	}
	r, err := http.NewRequestWithContext(ctx, method, s.base+path+separator+"directory="+url.QueryEscape(s.dir), body)
	if err != nil {
		return nil, err
	}
	r.SetBasicAuth("opencode", s.password)
	if in != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	return r, nil
}

// call sends a request and decodes the response into out, unless that is nil. The error is a *statusError
// if the server refused the request.
func (s *server) call(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := s.request(ctx, method, path, in)
	if err != nil {
		return err
	}
	response, err := s.client.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }() // it was only read
	if response.StatusCode >= http.StatusMultipleChoices {
		text, _ := io.ReadAll(io.LimitReader(response.Body, maxError)) // what there is
		return &statusError{response.StatusCode, shorten(string(text), maxMessage)}
	}
	if out == nil {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, maxReply))
	if err == nil {
		err = decode(text, out)
	}
	if err != nil {
		return fmt.Errorf("read the response to %s %s: %w", method, path, err)
	}
	return nil
}

// listen opens the event stream. It returns when OpenCode has begun to send events. The channel is closed
// at the end of the stream. An event that is too long is sent as nil.
func (s *server) listen() (<-chan []byte, error) {
	if s.stream != nil {
		<-s.stream
	}
	ctx, cancel := context.WithCancel(s.streams)
	idle := time.AfterFunc(silence, cancel)
	r, err := s.request(ctx, http.MethodGet, "/event", nil)
	if err != nil {
		cancel()
		return nil, err
	}
	response, err := s.client.Do(r) //nolint:bodyclose // readEvents closes it
	if err != nil {
		cancel()
		return nil, err
	}
	in := bufio.NewReaderSize(response.Body, maxLineBuffer)
	if _, err = readEvent(in); err == nil && response.StatusCode != http.StatusOK {
		err = &statusError{response.StatusCode, "no events"}
	}
	if err != nil {
		cancel()
		_ = response.Body.Close() // it was only read
		return nil, err
	}
	events := make(chan []byte)
	s.stream = make(chan struct{})
	go func() {
		defer close(s.stream)
		defer close(events)
		defer cancel()
		defer idle.Stop()
		defer func() { _ = response.Body.Close() }() // it was only read
		for {
			data, err := readEvent(in)
			if err != nil {
				return
			}
			idle.Stop() // while this side is slow
			select {
			case events <- data:
			case <-ctx.Done():
				return
			}
			idle.Reset(silence)
		}
	}()
	return events, nil
}

const maxLineBuffer = 64 << 10

// readEvent returns the data of the next event, or nil if it is longer than maxEvent.
func readEvent(in *bufio.Reader) ([]byte, error) {
	var line []byte
	tooLong := false
	for {
		part, err := in.ReadSlice('\n')
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if line = append(line, part...); len(line) > maxEvent {
			tooLong, line = true, line[:0]
		}
		if err != nil {
			continue
		}
		if tooLong {
			return nil, nil
		}
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			return bytes.TrimSpace(data), nil
		}
		line = line[:0]
	}
}
