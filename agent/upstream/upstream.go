// Package upstream has the clients of model servers: those with OpenAI's chat completions API,
// which vLLM, Ollama and llama.cpp also have, and those with Anthropic's messages API. Both stream.
// Only the operator chooses the server, never a request.
package upstream

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
)

// Protocol is the API of a server.
type Protocol string

// The protocols.
const (
	OpenAI    Protocol = "openai"
	Anthropic Protocol = "anthropic"
)

const (
	maxEvent     = 4 << 20  // bytes of one event
	maxReply     = 64 << 20 // bytes of a reply: 128k tokens, each with an event of 300 bytes, and more
	maxError     = 64 << 10 // bytes of the body of an error that are read
	maxMessage   = 500      // bytes of a message with an upstream's text
	firstRetry   = 500 * time.Millisecond
	longestRetry = 10 * time.Second
)

// Client asks one server. Its fields are set before its use. It is safe for concurrent use.
type Client struct {
	Protocol Protocol
	// URL is the address below which the API is: its /v1 included with OpenAI, not included with
	// Anthropic, as their own clients have it. It has no slash at the end.
	URL string
	// Key returns the key, or "". It is read for each turn, so that it can be replaced.
	Key func() (string, error)
	// Models maps the names of models that clients send to the server's. The name * matches all
	// others. If it is nil, names stay unchanged.
	Models map[string]string
	// Timeout is how long the server may stay silent, in all states of a request.
	Timeout time.Duration
	// Retries is how often a request is retried if the server did not begin to answer.
	Retries int
	HTTP    *http.Client
}

// Stream implements [agent.Upstream].
func (c *Client) Stream(ctx context.Context, turn *agent.Turn, text func(string) error) (*agent.Reply, error) {
	model, err := c.model(turn.Model)
	if err != nil {
		return nil, err
	}
	key, err := c.readKey()
	if err != nil {
		return nil, err
	}
	p := c.protocol(model, key)
	if messages, ok := p.(*anthropicProtocol); ok {
		messages.betas = turn.Anthropic.Betas
	}
	body, err := json.Marshal(p.request(turn))
	if err != nil {
		return nil, fmt.Errorf("encode a turn: %w", err)
	}
	var reply *agent.Reply
	wait := backoff.NewExponentialBackOff(backoff.WithInitialInterval(firstRetry), backoff.WithMaxInterval(longestRetry),
		backoff.WithMaxElapsedTime(0))
	attempts := &retryAfter{BackOff: backoff.WithMaxRetries(wait, uint64(max(0, c.Retries)))}
	err = backoff.Retry(func() error {
		var begun bool
		var err error
		reply, begun, err = c.attempt(ctx, p, body, key, turn, text)
		e, failed := errors.AsType[*agent.UpstreamError](err)
		if err == nil || begun || !failed || ctx.Err() != nil || !repeats(e.Kind, turn.Patient) {
			return permanent(err)
		}
		attempts.after = time.Duration(e.RetryAfter) * time.Second
		return err
	}, backoff.WithContext(attempts, ctx))
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return reply, err
}

// repeats reports whether to retry a request after an error of a kind. A client is told how long a
// server is busy, and retries itself. If only this server waits for the answer, it retries.
func repeats(kind agent.UpstreamKind, patient bool) bool {
	switch kind {
	case agent.UpstreamFailed:
		return true
	case agent.UpstreamRateLimited, agent.UpstreamOverloaded:
		return patient
	default:
		return false
	}
}

func permanent(err error) error {
	if err == nil {
		return nil
	}
	return backoff.Permanent(err)
}

// retryAfter waits at least as long as the server asked, but does not retry beyond longestRetry.
type retryAfter struct {
	backoff.BackOff
	after time.Duration
}

// NextBackOff implements [backoff.BackOff].
func (r *retryAfter) NextBackOff() time.Duration {
	next := r.BackOff.NextBackOff()
	if next == backoff.Stop || r.after > longestRetry {
		return backoff.Stop
	}
	return max(next, r.after)
}

func (c *Client) model(name string) (string, error) {
	if c.Models == nil {
		return name, nil
	}
	if to, ok := c.Models[name]; ok {
		return to, nil
	}
	if to, ok := c.Models["*"]; ok {
		return to, nil
	}
	return "", &agent.UpstreamError{
		Kind: agent.UpstreamNoModel, Message: fmt.Sprintf("this server has no model %q", proto.Shorten(name)),
	}
}

// protocol is what differs between servers.
type protocol interface {
	path() string
	modelsPath() string
	headers(h http.Header)
	// request returns the value whose JSON form is sent.
	request(turn *agent.Turn) any
	// events returns what reads the events of one answer.
	events(turn *agent.Turn) events
}

// events reads the events of an answer.
type events interface {
	// event handles the data of an event. done is set by the last one.
	event(data []byte, text func(string) error) (done bool, err error)
	// reply returns the reply after the last event.
	reply() *agent.Reply
	// finished reports whether the answer stated why it ends, so that its connection may close.
	finished() bool
}

func (c *Client) protocol(model, key string) protocol {
	if c.Protocol == Anthropic {
		return &anthropicProtocol{model: model, key: key}
	}
	return &openAIProtocol{model: model, key: key}
}

// attempt sends one request. begun reports whether text or a function of the turn was called.
func (c *Client) attempt(
	ctx context.Context, p protocol, body []byte, key string, turn *agent.Turn, text func(string) error,
) (reply *agent.Reply, begun bool, err error) {
	answer, err := c.post(ctx, p, key, body, "text/event-stream")
	if err != nil {
		return nil, false, err
	}
	defer func() { _ = answer.Close() }() // it was only read
	var ours error                        // of text, and of what the turn calls
	reported := *turn
	reported.OnThinking = noted(turn.OnThinking, &begun, &ours)
	reported.OnThinkingPart = noted(turn.OnThinkingPart, &begun, &ours)
	reported.OnCallPart = noted(turn.OnCallPart, &begun, &ours)
	es := p.events(&reported)
	read := noted(text, &begun, &ours)
	err = readEvents(answer, func(data []byte) (bool, error) { return es.event(data, read) })
	_, known := errors.AsType[*agent.UpstreamError](err)
	switch {
	case ours != nil:
		return nil, begun, ours
	case known:
		return nil, begun, redact(err, key)
	case err != nil:
		return nil, begun, answer.idle.wrap(err)
	case !es.finished():
		return nil, begun, &agent.UpstreamError{Kind: agent.UpstreamFailed, Message: "the model's server broke its reply off"}
	}
	return es.reply(), begun, nil
}

// noted returns f, nil if that is nil, so that begun is set by a call, and failed is its error.
func noted[T any](f func(T) error, begun *bool, failed *error) func(T) error {
	if f == nil {
		return nil
	}
	return func(v T) error {
		*begun = true
		*failed = f(v)
		return *failed
	}
}

// readKey returns the key for the model's server.
func (c *Client) readKey() (string, error) {
	key, err := c.Key()
	if err != nil {
		return "", &agent.UpstreamError{
			Kind: agent.UpstreamFailed, Message: "the server's key for the model cannot be read", Cause: err,
		}
	}
	return key, nil
}

// answer is the body of a successful answer. Each read has the client's timeout.
type answer struct {
	io.Reader
	contentType string
	idle        *idleContext
	body        io.Closer
	cancel      context.CancelFunc
}

// Close implements [io.Closer].
func (a *answer) Close() error {
	defer a.cancel()
	return a.body.Close()
}

// post sends a request. accept is the media type of the answer, empty for any. The caller closes the
// answer. The error is an [*agent.UpstreamError].
func (c *Client) post(ctx context.Context, p protocol, key string, body []byte, accept string) (*answer, error) {
	idle := &idleContext{timeout: c.Timeout}
	ctx, cancel := idle.start(ctx)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+p.path(), bytes.NewReader(body))
	if err != nil {
		cancel()
		return nil, &agent.UpstreamError{
			Kind: agent.UpstreamFailed, Message: "the model's server cannot be asked", Cause: err,
		}
	}
	r.Header.Set("Content-Type", "application/json")
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	p.headers(r.Header)
	response, err := c.HTTP.Do(r) //nolint:bodyclose // the answer closes it
	if err != nil {
		cancel()
		return nil, idle.wrap(err)
	}
	a := &answer{idle.reader(response.Body), response.Header.Get("Content-Type"), idle, response.Body, cancel}
	if response.StatusCode != http.StatusOK {
		defer func() { _ = a.Close() }() // it was only read
		return nil, statusError(response, key)
	}
	return a, nil
}

// idleContext ends a request when the server sends nothing for too long.
type idleContext struct {
	timeout time.Duration
	timer   *time.Timer
	late    atomic.Bool
}

func (i *idleContext) start(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	i.timer = time.AfterFunc(i.timeout, func() { i.late.Store(true); cancel() })
	return ctx, func() { i.timer.Stop(); cancel() }
}

// wrap returns the error for the failure of a request.
func (i *idleContext) wrap(err error) error {
	if i.late.Load() {
		return &agent.UpstreamError{
			Kind: agent.UpstreamTimeout, Message: fmt.Sprintf("the model's server sent nothing for %s", i.timeout),
		}
	}
	return &agent.UpstreamError{
		Kind: agent.UpstreamFailed, Message: "the model's server cannot be reached, or broke its reply off", Cause: err,
	}
}

// reader returns a reader whose reads each have the timeout. The time between them is not the
// server's.
func (i *idleContext) reader(r io.Reader) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		i.timer.Reset(i.timeout)
		defer i.timer.Stop()
		return r.Read(p)
	})
}

type readerFunc func([]byte) (int, error)

// Read implements [io.Reader].
func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// readEvents calls each with the data of server-sent events until it reports the last one, or the
// stream ends.
func readEvents(r io.Reader, each func(data []byte) (done bool, err error)) error {
	in := bufio.NewScanner(io.LimitReader(r, maxReply))
	in.Buffer(make([]byte, 0, 4<<10), maxEvent)
	var data []byte
	for in.Scan() {
		line := in.Bytes()
		if rest, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			if len(data) > 0 {
				data = append(data, '\n')
			}
			data = append(data, bytes.TrimPrefix(rest, []byte(" "))...)
			if len(data) > maxEvent {
				return bufio.ErrTooLong
			}
			continue
		}
		if len(line) > 0 || len(data) == 0 {
			continue
		}
		done, err := each(data)
		if err != nil || done {
			return err
		}
		data = data[:0]
	}
	if err := in.Err(); err != nil {
		return err
	}
	if len(data) > 0 { // the last line break is missing
		_, err := each(data)
		return err
	}
	return nil
}

// statusError returns the error for an answer that is not 200.
func statusError(response *http.Response, key string) error {
	text, _ := io.ReadAll(io.LimitReader(response.Body, maxError)) // what there is
	e := &agent.UpstreamError{Cause: fmt.Errorf("status %d", response.StatusCode)}
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil && seconds > 0 {
		e.RetryAfter = seconds
	}
	switch response.StatusCode {
	case http.StatusTooManyRequests:
		e.Kind, e.Message = agent.UpstreamRateLimited, "the model's server has too many requests"
	case http.StatusServiceUnavailable, statusOverloaded:
		e.Kind, e.Message = agent.UpstreamOverloaded, "the model's server is overloaded"
	case http.StatusNotFound:
		e.Kind, e.Message = agent.UpstreamNoModel, "the model's server does not have this model"
	case http.StatusRequestTimeout, http.StatusGatewayTimeout:
		e.Kind, e.Message = agent.UpstreamTimeout, "the model's server did not answer in time"
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		e.Kind, e.Message = agent.UpstreamRejected, "the model's server refused the request: "+messageOf(text)
		if tooLong.Match(text) { // clients know these words, and shorten the conversation
			const words = "prompt is too long: "
			e.Kind, e.Message = agent.UpstreamTooLong, words+strings.TrimPrefix(messageOf(text), words)
		}
	case http.StatusUnauthorized, http.StatusForbidden: // our key is none of the client's business
		e.Kind, e.Message = agent.UpstreamDenied, "the model's server cannot be used; the operator's log has the cause"
	default:
		e.Kind, e.Message = agent.UpstreamFailed, "the model's server failed"
	}
	return redact(e, key)
}

const statusOverloaded = 529 // of Anthropic

// tooLong is what servers say of a conversation that the model cannot read.
var tooLong = regexp.MustCompile(`(?i)prompt is too long|context_length_exceeded|maximum context length|` +
	`exceed_context_size|context window`)

// messageOf returns the message in the body of an error.
func messageOf(body []byte) string {
	var form struct {
		Error   json.RawMessage `json:"error"`
		Message string          `json:"message"`
	}
	var nested struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(body, &form) // another form has no message
	if json.Unmarshal(form.Error, &nested) == nil && nested.Message != "" {
		form.Message = nested.Message
	}
	if form.Message == "" {
		return "it did not say why"
	}
	return form.Message
}

// redact removes the key, which a server may echo, from an error's message, and then truncates the
// message. Truncating first could cut through a key.
func redact(err error, key string) error {
	e, ok := errors.AsType[*agent.UpstreamError](err)
	if !ok {
		return err
	}
	if key != "" {
		e.Message = strings.ReplaceAll(e.Message, key, "***")
	}
	e.Message = strings.ToValidUTF8(e.Message[:min(len(e.Message), maxMessage)], "")
	return err
}
