package schedules

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Ticks on days of changes of clocks. These are in the past: governments change the rules, and machines
// know the new ones at different times.
func TestTicks(t *testing.T) {
	for _, c := range []struct{ cron, zone, want string }{
		{"0 0 5 9 *", "America/Santiago", "2021-09-05T04:00:00Z"},
		{"0 0 26 4 *", "Africa/Cairo", "2024-04-25T22:00:00Z"},
		{"0 0 14 3 *", "America/Havana", "2021-03-14T05:00:00Z"},
		{"0 0 28 3 *", "Asia/Beirut", "2021-03-27T22:00:00Z"},
		{"0 0 28 3 *", "Atlantic/Azores", "2021-03-28T01:00:00Z"},
		{"45 3 4 4 *", "Pacific/Chatham", "2021-04-03T15:00:00Z"},
		{"0 9 27 11 *", "UTC", "2021-11-27T09:00:00Z"},
	} {
		t.Run(c.zone, func(t *testing.T) {
			ticker, err := newTicker(&proto.Schedule{Cron: c.cron, TimeZone: c.zone})
			if err != nil {
				t.Fatal(err)
			}
			want, err := time.Parse(time.RFC3339, c.want)
			if err != nil {
				t.Fatal(err)
			}
			at, err := ticker.next(want.AddDate(0, -6, 0))
			if err != nil || !at.Equal(want) {
				t.Errorf("got %s, want %s: %v", at.Format(time.RFC3339), c.want, err)
			}
		})
	}
}

func TestIntervals(t *testing.T) {
	start := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	ticker, err := newTicker(&proto.Schedule{
		ID: "sch_a", Every: proto.Seconds(90 * time.Second), Jitter: proto.Seconds(20 * time.Second), CreatedAt: start,
	})
	if err != nil {
		t.Fatal(err)
	}
	for after, want := range map[string]string{
		"-1h": "1m30s", "0s": "1m30s", "89s": "1m30s", "90s": "3m0s",
		"200s": "4m30s",
	} {
		d, err := time.ParseDuration(after)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ticker.next(start.Add(d)); err != nil || got.Sub(start).String() != want {
			t.Errorf("the tick after %s is %s: %v", after, got.Sub(start), err)
		}
	}
	delays := map[time.Duration]bool{}
	for tick := start; len(delays) < 5; tick = tick.Add(ticker.every) {
		delay := ticker.due(tick).Sub(tick)
		if delay < 0 || delay >= 20*time.Second || ticker.due(tick).Sub(tick) != delay {
			t.Fatalf("the delay of %s is %s", tick, delay)
		}
		delays[delay] = true
	}
}

func TestSchedulesWithoutTicks(t *testing.T) {
	for _, c := range []struct{ cron, zone, want string }{
		{"", "Mars/Olympus", "time_zone must be"},
		{"", "../../etc/passwd", "time_zone must be"},
		{"", "Local", "time_zone must be"},
		{"* * * * *", "Europe/Berlin ", "time_zone must be"},
		{"", "UTC", "every must be"},
		{"* * *", "UTC", "cron must have 5 fields"},
		{"61 * * * *", "UTC", `cron has a wrong minute "61": it must be`},
		{"0 0 30 2 *", "UTC", "cron must match a day that exists"},
	} {
		if _, err := newTicker(&proto.Schedule{Cron: c.cron, TimeZone: c.zone}); err == nil ||
			!strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// stuck is an expression whose next tick is never later than the one before.
type stuck struct{}

func (stuck) Next(after time.Time, _ *time.Location) (time.Time, error) { return after, nil }

// A tick that cannot be computed is an error of its schedule. The state has no next tick, so that
// nothing looks at it again, until the timing is changed.
func TestTicksThatCannotBeComputed(t *testing.T) {
	for want, ticker := range map[string]*ticker{
		"the next tick is not after": {cron: stuck{}},
		"no such zone":               failedTicker(errors.New("no such zone")),
	} {
		s := &proto.Schedule{ID: "a", Org: "acme", TimedAt: noon}
		d, ok := decide(s, ticker, proto.ScheduleState{TimedAt: noon, Next: noon}, false, noon.Add(time.Second))
		if !ok || len(d.start) != 1 || !d.state.Next.IsZero() || !strings.HasPrefix(d.state.Error, want) {
			t.Errorf("decided %+v, want the error %q", d, want)
		}
		entry := entry{definition: &definition{Schedule: *s, ticker: ticker}, state: &d.state}
		if at, ok := entry.due(); ok {
			t.Errorf("it is looked at again at %s", at)
		}
		if again, ok := decide(s, ticker, d.state, false, noon.Add(time.Hour)); ok {
			t.Errorf("decided again: %+v", again)
		}
		s.TimedAt, s.Every, s.CreatedAt = noon.Add(time.Hour), proto.Seconds(time.Minute), noon
		fixed, err := newTicker(s)
		if err != nil {
			t.Fatal(err)
		}
		if d, _ = decide(s, fixed, d.state, false, noon.Add(time.Hour)); d.state.Error != "" || d.state.Next.IsZero() {
			t.Errorf("after a change of the timing: %+v", d.state)
		}
	}
}
