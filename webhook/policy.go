package webhook

import (
	"fmt"
	"net/http"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/send"
)

const (
	jitter = 0.2 // of every wait, up and down
	// maxRetryAfter is the longest that a receiver can have a delivery wait for it.
	maxRetryAfter = 24 * time.Hour
)

// verdict is what follows from one attempt.
type verdict struct {
	status  proto.DeliveryStatus
	reason  string
	wait    time.Duration // until the next attempt, while pending
	slow    bool          // the receiver is overloaded or does not answer: all that goes there slows down
	pause   time.Duration // that the receiver asks for, for all that goes there
	disable string        // why nothing more is sent to the URL; empty where it is
}

// decide gives the verdict on an attempt that was the nth of its ladder. It is the one place that knows what an answer means.
func decide(o *send.Outcome, w *proto.Webhook, n int) verdict {
	if o.Error == "" {
		return verdict{status: proto.DeliveryDelivered}
	}
	v := verdict{status: proto.DeliveryPending}
	switch o.Status {
	case http.StatusGone:
		return verdict{
			status: proto.DeliveryFailed, reason: "the endpoint answered 410 Gone, and is disabled", disable: "it answered 410 Gone",
		}
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		v.pause = min(o.RetryAfter, maxRetryAfter)
		v.slow = true
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		v.slow = true
	case 0:
		v.slow = o.Error == proto.DeliveryTimeout || o.Error == proto.DeliveryConnect || o.Error == proto.DeliveryTLS || o.Error == proto.DeliveryBroken
	}
	if n >= w.MaxAttempts {
		v.status, v.reason = proto.DeliveryFailed, fmt.Sprintf("no success in %d attempts", n)
		return v
	}
	v.wait = max(jittered(w.Wait(n)), v.pause)
	if v.pause > 0 {
		v.reason = "the endpoint asked to wait"
	}
	return v
}

// jittered spreads a wait, so that what failed together does not come back together.
func jittered(wait time.Duration) time.Duration {
	if wait <= 0 {
		return 0
	}
	return backoff.NewExponentialBackOff(backoff.WithInitialInterval(wait), backoff.WithMaxInterval(2*wait),
		backoff.WithMultiplier(1), backoff.WithRandomizationFactor(jitter), backoff.WithMaxElapsedTime(0)).NextBackOff()
}
