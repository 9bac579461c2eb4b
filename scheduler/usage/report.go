package usage

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// freshTimeout limits how long a report waits for the counter to catch up.
	freshTimeout = 2 * time.Second
	freshPoll    = 100 * time.Millisecond
)

// group is the values by which a row of a report is grouped.
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

// Report returns the usage that a filter selects, sorted by its groups. It waits up to freshTimeout
// for everything that ended before the call. It returns a [*proto.FieldError] if there are more
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
		if err := r.read(ctx, u.Store, orgEntry(org, m.Format(monthLayout)), func(tokens []string, e *entry) error {
			return r.addOrg(tokens[1], e, !detailed)
		}); err != nil {
			return proto.UsageReport{}, err
		}
		if !detailed {
			continue
		}
		if err := r.read(ctx, u.Store, keyEntry(org, m.Format(monthLayout), "*"), func(tokens []string, e *entry) error {
			return r.addKey(tokens[1], tokens[3], e)
		}); err != nil {
			return proto.UsageReport{}, err
		}
	}
	return proto.UsageReport{Rows: r.sorted(), Complete: complete}, nil
}

// read calls add with the entries whose keys match a pattern, and the keys' tokens.
func (r *report) read(
	ctx context.Context, st *store.Store, pattern string, add func(tokens []string, e *entry) error,
) error {
	entries, err := readEntries(ctx, st, pattern)
	if err != nil {
		return err
	}
	for key, e := range entries {
		if err := add(strings.Split(key, "."), e); err != nil {
			return err
		}
	}
	return nil
}

// row returns the row of a group.
func (r *report) row(g group) (*proto.UsageRow, error) {
	for by, value := range map[proto.UsageGroup]*string{
		proto.UsageByOrg: &g.org, proto.UsageByDay: &g.day, proto.UsageByKey: &g.key,
		proto.UsageByLanguage: (*string)(&g.language),
	} {
		if !r.By(by) {
			*value = ""
		}
	}
	if r.rows[g] == nil {
		if len(r.rows) == proto.MaxUsageRows {
			return nil, proto.FieldErrorf("group_by", "gives more than %d rows; ask for fewer days, or for less detail",
				proto.MaxUsageRows)
		}
		r.rows[g] = &proto.UsageRow{Org: g.org, Day: g.day, Key: g.key, Language: g.language}
	}
	return r.rows[g], nil
}

// add adds to the row of a group, if the filter selects its day.
func (r *report) add(g group, sum *proto.UsageSum, stored int64) error {
	if g.day < r.from || g.day > r.to {
		return nil
	}
	row, err := r.row(g)
	if err != nil {
		return err
	}
	row.Add(sum)
	row.StoredByteDays += stored
	return nil
}

// addOrg adds the stored bytes of an organisation's entry, and its sums if sums is set.
func (r *report) addOrg(org string, e *entry, sums bool) error {
	for day, bytes := range e.Stored {
		if bytes == 0 {
			continue
		}
		if err := r.add(group{org: org, day: day}, &proto.UsageSum{}, bytes); err != nil {
			return err
		}
	}
	for day, sum := range e.Sums {
		if !sums {
			break
		}
		if err := r.add(group{org: org, day: day}, sum, 0); err != nil {
			return err
		}
	}
	return nil
}

// addKey adds the entry of an API key.
func (r *report) addKey(org, key string, e *entry) error {
	for name, sum := range e.Sums {
		day, language, _ := strings.Cut(name, " ")
		if err := r.add(group{org, day, key, proto.Language(language)}, sum, 0); err != nil {
			return err
		}
	}
	return nil
}

func (r *report) sorted() []proto.UsageRow {
	rows := make([]proto.UsageRow, 0, len(r.rows))
	for _, row := range r.rows {
		rows = append(rows, *row)
	}
	slices.SortFunc(rows, func(a, b proto.UsageRow) int {
		return cmp.Or(cmp.Compare(a.Org, b.Org), cmp.Compare(a.Day, b.Day), cmp.Compare(a.Key, b.Key),
			cmp.Compare(a.Language, b.Language))
	})
	return rows
}

// fresh waits up to freshTimeout until everything stored at the time of the call is counted, and
// reports whether it is.
func (u *Usage) fresh(ctx context.Context) (bool, error) {
	last := map[string]uint64{}
	for _, st := range []store.Stream{u.Store.Records.Stream, u.Store.Deliveries, u.Store.AgentLogs} {
		seq, err := lastSeq(ctx, st)
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
func lastSeq(ctx context.Context, st store.Stream) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, freshTimeout)
	defer cancel()
	state, err := st.State(ctx)
	return state.Last, err
}
