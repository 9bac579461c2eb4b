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

const (
	// sample is how many of its newest postings a term is judged by: the postings of a rarer term reach further back.
	sample = 256
	// firstProbes and maxProbes limit how many postings of the rarest term are looked up under the
	// other terms: at first, and per page. A lookup takes some microseconds.
	firstProbes = 256
	maxProbes   = 1024
)

// List returns the executions that match the filter, newest first, and the place where the next
// page continues. If several terms rarely occur together, a page may have fewer executions than the
// limit, even none, and not be the last one. List does not set the page's completeness.
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
	var last int64 // place of the last execution of the page
	for len(q.classes) > 0 && q.until > q.from {
		if q.probes >= maxProbes {
			page.Next = q.until
			return page, nil
		}
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
				page.Next = last
				return page, nil
			}
			page.Records, last = append(page.Records, r), place
		}
	}
	return page, nil
}

// query is a filter in the terms of the index.
type query struct {
	db          *DB
	terms       []int64 // the rarest first
	classes     []int64
	from, until int64 // places
	probes      int   // postings of the first term looked up under the others
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
		"UNION ALL SELECT (SELECT min(p.class) FROM bullpen_postings p WHERE p.term = $1 AND p.class > c.class) FROM c "+
		"WHERE c.class IS NOT NULL) "+
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

// sort puts the rarest term first, as far as the newest postings show that.
func (q *query) sort(ctx context.Context) error {
	if len(q.terms) == 1 || len(q.classes) == 0 {
		return nil
	}
	counts, oldest := map[int64]int64{}, map[int64]int64{}
	for _, t := range q.terms {
		text, args := q.postings("p.place", "", t)
		found, err := q.db.numbersOf(ctx, text+fmt.Sprintf(" ORDER BY place DESC LIMIT %d", sample), args...)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			q.classes = nil
			return nil
		}
		counts[t], oldest[t] = int64(len(found)), found[len(found)-1]
	}
	slices.SortStableFunc(q.terms, func(a, b int64) int {
		return cmp.Or(cmp.Compare(counts[a], counts[b]), cmp.Compare(oldest[a], oldest[b]))
	})
	return nil
}

// postings returns an unordered query for the postings of a term, with its parameters. Both
// databases merge the classes only as far as they are read.
func (q *query) postings(what, condition string, term int64, args ...any) (text string, values []any) {
	values = append([]any{term, q.from, q.until}, args...)
	list := make([]string, len(q.classes))
	for i, class := range q.classes {
		list[i] = fmt.Sprintf("SELECT %s FROM bullpen_postings p WHERE p.term = $1 AND p.class = %d AND p.place >= $2 AND "+
			"p.place < $3%s", what, class, condition)
	}
	return strings.Join(list, " UNION ALL "), values
}

// next returns up to limit places of executions that have all terms, newest first. It moves until
// to where the search continues, which is from at the end.
func (q *query) next(ctx context.Context, limit int) ([]int64, error) {
	end := q.from
	if len(q.terms) > 1 { // a part
		n := min(max(firstProbes, q.probes), maxProbes-q.probes)
		text, values := q.postings("p.place", "", q.terms[0])
		lowest, err := q.db.numbersOf(ctx, text+fmt.Sprintf(" ORDER BY place DESC LIMIT 1 OFFSET %d", n-1), values...)
		if err != nil {
			return nil, err
		}
		if len(lowest) > 0 {
			end = lowest[0]
		}
		q.probes += n
	}
	part := *q
	part.from = end
	var condition strings.Builder
	var args []any
	for i, t := range q.terms[1:] {
		// The offset keeps PostgreSQL from a join, for which it may compare all with all.
		_, _ = fmt.Fprintf(&condition,
			" AND EXISTS (SELECT 1 FROM bullpen_postings o WHERE o.term = $%d AND o.class = p.class AND o.place = p.place "+
				"LIMIT 1 OFFSET 0)", i+4)
		args = append(args, t)
	}
	text, values := part.postings("p.place", condition.String(), q.terms[0], args...)
	found, err := q.db.numbersOf(ctx, text+fmt.Sprintf(" ORDER BY place DESC LIMIT %d", limit), values...)
	if err != nil {
		return nil, err
	}
	if q.until = end; len(found) == limit {
		q.until = found[limit-1]
	}
	return found, nil
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
	text := fmt.Sprintf( //nolint:gosec // parameters only
		"SELECT place, trace, summary FROM bullpen_executions WHERE place IN %s",
		d.tuples(1, len(places)))
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
