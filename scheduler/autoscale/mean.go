package autoscale

import (
	"math"
	"time"
)

// meanMemory is the time after which a measurement of a Mean has lost most of its weight.
const meanMemory = 5 * time.Minute

// Mean is a mean in which measurements lose weight as they age.
type Mean struct {
	Sum    float64   `json:"sum"` // weighted
	Weight float64   `json:"weight"`
	At     time.Time `json:"at"` // of the last measurement
}

// Add adds a measurement.
func (m *Mean) Add(now time.Time, value float64) {
	keep := 1.0
	if m.Weight > 0 {
		keep = math.Exp(-max(0, now.Sub(m.At).Seconds()) / meanMemory.Seconds())
	}
	m.Sum, m.Weight, m.At = m.Sum*keep+value, m.Weight*keep+1, now
}

// Value returns the mean, 0 without a measurement.
func (m *Mean) Value() float64 {
	if m.Weight == 0 {
		return 0
	}
	return m.Sum / m.Weight
}
