// Package send makes single attempts to deliver a webhook: one signed POST, with a detailed
// outcome. Package webhook schedules attempts and retries.
package send

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptrace"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/guard"
)

const (
	// maxDetail bounds the detail of an outcome, in bytes. Receivers influence its text.
	maxDetail = 500
	// maxConnections limits the connections of an attempt. It needs several if idle connections are
	// dead. A receiver that answers each request with GOAWAY would get hundreds per second, each
	// with a handshake.
	maxConnections = 10
)

// Sender makes attempts. It is safe for concurrent use.
type Sender struct {
	Guard     *guard.Guard
	UserAgent string // as in "bullpen/1.0"
}

// Post is the input of an attempt.
type Post struct {
	URL string
	ID  string // of the delivery, the same in all its attempts
	// Body is JSON.
	Body []byte
	// Settings holds the secrets and the timeout. Its URL is ignored.
	Settings proto.Webhook
}

// Outcome is the result of an attempt: a success if Error is empty. Number is not set.
type Outcome struct {
	proto.DeliveryAttempt
	// RetryAfter is the wait requested by a response other than 2xx, not capped; 0 for none.
	RetryAfter time.Duration
}

// Causes of an attempt's cancelled context.
var (
	errTimeout            = errors.New("the attempt took too long")
	errTooManyConnections = errors.New("the attempt took too many connections")
)

// Send posts to a receiver and waits for its response until the timeout of the settings. It follows
// no redirects and decompresses no bodies.
//
// A 2xx status is a success, whatever happens to the body. The body is read for the record, up to
// 64 KiB; if it is incomplete, too long or too slow, only the detail reports it.
//
// If ctx is cancelled, the class of the error is [proto.DeliveryInternal].
func (s *Sender) Send(ctx context.Context, p Post) Outcome {
	begun := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(p.Settings.Timeout), errTimeout)
	defer cancel()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	steps := &steps{onTooMany: func() { abort(errTooManyConnections) }}
	o := s.post(httptrace.WithClientTrace(ctx, steps.clientTrace()), &p, begun, steps)
	now := time.Now()
	o.At = begun.UTC()
	o.Timings, o.RemoteAddr = steps.timings(now)
	o.Timings.Total = milliseconds(now.Sub(begun))
	o.Detail = truncate(o.Detail, maxDetail)
	return o
}

// failed returns the outcome of an attempt without a response.
func failed(class proto.DeliveryError, detail string) Outcome {
	return Outcome{DeliveryAttempt: proto.DeliveryAttempt{Error: class, Detail: detail}}
}

func (s *Sender) post(ctx context.Context, p *Post, now time.Time, steps *steps) Outcome {
	if err := s.Guard.CheckURL("the URL", p.URL); err != nil {
		return failed(proto.DeliveryRefused, err.Error())
	}
	req, err := s.request(ctx, p, now)
	if err != nil {
		return failed(proto.DeliveryInternal, err.Error())
	}
	o := s.exchange(ctx, req, steps)
	if steps.connected() {
		o.Headers = redact(req.Header, &p.Settings)
	}
	return o
}

// exchange sends a request and reads its response.
func (s *Sender) exchange(ctx context.Context, req *http.Request, steps *steps) Outcome {
	resp, err := s.Guard.Transport().RoundTrip(req)
	if err != nil {
		return failed(classify(ctx, err, steps))
	}
	defer resp.Body.Close() //nolint:errcheck // nothing depends on it
	body, err := readBody(resp)
	o := Outcome{DeliveryAttempt: proto.DeliveryAttempt{Status: resp.StatusCode, Response: responseHead(resp, body)}}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		o.Error, o.Detail = proto.DeliveryRejected, "the receiver answered "+resp.Status
		o.RetryAfter = retryAfter(resp.Header.Get("Retry-After"), time.Now())
		return o
	}
	switch {
	case errors.Is(err, errBodyTooLong):
		o.Detail = "the body of the answer is longer than 64 KiB: the connection was closed"
	case err != nil:
		_, why := classify(ctx, err, steps)
		o.Detail = "the body of the answer did not end: " + why
	}
	return o
}

func (s *Sender) request(ctx context.Context, p *Post, now time.Time) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL, bytes.NewReader(p.Body))
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", s.UserAgent)
	// A header without a value is not sent. Its presence allows net/http to repeat the request if
	// an idle connection is dead: receivers recognise a delivery by its id.
	req.Header["Idempotency-Key"] = nil
	if err := sign(req.Header, p, now); err != nil {
		return nil, err
	}
	return req, nil
}
