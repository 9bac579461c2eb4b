package usage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	flushEvery  = time.Second
	sampleEvery = time.Hour
	maxChanged  = 1024 // changed entries that trigger a write before flushEvery
	maxPassed   = 8192 // messages likewise
	maxCached   = 1024 // entries in memory between two writes
	writes      = 16   // at a time
)

// Counter counts usage, in one process at a time.
type Counter struct {
	Store     *store.Store
	Retention time.Duration // of records
	Instance  string        // unique to this process
	Log       *slog.Logger
}

// Run counts until ctx is done. It always returns nil.
func (c *Counter) Run(ctx context.Context) error {
	elector := leader.Elector{Store: c.Store, Name: "usage", Instance: c.Instance, Log: c.Log}
	elector.Run(ctx, func(ctx context.Context, _ *leader.Term) error {
		c.Count(ctx)
		return nil
	})
	return nil
}

// Count counts until ctx is done. Another counter may run at the same time.
func (c *Counter) Count(ctx context.Context) {
	c.Store.KeepFollowing(ctx, c.Log, "usage not up to date, will retry", c.follow)
}

// part is usage to add to the entries of an API key, a day and a language.
type part struct {
	org, day, key string
	language      proto.Language
	proto.UsageSum
}

// change is the usage in a message. Its first place is the current one.
type change struct {
	places []store.Place
	parts  []part
}

// follow counts the messages after the stored position, until ctx is done or an error occurs.
func (c *Counter) follow(ctx context.Context) error {
	a := &accumulator{
		Counter: c, entries: map[string]*cached{}, position: map[string]uint64{},
		passed: map[string]uint64{},
	}
	e, err := c.Store.Usage.Get(ctx, positionKey)
	if err != nil && !store.IsNotFound(err) {
		return fmt.Errorf("read the position of usage: %w", err)
	}
	if err == nil {
		if err := json.Unmarshal(e.Value(), &a.position); err != nil {
			return fmt.Errorf("decode the position of usage: %w", err)
		}
		c.reportGap(ctx, a.position, e.Created())
	}
	after := func(st store.Stream) uint64 { return a.position[store.StreamID(st)] }
	st := c.Store
	changes := make(chan change, maxChanged)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.read(ctx, st.Records.Stream, after(st.Records.Stream), changes, c.record) })
	group.Go(func() error { return c.read(ctx, st.Deliveries, after(st.Deliveries), changes, c.delivery) })
	group.Go(func() error { return c.read(ctx, st.AgentLogs, after(st.AgentLogs), changes, c.turn) })
	group.Go(func() error { return a.run(ctx, changes) })
	return group.Wait()
}

// reportGap logs if executions cannot be counted: they may have ended and expired since the
// position was written, or the stream has lost counted messages and will reuse their sequence
// numbers.
func (c *Counter) reportGap(ctx context.Context, position map[string]uint64, written time.Time) {
	last, err := lastSeq(ctx, c.Store.Records.Stream)
	at := position[store.StreamID(c.Store.Records)]
	switch {
	case err != nil: // following the stream will fail as well
	case last < at:
		c.Log.Error("the stream of records has lost messages that usage counts; as many others will not be counted",
			"messages", at-last)
	case last > at && time.Since(written) > c.Retention:
		c.Log.Warn("executions that ended and expired while no gateway ran are missing in usage", "counted_until", written)
	}
}

// read sends the usage of a stream's messages after a sequence number. decode returns nothing for a
// message without usage, and an error if reading must start over.
func (c *Counter) read(
	ctx context.Context, st store.Stream, after uint64, changes chan<- change,
	decode func(ctx context.Context, m *store.Message) ([]part, error),
) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	id := store.StreamID(st)
	return st.Follow(ctx, store.Range{From: after + 1}, func(m *store.Message) {
		if ctx.Err() != nil {
			return
		}
		parts, err := decode(ctx, m)
		if err != nil {
			fail(err)
			return
		}
		places := append([]store.Place{{Stream: id, Seq: m.Seq}}, store.Places(m.Header)...)
		select {
		case changes <- change{places, parts}:
		case <-ctx.Done():
		}
	}, func() {})
}

// record returns what a terminal record adds.
func (c *Counter) record(ctx context.Context, m *store.Message) ([]part, error) {
	if !proto.Status(m.Header.Get(store.HeaderStatus)).Terminal() {
		return nil, nil
	}
	rec, err := c.Store.Records.Summary(ctx, m)
	if err == nil && rec.CompletedAt == nil {
		err = fmt.Errorf("it has no time of its end: %w", store.ErrMalformed)
	}
	if err != nil {
		inHeader := m.Header.Get(store.HeaderSummary) != ""
		return nil, c.skip(m, err, inHeader)
	}
	p := part{rec.Org, rec.CompletedAt.UTC().Format(proto.UsageDayLayout), rec.Key, rec.Language, proto.NewUsageSum(rec)}
	return c.valid(m, p)
}

// skip logs that a malformed message is not counted. It returns other errors, such as failed reads,
// after which the message must be read again.
func (c *Counter) skip(m *store.Message, err error, inHeader bool) error {
	switch {
	case store.IsNotFound(err): // replaced, or it has just expired
		return nil
	case inHeader || errors.Is(err, store.ErrMalformed) || errors.Is(err, jetstream.ErrDigestMismatch):
		c.Log.Error("malformed message not in usage", "subject", m.Subject, "error", err)
		return nil
	default:
		return fmt.Errorf("read %s: %w", m.Subject, err)
	}
}

// keyPattern matches the ids of API keys.
var keyPattern = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// valid returns those parts that can be stored.
func (c *Counter) valid(m *store.Message, parts ...part) ([]part, error) {
	return slices.DeleteFunc(parts, func(p part) bool {
		_, err := time.Parse(proto.UsageDayLayout, p.day)
		if err == nil && proto.ValidOrg(p.org) && keyPattern.MatchString(p.key) {
			return false
		}
		c.Log.Error("malformed message not in usage", "subject", m.Subject, "org", p.org, "key", p.key, "day", p.day)
		return true
	}), nil
}

// delivery returns the usage of a finished delivery.
func (c *Counter) delivery(ctx context.Context, m *store.Message) ([]part, error) {
	switch proto.DeliveryStatus(m.Header.Get(store.HeaderStatus)) {
	case proto.DeliveryDelivered, proto.DeliveryFailed:
	default:
		return nil, nil
	}
	org, id, err := store.ParseDeliverySubject(m.Subject)
	var used proto.DeliveryUsage
	if err == nil {
		used, err = c.deliveryUsage(ctx, id, m)
	}
	if err != nil {
		inHeader := m.Header.Get(store.HeaderUsed) != ""
		return nil, c.skip(m, err, inHeader)
	}
	var parts []part
	for day, n := range used.Attempts {
		parts = append(parts, part{org, day, used.Key, "", proto.UsageSum{WebhookAttempts: n}})
	}
	return c.valid(m, parts...)
}

// deliveryUsage returns the usage in a delivery's header. Older versions have no such header; it
// then reads the whole delivery.
func (c *Counter) deliveryUsage(
	ctx context.Context, id proto.TraceID, m *store.Message,
) (used proto.DeliveryUsage, err error) {
	if text := m.Header.Get(store.HeaderUsed); text != "" {
		err = json.Unmarshal([]byte(text), &used)
		return used, err
	}
	stored, err := c.Store.Deliveries.At(ctx, m.Seq)
	if err != nil {
		return used, err
	}
	d, err := proto.DecodeDelivery(id, stored.Data)
	if err != nil {
		return used, fmt.Errorf("%w: %w", store.ErrMalformed, err)
	}
	return d.Usage(), nil
}

// turn returns the usage of a message with which a turn of an agent session ended.
func (c *Counter) turn(_ context.Context, m *store.Message) ([]part, error) {
	key := m.Header.Get(store.HeaderTurn)
	if key == "" {
		return nil, nil
	}
	org, _ := store.ParseAgentLogSubject(m.Subject)
	day := m.FirstStored().UTC().Format(proto.UsageDayLayout)
	return c.valid(m, part{org, day, key, "", proto.UsageSum{AgentTurns: 1}})
}

// accumulator adds changes to entries in memory and writes these.
type accumulator struct {
	*Counter
	entries  map[string]*cached
	changed  int               // entries that are not written
	position map[string]uint64 // that is stored
	passed   map[string]uint64 // the last sequence number of each stream since then
	count    int               // messages since then
}

// cached is an entry in memory.
type cached struct {
	*entry
	revision uint64 // 0 if it is not stored yet
	changed  bool
}

// run adds changes and samples until ctx is done or an error.
func (a *accumulator) run(ctx context.Context, changes <-chan change) error {
	flush, sample := time.NewTimer(flushEvery), time.NewTimer(0)
	defer flush.Stop()
	defer sample.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case c := <-changes:
			if err := a.add(ctx, c); err != nil {
				return err
			}
			if a.changed < maxChanged && a.count < maxPassed {
				continue
			}
		case <-flush.C:
		case <-sample.C:
			if err := a.sample(ctx); err != nil {
				return err
			}
			sample.Reset(sampleEvery)
		}
		if err := a.flush(ctx); err != nil {
			return err
		}
		flush.Reset(flushEvery)
	}
}

// add adds a change to its entries. A change is added to an entry as a whole, since the entry then
// records its position.
func (a *accumulator) add(ctx context.Context, c change) error {
	at := c.places[0]
	a.passed[at.Stream] = at.Seq
	a.count++
	sums := map[string]map[string]*proto.UsageSum{} // by the key of the entry and the name in it
	put := func(key, name string, p *part) {
		if sums[key] == nil {
			sums[key] = map[string]*proto.UsageSum{}
		}
		if sums[key][name] == nil {
			sums[key][name] = &proto.UsageSum{}
		}
		sums[key][name].Add(&p.UsageSum)
	}
	for i := range c.parts {
		p := &c.parts[i]
		put(keyEntry(p.org, monthOf(p.day), p.key), keyName(p.day, p.language), p)
		put(orgEntry(p.org, monthOf(p.day)), p.day, p)
	}
	for key, named := range sums {
		e, err := a.entry(ctx, key)
		if err != nil {
			return err
		}
		if e.counts(c.places) {
			continue
		}
		for name, sum := range named {
			if e.Sums[name] == nil {
				e.Sums[name] = &proto.UsageSum{}
			}
			e.Sums[name].Add(sum)
		}
		e.Counted[at.Stream] = at.Seq
		a.change(e)
	}
	return nil
}

func (a *accumulator) change(e *cached) {
	if !e.changed {
		e.changed = true
		a.changed++
	}
}

// entry returns the entry with that key, which may be empty.
func (a *accumulator) entry(ctx context.Context, key string) (*cached, error) {
	if e := a.entries[key]; e != nil {
		return e, nil
	}
	stored, err := a.Store.Usage.Get(ctx, key)
	if err != nil && !store.IsNotFound(err) {
		return nil, fmt.Errorf("read usage %s: %w", key, err)
	}
	e := &cached{}
	if err == nil {
		e.revision = stored.Revision()
	} else {
		stored = nil
	}
	if e.entry, err = decodeEntry(stored); err != nil {
		return nil, err
	}
	a.entries[key] = e
	return e, nil
}

// flush writes the changed entries and then the position.
func (a *accumulator) flush(ctx context.Context) error {
	group, writing := errgroup.WithContext(ctx)
	group.SetLimit(writes)
	for key, e := range a.entries {
		if e.changed {
			group.Go(func() error { return a.write(writing, key, e) })
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	a.changed = 0
	if len(a.entries) > maxCached {
		clear(a.entries)
	}
	if a.count == 0 {
		return nil
	}
	maps.Copy(a.position, a.passed)
	text, err := json.Marshal(a.position)
	if err == nil {
		_, err = a.Store.Usage.Put(ctx, positionKey, text)
	}
	if err != nil {
		return fmt.Errorf("store the position of usage: %w", err)
	}
	a.count = 0
	return nil
}

// write replaces an entry, unless it changed since it was read. Then another counter, or an earlier
// write whose answer was lost, has changed it, and it must be read again.
func (a *accumulator) write(ctx context.Context, key string, e *cached) error {
	text, err := json.Marshal(e.entry)
	if err != nil {
		return fmt.Errorf("encode usage %s: %w", key, err)
	}
	if e.revision == 0 {
		e.revision, err = a.Store.Usage.Create(ctx, key, text)
	} else {
		e.revision, err = a.Store.Usage.Update(ctx, key, text, e.revision)
	}
	if err != nil {
		return fmt.Errorf("store usage %s: %w", key, err)
	}
	e.changed = false
	return nil
}

// sample adds the bytes that organisations store now.
func (a *accumulator) sample(ctx context.Context) error {
	now := time.Now().UTC()
	stored, errThreads := a.threadBytes(ctx)
	outputs, err := a.outputBytes(ctx, now)
	if err := errors.Join(errThreads, err); err != nil {
		return fmt.Errorf("sample the stored bytes: %w", err)
	}
	for org, bytes := range outputs { // also those that store nothing any more
		stored[org] += bytes
	}
	day := now.Format(proto.UsageDayLayout)
	for org, bytes := range stored {
		e, err := a.entry(ctx, orgEntry(org, monthOf(day)))
		if err != nil {
			return err
		}
		before, sampled := e.Stored[day]
		if sampled && before >= bytes && e.StoredBytes == bytes {
			continue
		}
		e.Stored[day], e.StoredBytes = max(before, bytes), bytes
		a.change(e)
	}
	return nil
}

// threadBytes returns the total size of all threads' newest versions and staged files, by
// organisation.
func (a *accumulator) threadBytes(ctx context.Context) (map[string]int64, error) {
	last, err := lastSeq(ctx, a.Store.Threads)
	if err != nil {
		return nil, err
	}
	bytes := map[string]int64{}
	err = a.Store.Threads.Read(ctx, store.Range{}, func(m *store.Message) {
		text := m.Header.Get(store.HeaderThread)
		if text == "" || m.Seq > last { // removed; or changed since, and perhaps counted already
			return
		}
		var s proto.ThreadSummary
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			a.Log.Error("malformed thread not in usage", "subject", m.Subject, "error", err)
			return
		}
		org, _ := store.ParseThreadSubject(m.Subject)
		bytes[org] += s.Bytes + s.StagedBytes
	})
	return bytes, err
}

// outputBytes returns the size of retained results, by organisation: those of all executions that
// ended on a day that is not wholly past the retention.
func (a *accumulator) outputBytes(ctx context.Context, now time.Time) (map[string]int64, error) {
	oldest := now.Add(-a.Retention)
	bytes := map[string]int64{}
	for m := firstOfMonth(oldest).AddDate(0, -1, 0); !m.After(now); m = m.AddDate(0, 1, 0) {
		entries, err := readEntries(ctx, a.Store, orgEntry("*", m.Format(monthLayout)))
		if err != nil {
			return nil, err
		}
		for key, e := range entries {
			org := orgOf(key)
			if _, known := bytes[org]; !known {
				bytes[org] = 0 // it may have stored something before
			}
			for day, sum := range e.Sums {
				if day >= oldest.Format(proto.UsageDayLayout) {
					bytes[org] += sum.OutputBytes
				}
			}
		}
	}
	return bytes, nil
}

func firstOfMonth(t time.Time) time.Time {
	return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
}
