package autoscale_test

import (
	"math"
	"testing"
	"time"

	. "github.com/bullpen-run/bullpen/scheduler/autoscale"
)

// The mean follows the last minutes.
func TestMeanDecays(t *testing.T) {
	var m Mean
	if m.Value() != 0 {
		t.Errorf("got %v without a measurement", m.Value())
	}
	now := start
	add := func(n int, value float64) {
		for range n {
			now = now.Add(time.Second)
			m.Add(now, value)
		}
	}
	if add(1000, 10); math.Abs(m.Value()-10) > 1e-9 {
		t.Errorf("got %v, want 10", m.Value())
	}
	if add(1200, 1); m.Value() < 1 || m.Value() > 1.2 {
		t.Errorf("got %v, want 1", m.Value())
	}
	m.Add(now.Add(-time.Hour), 1) // clocks step
	if !(m.Value() > 0) {
		t.Errorf("got %v after a step of the clock", m.Value())
	}
}
