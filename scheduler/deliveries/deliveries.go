// Package deliveries stores webhook deliveries: one record for each execution with a webhook,
// changed by compare-and-set. Package webhook sends them.
package deliveries

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Store stores deliveries in JetStream.
type Store struct{ Store *store.Store }

func header(d *proto.Delivery) (nats.Header, error) {
	h := nats.Header{}
	h.Set(store.HeaderStatus, string(d.Status))
	h.Set(store.HeaderOrigin, proto.Origin(d.URL))
	if d.Status == proto.DeliveryPending {
		h.Set(store.HeaderDue, d.NextAt.UTC().Format(time.RFC3339Nano))
		return h, nil
	}
	used, err := json.Marshal(d.Usage())
	h.Set(store.HeaderUsed, string(used))
	return h, err
}

// Create stores a delivery. It is no error if the delivery exists. Create retries until ctx is
// done.
func (s *Store) Create(ctx context.Context, d *proto.Delivery) error {
	_, err := s.write(ctx, d, 0)
	if store.IsConflict(err) {
		return nil
	}
	return err
}

// Encode returns the header and body of a stored delivery.
func Encode(d *proto.Delivery) (nats.Header, []byte, error) {
	body, err := json.Marshal(d)
	if err != nil {
		return nil, nil, fmt.Errorf("encode delivery of %s: %w", d.TraceID, err)
	}
	h, err := header(d)
	if err != nil {
		return nil, nil, fmt.Errorf("encode delivery of %s: %w", d.TraceID, err)
	}
	return h, body, nil
}

func (s *Store) write(ctx context.Context, d *proto.Delivery, revision uint64) (uint64, error) {
	h, body, err := Encode(d)
	if err != nil {
		return 0, err
	}
	seq, err := s.Store.Deliveries.Write(ctx, store.DeliverySubject(d.Org, d.TraceID), h, body, revision)
	if err != nil {
		return 0, fmt.Errorf("store delivery of %s: %w", d.TraceID, err)
	}
	return seq, nil
}

// Get returns a delivery and its revision, or [proto.ErrNotFound].
func (s *Store) Get(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, uint64, error) {
	m, err := s.Store.Deliveries.Last(ctx, store.DeliverySubject(org, id))
	if store.IsNotFound(err) {
		return nil, 0, fmt.Errorf("delivery of %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, err
	}
	d, err := proto.DecodeDelivery(id, m.Data)
	if err == nil && d.Status != proto.DeliveryPending {
		d.Ended = d.Made
	}
	return d, m.Seq, err
}

// Update replaces the delivery at the given revision and returns the new revision. It retries until
// ctx is done. It returns [proto.ErrConflict] if the revision is not the newest.
func (s *Store) Update(ctx context.Context, d *proto.Delivery, revision uint64) (uint64, error) {
	seq, err := s.write(ctx, d, revision)
	if store.IsConflict(err) {
		return 0, fmt.Errorf("delivery of %s: %w", d.TraceID, proto.ErrConflict)
	}
	return seq, err
}

// Delivery returns a delivery, or [proto.ErrNotFound].
func (s *Store) Delivery(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error) {
	d, _, err := s.Get(ctx, org, id)
	return d, err
}

// Replay starts a finished delivery again and returns it. It returns [proto.ErrNotFound] if there
// is none, and [proto.ErrConflict] if it is pending.
func (s *Store) Replay(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error) {
	var d *proto.Delivery
	err := store.Update(ctx, func() (err error) {
		var revision uint64
		if d, revision, err = s.Get(ctx, org, id); err != nil {
			return err
		}
		if d.Status == proto.DeliveryPending {
			return fmt.Errorf("delivery of %s is pending: %w", id, proto.ErrConflict)
		}
		d.Replay(time.Now())
		_, err = s.write(ctx, d, revision)
		return err
	})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// listWindows are how far back from the end of a page List looks for its deliveries, in this order.
// 0 is no limit. A stream can only be read forwards, and usually the last hour has a whole page.
func listWindows() []time.Duration { return []time.Duration{time.Hour, 24 * time.Hour, 0} }

// listReads is how many deliveries of a page List reads at a time.
const listReads = 8

// place is the end of a page of a list: the message of the stream before which the page ends.
type place struct {
	seq uint64
	at  time.Time // when it was stored
}

// List returns up to limit deliveries of an organisation, most recently changed first. An empty
// status selects all. before is empty for the first page, and the previous call's next for others.
func (s *Store) List(
	ctx context.Context, org string, status proto.DeliveryStatus, before string, limit int,
) (page []*proto.Delivery, next string, err error) {
	end := place{seq: math.MaxUint64, at: time.Now()}
	if before != "" {
		var at int64
		if _, err := fmt.Sscanf(before, "%d-%d", &end.seq, &at); err != nil {
			return nil, "", proto.FieldErrorf("cursor", "must be the next_cursor of an answer to the same request")
		}
		end.at = time.Unix(0, at)
	}
	var found []listed
	for _, window := range listWindows() {
		in := store.Range{Subject: store.DeliveryPattern(org)}
		if window > 0 {
			in.Since = end.at.Add(-window)
		}
		if found, err = s.lastBefore(ctx, in, status, end, limit+1); err != nil {
			return nil, "", fmt.Errorf("list the deliveries of %s: %w", org, err)
		}
		if len(found) > limit {
			found = found[1:]
			next = fmt.Sprintf("%d-%d", found[0].seq, found[0].at.UnixNano())
			break
		}
	}
	slices.Reverse(found)
	read := make([]*proto.Delivery, len(found))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(listReads)
	for i, x := range found {
		reads.Go(func() (err error) {
			if read[i], err = s.Delivery(ctx, org, x.id); errors.Is(err, proto.ErrNotFound) {
				return nil // past its retention
			}
			return err
		})
	}
	if err := reads.Wait(); err != nil {
		return nil, "", err
	}
	seen := map[proto.TraceID]bool{} // a delivery that changed meanwhile may have been found twice
	for _, d := range read {
		if d != nil && (status == "" || d.Status == status) && !seen[d.TraceID] {
			seen[d.TraceID] = true
			page = append(page, d)
		}
	}
	return page, next, nil
}

// listed is a delivery that a list has found.
type listed struct {
	place
	id proto.TraceID
}

// lastBefore returns the last deliveries in r before end, up to limit, oldest first.
func (s *Store) lastBefore(
	ctx context.Context, r store.Range, status proto.DeliveryStatus, end place, limit int,
) (last []listed, err error) {
	reading, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	err = s.Store.Deliveries.Read(reading, r, func(m *store.Message) {
		_, id, err := store.ParseDeliverySubject(m.Subject)
		switch {
		case reading.Err() != nil || err != nil:
		case m.Seq >= end.seq:
			stop(errPageFull)
		case status == "" || proto.DeliveryStatus(m.Header.Get(store.HeaderStatus)) == status:
			last = append(last, listed{place{m.Seq, m.Time}, id})
			if len(last) > limit {
				last = last[1:]
			}
		}
	})
	if errors.Is(err, errPageFull) {
		err = nil
	}
	return last, err
}

// replayPage is how far a bulk replay has come.
type replayPage struct {
	From uint64 // the sequence number of the first message of the page; 0 for the first page
	End  uint64 // the last one of all pages, so that deliveries that fail again are not visited again
	Left int    // failed deliveries in this page and those after it
}

// errPageFull ends the reading of a page.
var errPageFull = errors.New("the page is full")

// ReplayFailed replays deliveries of an organisation that failed since a time, oldest failure
// first: up to limit after a place, which is empty or an earlier call's Next. It returns a
// [*proto.FieldError] for an invalid place. The first page reads all deliveries since the time, to
// count them; others read their own.
func (s *Store) ReplayFailed(
	ctx context.Context, org string, since time.Time, after string, limit int,
) (r proto.Replayed, err error) {
	var page replayPage
	if after != "" {
		if _, err := fmt.Sscanf(after, "%d-%d-%d", &page.From, &page.End, &page.Left); err != nil || page.From == 0 {
			return r, proto.FieldErrorf("after", "must be what next had in the answer before")
		}
	}
	all := store.Range{Subject: store.DeliveryPattern(org), Since: since, From: page.From}
	failed, next, err := s.failedIn(ctx, all, &page, limit)
	if err != nil {
		return r, fmt.Errorf("look for failed deliveries: %w", err)
	}
	for _, id := range failed {
		_, err := s.Replay(ctx, org, id)
		if err != nil && !errors.Is(err, proto.ErrNotFound) && !errors.Is(err, proto.ErrConflict) {
			return r, err
		}
		if err == nil { // otherwise it was replayed concurrently, or is past its retention
			r.Replayed++
		}
	}
	if next.From > 0 {
		r.Left, r.Next = next.Left, fmt.Sprintf("%d-%d-%d", next.From, next.End, next.Left)
	}
	return r, nil
}

// failedIn returns up to limit failed deliveries of a page, and the next page, which is zero if there is
// none.
func (s *Store) failedIn(
	ctx context.Context, r store.Range, page *replayPage, limit int,
) (failed []proto.TraceID, next replayPage, err error) {
	reading, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	counting, newest := page.From == 0, uint64(0)
	err = s.Store.Deliveries.Read(reading, r, func(m *store.Message) {
		newest = m.Seq
		_, id, err := store.ParseDeliverySubject(m.Subject)
		switch {
		case reading.Err() != nil:
		case !counting && newest > page.End:
			stop(errPageFull)
		case err != nil || proto.DeliveryStatus(m.Header.Get(store.HeaderStatus)) != proto.DeliveryFailed:
		case len(failed) < limit:
			failed = append(failed, id)
		default:
			if next.From == 0 {
				next.From = newest
			}
			if next.Left++; !counting {
				stop(errPageFull)
			}
		}
	})
	if errors.Is(err, errPageFull) {
		err = nil
	}
	if next.From > 0 {
		next.End = newest
		if !counting {
			next.End, next.Left = page.End, max(next.Left, page.Left-len(failed))
		}
	}
	return failed, next, err
}

// Scan calls onChange with every delivery of an organisation, except malformed ones.
func (s *Store) Scan(ctx context.Context, org string, onChange func(proto.DeliveryChange)) error {
	return s.Store.Deliveries.Read(ctx, store.Range{Subject: store.DeliveryPattern(org)}, func(m *store.Message) {
		if c, err := parseChange(m); err == nil { // Follow reports malformed ones
			onChange(c)
		}
	})
}

// Follow calls onChange with every existing delivery and then with every change, in the order of
// revisions. It calls onCurrent once, after the last delivery that existed at the start, and
// onMalformed with the error of each malformed one. All calls are made by one goroutine. Follow
// returns when ctx is done, or with an error if it may have missed changes.
func (s *Store) Follow(
	ctx context.Context, onChange func(proto.DeliveryChange), onCurrent func(), onMalformed func(error),
) error {
	return s.Store.Deliveries.Follow(ctx, store.Range{}, func(m *store.Message) {
		c, err := parseChange(m)
		if err != nil {
			onMalformed(fmt.Errorf("read the delivery on %s: %w", m.Subject, err))
			return
		}
		onChange(c)
	}, onCurrent)
}

// parseChange parses the headers of a stored delivery.
func parseChange(m *store.Message) (c proto.DeliveryChange, err error) {
	if c.Org, c.TraceID, err = store.ParseDeliverySubject(m.Subject); err != nil {
		return c, err
	}
	c.Revision, c.Origin = m.Seq, m.Header.Get(store.HeaderOrigin)
	if due := m.Header.Get(store.HeaderDue); due != "" {
		c.Due, err = time.Parse(time.RFC3339Nano, due)
	}
	return c, err
}
