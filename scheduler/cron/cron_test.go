package cron

import (
	"strings"
	"testing"
	"time"
)

func TestExpressions(t *testing.T) {
	for _, c := range []struct{ name, cron, after, want string }{
		{"steps", "*/20 9 * * *", "2026-11-20T09:30:00Z", "2026-11-20T09:40:00Z 2026-11-21T09:00:00Z"},
		{
			"a step from a value", "50/5 9 * * *", "2026-11-20T09:30:00Z",
			"2026-11-20T09:50:00Z 2026-11-20T09:55:00Z 2026-11-21T09:50:00Z",
		},
		{
			"a step larger than its range", "10 7-10/5 * * *", "2026-11-20T09:30:00Z",
			"2026-11-21T07:10:00Z 2026-11-22T07:10:00Z",
		},
		{
			"a step larger than its field", "*/70 12 * * *", "2026-11-20T09:30:00Z",
			"2026-11-20T12:00:00Z 2026-11-21T12:00:00Z",
		},
		{
			"a list", "1,5-6,*/30 12 * * *", "2026-11-20T12:01:00Z",
			"2026-11-20T12:05:00Z 2026-11-20T12:06:00Z 2026-11-20T12:30:00Z 2026-11-21T12:00:00Z",
		},
		{"seconds", "30,40 0 12 * * *", "2026-11-20T12:00:30.5Z", "2026-11-20T12:00:40Z 2026-11-21T12:00:30Z"},
		{
			"a range over midnight", "0 22-1 * * *", "2026-11-20T12:00:00Z",
			"2026-11-20T22:00:00Z 2026-11-20T23:00:00Z 2026-11-21T00:00:00Z 2026-11-21T01:00:00Z 2026-11-21T22:00:00Z",
		},
		{
			"a range over the weekend", "0 0 * * fri-mon/2", "2026-11-20T12:00:00Z",
			"2026-11-22T00:00:00Z 2026-11-27T00:00:00Z",
		},
		{
			"Sunday is 7", "0 0 * * 5-7", "2026-11-20T12:00:00Z",
			"2026-11-21T00:00:00Z 2026-11-22T00:00:00Z 2026-11-27T00:00:00Z",
		},
		{
			"Sunday is 0 and 7", "0 0 * * 0-7", "2026-11-20T12:00:00Z",
			"2026-11-21T00:00:00Z 2026-11-22T00:00:00Z 2026-11-23T00:00:00Z 2026-11-24T00:00:00Z 2026-11-25T00:00:00Z " +
				"2026-11-26T00:00:00Z 2026-11-27T00:00:00Z",
		},
		{
			"names", "0 6 1 Jan-mar *", "2027-01-01T06:00:00Z",
			"2027-02-01T06:00:00Z 2027-03-01T06:00:00Z 2028-01-01T06:00:00Z",
		},
		{"a word", "@Weekly", "2026-11-20T12:00:00Z", "2026-11-22T00:00:00Z 2026-11-29T00:00:00Z"},
		{"leap days", "0 0 29 2 ?", "2096-01-01T00:00:00Z", "2096-02-29T00:00:00Z 2104-02-29T00:00:00Z"},
		{"the end of the year", "59 59 23 31 12 *", "2026-12-31T23:59:59Z", "2027-12-31T23:59:59Z"},

		{
			"either day", "0 0 13 * FRI", "2026-11-10T00:00:00Z",
			"2026-11-13T00:00:00Z 2026-11-20T00:00:00Z 2026-11-27T00:00:00Z 2026-12-04T00:00:00Z 2026-12-11T00:00:00Z " +
				"2026-12-13T00:00:00Z",
		},
		{
			"a day with a step is restricted", "0 0 */10 * MON", "2026-11-20T12:00:00Z",
			"2026-11-21T00:00:00Z 2026-11-23T00:00:00Z 2026-11-30T00:00:00Z 2026-12-01T00:00:00Z",
		},
		{
			"a day of the week with a step is restricted", "0 0 1 * */3", "2026-11-28T12:00:00Z",
			"2026-11-29T00:00:00Z 2026-12-01T00:00:00Z 2026-12-02T00:00:00Z",
		},
		{"? and */1 are *", "0 0 ? * MON,TUE", "2026-11-20T12:00:00Z", "2026-11-23T00:00:00Z 2026-11-24T00:00:00Z"},

		{
			"the last day", "0 0 L * *", "2028-01-01T00:00:00Z",
			"2028-01-31T00:00:00Z 2028-02-29T00:00:00Z 2028-03-31T00:00:00Z 2028-04-30T00:00:00Z",
		},
		{"days before the last", "0 0 l-3 * ?", "2027-01-01T00:00:00Z", "2027-01-28T00:00:00Z 2027-02-25T00:00:00Z"},
		{
			"as many days before the last as there are", "0 0 L-30 * *", "2027-01-31T00:00:00Z",
			"2027-03-01T00:00:00Z 2027-05-01T00:00:00Z",
		},
		{
			"the last workday", "0 0 LW * *", "2027-01-01T00:00:00Z",
			"2027-01-29T00:00:00Z 2027-02-26T00:00:00Z 2027-03-31T00:00:00Z",
		},
		{
			"the workday nearest to days before the last", "0 0 L-1W * *", "2027-01-01T00:00:00Z",
			"2027-01-29T00:00:00Z 2027-02-26T00:00:00Z 2027-03-30T00:00:00Z",
		},
		{
			"the nearest workday: itself, before, after", "0 0 15W * ?", "2027-04-01T00:00:00Z",
			"2027-04-15T00:00:00Z 2027-05-14T00:00:00Z 2027-06-15T00:00:00Z 2027-07-15T00:00:00Z 2027-08-16T00:00:00Z",
		},
		{
			"the nearest workday stays in its month: Saturday the 1st", "0 0 1w 5 *", "2027-04-01T00:00:00Z",
			"2027-05-03T00:00:00Z",
		},
		{
			"the nearest workday stays in its month: Sunday the 31st", "0 0 31W 1 *", "2027-01-01T00:00:00Z",
			"2027-01-29T00:00:00Z",
		},
		{
			"no nearest workday of a day that the month does not have", "0 0 31W * *", "2027-03-31T00:00:00Z",
			"2027-05-31T00:00:00Z",
		},
		{
			"a list of special days", "0 0 1,15W,L * *", "2027-01-01T00:00:00Z",
			"2027-01-15T00:00:00Z 2027-01-31T00:00:00Z 2027-02-01T00:00:00Z",
		},
		{"the last Friday", "0 0 * * FRIL", "2027-01-01T00:00:00Z", "2027-01-29T00:00:00Z 2027-02-26T00:00:00Z"},
		{"the last Friday is 5, as in other fields of cron", "0 0 * * 5L", "2027-01-01T00:00:00Z", "2027-01-29T00:00:00Z"},
		{"the last Sunday", "0 0 * * 7l", "2027-01-01T00:00:00Z", "2027-01-31T00:00:00Z 2027-02-28T00:00:00Z"},
		{"the third Friday", "0 0 ? * 5#3", "2027-01-01T00:00:00Z", "2027-01-15T00:00:00Z 2027-02-19T00:00:00Z"},
		{
			"the fifth Sunday, of months that have it", "0 0 * * sun#5,0#5", "2027-01-01T00:00:00Z",
			"2027-01-31T00:00:00Z 2027-05-30T00:00:00Z",
		},
		{
			"once in decades", "0 0 * 2 FRI#5", "2026-01-01T00:00:00Z",
			"2036-02-29T00:00:00Z 2064-02-29T00:00:00Z 2092-02-29T00:00:00Z 2104-02-29T00:00:00Z",
		},
	} {
		t.Run(c.name, func(t *testing.T) { checkTicks(t, c.cron, "UTC", c.after, c.want) })
	}
}

func checkTicks(t *testing.T, expression, zone, after, want string) {
	t.Helper()
	e, err := Parse(expression)
	if err != nil {
		t.Fatal(err)
	}
	location, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	at, err := time.Parse(time.RFC3339Nano, after)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for range strings.FieldsSeq(want) {
		if at, err = e.Next(at, location); err != nil {
			t.Fatal(err)
		}
		got = append(got, at.Format(time.RFC3339Nano))
	}
	if strings.Join(got, " ") != want {
		t.Errorf("got %s, want %s", strings.Join(got, " "), want)
	}
}

// The changes are in the past, because governments change the rules, and machines know the new ones at
// different times.
func TestChangesOfClocks(t *testing.T) {
	for _, c := range []struct{ name, cron, zone, after, want string }{
		{"a fixed offset", "0 0 * * *", "Etc/GMT-14", "2015-11-20T12:00:00Z", "2015-11-21T10:00:00Z 2015-11-22T10:00:00Z"},
		{
			"an offset of minutes", "0 9 * * *", "Asia/Kolkata", "2015-11-20T00:00:00Z",
			"2015-11-20T03:30:00Z 2015-11-21T03:30:00Z",
		},
		{
			"forward: a skipped time is an hour later", "30 2 * * *", "Europe/Berlin", "2015-03-28T02:00:00Z",
			"2015-03-29T01:30:00Z 2015-03-30T00:30:00Z",
		},
		{
			"forward: another time", "30 8 * * *", "Europe/Berlin", "2015-03-28T08:00:00Z",
			"2015-03-29T06:30:00Z 2015-03-30T06:30:00Z",
		},
		{
			"forward: every hour", "0 * * * *", "Europe/Berlin", "2015-03-29T00:00:00Z",
			"2015-03-29T01:00:00Z 2015-03-29T02:00:00Z",
		},
		{
			"forward at midnight", "@daily", "America/Santiago", "2021-09-04T03:00:00Z",
			"2021-09-04T04:00:00Z 2021-09-05T04:00:00Z 2021-09-06T03:00:00Z",
		},
		{
			"back: a repeated time counts once", "30 2 * * *", "Europe/Berlin", "2015-10-24T12:00:00Z",
			"2015-10-25T00:30:00Z 2015-10-26T01:30:00Z",
		},
		{
			"back: from between the two", "30 2 * * *", "Europe/Berlin", "2015-10-25T01:00:00Z",
			"2015-10-26T01:30:00Z 2015-10-27T01:30:00Z",
		},
		{
			"back: every half hour", "*/30 * * * *", "Europe/Berlin", "2015-10-25T00:15:00Z",
			"2015-10-25T00:30:00Z 2015-10-25T01:00:00Z 2015-10-25T01:30:00Z",
		},
		// Irish winter time is a saving of minus an hour.
		{
			"Dublin, forward", "30 1 * * *", "Europe/Dublin", "2021-03-27T12:00:00Z",
			"2021-03-28T01:30:00Z 2021-03-29T00:30:00Z",
		},
		{"Dublin, back", "30 1 * * *", "Europe/Dublin", "2021-10-30T12:00:00Z", "2021-10-31T00:30:00Z 2021-11-01T01:30:00Z"},
		{
			"Lord Howe, forward by half an hour", "15 2 * * *", "Australia/Lord_Howe", "2021-10-02T00:00:00Z",
			"2021-10-02T15:45:00Z 2021-10-03T15:15:00Z",
		},
		{
			"Lord Howe, back by half an hour", "45 1 * * *", "Australia/Lord_Howe", "2021-04-03T00:00:00Z",
			"2021-04-03T14:45:00Z 2021-04-04T15:15:00Z",
		},
		{
			"Lord Howe, each hour", "45 * * * *", "Australia/Lord_Howe", "2021-04-03T14:00:00Z",
			"2021-04-03T14:45:00Z 2021-04-03T15:15:00Z 2021-04-03T16:15:00Z",
		},
		{
			"Casablanca, back for Ramadan", "30 2 * * *", "Africa/Casablanca", "2021-04-10T12:00:00Z",
			"2021-04-11T01:30:00Z 2021-04-12T02:30:00Z",
		},
		{
			"Casablanca, forward after it", "30 2 * * *", "Africa/Casablanca", "2021-05-15T12:00:00Z",
			"2021-05-16T02:30:00Z 2021-05-17T01:30:00Z",
		},
		{
			"Apia skips a day", "0 12 30 12 *", "Pacific/Apia", "2011-12-01T00:00:00Z",
			"2011-12-30T22:00:00Z 2012-12-29T22:00:00Z",
		},
		{
			"Apia skips a day of daily ticks", "0 12 * * *", "Pacific/Apia", "2011-12-29T00:00:00Z",
			"2011-12-29T22:00:00Z 2011-12-30T22:00:00Z 2011-12-31T22:00:00Z",
		},
		{
			"a skipped time after a later one", "0,30 2,3 * * *", "Europe/Berlin", "2021-03-27T12:00:00Z",
			"2021-03-28T01:00:00Z 2021-03-28T01:30:00Z 2021-03-29T00:00:00Z",
		},
		{
			"a skipped time does not hide a later one", "20 2 28 3 *", "Europe/Berlin", "2021-03-28T01:10:00Z",
			"2021-03-28T01:20:00Z 2022-03-28T00:20:00Z",
		},
		{
			"the last day of a leap year", "0 12 * * *", "Asia/Tokyo", "2040-12-30T12:00:00Z",
			"2040-12-31T03:00:00Z 2041-01-01T03:00:00Z",
		},
		{"far ahead", "0 12 1 7 *", "Asia/Tokyo", "2400-01-01T00:00:00Z", "2400-07-01T03:00:00Z"},
	} {
		t.Run(c.name, func(t *testing.T) { checkTicks(t, c.cron, c.zone, c.after, c.want) })
	}
}

func TestWrongExpressions(t *testing.T) {
	for expression, want := range map[string]string{
		"": "must have 5 fields (minute, hour, day of the month, month, day of the " +
			"week), or 6 with the second first; it has 0",
		"* * *":                   "must have 5 fields",
		"0 0 1 1 * 2027 1":        "must have 5 fields",
		strings.Repeat("1,", 600): "must be at most 1024 bytes",
		"TZ=Asia/Tokyo 0 9 * * *": "must not name a time zone; use time_zone",
		"CRON_TZ=UTC @daily":      "must not name a time zone; use time_zone",
		"@every 1h":               "must not be an interval; use every",
		"@reboot":                 `must not be "@reboot"; the names are @hourly, @daily,`,
		"@daily 5":                `must not be "@daily 5"`,
		"61 * * * *":              `has a wrong minute "61": it must be *, a value from 0 to 59, a range a-b,`,
		"60 * * * * *":            `has a wrong second "60": it must be *, a value from 0 to 59`,
		"0 24 * * *":              `has a wrong hour "24": it must be *, a value from 0 to 23`,
		"0 1,5-24 * * *":          `has a wrong hour "5-24": it must be`,
		"0 0 0 * *":               `has a wrong day of the month "0": it must be *, a value from 1 to 31`,
		"0 0 * 13 *":              `has a wrong month "13": it must be *, a value from 1 to 12 or JAN to DEC`,
		"0 0 * July *":            `has a wrong month "July": it must be`,
		"0 0 * * 8": `has a wrong day of the week "8": it must be *, a value from 0 to 7 or ` +
			`SUN to SAT`,
		"0 0 * * N M":       `has a wrong month "N"`,
		"0 0 1,,2 * *":      `has a wrong day of the month "": it must be`,
		"0 0 +1 * *":        `has a wrong day of the month "+1": it must be`,
		"-5 * * * *":        `has a wrong minute "-5": it must be`,
		"5- * * * *":        `has a wrong minute "5-": it must be`,
		"1-2-3 * * * *":     `has a wrong minute "1-2-3": it must be`,
		"*-5 * * * *":       `has a wrong minute "*-5": it must be`,
		"*/0 * * * *":       `has a wrong minute "*/0": what follows / must be a whole number from 1`,
		"*/ * * * *":        `has a wrong minute "*/": what follows / must be`,
		"*/5/5 * * * *":     `has a wrong minute "*/5/5": what follows / must be`,
		"0 */-2 * * *":      `has a wrong hour "*/-2": what follows / must be`,
		"0 0 * * MON-FRI/x": `has a wrong day of the week "MON-FRI/x": what follows / must be`,
		"H * * * *": `has a wrong minute "H": H, a value chosen by a hash, is not supported; ` +
			`name a value, and use jitter`,
		"0 h(0-7) * * *": `has a wrong hour "h(0-7)": H, a value chosen by a hash, is not supported`,
		"0 0 H/2 * *":    `has a wrong day of the month "H/2": H, a value`,
		"? * * * *":      `has a wrong minute "?": ? is for the days`,
		"0 0 ?/2 * *":    `has a wrong day of the month "?/2": ? is for the days, and has no step`,
		"L * * * *":      `has a wrong minute "L": L, W and # are for the days`,
		"0 0 * L *":      `has a wrong month "L": L, W and # are for the days`,
		"0 0 * 1#2 *":    `has a wrong month "1#2": L, W and # are for the days`,
		"0 0 15L * *": `has a wrong day of the month "15L": L is the last day of the month, L-3 ` +
			`three days before it,`,
		"0 0 L-31 * *": `has a wrong day of the month "L-31": L is the last day`,
		"0 0 W * *":    `has a wrong day of the month "W": L is the last day`,
		"0 0 32W * *":  `has a wrong day of the month "32W": L is the last day`,
		"0 0 1-5W * *": `has a wrong day of the month "1-5W": L is the last day`,
		"0 0 5#3 * *":  `has a wrong day of the month "5#3": L is the last day`,
		"0 0 * * L": `has a wrong day of the week "L": FRIL or 5L is the last Friday of the ` +
			`month; L needs a day before it`,
		"0 0 * * L-3": `has a wrong day of the week "L-3": L, W and # are for the days, and have ` +
			`neither ranges nor steps`,
		"0 0 * * 15W": `has a wrong day of the week "15W": W is for the day of the month`,
		"0 0 * * FRI#6": `has a wrong day of the week "FRI#6": FRI#3 is the third Friday of the ` +
			`month; it has at most five`,
		"0 0 * * FRI#": `has a wrong day of the week "FRI#": FRI#3 is`,
		"0 0 * * 8#1":  `has a wrong day of the week "8#1": FRI#3 is`,
		"0 0 30 2 *":   `must match a day that exists; no month "2" has a day of the month "30"`,
		"0 0 31 2,4,6,9,11 ?": `must match a day that exists; no month "2,4,6,9,11" has a day of the ` +
			`month "31"`,
		"0 0 30W feb *":                       `must match a day that exists; no month "feb" has a day of the month "30W"`,
		strings.Repeat("9", 500):              "must have 5 fields",
		"0 0 * * \xff":                        `has a wrong day of the week "\xff": it must be`,
		"0 0 * * " + strings.Repeat("x", 500): `has a wrong day of the week "` + strings.Repeat("x", 64) + `…": it must be`,
	} {
		if _, err := Parse(expression); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v", expression, err)
		}
	}
}

// FuzzParse checks that an expression is either refused with a reason, or has ticks that match it
// and go forward.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"* * * * *", "*/20 9 * * 1-5", "30 0 12 * * *", "@daily", "@every 1h", "0 6 1 jan sun", "10 7-10/5 * * *",
		"0 22-2 * * fri-mon", "0 0 L,LW,L-3,15W * ?",
		"0 0 ? * FRIL,5#3", "0 0 30 2 *", "45 3 4 4 *", "H * * * *", "*/99999999999 * * * *", "0 0 1,,2 * *",
		"TZ=UTC * * * * *", "0 0 * * 0-7/7", "59 59 23 31 12 6#5",
	} {
		f.Add(seed, uint32(1_800_000_000))
	}
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string, unix uint32) {
		e, err := Parse(text)
		if err != nil {
			if message := err.Error(); len(message) > 500 || !strings.HasPrefix(message, "must ") &&
				!strings.HasPrefix(message, "has a wrong ") {
				t.Errorf("%q: %s", text, message)
			}
			return
		}
		at := time.Unix(int64(unix), 0)
		for range 3 {
			next, err := e.Next(at, berlin)
			if err != nil || !next.After(at) {
				t.Fatalf("%q: after %s comes %s, %v", text, at, next, err)
			}
			at = next
			if e.seconds&(1<<at.Second()) == 0 || e.minutes&(1<<at.Minute()) == 0 { // clocks in Berlin change by hours
				t.Fatalf("%q matches %s", text, at)
			}
		}
	})
}
