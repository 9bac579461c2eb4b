package history

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// bulks are the numbers of rows that one statement handles, so that few statements are prepared.
var bulks = []int{256, 32, 4, 1} // read only

// expireBulk is the number of rows that one transaction of Expire removes.
const expireBulk = 500

// posting is one row of the postings.
type posting struct{ term, class, place int64 }

// row is the stored form of an execution.
type row struct {
	place, seq, job, class int64
	trace                  proto.TraceID
	org                    string // of rows that were read
	terms                  []int64
	summary                []byte
}

// newRow returns the row of a change.
func newRow(c *proto.HistoryChange) (row, error) {
	summary, err := proto.SummarizeRecord(c.Record)
	return row{
		place: place(c.Record), seq: int64(c.Seq), job: int64(c.JobSeq), class: classOf(c.Record), trace: c.Record.TraceID,
		terms: termsOf(&c.Record.Meta), summary: summary,
	}, err
}

// transact calls f in a transaction.
func (d *DB) transact(ctx context.Context, f func(*sql.Tx) error) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	d.writing.Lock()
	defer d.writing.Unlock()
	tx, err := d.write.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// Apply stores changes, each of another execution, and advances the index's position in the
// streams. It returns [proto.ErrConflict] if the index was not at from. Stale changes have no
// effect.
func (d *DB) Apply(ctx context.Context, from, to proto.HistoryPosition, changes []proto.HistoryChange) error {
	if err := d.Present(); err != nil {
		return d.fail("write", err)
	}
	rows := make([]row, 0, len(changes))
	for i := range changes {
		r, err := newRow(&changes[i])
		if err != nil {
			return err
		}
		rows = append(rows, r)
	}
	return d.fail("write", d.transact(ctx, func(tx *sql.Tx) error {
		done, err := tx.ExecContext(
			ctx, "UPDATE bullpen_history SET jobs = $1, records = $2 WHERE jobs = $3 AND records = $4 AND streams = $5 AND "+
				"version = $6",
			int64(to.Jobs), int64(to.Records), int64(from.Jobs), int64(from.Records), from.Streams, version())
		if err != nil {
			return err
		}
		if n, err := done.RowsAffected(); err != nil || n != 1 {
			return errors.Join(fmt.Errorf("position of the index of executions: %w", proto.ErrConflict), err)
		}
		return d.put(ctx, tx, rows)
	}))
}

// put stores rows.
func (d *DB) put(ctx context.Context, tx *sql.Tx, rows []row) error {
	slices.SortFunc(rows, func(a, b row) int { return cmp.Compare(a.place, b.place) })
	stored, taken, err := d.find(ctx, tx, rows)
	if err != nil {
		return err
	}
	var obsolete, postings []posting
	values := rows[:0]
	for _, r := range rows {
		old, first := stored[r.trace], r.place
		switch {
		case old == nil:
			// A place that another execution has is not free.
			for n := int64(0); ; n++ {
				if n == probes {
					return fmt.Errorf("no place for execution %s among others of its millisecond", r.trace)
				}
				if r.place = first + n; !taken[r.place] {
					break
				}
			}
		case old.seq >= r.seq:
			continue
		default:
			r.place, r.job = old.place, old.job
			if old.class != r.class {
				for _, t := range r.terms {
					obsolete = append(obsolete, posting{t, old.class, r.place})
				}
			}
		}
		taken[r.place] = true
		if old == nil || old.class != r.class {
			for _, t := range r.terms {
				postings = append(postings, posting{t, r.class, r.place})
			}
		}
		values = append(values, r)
	}
	if err := d.removePostings(ctx, tx, obsolete); err != nil {
		return err
	}
	err = bulk(values, func(some []row) error {
		args := make([]any, 0, 6*len(some))
		for _, r := range some {
			args = append(args, r.place, string(r.trace), r.seq, r.job, r.class, r.summary)
		}
		return d.exec(ctx, tx, "INSERT INTO bullpen_executions (place, trace, seq, job, class, summary) VALUES "+
			d.tuples(len(some), 6)+
			" ON CONFLICT (place) DO UPDATE SET seq = excluded.seq, class = excluded.class, summary = excluded.summary", args)
	})
	if err != nil {
		return err
	}
	sortPostings(postings)
	return bulk(postings, func(some []posting) error {
		return d.exec(ctx, tx, "INSERT INTO bullpen_postings (term, class, place) VALUES "+d.tuples(len(some), 3)+
			" ON CONFLICT DO NOTHING", postingArgs(some))
	})
}

// find returns the stored rows at the possible places of rows, by execution, and those places.
func (d *DB) find(
	ctx context.Context, tx *sql.Tx, rows []row,
) (found map[proto.TraceID]*row, taken map[int64]bool, err error) {
	found, taken = map[proto.TraceID]*row{}, map[int64]bool{}
	err = bulk(rows, func(some []row) error {
		args := make([]any, 0, len(some))
		for i := range some {
			args = append(args, some[i].place)
		}
		statement, err := d.prepared(ctx, tx, fmt.Sprintf("WITH wanted (place) AS (VALUES %s) "+
			"SELECT e.place, e.trace, e.seq, e.job, e.class FROM wanted CROSS JOIN bullpen_executions e WHERE e.place >= "+
			"wanted.place AND e.place < wanted.place + %d",
			d.numbers(len(some), 1), probes))
		if err != nil {
			return err
		}
		result, err := statement.QueryContext(ctx, args...)
		if err != nil {
			return err
		}
		defer func() { _ = result.Close() }()
		for result.Next() {
			r := new(row)
			if err := result.Scan(&r.place, &r.trace, &r.seq, &r.job, &r.class); err != nil {
				return err
			}
			found[r.trace], taken[r.place] = r, true
		}
		return result.Err()
	})
	return found, taken, err
}

func (d *DB) removePostings(ctx context.Context, tx *sql.Tx, postings []posting) error {
	sortPostings(postings)
	return bulk(postings, func(some []posting) error {
		return d.exec(ctx, tx, "DELETE FROM bullpen_postings WHERE (term, class, place) IN (VALUES "+d.numbers(len(some), 3)+
			")", postingArgs(some))
	})
}

// sortPostings sorts postings as the database stores them: neighbours are written together.
func sortPostings(postings []posting) {
	slices.SortFunc(postings, func(a, b posting) int {
		return cmp.Or(cmp.Compare(a.term, b.term), cmp.Compare(a.class, b.class), cmp.Compare(a.place, b.place))
	})
}

func postingArgs(postings []posting) []any {
	args := make([]any, 0, 3*len(postings))
	for _, p := range postings {
		args = append(args, p.term, p.class, p.place)
	}
	return args
}

// bulk calls f with pieces of list.
func bulk[T any](list []T, f func([]T) error) error {
	for len(list) > 0 {
		n := bulks[slices.IndexFunc(bulks, func(n int) bool { return n <= len(list) })]
		if err := f(list[:n]); err != nil {
			return err
		}
		list = list[n:]
	}
	return nil
}

// tuples returns n tuples of parameters.
func (d *dialect) tuples(n, width int) string { return d.parameters(n, width, "") }

// numbers returns n tuples of numeric parameters. PostgreSQL takes a parameter for text unless it is
// compared with a column.
func (d *dialect) numbers(n, width int) string { return d.parameters(n, width, d.integer) }

func (d *dialect) parameters(n, width int, kind string) string {
	var text strings.Builder
	for i := range n * width {
		switch {
		case i == 0:
			_, _ = text.WriteString("(")
		case i%width == 0:
			_, _ = text.WriteString("),(")
		default:
			_, _ = text.WriteString(",")
		}
		parameter := "?" // SQLite is slow with many names
		if d.path == "" {
			parameter = fmt.Sprint("$", i+1)
		}
		if kind != "" {
			parameter = "CAST(" + parameter + " AS " + kind + ")"
		}
		_, _ = text.WriteString(parameter)
	}
	return text.String() + ")"
}

// prepared returns a statement that is prepared once.
func (d *DB) prepared(ctx context.Context, tx *sql.Tx, text string) (*sql.Stmt, error) {
	statement := d.statements[text]
	if statement == nil {
		var err error
		if statement, err = d.write.PrepareContext(ctx, text); err != nil {
			return nil, err
		}
		d.statements[text] = statement
	}
	return tx.StmtContext(ctx, statement), nil
}

func (d *DB) exec(ctx context.Context, tx *sql.Tx, text string, args []any) error {
	statement, err := d.prepared(ctx, tx, text)
	if err != nil {
		return err
	}
	_, err = statement.ExecContext(ctx, args...)
	return err
}

// Expire removes the executions whose records and jobs are gone: those with smaller sequence
// numbers. It removes a limited number, and reports whether there are more.
func (d *DB) Expire(ctx context.Context, jobs, records uint64) (more bool, err error) {
	if err := d.Present(); err != nil {
		return false, d.fail("remove expired executions", err)
	}
	err = d.transact(ctx, func(tx *sql.Tx) error {
		gone, err := d.gone(ctx, tx, int64(jobs), int64(records))
		if err != nil {
			return err
		}
		more = len(gone) >= expireBulk
		return d.removeRows(ctx, tx, gone)
	})
	return more, d.fail("remove expired executions", err)
}

// gone returns the first rows whose records and jobs have smaller sequence numbers.
func (d *DB) gone(ctx context.Context, tx *sql.Tx, jobs, records int64) (rows []row, err error) {
	for _, query := range []struct {
		text  string
		below int64
	}{
		{
			"SELECT place, class, trace, summary FROM bullpen_executions WHERE seq > 0 AND seq < $1 ORDER BY seq LIMIT $2",
			records,
		},
		{
			"SELECT place, class, trace, summary FROM bullpen_executions WHERE seq = 0 AND job < $1 ORDER BY job LIMIT $2",
			jobs,
		},
	} {
		found, err := d.selectRows(ctx, tx, query.text, query.below, expireBulk)
		if err != nil {
			return nil, err
		}
		rows = append(rows, found...)
	}
	return rows, nil
}
