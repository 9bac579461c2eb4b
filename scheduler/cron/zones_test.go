package cron

import (
	"archive/zip"
	"fmt"
	"go/build"
	"io"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"
)

const (
	firstYear, lastYear = 2026, 2037 // without the last one

	minutesOfDay = 24 * 60
	margin       = minutesOfDay / 6 // of a table, around the minutes that are compared
)

// zone is a time zone with its own data. Names of the same data are one zone.
type zone struct {
	name string
	*time.Location
}

// zones returns all time zones of Go's copy of the time zone database.
func zones(t *testing.T) (list []zone) {
	t.Helper()
	database, err := zip.OpenReader(filepath.Join(build.Default.GOROOT, "lib", "time", "zoneinfo.zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = database.Close() }() // only read
	seen := map[string]bool{}
	for _, file := range database.File {
		if strings.HasSuffix(file.Name, "/") {
			continue
		}
		r, err := file.Open()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		location, err := time.LoadLocationFromTZData(file.Name, data)
		if err != nil {
			t.Fatal(err)
		}
		if !seen[string(data)] {
			list = append(list, zone{file.Name, location})
		}
		seen[string(data)] = true
	}
	if len(list) < 300 {
		t.Fatalf("the database has %d time zones", len(list))
	}
	return list
}

// minuteOf returns the minute of an instant, counted from 1970.
func minuteOf(t time.Time) int { return int(t.Unix() / 60) }

// clock returns what the clock of a zone shows in a minute, as a minute of a clock in UTC.
func (z *zone) clock(minute int) int {
	_, offset := time.Unix(int64(minute)*60, 0).In(z.Location).Zone()
	return minute + offset/60
}

// table has the minutes at which each time of day ticks, in order.
type table struct {
	daily  [minutesOfDay][]int // the time of day on each day
	hourly [minutesOfDay][]int // as often as the clock shows it
}

// table reads the clock minute by minute. A time that is skipped gets the minute in which the clock
// would show it had it not been changed.
func (z *zone) table(from, to int) *table {
	t, before := new(table), z.clock(from-1)
	latest := before // the latest time that was on the clock
	for minute := from; minute < to; minute++ {
		shown := z.clock(minute)
		for skipped := before + 1; skipped < shown; skipped++ {
			of := skipped % minutesOfDay
			if skipped > latest {
				t.daily[of] = append(t.daily[of], minute+skipped-before-1)
			}
			t.hourly[of] = append(t.hourly[of], minute+skipped-before-1)
		}
		of := shown % minutesOfDay
		if shown > latest {
			t.daily[of] = append(t.daily[of], minute)
		}
		t.hourly[of] = append(t.hourly[of], minute)
		before, latest = shown, max(latest, shown)
	}
	return t
}

// between returns the minutes after from and before to, each of them once.
func between(minutes []int, from, to int) []int {
	minutes = slices.DeleteFunc(slices.Clone(minutes), func(minute int) bool { return minute <= from || minute >= to })
	slices.Sort(minutes)
	return slices.Compact(minutes)
}

// compare compares the ticks of an expression with those of a table.
func (z *zone) compare(t *testing.T, expression string, from, to int, want []int) {
	t.Helper()
	e, err := Parse(expression)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Unix(int64(from)*60, 0)
	for i := 0; ; i++ {
		next, err := e.Next(at, z.Location)
		if err != nil || !next.After(at) {
			t.Errorf("%s in %s after %s: %s, %v", expression, z.name, at.UTC(), next, err)
			return
		}
		at = next
		if minuteOf(at) >= to {
			if i != len(want) {
				start := time.Unix(int64(from)*60, 0).UTC()
				t.Errorf("%s in %s: %d ticks from %s on, want %d", expression, z.name, i, start, len(want))
			}
			return
		}
		if i >= len(want) || want[i] != minuteOf(at) {
			t.Errorf("%s in %s: unexpected tick %s, the %dth of %d", expression, z.name, at, i+1, len(want))
			return
		}
	}
}

// years returns the first minute of the years that are tested and the one after the last.
func years() (from, to int) {
	return minuteOf(time.Date(firstYear, 1, 1, 0, 0, 0, 0, time.UTC)),
		minuteOf(time.Date(lastYear, 1, 1, 0, 0, 0, 0, time.UTC))
}

// changes returns the minutes at which the clock is changed, found by looking at it in intervals.
func (z *zone) changes(interval int) (list []int) {
	ahead := func(minute int) int { return z.clock(minute) - minute }
	from, to := years()
	for minute := from; minute < to; minute += interval {
		if ahead(minute) != ahead(minute+interval) {
			list = append(list, minute+sort.Search(interval, func(i int) bool { return ahead(minute+i) != ahead(minute) }))
		}
	}
	return list
}

// TestDaysOfChanges compares the ticks of daily expressions around all changes of clocks, in all
// time zones: each time of day is one tick on each day. So does it at the end of leap years, where
// the standard library is wrong about the next change.
func TestDaysOfChanges(t *testing.T) {
	t.Parallel()
	around, interval := minutesOfDay, minutesOfDay/24
	if testing.Short() {
		around, interval = minutesOfDay/3, minutesOfDay
	}
	seen := map[string]bool{} // zones often change their clocks in the same way
	for _, z := range zones(t) {
		changes := z.changes(interval)
		for _, change := range changes {
			if key := fmt.Sprint(change, z.clock(change-1), z.clock(change)); !seen[key] {
				seen[key] = true
				z.compareDaily(t, change, around)
			}
		}
		for year := firstYear; year < lastYear && len(changes) > 0; year++ {
			if last := time.Date(year, 12, 31, 12, 0, 0, 0, time.UTC); last.YearDay() == 366 {
				z.compareDaily(t, minuteOf(last), minutesOfDay/3)
			}
		}
	}
	t.Logf("%d different changes", len(seen))
}

// compareDaily compares the ticks of daily expressions around a minute.
func (z *zone) compareDaily(t *testing.T, moment, around int) {
	t.Helper()
	from, to := moment-around, moment+around
	table := z.table(from-margin, to+margin)
	var times []int
	for of := range minutesOfDay {
		if around >= minutesOfDay || of%97 == moment/minutesOfDay%97 {
			times = append(times, of)
		}
	}
	for _, edge := range []int{z.clock(moment - 1), z.clock(moment)} {
		times = append(times, (edge-1)%minutesOfDay, edge%minutesOfDay, (edge+1)%minutesOfDay)
	}
	for _, of := range times {
		z.compare(t, fmt.Sprintf("%d %d * * *", of%60, of/60), from, to, between(table.daily[of], from, to))
	}
	var hourly []int
	for of := moment % 60; of < minutesOfDay; of += 60 {
		hourly = append(hourly, table.hourly[of]...)
	}
	z.compare(t, fmt.Sprintf("%d * * * *", moment%60), from, to, between(hourly, from, to))
}

// TestAllMinutes compares the ticks of each minute of the years, in all time zones that differ in
// them. One expression matches the minutes of one half of the day, another those of the other half:
// no expression that matches all hours has daily ticks.
func TestAllMinutes(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	interval := minutesOfDay / 24
	from, to := years()
	if testing.Short() { // TestDaysOfChanges has the days that matter
		interval, to = minutesOfDay, from+minutesOfDay
	}
	for _, z := range zones(t) {
		changes := z.changes(interval)
		key := fmt.Sprint(z.clock(from) - from)
		for _, change := range changes {
			key += fmt.Sprint(" ", change, z.clock(change)-change)
		}
		if seen[key] {
			continue
		}
		seen[key] = true
		t.Run(z.name, func(t *testing.T) {
			t.Parallel()
			table := z.table(from-margin, to+margin)
			for half, expression := range []string{"* 0-11 * * *", "* 12-23 * * *"} {
				var want []int
				for of := half * minutesOfDay / 2; of < (half+1)*minutesOfDay/2; of++ {
					want = append(want, table.daily[of]...)
				}
				z.compare(t, expression, from, to, between(want, from, to))
			}
		})
	}
}
