package usage

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// freshTimeout bounds how long a report waits until what has ended is counted.
	freshTimeout = 2 * time.Second
	freshPoll    = 100 * time.Millisecond
	infoTimeout  = time.Second
)

// group is what a row of a report has in common.
type group struct {
	org, day, key string
	language      proto.Language
}

// report adds up entries.
type report struct {
	*proto.UsageFilter
	from, to string // days
	rows     map[group]*proto.UsageRow
}

// Report returns the usage that a filter selects, sorted by what its rows differ in. It waits up to
// freshTimeout for what ended before the call. It returns a [*proto.FieldError] if there are more
// than [proto.MaxUsageRows] rows.
func (u *Usage) Report(ctx context.Context, f *proto.UsageFilter) (proto.UsageReport, error) {
	complete, err := u.fresh(ctx)
	if err != nil {
		return proto.UsageReport{}, err
	}
	r := &report{f, f.From.Format(proto.UsageDayLayout), f.To.Format(proto.UsageDayLayout), map[group]*proto.UsageRow{}}
	detailed := f.By(proto.UsageByKey) || f.By(proto.UsageByLanguage)
	org := cmp.Or(f.Org, "*")
	for m := firstOfMonth(f.From); !m.After(f.To); m = m.AddDate(0, 1, 0) {
		months, err := readEntries(ctx, u.Store, monthKey(org, m.Format(monthLayout)))
		if err != nil {
			return proto.UsageReport{}, err
		}
		for key, e := range months {
			if err := r.addMonth(orgOf(key), e, !detailed); err != nil {
				return proto.UsageReport{}, err
			}
		}
		for _, pattern := range r.dayPatterns(org, m, detailed) {
			days, err := readEntries(ctx, u.Store, pattern)
			if err != nil {
				return proto.UsageReport{}, err
			}
			for key, e := range days {
				if err := r.addDay(key, e); err != nil {
					return proto.UsageReport{}, err
				}
			}
		}
	}
	return proto.UsageReport{Rows: r.sorted(), Complete: complete}, nil
}

// dayPatterns returns the patterns of the entries of days in a month that the report needs. Those of
// all organisations are read day by day, so that they need not be in memory together.
func (r *report) dayPatterns(org string, m time.Time, detailed bool) []string {
	switch {
	case !detailed:
		return nil
	case org != "*":
		return []string{dayPrefix + org + "." + m.Format(monthLayout) + ".*.*"}
	}
	var patterns []string
	for day := m; day.Month() == m.Month(); day = day.AddDate(0, 0, 1) {
		if text := day.Format(proto.UsageDayLayout); text >= r.from && text <= r.to {
			patterns = append(patterns, dayKey(org, text, "*"))
		}
	}
	return patterns
}

// row returns the row of a group.
func (r *report) row(g group) (*proto.UsageRow, error) {
	for by, value := range map[proto.UsageGroup]*string{
		proto.UsageByOrg: &g.org, proto.UsageByDay: &g.day, proto.UsageByKey: &g.key, proto.UsageByLanguage: (*string)(&g.language),
	} {
		if !r.By(by) {
			*value = ""
		}
	}
	if r.rows[g] == nil {
		if len(r.rows) == proto.MaxUsageRows {
			return nil, proto.FieldErrorf("group_by", "gives more than %d rows; ask for fewer days, or for less detail", proto.MaxUsageRows)
		}
		r.rows[g] = &proto.UsageRow{Org: g.org, Day: g.day, Key: g.key, Language: g.language}
	}
	return r.rows[g], nil
}

// addMonth adds the stored bytes of a month's entry, and its sums if sums is set.
func (r *report) addMonth(org string, e *entry, sums bool) error {
	for day, bytes := range e.Stored {
		if day < r.from || day > r.to || bytes == 0 {
			continue
		}
		row, err := r.row(group{org: org, day: day})
		if err != nil {
			return err
		}
		row.StoredByteDays += bytes
	}
	for day, sum := range e.Sums {
		if !sums || day < r.from || day > r.to {
			continue
		}
		row, err := r.row(group{org: org, day: day})
		if err != nil {
			return err
		}
		row.Add(sum)
	}
	return nil
}

// addDay adds a day's entry.
func (r *report) addDay(entryKey string, e *entry) error {
	tokens := strings.Split(entryKey, ".")
	org, day, key := tokens[1], tokens[2]+"-"+tokens[3], tokens[4]
	if day < r.from || day > r.to {
		return nil
	}
	for language, sum := range e.Sums {
		row, err := r.row(group{org, day, key, proto.Language(language)})
		if err != nil {
			return err
		}
		row.Add(sum)
	}
	return nil
}

func (r *report) sorted() []proto.UsageRow {
	rows := make([]proto.UsageRow, 0, len(r.rows))
	for _, row := range r.rows {
		rows = append(rows, *row)
	}
	slices.SortFunc(rows, func(a, b proto.UsageRow) int {
		return cmp.Or(cmp.Compare(a.Org, b.Org), cmp.Compare(a.Day, b.Day), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Language, b.Language))
	})
	return rows
}

// fresh waits until everything that is stored now is counted, up to freshTimeout, and reports
// whether it is.
func (u *Usage) fresh(ctx context.Context) (bool, error) {
	last := map[string]uint64{}
	for _, st := range []jetstream.Stream{u.Store.Executions, u.Store.Deliveries} {
		seq, err := u.lastSeq(ctx, st)
		if err != nil {
			return false, err
		}
		last[store.StreamID(st)] = seq
	}
	deadline := time.NewTimer(freshTimeout)
	defer deadline.Stop()
	for {
		position := map[string]uint64{}
		e, err := u.Store.Usage.Get(ctx, positionKey)
		if err == nil {
			err = json.Unmarshal(e.Value(), &position)
		}
		if err != nil && !store.IsNotFound(err) {
			return false, fmt.Errorf("read the position of usage: %w", err)
		}
		counted := true
		for stream, seq := range last {
			counted = counted && position[stream] >= seq
		}
		if counted {
			return true, nil
		}
		select {
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-deadline.C:
			return false, nil
		case <-time.After(freshPoll):
		}
	}
}

// lastSeq returns the sequence number of the last message of a stream.
func (u *Usage) lastSeq(ctx context.Context, st jetstream.Stream) (seq uint64, err error) {
	name := st.CachedInfo().Config.Name
	ctx, cancel := context.WithTimeout(ctx, freshTimeout)
	defer cancel()
	err = u.Store.RetryLeader(name, infoTimeout).Do(ctx, func(ctx context.Context) error {
		now, err := u.Store.JS.Stream(ctx, name)
		if err == nil {
			seq = now.CachedInfo().State.LastSeq
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read the state of stream %s: %w", name, err)
	}
	return seq, nil
}
