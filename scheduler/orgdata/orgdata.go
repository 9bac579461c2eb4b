// Package orgdata knows what is stored of an organisation. It counts it, by kind and from the
// stores themselves, and removes all of it when the organisation is deleted.
//
// Each kind of data is a [Holder], a row of the table in [New]. A new kind is a row more: the tests
// fail while a stream or bucket is in none.
package orgdata

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Holder is where one kind of data is stored.
type Holder struct {
	Kind string
	// Stores names the streams, buckets and object stores that have the data; none if it is elsewhere.
	Stores []string
	// Count counts what is stored of the organisation of a scan.
	Count func(ctx context.Context, s *Scan) (Amount, error)
	// Remove removes it. It may be called again at any time, also after a crash. What it cannot
	// remove at once it begins to remove.
	Remove func(ctx context.Context, s *Scan) error
}

// Amount is how much is stored.
type Amount struct{ Count, Bytes int64 }

// Data is what is stored of organisations.
type Data struct {
	Store   *store.Store
	Holders []Holder
	Log     *slog.Logger
}

// List returns what is stored of an organisation, which need not exist.
func (d *Data) List(ctx context.Context, org string) (*proto.OrgData, error) {
	list, scan := &proto.OrgData{Org: org}, d.scan(org)
	for _, h := range d.Holders {
		n, err := h.Count(ctx, scan)
		if err != nil {
			return nil, fmt.Errorf("count the %s of organisation %s: %w", h.Kind, org, err)
		}
		list.Kinds = append(list.Kinds, proto.StoredData{Kind: h.Kind, Count: n.Count, Bytes: n.Bytes})
	}
	return list, nil
}

// remove removes what is stored of an organisation, one kind after the other, and reports whether
// nothing was found. It stops at a kind of which something remains. Later kinds may tell to whom
// earlier ones belong, so that each call begins with the first. check is called before each removal,
// and its error ends the call.
func (d *Data) remove(ctx context.Context, org string, check func(context.Context) error) (empty bool, err error) {
	scan := d.scan(org)
	empty = true
	for _, h := range d.Holders {
		if h.Remove == nil {
			continue // the organisation itself
		}
		before, err := h.Count(ctx, scan)
		if err == nil {
			err = check(ctx)
		}
		if err == nil {
			err = h.Remove(ctx, scan)
		}
		if err != nil {
			return false, fmt.Errorf("remove the %s: %w", h.Kind, err)
		}
		if before.Count == 0 {
			continue
		}
		empty = false
		after, err := h.Count(ctx, d.scan(org))
		if err != nil {
			return false, fmt.Errorf("count the %s: %w", h.Kind, err)
		}
		if after.Count > 0 {
			return false, nil
		}
	}
	return empty, nil
}

// scan returns a new scan for an organisation.
func (d *Data) scan(org string) *Scan { return &Scan{Org: org, store: d.Store, log: d.Log} }

// Scan is one look at what is stored of an organisation. It is for one goroutine.
type Scan struct {
	Org string

	store      *store.Store
	log        *slog.Logger
	executions *executions
}

// executions are the executions in the streams of jobs and of records. The ids of those of other
// organisations are known by a hash alone: there may be millions.
type executions struct {
	own     map[string]bool
	records []uint64 // sequence numbers of the organisation's own
	known   map[uint64]struct{}
}

// Executes reports whether an execution is one of the organisation's, as far as its record or its
// job is stored.
func (s *Scan) Executes(ctx context.Context) (func(id string) bool, error) {
	x, err := s.readExecutions(ctx)
	if err != nil {
		return nil, err
	}
	return func(id string) bool { return x.own[id] }, nil
}

func (s *Scan) readExecutions(ctx context.Context) (*executions, error) {
	if s.executions != nil {
		return s.executions, nil
	}
	x := &executions{own: map[string]bool{}, known: map[uint64]struct{}{}}
	add := func(org, id string) {
		x.known[hash(id)] = struct{}{}
		if org == s.Org {
			x.own[id] = true
		}
	}
	// A record is stored before its job is removed, so that no execution is missed.
	jobs, err := s.store.Subjects(ctx, s.store.Jobs, store.AllJobs)
	if err != nil {
		return nil, err
	}
	for subject := range jobs {
		add(store.ParseJobSubject(subject))
	}
	err = s.store.Read(ctx, s.store.Executions, all(store.AllRecords), func(m jetstream.Msg, at *jetstream.MsgMetadata) {
		id := store.LastToken(m.Subject())
		rec, err := s.store.Summary(ctx, proto.TraceID(id), at.Sequence.Stream, m.Headers())
		switch {
		case err == nil:
			if add(rec.Org, id); rec.Org == s.Org {
				x.records = append(x.records, at.Sequence.Stream)
			}
		case ctx.Err() == nil && !store.IsNotFound(err): // else it was replaced meanwhile
			add("", id)
			s.log.Warn("malformed record belongs to no organisation", "subject", m.Subject(), "error", err)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read the records of executions: %w", err)
	}
	s.executions = x
	return x, nil
}

// all selects the messages on subjects that match a filter.
func all(filter string) jetstream.ConsumerConfig {
	return jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubject: filter}
}
