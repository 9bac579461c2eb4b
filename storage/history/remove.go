package history

import (
	"context"
	"database/sql"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// CountOrg returns the number of executions of an organisation in the index.
func (d *DB) CountOrg(ctx context.Context, org string) (n int64, err error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if _, known, err := d.position(ctx, d.read); err != nil || !known {
		return 0, d.fail("count", err) // an index that is not prepared yet is empty
	}
	err = d.read.QueryRowContext(ctx, "SELECT count(*) FROM bullpen_postings WHERE term = $1", term(org, all, "")).Scan(&n)
	return n, d.fail("count", err)
}

// RemoveOrg removes the executions of an organisation that were created before a time. It removes a
// limited number, and reports whether there are more.
func (d *DB) RemoveOrg(ctx context.Context, org string, before time.Time) (more bool, err error) {
	if err := d.Present(); err != nil {
		return false, d.fail("remove the executions of an organisation", err)
	}
	err = d.transact(ctx, func(tx *sql.Tx) error {
		found, err := d.selectRows(
			ctx, tx, "SELECT e.place, e.class, e.trace, e.summary FROM bullpen_postings p JOIN bullpen_executions e ON "+
				"e.place = p.place "+
				"WHERE p.term = $1 AND p.place < $2 LIMIT $3", term(org, all, ""), firstPlace(before), expireBulk)
		if err != nil {
			return err
		}
		more = len(found) >= expireBulk
		own := found[:0]
		for _, r := range found {
			if r.org == org { // else another term of the same number
				own = append(own, r)
			}
		}
		return d.removeRows(ctx, tx, own)
	})
	return more, d.fail("remove the executions of an organisation", err)
}

// removeRows removes rows with their postings.
func (d *DB) removeRows(ctx context.Context, tx *sql.Tx, rows []row) error {
	var postings []posting
	for i := range rows {
		for _, t := range rows[i].terms {
			postings = append(postings, posting{t, rows[i].class, rows[i].place})
		}
	}
	if err := d.removePostings(ctx, tx, postings); err != nil {
		return err
	}
	return bulk(rows, func(some []row) error {
		args := make([]any, 0, len(some))
		for i := range some {
			args = append(args, some[i].place)
		}
		return d.exec(ctx, tx, "DELETE FROM bullpen_executions WHERE place IN "+d.tuples(1, len(some)), args)
	})
}

// selectRows returns the rows whose place, class, trace and summary a query selects, with their
// terms.
func (d *DB) selectRows(ctx context.Context, tx *sql.Tx, text string, args ...any) (rows []row, err error) {
	statement, err := d.prepared(ctx, tx, text)
	if err != nil {
		return nil, err
	}
	result, err := statement.QueryContext(ctx, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = result.Close() }()
	for result.Next() {
		var r row
		if err := result.Scan(&r.place, &r.class, &r.trace, &r.summary); err != nil {
			return nil, err
		}
		record, err := proto.DecodeSummary(r.trace, r.summary)
		if err != nil {
			return nil, err
		}
		r.org, r.terms = record.Org, termsOf(&record.Meta)
		rows = append(rows, r)
	}
	return rows, result.Err()
}
