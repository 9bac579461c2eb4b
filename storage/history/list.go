package history

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// enough is the number of postings up to which those of two terms are compared exactly, to go
// through the fewer.
const enough = 4096

// List returns the executions that match the filter, the newest first, and the place to go on
// before. The page has no statement about its completeness.
func (d *DB) List(ctx context.Context, f *proto.HistoryFilter) (page proto.HistoryPage, err error) {
	d.mu.RLock()
	page, err = d.list(ctx, f)
	d.mu.RUnlock()
	return page, d.fail("list", err)
}

func (d *DB) list(ctx context.Context, f *proto.HistoryFilter) (page proto.HistoryPage, err error) {
	if _, known, err := d.position(ctx, d.read); err != nil || !known {
		return page, err // an index that is not prepared yet is empty
	}
	q, err := d.query(ctx, f)
	if err != nil {
		return page, err
	}
	for len(q.classes) > 0 {
		places, err := q.next(ctx, f.Limit+1)
		if err != nil {
			return page, err
		}
		records, err := d.records(ctx, places)
		if err != nil {
			return page, err
		}
		for _, place := range places {
			r := records[place]
			if r == nil || !f.Matches(r) {
				continue // removed meanwhile, or another term of the same number
			}
			if len(page.Records) == f.Limit {
				return page, nil
			}
			page.Records, page.Next = append(page.Records, r), place
		}
		if len(places) <= f.Limit {
			break
		}
		q.until = places[len(places)-1]
	}
	page.Next = 0
	return page, nil
}

// query is a filter in the terms of the index.
type query struct {
	db          *DB
	terms       []int64 // the rarest first
	classes     []int64
	from, until int64 // places
}

// query returns the query of a filter. It has no classes if nothing can match.
func (d *DB) query(ctx context.Context, f *proto.HistoryFilter) (*query, error) {
	q := &query{db: d, from: math.MinInt64, until: math.MaxInt64}
	if !f.From.IsZero() {
		q.from = firstPlace(f.From)
	}
	if !f.Until.IsZero() {
		q.until = firstPlace(f.Until)
	}
	if f.Before != 0 {
		q.until = min(q.until, f.Before)
	}
	for _, t := range f.Terms() {
		q.terms = append(q.terms, term(f.Org, t.Name, t.Value))
	}
	if len(q.terms) == 0 {
		q.terms = []int64{term(f.Org, all, "")}
	}
	for i, t := range q.terms {
		classes, err := d.classes(ctx, t)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			q.classes = slices.DeleteFunc(classes, func(class int64) bool { return !selects(f, class) })
		} else {
			q.classes = slices.DeleteFunc(q.classes, func(class int64) bool { return !slices.Contains(classes, class) })
		}
	}
	return q, q.sort(ctx)
}

// firstPlace returns the first place of an execution that was created at t or later, in whole
// milliseconds.
func firstPlace(t time.Time) int64 {
	ms := t.UnixMilli()
	if t.After(time.UnixMilli(ms)) {
		ms++
	}
	const last = math.MaxInt64 >> places
	return max(-last, min(ms, last)) << places
}

// classes returns the classes of the postings of a term.
func (d *DB) classes(ctx context.Context, term int64) ([]int64, error) {
	// Each step jumps over the postings of a class.
	return d.numbersOf(ctx, "WITH RECURSIVE c (class) AS (SELECT min(class) FROM bullpen_postings WHERE term = $1 "+
		"UNION ALL SELECT (SELECT min(p.class) FROM bullpen_postings p WHERE p.term = $1 AND p.class > c.class) FROM c WHERE c.class IS NOT NULL) "+
		"SELECT class FROM c WHERE class IS NOT NULL", term)
}

// numbersOf returns the numbers that a query selects.
func (d *DB) numbersOf(ctx context.Context, text string, args ...any) (list []int64, err error) {
	result, err := d.read.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = result.Close() }()
	for result.Next() {
		var n int64
		if err := result.Scan(&n); err != nil {
			return nil, err
		}
		list = append(list, n)
	}
	return list, result.Err()
}

// sort puts the rarest term first, as far as that is known within enough postings.
func (q *query) sort(ctx context.Context) error {
	if len(q.terms) == 1 || len(q.classes) == 0 {
		return nil
	}
	counts := map[int64]int64{}
	for _, t := range q.terms {
		text, args := q.ranges("1", "", enough, t)
		count, err := q.db.numbersOf(ctx, "SELECT count(*) FROM ("+text+") AS postings", args...)
		if err != nil {
			return err
		}
		counts[t] = count[0]
	}
	slices.SortStableFunc(q.terms, func(a, b int64) int { return cmp.Compare(counts[a], counts[b]) })
	return nil
}

// ranges returns a query for up to limit postings of each class of a term, the newest first, with
// its parameters.
func (q *query) ranges(what, condition string, limit int, term int64, args ...any) (text string, values []any) {
	values = append([]any{term, q.from, q.until}, args...)
	list := make([]string, len(q.classes))
	for i, class := range q.classes {
		list[i] = fmt.Sprintf("SELECT * FROM (SELECT %s FROM bullpen_postings p WHERE p.term = $1 AND p.class = %d AND p.place >= $2 AND p.place < $3%s "+
			"ORDER BY p.place DESC LIMIT %d) AS c%d", what, class, condition, limit, i)
	}
	return strings.Join(list, " UNION ALL "), values
}

// next returns up to limit places of executions that have all terms, the newest first.
func (q *query) next(ctx context.Context, limit int) ([]int64, error) {
	var condition strings.Builder
	var args []any
	for i, t := range q.terms[1:] {
		_, _ = fmt.Fprintf(&condition, " AND EXISTS (SELECT 1 FROM bullpen_postings o WHERE o.term = $%d AND o.class = p.class AND o.place = p.place)", i+4)
		args = append(args, t)
	}
	text, values := q.ranges("p.place", condition.String(), limit, q.terms[0], args...)
	return q.db.numbersOf(ctx, text+fmt.Sprintf(" ORDER BY place DESC LIMIT %d", limit), values...)
}

// records reads the executions at places.
func (d *DB) records(ctx context.Context, places []int64) (map[int64]*proto.Record, error) {
	found := map[int64]*proto.Record{}
	if len(places) == 0 {
		return found, nil
	}
	args := make([]any, len(places))
	for i, p := range places {
		args[i] = p
	}
	text := fmt.Sprintf("SELECT place, trace, summary FROM bullpen_executions WHERE place IN %s", d.tuples(1, len(places))) //nolint:gosec // parameters only
	result, err := d.read.QueryContext(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = result.Close() }()
	for result.Next() {
		var place int64
		var trace proto.TraceID
		var summary sql.RawBytes
		if err := result.Scan(&place, &trace, &summary); err != nil {
			return nil, err
		}
		if found[place], err = proto.DecodeSummary(trace, summary); err != nil {
			return nil, err
		}
	}
	return found, result.Err()
}
