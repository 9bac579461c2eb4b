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
	// maxRetryAfter caps the wait that a receiver can ask for.
	maxRetryAfter = 24 * time.Hour
)

// verdict is the consequence of one attempt.
type verdict struct {
	status  proto.DeliveryStatus
	reason  string
	wait    time.Duration // until the next attempt, while pending
	backOff bool          // the receiver is overloaded or does not answer: slow down its whole queue
	pause   time.Duration // requested by the receiver, for its whole queue
	disable string        // why to disable the URL; empty to keep it
}

// decide returns the verdict on the nth attempt since the delivery was created or replayed. No
// other code interprets the answer of a receiver.
func decide(o *send.Outcome, w *proto.Webhook, n int) verdict {
	if o.Error == "" {
		return verdict{status: proto.DeliveryDelivered}
	}
	v := verdict{status: proto.DeliveryPending}
	switch o.Status {
	case http.StatusGone:
		return verdict{
			status: proto.DeliveryFailed, reason: "the endpoint answered 410 Gone, and is disabled",
			disable: "it answered 410 Gone",
		}
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		v.pause = min(o.RetryAfter, maxRetryAfter)
		v.backOff = true
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		v.backOff = true
	case 0:
		switch o.Error {
		case proto.DeliveryTimeout, proto.DeliveryConnect, proto.DeliveryTLS, proto.DeliveryBroken:
			v.backOff = true
		}
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

// jittered spreads a wait, so that deliveries that failed together are not retried together.
func jittered(wait time.Duration) time.Duration {
	if wait <= 0 {
		return 0
	}
	return backoff.NewExponentialBackOff(backoff.WithInitialInterval(wait), backoff.WithMaxInterval(2*wait),
		backoff.WithMultiplier(1), backoff.WithRandomizationFactor(jitter), backoff.WithMaxElapsedTime(0)).NextBackOff()
}
