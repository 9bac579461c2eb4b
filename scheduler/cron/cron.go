// Package cron parses cron expressions and computes their ticks.
//
// An expression is matched against wall-clock time, which knows no time zone. Only the result is
// mapped to an instant, so each time of day that an expression names is one tick on each of its
// days, whatever the clock does:
//
//   - A time that is skipped when the clock is put forward is as much later as the clock is put
//     forward: 02:30 becomes 03:30 if 02:00 to 03:00 is skipped.
//   - A time that is repeated when the clock is put back counts once, the first time, unless the
//     expression matches every hour.
//
// The work of every function has a bound. No schedule that is stored can keep a process busy.
package cron

import (
	"errors"
	"math"
	"math/bits"
	"sort"
	"time"
)

const (
	// cycle is the number of years after which the calendar repeats, weekdays included.
	cycle = 400
	// maxChanges bounds how many changes of the clock a search for a tick passes.
	maxChanges = 8 * cycle

	daySeconds = 24 * 60 * 60
	slack      = 3 * daySeconds // more than any zone's offset from UTC and any change of it
	allHours   = 1<<24 - 1
)

// Expression is a parsed cron expression. It matches a time on at least one day in [cycle] years.
type Expression struct {
	seconds, minutes, hours, months uint64 // bit n is set for the value n
	days                            monthDays
	weekdays                        weekdays
}

// monthDays is the field with the days of the month.
type monthDays struct {
	any     bool   // the field is *
	days    uint64 // bit n: day n
	last    uint64 // bit n: n days before the last one
	nearest uint64 // bit n: the day from Monday to Friday that is nearest to day n, in the same month
	// lastNearest, bit n: the day from Monday to Friday that is nearest to n days before the last one.
	lastNearest uint64
}

// weekdays is the field with the days of the week. Bit 0 is Sunday.
type weekdays struct {
	any  bool // the field is *
	days uint64
	last uint64    // the last of the month
	nth  [5]uint64 // the first to the fifth of the month
}

// Next returns the first tick after an instant, to the second. An error means that the data of the
// time zone make no sense.
func (e *Expression) Next(after time.Time, zone *time.Location) (time.Time, error) {
	from := after.Unix() + 1
	for range maxChanges {
		tick, change, ok := e.nextBeforeChange(from, zone)
		if ok {
			return time.Unix(tick, 0).UTC(), nil
		}
		if change <= from {
			break
		}
		wall, _ := e.nextWall(change - slack) // no tick after the change is earlier than wall by more than slack
		from = max(change, wall-slack)
	}
	return time.Time{}, errors.New("the data of the time zone " + zone.String() + " make no sense on this server")
}

// nextBeforeChange returns the first tick from an instant on, but before the next change of the
// clock. If there is none, ok is false and change is when the clock changes. Both are Unix times.
func (e *Expression) nextBeforeChange(from int64, zone *time.Location) (tick, change int64, ok bool) {
	now := time.Unix(from, 0).In(zone)
	offset, last := offsetAt(from, zone), int64(math.MinInt64)
	begin, end := now.ZoneBounds()
	change = math.MaxInt64
	if !end.IsZero() {
		change = end.Unix()
	}
	if change <= from { // the standard library returns this on the last day of a leap year
		change = from + 1 + int64(sort.Search(daySeconds, func(i int) bool {
			return offsetAt(from+1+int64(i), zone) != offset
		}))
	}
	consider := func(wall, offset int64) {
		if at := wall - offset; at < change && (!ok || at < tick) {
			tick, ok = at, true
		}
	}
	if !begin.IsZero() {
		start := begin.Unix()
		before := offsetAt(start-1, zone)
		if e.hours != allHours {
			last = start + before // the clock showed everything before it already
		}
		// What is skipped counts by the clock as it was.
		if wall, found := e.nextWall(max(from, start) + before); found && wall < start+offset {
			consider(wall, before)
		}
	}
	if wall, found := e.nextWall(max(from+offset, last)); found {
		consider(wall, offset)
	}
	return tick, change, ok
}

// offsetAt returns by how many seconds a zone's clock is ahead of UTC.
func offsetAt(unix int64, zone *time.Location) int64 {
	_, offset := time.Unix(unix, 0).In(zone).Zone()
	return int64(offset)
}

// nextWall returns the first matching time at from or later. Both are wall-clock times, in seconds
// since 1970 on a clock that never changes. ok is false if no further day matches.
func (e *Expression) nextWall(from int64) (wall int64, ok bool) {
	t := time.Unix(from, 0).UTC()
	year, month, day := t.Date()
	second := t.Hour()*3600 + t.Minute()*60 + t.Second()
	if e.matchingDays(year, month)&(1<<day) != 0 {
		if s, ok := e.nextOfDay(second); ok {
			return from - int64(second) + int64(s), true
		}
	}
	left := ^uint64(0) << (day + 1)
	for range cycle*12 + 1 {
		if matching := e.matchingDays(year, month) & left; matching != 0 {
			s, _ := e.nextOfDay(0)
			return time.Date(year, month, bits.TrailingZeros64(matching), 0, 0, s, 0, time.UTC).Unix(), true
		}
		left = ^uint64(0)
		if month++; month > time.December {
			year, month = year+1, time.January
		}
	}
	return 0, false
}

// nextOfDay returns the first second of a day that matches, from one on. ok is false if there is none.
func (e *Expression) nextOfDay(from int) (second int, ok bool) {
	h, m, s := from/3600, from/60%60, from%60
	if h = next(e.hours, h); h > from/3600 {
		m, s = 0, 0
	}
	if m = next(e.minutes, m); m > from/60%60 {
		s = 0
	}
	if s = next(e.seconds, s); s > 59 {
		m, s = next(e.minutes, m+1), bits.TrailingZeros64(e.seconds)
	}
	if m > 59 {
		h, m, s = next(e.hours, h+1), bits.TrailingZeros64(e.minutes), bits.TrailingZeros64(e.seconds)
	}
	return h*3600 + m*60 + s, h < 24
}

// next returns the first bit that is set, from one on; 64 for none.
func next(set uint64, from int) int { return bits.TrailingZeros64(set >> from << from) }

// matchingDays returns the days of a month that match. Bit 1 is the first day.
func (e *Expression) matchingDays(year int, month time.Month) uint64 {
	if e.months&(1<<month) == 0 {
		return 0
	}
	first := time.Date(year, month, 1, 0, 0, 0, 0, time.UTC)
	length, weekday := first.AddDate(0, 1, -1).Day(), int(first.Weekday())
	switch {
	case e.weekdays.any && e.days.any:
		return 1<<(length+1) - 2
	case e.weekdays.any:
		return e.days.of(length, weekday)
	case e.days.any:
		return e.weekdays.of(length, weekday)
	default:
		return e.days.of(length, weekday) | e.weekdays.of(length, weekday)
	}
}

// of returns the days of a month with the given length whose first day is weekday.
func (d *monthDays) of(length, weekday int) uint64 {
	days := d.days & (1<<(length+1) - 2)
	if d.last|d.nearest|d.lastNearest == 0 {
		return days
	}
	for day := 1; day <= length; day++ {
		before := length - day
		if d.last&(1<<before) != 0 {
			days |= 1 << day
		}
		if d.nearest&(1<<day) != 0 || d.lastNearest&(1<<before) != 0 {
			days |= 1 << nearestWorkday(day, length, weekday)
		}
	}
	return days
}

// nearestWorkday returns the day from Monday to Friday nearest to day, within its month.
func nearestWorkday(day, length, weekday int) int {
	switch on := time.Weekday((weekday + day - 1) % 7); {
	case on == time.Saturday && day == 1:
		return day + 2
	case on == time.Saturday:
		return day - 1
	case on == time.Sunday && day == length:
		return day - 2
	case on == time.Sunday:
		return day + 1
	default:
		return day
	}
}

// of returns the days of a month with the given length whose first day is weekday.
func (w *weekdays) of(length, weekday int) (days uint64) {
	for day := 1; day <= length; day++ {
		set := w.days | w.nth[(day-1)/7]
		if day+7 > length {
			set |= w.last
		}
		if set&(1<<((weekday+day-1)%7)) != 0 {
			days |= 1 << day
		}
	}
	return days
}
