// Package usage counts what organisations use: executions, their CPU time and memory, the bytes
// that they send and store, and attempts of webhooks. The counts outlive the executions.
//
// # Counting once
//
// A [Counter] follows the streams of records and deliveries, and adds what has ended to entries of
// a bucket: one for each API key and month, with a sum for each day and language, and one for each
// organisation and month, with a sum for each day. Each entry has the place in each stream up to
// which it counts. A message is added only to the entries that do not count it yet, and entries are
// changed by compare-and-set. So a counter may be killed between any two writes, and two may run at
// a time: what was counted and what was not is in the entries themselves. The position, which is
// written last, only saves reading a stream from its beginning.
//
// A terminal record is never replaced, so each is read as long as it is kept. A delivery that has
// ended may be replayed, and counts with each end. Its attempts up to an end are not counted if the
// counter did not read that end before it was replaced.
package usage

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const monthLayout = "2006-01"

// forgetEvery is how often months that are over are dropped from memory.
const forgetEvery = time.Hour

// Keys of the bucket.
const (
	positionKey = "position"
	orgPrefix   = "org." // org.<organisation>.<month>
	keyPrefix   = "key." // key.<organisation>.<month>.<key id>
	// crossPrefix begins the keys of limits that were reached. What follows is
	// <organisation>.<month>.<quota>.<level>.<limit>.
	crossPrefix = "cross."
)

// entry is a value of the bucket: the usage of an organisation or of an API key in a month.
type entry struct {
	// Sums are per day for an organisation, and per day and language for a key, see keyName.
	Sums map[string]*proto.UsageSum `json:"sums"`
	// Stored has the largest sample of stored bytes of each day. StoredBytes is the last sample.
	// Only an organisation has them.
	Stored      map[string]int64 `json:"stored,omitempty"`
	StoredBytes int64            `json:"stored_bytes,omitempty"`
	// Counted maps each stream's id to the sequence number of the last message in the sums.
	Counted map[string]uint64 `json:"counted"`
}

// counts reports whether the sums include a message stored at one of these places.
func (e *entry) counts(places []store.Place) bool {
	for _, p := range places {
		if p.Seq <= e.Counted[p.Stream] {
			return true
		}
	}
	return false
}

func decodeEntry(e jetstream.KeyValueEntry) (*entry, error) {
	value := &entry{Sums: map[string]*proto.UsageSum{}, Stored: map[string]int64{}, Counted: map[string]uint64{}}
	if e == nil {
		return value, nil
	}
	if err := json.Unmarshal(e.Value(), value); err != nil {
		return nil, fmt.Errorf("decode usage %s: %w", e.Key(), err)
	}
	return value, nil
}

// orgEntry returns the key of the entry of an organisation in a month.
func orgEntry(org, month string) string { return orgPrefix + org + "." + month }

// keyEntry returns the key of the entry of an API key in a month.
func keyEntry(org, month, key string) string { return keyPrefix + org + "." + month + "." + key }

// keyName returns the name of the sum of a day and language in the entry of an API key.
func keyName(day string, language proto.Language) string { return day + " " + string(language) }

// monthOf returns the month of a day in the form of [proto.UsageDayLayout].
func monthOf(day string) string { return day[:len(monthLayout)] }

// readEntries returns the entries whose keys match a pattern.
func readEntries(ctx context.Context, st *store.Store, pattern string) (map[string]*entry, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	found := map[string]*entry{}
	err := store.ReadBucket(ctx, st.Usage, pattern, func(e jetstream.KeyValueEntry) {
		if e.Operation() != jetstream.KeyValuePut {
			return
		}
		value, err := decodeEntry(e)
		if err != nil {
			cancel(err)
			return
		}
		found[e.Key()] = value
	})
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if err != nil {
		return nil, fmt.Errorf("read usage %s: %w", pattern, err)
	}
	return found, nil
}

// Usage answers questions about usage. Run must be running for Month to be up to date.
type Usage struct {
	Store  *store.Store
	months *store.Collection[month]
}

// month is a month's entry in memory.
type month struct {
	proto.UsageMonth
	sampled bool
}

// Open reads the usage of the present month and the one before.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Usage, error) {
	months, err := store.OpenCollection(ctx, store.CollectionConfig[month]{
		Store: st, Bucket: st.Usage, Keys: orgPrefix + "*.*", Name: "usage of months", Decode: decodeMonth, Log: log,
	})
	return &Usage{Store: st, months: months}, err
}

// Run applies changes until ctx is done. It always returns nil.
func (u *Usage) Run(ctx context.Context) error {
	var watch sync.WaitGroup
	watch.Go(func() { _ = u.months.Run(ctx) })
	defer watch.Wait()
	tick := time.NewTicker(forgetEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			u.forget(now)
		}
	}
}

// forget drops months that are over from memory.
func (u *Usage) forget(now time.Time) {
	u.months.Forget(func(key string) bool { return past(key, now) })
}

// past reports whether an entry is of a month before the last one: Month does not need it.
func past(key string, now time.Time) bool {
	return key[strings.LastIndexByte(key, '.')+1:] < firstOfMonth(now.UTC()).AddDate(0, -1, 0).Format(monthLayout)
}

func decodeMonth(e jetstream.KeyValueEntry) (*month, error) {
	if past(e.Key(), time.Now()) {
		return nil, nil
	}
	stored, err := decodeEntry(e)
	if err != nil {
		return nil, err
	}
	m := &month{sampled: len(stored.Stored) > 0}
	m.StoredBytes = stored.StoredBytes
	for _, sum := range stored.Sums {
		m.Add(sum)
	}
	for _, bytes := range stored.Stored {
		m.StoredByteDays += bytes
	}
	return m, nil
}

// Month returns an organisation's usage in the current month, as of a few seconds ago. It reads
// memory only. Its maps must not be modified.
func (u *Usage) Month(org string) proto.UsageMonth {
	now := time.Now().UTC()
	first := firstOfMonth(now)
	var m month
	if stored := u.months.Get(orgEntry(org, now.Format(monthLayout))); stored != nil {
		m = *stored
	}
	if !m.sampled { // the first sample of the month is not there yet
		before := first.AddDate(0, -1, 0)
		if stored := u.months.Get(orgEntry(org, before.Format(monthLayout))); stored != nil {
			m.StoredBytes = stored.StoredBytes
		}
	}
	m.Ends = first.AddDate(0, 1, 0)
	return m.UsageMonth
}

// Cross reports whether this is the first call, in any process, for a limit that an organisation
// has reached.
func (u *Usage) Cross(ctx context.Context, c proto.Crossing) (first bool, err error) {
	month := c.Month.AddDate(0, -1, 0).Format(monthLayout)
	key := fmt.Sprint(crossPrefix, c.Org, ".", month, ".", c.Name, ".", c.Level, ".", c.Limit)
	_, err = u.Store.Usage.Create(ctx, key, nil)
	if store.IsConflict(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("store that the organisation %s has reached a limit: %w", c.Org, err)
	}
	return true, nil
}

// orgOf returns the organisation in the key of an entry.
func orgOf(key string) string { return strings.Split(key, ".")[1] }
