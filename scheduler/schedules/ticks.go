package schedules

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	"github.com/netresearch/go-cron"

	"github.com/bullpen-run/bullpen/proto"
)

const allHours = 1<<24 - 1

var parser = cron.MustNewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.DowOrDom | cron.Descriptor)

// ticker computes the ticks of a schedule.
type ticker struct {
	cron     *cron.SpecSchedule // nil for an interval
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
		return t, nil
	}
	if strings.Contains(s.Cron, "=") { // a time zone of its own
		return nil, proto.FieldErrorf("cron", "must not name a time zone; use time_zone")
	}
	parsed, err := parser.Parse(s.Cron)
	if err != nil {
		return nil, proto.FieldErrorf("cron", "must be an expression of 5 or 6 fields, or @hourly, @daily, @weekly, @monthly or @yearly. The fields are seconds (0-59, "+
			"may be left out), minutes (0-59), hours (0-23), days (1-31), months (1-12 or JAN-DEC) and days of the week (0-7 or SUN-SAT). Each is *, a value, "+
			"a range a-b, or a list a,b; /n after * or a range takes every n-th value")
	}
	spec, ok := parsed.(*cron.SpecSchedule)
	if !ok {
		return nil, proto.FieldErrorf("cron", "must not be an interval; use every")
	}
	spec.Location = t.location
	t.cron = spec
	if t.next(time.Now()).IsZero() {
		return nil, proto.FieldErrorf("cron", "must match a day that exists")
	}
	return t, nil
}

// next returns the first tick after a time, zero if there is none. A time of day that is skipped
// when the clock is put forward counts as one hour later. One that is repeated when the clock is
// put back counts once, unless the expression matches every hour.
func (t *ticker) next(after time.Time) time.Time {
	if t.cron == nil {
		past := max(after.Sub(t.start), 0)
		return t.start.Add(past - past%t.every + t.every)
	}
	tick := t.cron.Next(after.In(t.location))
	for !tick.IsZero() && t.cron.Hour&allHours != allHours && repeats(tick) {
		tick = t.cron.Next(tick)
	}
	if tick.IsZero() {
		return tick
	}
	return tick.UTC()
}

// repeats reports whether the wall clock showed the time of t before, because it was put back in
// the three hours before.
func repeats(t time.Time) bool {
	_, offset := t.Zone()
	_, before := t.Add(-3 * time.Hour).Zone()
	if before <= offset {
		return false
	}
	first := t.Add(-time.Duration(before-offset) * time.Second)
	return first.Format(time.DateTime) == t.Format(time.DateTime)
}

// due returns when a tick is due: later than the tick by a part of the jitter that depends on
// nothing but the schedule and the tick.
func (t *ticker) due(tick time.Time) time.Time {
	if t.jitter <= 0 {
		return tick
	}
	hash := fnv.New64a()
	_, _ = fmt.Fprintf(hash, "%s %d", t.id, tick.Unix())
	sum := binary.BigEndian.Uint64(hash.Sum(nil))
	return tick.Add(time.Duration(sum % uint64(t.jitter)))
}
