package schedules

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/cron"
)

// expression is implemented by [*cron.Expression].
type expression interface {
	Next(after time.Time, zone *time.Location) (time.Time, error)
}

// ticker computes the ticks of a schedule.
type ticker struct {
	cron     expression // nil for an interval
	location *time.Location
	start    time.Time // of the interval
	every    time.Duration
	jitter   time.Duration
	id       string
}

// newTicker returns the ticker of a schedule. Its errors are [*proto.FieldError].
func newTicker(s *proto.Schedule) (*ticker, error) {
	t := &ticker{start: s.CreatedAt, every: time.Duration(s.Every), jitter: time.Duration(s.Jitter), id: s.ID}
	var err error
	if t.location, err = time.LoadLocation(s.TimeZone); err != nil || s.TimeZone == "Local" {
		return nil, proto.FieldErrorf("time_zone", "must be the name of an IANA time zone, such as Europe/Berlin")
	}
	if s.Cron == "" {
		if t.every <= 0 {
			return nil, proto.FieldErrorf("every", "must be more than 0")
		}
		return t, nil
	}
	if t.cron, err = cron.Parse(s.Cron); err != nil {
		return nil, proto.FieldErrorf("cron", "%v", err)
	}
	return t, nil
}

// failedTicker returns the ticker of a stored schedule that this server cannot compute.
func failedTicker(err error) *ticker { return &ticker{cron: failed{err}} }

// failed is an expression without ticks.
type failed struct{ error }

// Next implements [expression].
func (f failed) Next(time.Time, *time.Location) (time.Time, error) { return time.Time{}, f.error }

// next returns the first tick after a time.
func (t *ticker) next(after time.Time) (time.Time, error) {
	if t.cron == nil {
		past := max(after.Sub(t.start), 0)
		return t.start.Add(past - past%t.every + t.every), nil
	}
	tick, err := t.cron.Next(after, t.location)
	if err == nil && !tick.After(after) {
		err = errors.New("the next tick is not after the previous one")
	}
	return tick, err
}

// due returns when a tick is due: the tick plus a part of the jitter that depends only on the
// schedule and the tick.
func (t *ticker) due(tick time.Time) time.Time {
	if t.jitter <= 0 {
		return tick
	}
	hash := fnv.New64a()
	_, _ = fmt.Fprintf(hash, "%s %d", t.id, tick.Unix())
	sum := binary.BigEndian.Uint64(hash.Sum(nil))
	return tick.Add(time.Duration(sum % uint64(t.jitter)))
}
