package web

import (
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bullpen-run/bullpen/proto/api"
)

// rateLimits limits the rates of requests by a leaky bucket for each name.
type rateLimits struct {
	mu      sync.Mutex
	buckets map[string]*rate.Limiter
	swept   time.Time
}

// sweepEvery is how often full buckets are forgotten. Their names are idle.
const sweepEvery = time.Minute

// take takes a request from a name's bucket, which holds burst requests and drains at limit. left
// is the number of requests that may follow immediately, and wait the time until this one is
// allowed, 0 if it is now.
func (l *rateLimits) take(name string, limit rate.Limit, burst int, now time.Time) (left int, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.swept) > sweepEvery {
		for name, bucket := range l.buckets {
			if bucket.TokensAt(now) >= float64(bucket.Burst()) {
				delete(l.buckets, name)
			}
		}
		l.swept = now
	}
	bucket := l.buckets[name]
	switch {
	case bucket == nil:
		if l.buckets == nil {
			l.buckets = map[string]*rate.Limiter{}
		}
		bucket = rate.NewLimiter(limit, burst)
		l.buckets[name] = bucket
	case bucket.Burst() != burst:
		bucket.SetLimitAt(now, limit)
		bucket.SetBurstAt(now, burst)
	}
	if !bucket.AllowN(now, 1) {
		missing := 1 - bucket.TokensAt(now)
		return 0, time.Duration(missing / float64(limit) * float64(time.Second))
	}
	return int(bucket.TokensAt(now)), 0
}

// limitRate refuses requests of a key beyond its request rate; a key may burst one minute's worth.
// Headers show how many are left. Each gateway counts its own requests.
func (c *Core) limitRate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		perMinute := i.Plan.RequestRate
		if perMinute == 0 {
			next.ServeHTTP(w, r)
			return
		}
		left, wait := c.rates.take(i.Key.ID, rate.Limit(float64(perMinute)/time.Minute.Seconds()), perMinute, time.Now())
		seconds := int(math.Ceil(wait.Seconds()))
		h := w.Header()
		h.Set("RateLimit-Policy", fmt.Sprintf(`"key";q=%d;w=60`, perMinute))
		h.Set("RateLimit", fmt.Sprintf(`"key";r=%d;t=%d`, left, seconds))
		if wait > 0 {
			e := api.Errorf(api.CodeRateLimited, "request rate limit of this API key reached (%d a minute)", perMinute)
			e.RetryAfter = seconds
			c.writeError(w, r, e)
			return
		}
		next.ServeHTTP(w, r)
	})
}
