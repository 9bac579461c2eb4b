// Package autoscale decides how many workers a pool should have. It only computes: it reads no
// queue, no clock and starts no worker.
package autoscale

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Bounds of a policy.
const (
	// MaxWorkers bounds Policy.Max.
	MaxWorkers = 100_000
	// MaxSlotsPerWorker bounds Policy.SlotsPerWorker.
	MaxSlotsPerWorker = 10_000

	maxTargetWait = 24 * time.Hour
	maxDelay      = 7 * 24 * time.Hour
)

// Policy is how a pool of workers is scaled. Durations are seconds in JSON.
type Policy struct {
	// Min and Max bound the number of workers. With Min 0 an idle pool is scaled to zero.
	Min int `json:"min_workers"`
	Max int `json:"max_workers"`
	// SlotsPerWorker is how many programs a worker runs at the same time.
	SlotsPerWorker int `json:"slots_per_worker"`
	// TargetWait is how long jobs may wait for a slot.
	TargetWait proto.Seconds `json:"target_wait"`
	// ScaleDownAfter is how long fewer workers must have been enough before the pool shrinks.
	ScaleDownAfter proto.Seconds `json:"scale_down_after"`
	// ScaleToZeroAfter is how long the pool must have been idle before its last worker is removed.
	// It is at least ScaleDownAfter.
	ScaleToZeroAfter proto.Seconds `json:"scale_to_zero_after"`
	// Tolerance is the fraction of the slots, such as 0.1, by which demand may differ without a
	// change.
	Tolerance float64 `json:"tolerance"`
}

// DefaultPolicy returns the defaults for fields that a file omits.
func DefaultPolicy() Policy {
	return Policy{
		Max: 10, SlotsPerWorker: 4, TargetWait: proto.Seconds(10 * time.Second),
		ScaleDownAfter: proto.Seconds(5 * time.Minute), ScaleToZeroAfter: proto.Seconds(10 * time.Minute), Tolerance: 0.1,
	}
}

// ParsePolicy parses and validates a policy in JSON. Fields that are missing have their defaults.
func ParsePolicy(data []byte) (Policy, error) {
	p := new(DefaultPolicy())
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return Policy{}, fmt.Errorf("parse autoscaling policy: %w", err)
	}
	if p == nil {
		return Policy{}, errors.New("parse autoscaling policy: it is null")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Policy{}, errors.New("parse autoscaling policy: there is more than one JSON value")
	}
	if err := p.Validate(); err != nil {
		return Policy{}, fmt.Errorf("autoscaling policy: %w", err)
	}
	return *p, nil
}

// Validate returns an error that names each field with an invalid value.
func (p *Policy) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	within := func(name string, d proto.Seconds, least, most time.Duration) {
		check(time.Duration(d) >= least && time.Duration(d) <= most, "%s must be between %v and %v", name, least, most)
	}
	check(p.Max >= 1 && p.Max <= MaxWorkers, "max_workers must be between 1 and %d", MaxWorkers)
	check(p.Min >= 0 && p.Min <= p.Max, "min_workers must be between 0 and max_workers")
	check(p.SlotsPerWorker >= 1 && p.SlotsPerWorker <= MaxSlotsPerWorker, "slots_per_worker must be between 1 and %d",
		MaxSlotsPerWorker)
	within("target_wait", p.TargetWait, time.Millisecond, maxTargetWait)
	within("scale_down_after", p.ScaleDownAfter, 0, maxDelay)
	within("scale_to_zero_after", p.ScaleToZeroAfter, 0, maxDelay)
	check(p.ScaleToZeroAfter >= p.ScaleDownAfter, "scale_to_zero_after must be at least scale_down_after")
	check(p.Tolerance >= 0 && p.Tolerance < 1 && !math.IsNaN(p.Tolerance), "tolerance must be at least 0 and less than 1")
	return errors.Join(errs...)
}
