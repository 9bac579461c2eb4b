package overview

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// clock is a clock that stands still.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func newTestCounters() (*Counters, *clock) {
	at := &clock{time.Unix(60*1000, 0)}
	return newCounters(at.now), at
}

func ended(org string, at time.Time, wait, duration time.Duration) *proto.Record {
	started := at.Add(-duration)
	result := proto.Exited(0)
	result.DurationMS = duration.Milliseconds()
	return &proto.Record{
		Meta: proto.Meta{Org: org, CreatedAt: started.Add(-wait)}, Status: proto.StatusSuccess, StartedAt: &started,
		CompletedAt: &at, Result: &result,
	}
}

func TestQuantilesAreWithinFivePercent(t *testing.T) {
	for v := int64(1); v < 24*time.Hour.Milliseconds(); v += 1 + v/13 {
		h := histogram{}
		h.add(v)
		if got, ok := h.quantile(0.5); !ok || math.Abs(got-float64(v)) > 0.05*float64(v) {
			t.Errorf("%d became %v", v, got)
		}
	}
	h := histogram{}
	if _, ok := h.quantile(0.5); ok {
		t.Error("an empty histogram has a median")
	}
	for v := range int64(1000) {
		h.add(v + 1)
	}
	for share, want := range map[float64]float64{0.5: 500, 0.99: 990, 1: 1000} {
		if got, _ := h.quantile(share); math.Abs(got-want) > 0.05*want {
			t.Errorf("the quantile %v is %v, want %v", share, got, want)
		}
	}
	h = histogram{}
	h.add(-5)
	h.add(0)
	h.add(math.MaxInt64)
	if got, _ := h.quantile(0.5); got != 0 {
		t.Errorf("the median with differing clocks is %v", got)
	}
}

func TestLastHour(t *testing.T) {
	c, clock := newTestCounters()
	c.Queued(&proto.Meta{Org: "a", CreatedAt: clock.at})
	c.Queued(&proto.Meta{Org: "b", CreatedAt: clock.at})
	c.Queued(&proto.Meta{Org: "a", CreatedAt: clock.at, SandboxID: "sbx_1"})
	clock.at = clock.at.Add(time.Minute)
	c.Queued(&proto.Meta{Org: "a", CreatedAt: clock.at.Add(time.Hour)}) // by a wrong clock
	c.Ended(ended("a", clock.at, 2*time.Second, 10*time.Second))
	withdrawn := ended("a", clock.at, 0, 0)
	withdrawn.Status, withdrawn.StartedAt = proto.StatusCancelled, nil
	c.Ended(withdrawn)

	hour := c.lastHour("a")
	from, minutes, total := hour.from, hour.minutes, hour.total
	if want := time.Unix(60*1001, 0); !from.Equal(want) {
		t.Errorf("complete since %s", from)
	}
	if minutes[span-2].arrivals != 1 || minutes[span-1].arrivals != 1 || total.arrivals != 2 {
		t.Errorf("arrivals %d, %d, in total %d", minutes[span-2].arrivals, minutes[span-1].arrivals, total.arrivals)
	}
	if got := minutes[span-1].ends; len(got) != 2 || got[proto.StatusSuccess] != 1 || got[proto.StatusCancelled] != 1 {
		t.Errorf("ends %v", got)
	}
	wait, _ := total.wait.quantile(0.5)
	duration, _ := total.duration.quantile(0.99)
	if math.Abs(wait-2000) > 100 || math.Abs(duration-10_000) > 500 {
		t.Errorf("waited %v, took %v", wait, duration)
	}
	if all := c.lastHour("").total.arrivals; all != 3 {
		t.Errorf("all organisations have %d arrivals", all)
	}

	clock.at = clock.at.Add(span * time.Minute)
	if hour := c.lastHour("a"); hour.total.arrivals != 0 || !hour.from.Equal(clock.at.Add(-59*time.Minute)) ||
		!hour.start.Equal(hour.from) {
		t.Errorf("an hour later: %d since %s", hour.total.arrivals, hour.from)
	}
	c.Queued(&proto.Meta{Org: "b", CreatedAt: clock.at})
	if len(c.orgs) != 2 || len(c.orgs["b"]) != 1 {
		t.Errorf("kept %v", c.orgs)
	}
}

// Organisations with few executions take little memory.
func TestMemoryOfManyOrganisations(t *testing.T) {
	const orgs = 500
	c, clock := newTestCounters()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for range span {
		for i := range orgs {
			c.Ended(ended(fmt.Sprint(i), clock.at, time.Second, time.Duration(i)*time.Second))
		}
		clock.at = clock.at.Add(time.Minute)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if each := (int64(after.HeapAlloc) - int64(before.HeapAlloc)) / orgs / span; each > 600 {
		t.Errorf("a minute of an organisation takes %d bytes", each)
	}
	runtime.KeepAlive(c)
}
