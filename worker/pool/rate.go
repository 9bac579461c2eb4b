package pool

import (
	"math"
	"time"
)

// rateWindow is the time constant of a Rate.
const rateWindow = 5 * time.Second

// Rate measures how often something is requested. The zero value is ready to use.
type Rate struct{ requests decayingCount }

// Add counts a request at now.
func (r *Rate) Add(now time.Time) { r.requests.add(now, rateWindow) }

// PerSecond returns the number of requests per second, averaged over about the last five seconds.
func (r *Rate) PerSecond(now time.Time) float64 {
	return r.requests.value(now, rateWindow) / rateWindow.Seconds()
}

// Last returns the time of the last request; zero before the first.
func (r *Rate) Last() time.Time { return r.requests.last }

// decayingCount counts events with a weight that decays exponentially with their age.
type decayingCount struct {
	last time.Time
	n    float64 // at last
}

func (c *decayingCount) add(now time.Time, decay time.Duration) {
	c.n, c.last = c.value(now, decay)+1, now
}

func (c *decayingCount) value(now time.Time, decay time.Duration) float64 {
	return c.n * math.Exp(-now.Sub(c.last).Seconds()/decay.Seconds())
}
