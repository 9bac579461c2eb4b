package warm

import (
	"math"
	"time"
)

// horizon is how far back the rate of what is asked for looks.
const horizon = 5 * time.Second

// Rate is how often something is asked for. Zero is never.
type Rate struct {
	last      time.Time
	perSecond float64 // at last
}

// Ask counts one that is asked for now.
func (r *Rate) Ask(now time.Time) { r.perSecond, r.last = r.At(now)+1/horizon.Seconds(), now }

// At is how many are asked for in a second, over about the last five.
func (r *Rate) At(now time.Time) float64 {
	return r.perSecond * math.Exp(-now.Sub(r.last).Seconds()/horizon.Seconds())
}

// Last is when one was asked for last; zero before the first.
func (r *Rate) Last() time.Time { return r.last }
