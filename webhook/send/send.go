// Package send makes single attempts to deliver webhooks: one POST each, signed, and an account of what came of it. When attempts are
// made, and whether there is another, is not its business.
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
	// maxDetail is how long the sentence about an attempt may be, in bytes: receivers choose words of it.
	maxDetail = 500
	// maxConnections is how many connections an attempt may use, one after the other, as more than one kept connection may be dead. A
	// receiver that sends each request away (GOAWAY) would get hundreds of them in a second, and cost us a handshake each.
	maxConnections = 10
)

// Sender makes attempts. Many may be under way at once.
type Sender struct {
	Guard     *guard.Guard
	UserAgent string // as in "bullpen/1.0"
}

// Post is what is to be sent, and where.
type Post struct {
	URL string
	ID  string // of the delivery, the same in all its attempts
	// Body is JSON.
	Body []byte
	// Settings say how to sign it and how long an attempt may take. The URL in them is not looked at.
	Settings proto.Webhook
}

// Outcome is what came of an attempt. The attempt has no number yet. It was a success where its Error is empty.
type Outcome struct {
	proto.DeliveryAttempt
	// RetryAfter is what an answer other than 2xx asked to wait before the next attempt; 0 for nothing. It is not capped.
	RetryAfter time.Duration
}

// Why attempts end before there is an answer.
var (
	errTimeout = errors.New("the attempt took too long")
	errTooMany = errors.New("the attempt took too many connections")
)

// Send posts to a receiver and waits for its answer, for at most the settings' time-out. Redirects are answers like any other, and
// bodies are kept as they came, compressed or not.
//
// A delivery has succeeded as soon as the head of an answer of 2xx is there: the receiver has then decided. Its body is read for the
// record, up to 64 KiB; one that is broken, longer or too slow changes nothing but the detail.
//
// What ctx cuts off has the class [proto.DeliveryInternal], whatever it was about.
func (s *Sender) Send(ctx context.Context, p Post) Outcome {
	begun := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(p.Settings.Timeout), errTimeout)
	defer cancel()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	steps := &steps{tooMany: func() { abort(errTooMany) }}
	o := s.post(httptrace.WithClientTrace(ctx, steps.hooks()), &p, begun, steps)
	now := time.Now()
	o.At = begun.UTC()
	o.Timings, o.RemoteAddr = steps.timings(now)
	o.Timings.Total = milliseconds(now.Sub(begun))
	o.Detail = beginning(o.Detail, maxDetail)
	return o
}

// failed is the outcome of an attempt that got no answer.
func failed(class proto.DeliveryError, detail string) Outcome {
	return Outcome{DeliveryAttempt: proto.DeliveryAttempt{Error: class, Detail: detail}}
}

// post sends the request and takes the answer.
func (s *Sender) post(ctx context.Context, p *Post, now time.Time, steps *steps) Outcome {
	if err := s.Guard.CheckForm("the URL", p.URL); err != nil {
		return failed(proto.DeliveryRefused, err.Error())
	}
	req, err := s.request(ctx, p, now)
	if err != nil {
		return failed(proto.DeliveryInternal, err.Error())
	}
	resp, err := s.Guard.Transport().RoundTrip(req)
	if err != nil {
		return failed(classify(ctx, err, steps))
	}
	defer resp.Body.Close() //nolint:errcheck // nothing is to be done about it
	body, err := readBody(resp)
	o := Outcome{DeliveryAttempt: proto.DeliveryAttempt{Status: resp.StatusCode, Response: responseHead(resp, body)}}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		o.Error, o.Detail = proto.DeliveryRejected, "the receiver answered "+resp.Status
		o.RetryAfter = retryAfter(resp.Header.Get("Retry-After"), time.Now())
		return o
	}
	switch {
	case errors.Is(err, errLong):
		o.Detail = "the body of the answer is longer than 64 KiB: the connection was closed"
	case err != nil:
		_, why := classify(ctx, err, steps)
		o.Detail = "the body of the answer did not end: " + why
	}
	return o
}

// request makes the request of an attempt.
func (s *Sender) request(ctx context.Context, p *Post, now time.Time) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL, bytes.NewReader(p.Body))
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", s.UserAgent)
	// An entry without a value is not sent. It tells net/http that the request may be sent again where a kept connection turns out to
	// be dead: receivers know a delivery by its id.
	req.Header["Idempotency-Key"] = nil
	if err := sign(req.Header, p, now); err != nil {
		return nil, err
	}
	return req, nil
}
