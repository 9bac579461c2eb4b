package gateway

import (
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/bullpen-run/bullpen/proto/api"
)

// rateLimits limits the requests of API keys, each by a leaky bucket that holds the requests of a
// minute.
type rateLimits struct {
	mu      sync.Mutex
	buckets map[string]*rate.Limiter // by the key's id
	swept   time.Time
}

// sweepEvery is the time after which buckets of idle keys are full, and are forgotten.
const sweepEvery = time.Minute

// take takes a request of a key that may send perMinute requests a minute. left is the number of
// requests that the key may send at once after it, and wait the time until it may send this one, 0
// if it may now.
func (l *rateLimits) take(key string, perMinute int, now time.Time) (left int, wait time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.swept) > sweepEvery {
		for id, bucket := range l.buckets {
			if bucket.TokensAt(now) >= float64(bucket.Burst()) {
				delete(l.buckets, id)
			}
		}
		l.swept = now
	}
	bucket, limit := l.buckets[key], rate.Limit(float64(perMinute)/time.Minute.Seconds())
	switch {
	case bucket == nil:
		if l.buckets == nil {
			l.buckets = map[string]*rate.Limiter{}
		}
		bucket = rate.NewLimiter(limit, perMinute)
		l.buckets[key] = bucket
	case bucket.Burst() != perMinute:
		bucket.SetLimitAt(now, limit)
		bucket.SetBurstAt(now, perMinute)
	}
	if !bucket.AllowN(now, 1) {
		missing := 1 - bucket.TokensAt(now)
		return 0, time.Duration(missing / float64(limit) * float64(time.Second))
	}
	return int(bucket.TokensAt(now)), 0
}

// limitRate refuses requests of a key that exceed its request rate, and tells clients how many are
// left. Each gateway counts those that it gets.
func (s *Server) limitRate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i := infoOf(r.Context())
		perMinute := i.plan.RequestRate
		if perMinute == 0 {
			next.ServeHTTP(w, r)
			return
		}
		left, wait := s.rates.take(i.key.ID, perMinute, time.Now())
		seconds := int(math.Ceil(wait.Seconds()))
		h := w.Header()
		h.Set("RateLimit-Policy", fmt.Sprintf(`"key";q=%d;w=60`, perMinute))
		h.Set("RateLimit", fmt.Sprintf(`"key";r=%d;t=%d`, left, seconds))
		if wait > 0 {
			e := api.Errorf(api.CodeRateLimited, "request rate limit of this API key reached (%d a minute)", perMinute)
			e.RetryAfter = seconds
			s.writeError(w, r, e)
			return
		}
		next.ServeHTTP(w, r)
	})
}
