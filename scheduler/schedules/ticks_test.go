package schedules

import (
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

func TestTicks(t *testing.T) {
	for _, c := range []struct{ name, cron, zone, after, want string }{
		{"five fields", "*/20 9 * * 1-5", "UTC", "2026-11-20T09:30:00Z", "2026-11-20T09:40:00Z 2026-11-23T09:00:00Z"},
		{"six fields", "30 0 12 * * *", "UTC", "2026-11-20T12:00:00Z", "2026-11-20T12:00:30Z 2026-11-21T12:00:30Z"},
		{"a word", "@hourly", "UTC", "2026-11-20T12:00:00Z", "2026-11-20T13:00:00Z 2026-11-20T14:00:00Z"},
		{"names", "0 6 1 jan sun", "UTC", "2027-01-01T06:00:00Z", "2027-01-03T06:00:00Z 2027-01-10T06:00:00Z"},
		{"a time zone", "0 9 * * *", "Asia/Kolkata", "2026-11-20T00:00:00Z", "2026-11-20T03:30:00Z 2026-11-21T03:30:00Z"},
		// On 2026-03-29 the clock goes from 02:00 to 03:00.
		{"forward: a skipped time is an hour later", "30 2 * * *", "Europe/Berlin", "2026-03-28T02:00:00Z", "2026-03-29T01:30:00Z 2026-03-30T00:30:00Z"},
		{"forward: another time", "30 8 * * *", "Europe/Berlin", "2026-03-28T08:00:00Z", "2026-03-29T06:30:00Z 2026-03-30T06:30:00Z"},
		{"forward: every hour", "0 * * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T01:00:00Z 2026-03-29T02:00:00Z"},
		// On 2026-10-25 the clock goes from 03:00 to 02:00.
		{"back: a repeated time counts once", "30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", "2026-10-25T00:30:00Z 2026-10-26T01:30:00Z"},
		{"back: from between the two", "30 2 * * *", "Europe/Berlin", "2026-10-25T01:00:00Z", "2026-10-26T01:30:00Z 2026-10-27T01:30:00Z"},
		{"back: every half hour", "*/30 * * * *", "Europe/Berlin", "2026-10-25T00:15:00Z", "2026-10-25T00:30:00Z 2026-10-25T01:00:00Z 2026-10-25T01:30:00Z"},
		{"back by half an hour", "45 1 * * *", "Australia/Lord_Howe", "2026-04-04T00:00:00Z", "2026-04-04T14:45:00Z 2026-04-05T15:15:00Z"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ticker, err := newTicker(&proto.Schedule{Cron: c.cron, TimeZone: c.zone})
			if err != nil {
				t.Fatal(err)
			}
			at, err := time.Parse(time.RFC3339, c.after)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for range strings.FieldsSeq(c.want) {
				at = ticker.next(at)
				got = append(got, at.Format(time.RFC3339))
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("got %s, want %s", strings.Join(got, " "), c.want)
			}
		})
	}
}

func TestIntervals(t *testing.T) {
	start := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	ticker, err := newTicker(&proto.Schedule{ID: "sch_a", Every: proto.Seconds(90 * time.Second), Jitter: proto.Seconds(20 * time.Second), CreatedAt: start})
	if err != nil {
		t.Fatal(err)
	}
	for after, want := range map[string]string{"-1h": "1m30s", "0s": "1m30s", "89s": "1m30s", "90s": "3m0s", "200s": "4m30s"} {
		d, err := time.ParseDuration(after)
		if err != nil {
			t.Fatal(err)
		}
		if got := ticker.next(start.Add(d)).Sub(start); got.String() != want {
			t.Errorf("the tick after %s is %s", after, got)
		}
	}
	delays := map[time.Duration]bool{}
	for tick := start; len(delays) < 5; tick = ticker.next(tick) {
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
		{"* * *", "UTC", "cron must be an expression"},
		{"61 * * * *", "UTC", "cron must be an expression"},
		{"0 0 L * *", "UTC", "cron must be an expression"},
		{"0 0 30 2 *", "UTC", "cron must match a day"},
		{"@every 1h", "UTC", "cron must not be an interval"},
		{"TZ=Asia/Tokyo 0 9 * * *", "UTC", "cron must not name a time zone"},
	} {
		if _, err := newTicker(&proto.Schedule{Cron: c.cron, TimeZone: c.zone}); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
