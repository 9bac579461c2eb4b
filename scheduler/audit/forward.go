package audit

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	pollEvery     = time.Second // for new records
	resendLongest = time.Minute // between two attempts to send
)

// Sink receives records outside of bullpen.
type Sink interface {
	// Send delivers records in order. After an error it is called with all of them again.
	Send(ctx context.Context, records []Entry) error
}

// Forwarder sends all records of the log to a sink, each at least once and in order. Only one
// process sends at a time.
type Forwarder struct {
	Log      *Log
	Sink     Sink
	Name     string // of the sink: part of a subject and of the position's key
	Instance string // unique to this process
	Logger   *slog.Logger
}

// Run sends until ctx is done. It always returns nil.
func (f *Forwarder) Run(ctx context.Context) error {
	elector := leader.Elector{Store: f.Log.Store, Name: f.Name, Instance: f.Instance, Log: f.Logger}
	elector.Run(ctx, func(ctx context.Context, _ *leader.Term) error { return f.forward(ctx) })
	return nil
}

func (f *Forwarder) forward(ctx context.Context) error {
	sent, err := f.position(ctx)
	if err != nil {
		return err
	}
	for {
		last, first, err := f.Log.bounds(ctx)
		if err != nil {
			return err
		}
		if last != nil && sent > last.Sequence { // an earlier log was restored
			f.Logger.Warn("audit log ends before the record last sent, sending it again", "sink", f.Name, "sent", sent, "last",
				last.Sequence)
			sent = 0
		}
		if last == nil || sent == last.Sequence {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(pollEvery):
			}
			continue
		}
		if sent > 0 && first > sent+1 {
			f.Logger.Error("audit records were removed by --audit-retention before they were sent", "sink", f.Name, "first",
				sent+1, "last", first-1)
		}
		from := max(first, sent+1)
		records, err := f.Log.read(ctx, last.at(from), last.at(min(last.Sequence, from+window-1)))
		if err != nil {
			return err
		}
		if err := f.send(ctx, records); err != nil {
			return err
		}
		sent = min(last.Sequence, from+window-1)
		if _, err := f.Log.Store.Control.Put(ctx, f.key(), strconv.AppendInt(nil, sent, 10)); err != nil {
			return fmt.Errorf("store the position of %s: %w", f.Name, err)
		}
	}
}

// send repeats until the sink has the records, or ctx is done.
func (f *Forwarder) send(ctx context.Context, records []Entry) error {
	pauses := backoff.NewExponentialBackOff(backoff.WithMaxInterval(resendLongest), backoff.WithMaxElapsedTime(0))
	return backoff.RetryNotify(
		func() error { return f.Sink.Send(ctx, records) },
		backoff.WithContext(pauses, ctx),
		func(err error, pause time.Duration) {
			f.Logger.Warn("audit records not sent, will retry", "sink", f.Name, "records", len(records), "error", err, "in_ms",
				pause.Milliseconds())
		})
}

func (f *Forwarder) key() string { return f.Name + ".position" }

// position returns the sequence number of the last sent record, or 0.
func (f *Forwarder) position(ctx context.Context) (int64, error) {
	e, err := f.Log.Store.Control.Get(ctx, f.key())
	if store.IsNotFound(err) {
		return 0, nil
	}
	var sent int64
	if err == nil {
		sent, err = strconv.ParseInt(string(e.Value()), 10, 64)
	}
	if err != nil {
		return 0, fmt.Errorf("read the position of %s: %w", f.Name, err)
	}
	return sent, nil
}
