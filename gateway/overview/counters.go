// Package overview shows what executions did in the last hour.
//
// Each gateway counts the executions of all gateways, in memory, from its start. It keeps counts of
// each minute for each organisation with executions in it: at most 61 times two histograms of at
// most 255 buckets.
package overview

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// span is the number of minutes that are kept. The last one has not ended.
const span = 60

// Counters count executions by organisation and minute. It is safe for concurrent use.
type Counters struct {
	now   func() time.Time
	since time.Time

	mu     sync.Mutex
	orgs   map[string]map[int64]*figures // by minute since 1970; the figures of all organisations are at ""
	pruned int64                         // the minute in which old minutes were removed last
}

// NewCounters returns counters that count from now on.
func NewCounters() *Counters { return newCounters(time.Now) }

func newCounters(now func() time.Time) *Counters {
	return &Counters{now: now, since: now(), orgs: map[string]map[int64]*figures{}}
}

// figures count executions in a period.
type figures struct {
	arrivals int
	ends     map[proto.Status]int
	wait     histogram // for a slot, in milliseconds
	duration histogram // of programs, in milliseconds
}

func newFigures() *figures {
	return &figures{ends: map[proto.Status]int{}, wait: histogram{}, duration: histogram{}}
}

func (f *figures) add(other *figures) {
	f.arrivals += other.arrivals
	for status, n := range other.ends {
		f.ends[status] += n
	}
	f.wait.merge(other.wait)
	f.duration.merge(other.duration)
}

func minuteOf(at time.Time) int64 { return at.Unix() / 60 }

// Queued counts an execution that was accepted.
func (c *Counters) Queued(m *proto.Meta) {
	if m.SandboxID == "" {
		c.count(m.Org, m.CreatedAt, func(f *figures) { f.arrivals++ })
	}
}

// Ended counts an execution that has ended.
func (c *Counters) Ended(r *proto.Record) {
	if r.SandboxID != "" {
		return
	}
	at := c.now()
	if r.CompletedAt != nil {
		at = *r.CompletedAt
	}
	c.count(r.Org, at, func(f *figures) {
		f.ends[r.Status]++
		if r.StartedAt != nil {
			f.wait.add(r.StartedAt.Sub(r.QueuedAt()).Milliseconds())
			f.duration.add(r.Result.DurationMS)
		}
	})
}

// count changes the figures of an organisation, and those of all, in the minute of a time. A time
// outside the last hour counts as now, because another machine's clock may be wrong.
func (c *Counters) count(org string, at time.Time, change func(*figures)) {
	now := minuteOf(c.now())
	minute := minuteOf(at)
	if minute > now || minute <= now-span {
		minute = now
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.prune(now)
	for _, name := range []string{org, ""} {
		minutes := c.orgs[name]
		if minutes == nil {
			minutes = map[int64]*figures{}
			c.orgs[name] = minutes
		}
		if minutes[minute] == nil {
			minutes[minute] = newFigures()
		}
		change(minutes[minute])
	}
}

// prune removes the minutes that are too old, and the organisations without any.
func (c *Counters) prune(now int64) {
	if c.pruned == now {
		return
	}
	c.pruned = now
	for org, minutes := range c.orgs {
		maps.DeleteFunc(minutes, func(minute int64, _ *figures) bool { return minute <= now-span })
		if len(minutes) == 0 {
			delete(c.orgs, org)
		}
	}
}

// hour has the figures of the last hour.
type hour struct {
	start   time.Time // of the first minute
	from    time.Time // the figures are complete from here on
	minutes [span]*figures
	total   *figures // of all minutes
}

// lastHour returns the figures of an organisation, or of all if org is empty.
func (c *Counters) lastHour(org string) *hour {
	first := minuteOf(c.now()) - span + 1
	// The minute in which counting started is incomplete.
	from := max(first, minuteOf(c.since)+1)
	h := &hour{start: time.Unix(first*60, 0), from: time.Unix(from*60, 0), total: newFigures()}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range h.minutes {
		h.minutes[i] = newFigures()
		if f := c.orgs[org][first+int64(i)]; f != nil {
			h.minutes[i].add(f)
			h.total.add(f)
		}
	}
	return h
}

// histogram counts values by buckets whose limits grow by growth. It has those with values, in order:
// most organisations use few in a minute.
type histogram []bucket

type bucket struct {
	count uint32
	limit uint8 // the index of its limit
}

// limits are the upper limits of the buckets: the values of bucket i are above limits[i-1] and at
// most limits[i]. The last bucket also has all larger values.
var limits = func() (limits [256]float64) { // read only
	const growth = 1.09
	limits[1] = 1
	for i := 2; i < len(limits); i++ {
		limits[i] = limits[i-1] * growth
	}
	return limits
}()

// add counts a value. A negative one, by clocks that differ, counts as 0.
func (h *histogram) add(v int64) {
	i, _ := slices.BinarySearch(limits[:], float64(max(0, v)))
	h.merge(histogram{{1, uint8(min(i, len(limits)-1))}})
}

func (h *histogram) merge(other histogram) {
	for _, b := range other {
		i, ok := slices.BinarySearchFunc(*h, b.limit, func(b bucket, limit uint8) int { return int(b.limit) - int(limit) })
		if ok {
			(*h)[i].count += b.count
		} else {
			*h = slices.Insert(*h, i, b)
		}
	}
}

// quantile returns the value below or at which a share of all values are, within 5 %. ok is false
// without values.
func (h histogram) quantile(share float64) (value float64, ok bool) {
	count := 0.0
	for _, b := range h {
		count += float64(b.count)
	}
	if count == 0 {
		return 0, false
	}
	left := share * count
	for _, b := range h {
		if left -= float64(b.count); left <= 0 {
			if b.limit <= 1 {
				return limits[b.limit], true
			}
			return (limits[b.limit-1] + limits[b.limit]) / 2, true
		}
	}
	return limits[len(limits)-1], true
}
