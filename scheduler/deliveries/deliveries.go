// Package deliveries keeps what is to be delivered, and what became of it: one record for each execution that asked for a webhook,
// changed by compare-and-set. It sends nothing; room webhook does.
package deliveries

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	lookEvery = 100 * time.Millisecond // whether a feed is at its end
	tries     = 20                     // of a change by compare-and-set
	inboxSize = 256
)

// Store is the deliveries in JetStream.
type Store struct{ Store *store.Store }

func header(d *proto.Delivery) nats.Header {
	h := nats.Header{}
	h.Set(store.HeaderStatus, string(d.Status))
	h.Set(store.HeaderOrigin, proto.Origin(d.URL))
	if d.Status == proto.DeliveryPending {
		h.Set(store.HeaderDue, d.NextAt.UTC().Format(time.RFC3339Nano))
	}
	return h
}

// Create stores a delivery; that it is stored already is no error. It tries until ctx ends.
func (s *Store) Create(ctx context.Context, d *proto.Delivery) error {
	_, err := s.write(ctx, d, 0)
	if store.IsConflict(err) {
		return nil
	}
	return err
}

// Encode gives a delivery in the form in which it is stored.
func Encode(d *proto.Delivery) (nats.Header, []byte, error) {
	body, err := json.Marshal(d)
	if err != nil {
		return nil, nil, fmt.Errorf("encode delivery of %s: %w", d.TraceID, err)
	}
	return header(d), body, nil
}

func (s *Store) write(ctx context.Context, d *proto.Delivery, revision uint64) (uint64, error) {
	h, body, err := Encode(d)
	if err != nil {
		return 0, err
	}
	seq, err := s.Store.Write(ctx, store.DeliverySubject(d.Org, d.TraceID), h, body, revision)
	if err != nil {
		return 0, fmt.Errorf("store delivery of %s: %w", d.TraceID, err)
	}
	return seq, nil
}

// Get gives a delivery, and the revision to change it by. Its error is [proto.ErrNotFound] where there is none.
func (s *Store) Get(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, uint64, error) {
	m, err := s.Store.Last(ctx, s.Store.Deliveries, store.DeliverySubject(org, id))
	if store.IsNotFound(err) {
		return nil, 0, fmt.Errorf("delivery of %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, err
	}
	d, err := proto.DecodeDelivery(id, m.Data)
	return d, m.Seq, err
}

// Update stores d in place of the delivery as it was at a revision, and gives the new one. It tries until ctx ends. Its error is
// [proto.ErrConflict] where somebody else changed it.
func (s *Store) Update(ctx context.Context, d *proto.Delivery, revision uint64) (uint64, error) {
	seq, err := s.write(ctx, d, revision)
	if store.IsConflict(err) {
		return 0, fmt.Errorf("delivery of %s: %w", d.TraceID, proto.ErrConflict)
	}
	return seq, err
}

// Delivery gives a delivery. Its error is [proto.ErrNotFound] where there is none.
func (s *Store) Delivery(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error) {
	d, _, err := s.Get(ctx, org, id)
	return d, err
}

// Replay makes a delivery that has ended begin again, and gives it. Its error is [proto.ErrNotFound] where there is none, and
// [proto.ErrConflict] where it has not ended.
func (s *Store) Replay(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error) {
	for range tries {
		d, revision, err := s.Get(ctx, org, id)
		if err != nil {
			return nil, err
		}
		if d.Status == proto.DeliveryPending {
			return nil, fmt.Errorf("delivery of %s is pending: %w", id, proto.ErrConflict)
		}
		d.Replay(time.Now())
		if _, err = s.Update(ctx, d, revision); !errors.Is(err, proto.ErrConflict) {
			return d, err
		}
	}
	return nil, fmt.Errorf("replay delivery of %s: %w", id, proto.ErrConflict)
}

// ReplayFailed makes deliveries of an organisation begin again that have failed since a time: the first most of those whose trace ids come
// after the one given, in their order, so that who goes on after the last one comes to an end also if they fail again meanwhile.
func (s *Store) ReplayFailed(ctx context.Context, org string, since time.Time, after proto.TraceID, most int) (r proto.Replayed, err error) {
	var failed []proto.TraceID
	read, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	err = s.feed(read, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &since, FilterSubject: store.DeliveryPattern(org),
	}, func(m jetstream.Msg, _ *jetstream.MsgMetadata) {
		id, err := traceOf(m)
		if err == nil && id > after && proto.DeliveryStatus(m.Headers().Get(store.HeaderStatus)) == proto.DeliveryFailed {
			failed = append(failed, id)
		}
	}, func() { stop(errRead) })
	if !errors.Is(err, errRead) {
		return r, fmt.Errorf("look for failed deliveries: %w", err)
	}
	slices.Sort(failed)
	for _, id := range failed[:min(len(failed), most)] {
		_, err := s.Replay(ctx, org, id)
		if err != nil && !errors.Is(err, proto.ErrNotFound) && !errors.Is(err, proto.ErrConflict) {
			return r, err
		}
		if err == nil { // else somebody else has replayed it, or its retention is over
			r.Replayed++
		}
	}
	if r.Left = max(0, len(failed)-most); r.Left > 0 {
		r.Next = failed[most-1]
	}
	return r, nil
}

// errRead ends a feed whose end was reached.
var errRead = errors.New("all was read")

// Follow gives every delivery to take, as it is and then whenever it changes, in the order of their revisions, and calls current once
// take has had all that there were, all in one goroutine. It returns when ctx ends, or with an error when changes may have been
// missed. What is malformed is told to wrong, and passed over.
func (s *Store) Follow(ctx context.Context, take func(proto.DeliveryChange), current func(), wrong func(error)) error {
	cfg := jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy, FilterSubject: store.DeliveryPattern("")}
	return s.feed(ctx, cfg, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
		c, err := change(m, at)
		if err != nil {
			wrong(fmt.Errorf("read the delivery on %s: %w", m.Subject(), err))
			return
		}
		take(c)
	}, current)
}

// fed is one message of a feed.
type fed struct {
	msg jetstream.Msg
	at  *jetstream.MsgMetadata
}

// feed calls take for each delivery that cfg chooses, current once when all that lay there were taken, and then take for what comes.
func (s *Store) feed(
	ctx context.Context, cfg jetstream.ConsumerConfig, take func(jetstream.Msg, *jetstream.MsgMetadata), current func(),
) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	inbox := make(chan fed, inboxSize)
	stop, consumer, err := s.Store.Follow(ctx, s.Store.Deliveries, cfg, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
		select {
		case inbox <- fed{m, at}:
		case <-ctx.Done():
		}
	}, fail)
	if err != nil {
		return err
	}
	defer stop()
	pending, taken := consumer.CachedInfo().NumPending, uint64(0)
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	behind := true
	for {
		if behind && taken >= pending {
			behind = false
			look.Stop()
			current()
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case f := <-inbox:
			take(f.msg, f.at)
			taken++
		case <-look.C:
			if store.Drained(ctx, consumer, taken) {
				pending = taken
			}
		}
	}
}

func traceOf(m jetstream.Msg) (proto.TraceID, error) {
	return proto.ParseTraceID(m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:])
}

// change reads the headers of a stored delivery.
func change(m jetstream.Msg, at *jetstream.MsgMetadata) (c proto.DeliveryChange, err error) {
	if c.TraceID, err = traceOf(m); err != nil {
		return c, err
	}
	c.Org = strings.Split(m.Subject(), ".")[2]
	c.Revision, c.Origin = at.Sequence.Stream, m.Headers().Get(store.HeaderOrigin)
	if due := m.Headers().Get(store.HeaderDue); due != "" {
		c.Due, err = time.Parse(time.RFC3339Nano, due)
	}
	return c, err
}
