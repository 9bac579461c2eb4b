package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Store stores runs: for each a log of messages, the first of which is the request.
type Store interface {
	// Create stores a new run, and returns the number of its first message. A run in the background is
	// active then.
	Create(ctx context.Context, run *proto.AgentRun) (at uint64, err error)
	// Get returns a run and the number of its first message, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (run *proto.AgentRun, at uint64, err error)
	// Append adds a message after message number after, and returns its number. It returns
	// [proto.ErrConflict] if another message is the last.
	Append(ctx context.Context, org, id string, after uint64, message []byte) (at uint64, err error)
	// Next returns the first message with a number greater than after; nil if there is none. It
	// returns [proto.ErrNotFound] if message number after is gone.
	Next(ctx context.Context, org, id string, after uint64) (message []byte, at uint64, err error)
	// Watch returns a channel that receives a value after a message was added, and from time to
	// time. stop ends that.
	Watch(org, id string) (added <-chan struct{}, stop func(), err error)
	// Cancel requests the end of an active run. It returns [proto.ErrNotFound] if it is not active.
	Cancel(ctx context.Context, org, id string) error
	// Remove removes the log of a run.
	Remove(ctx context.Context, org, id string) error
}

// Entry is a message of the log of a run, after the first. One of Started, Event, Failed and Cancelled
// is set.
type Entry struct {
	At time.Time `json:"at"`
	// Started is the beginning of the run. It has the id of the container in which calls are carried
	// out.
	Started   *Start     `json:"started,omitempty"`
	Event     *Event     `json:"event,omitempty"`
	Failed    *api.Error `json:"failed,omitempty"`    // the run ended with an error
	Cancelled bool       `json:"cancelled,omitempty"` // the run was cancelled
}

// Start is how a run started.
type Start struct {
	Container string    `json:"container"`
	Created   time.Time `json:"created,omitzero"` // when the container was created, if the API needs it
}

// Ended reports whether the entry is the last one of its run.
func (e *Entry) Ended() bool {
	return e.Failed != nil || e.Cancelled || e.Event != nil && e.Event.Kind == EventEnd
}

// Reader reads the entries of a stored run.
type Reader struct {
	Store   Store
	Org, ID string
	At      uint64 // the number of the last message that was read
	// Reserve, if not nil, is called with the size in bytes of each message. Its error is returned.
	Reserve func(n int64) error
}

// Next returns the next entry, nil if there is none yet. It returns [proto.ErrNotFound] if the log
// was removed.
func (r *Reader) Next(ctx context.Context) (*Entry, error) {
	message, at, err := r.Store.Next(ctx, r.Org, r.ID, r.At)
	if err != nil || message == nil {
		return nil, err
	}
	if r.Reserve != nil {
		if err := r.Reserve(int64(len(message))); err != nil {
			return nil, err
		}
	}
	e := new(Entry)
	if err := json.Unmarshal(message, e); err != nil {
		return nil, fmt.Errorf("decode message %d of run %s: %w", at, r.ID, err)
	}
	r.At = at
	return e, nil
}

// Follow calls each with the entries up to the run's last one, as they arrive. It returns an error
// of each unchanged, and ctx.Err() if ctx is done first.
func (r *Reader) Follow(ctx context.Context, each func(*Entry) error) error {
	added, stop, err := r.Store.Watch(r.Org, r.ID)
	if err != nil {
		return err
	}
	defer stop()
	for {
		e, err := r.Next(ctx)
		if err == nil && e == nil {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-added:
				continue
			}
		}
		if err == nil {
			err = each(e)
		}
		if err != nil || e.Ended() {
			return err
		}
	}
}

const (
	// flushBytes and flushEvery limit the parts of texts that become one entry.
	flushBytes = 4 << 10
	flushEvery = 100 * time.Millisecond
	// storeTimeout is the time to store an entry.
	storeTimeout = 30 * time.Second
	// endTimeout limits storing the end of a run whose client has left.
	endTimeout = 10 * time.Second
)

// StoredLog is a [Log] that stores the events of a run before passing them on.
type StoredLog struct {
	Store Store
	Run   *proto.AgentRun
	At    uint64 // the number of the last message
	// To, if not nil, is called with each event after it was stored, or with each part of a text.
	To Log

	last    *Entry
	text    strings.Builder
	item    int // of text
	flushed time.Time
}

// Start stores that the run has started.
func (l *StoredLog) Start(ctx context.Context, s *Start) error {
	return l.append(ctx, &Entry{Started: s})
}

// Append implements [Log].
func (l *StoredLog) Append(ctx context.Context, e Event) error {
	if e.Kind == EventThinking || e.Kind == EventCallPart { // what follows has all of it
		if l.To == nil {
			return nil
		}
		return l.To.Append(ctx, e)
	}
	if err := l.store(ctx, &e); err != nil || l.To == nil {
		return err
	}
	return l.To.Append(ctx, e)
}

func (l *StoredLog) store(ctx context.Context, e *Event) error {
	if e.Kind != EventText {
		if err := l.flush(ctx); err != nil {
			return err
		}
		return l.append(ctx, &Entry{Event: e})
	}
	if !l.Run.Stream {
		return nil
	}
	l.text.WriteString(e.Text)
	if l.item = e.Item; l.text.Len() < flushBytes && time.Since(l.flushed) < flushEvery {
		return nil
	}
	return l.flush(ctx)
}

// flush stores the parts of a text that are not stored yet.
func (l *StoredLog) flush(ctx context.Context) error {
	if l.text.Len() == 0 {
		return nil
	}
	e := &Entry{Event: &Event{Kind: EventText, Item: l.item, Text: l.text.String()}}
	l.text.Reset()
	l.flushed = time.Now()
	return l.append(ctx, e)
}

// End stores that the run ended with an error, or nil. A run whose error is [context.Canceled] is
// stored as cancelled. ctx may be done.
func (l *StoredLog) End(ctx context.Context, cause error) error {
	if cause == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if err := l.flush(ctx); err != nil {
		return err
	}
	if errors.Is(cause, context.Canceled) {
		return l.append(ctx, &Entry{Cancelled: true})
	}
	return l.append(ctx, &Entry{Failed: Public(cause)})
}

func (l *StoredLog) append(ctx context.Context, e *Entry) error {
	e.At = time.Now().UTC()
	var message bytes.Buffer
	enc := json.NewEncoder(&message)
	enc.SetEscapeHTML(false) // six bytes for one
	if err := enc.Encode(e); err != nil {
		return fmt.Errorf("encode an entry of the log of run %s: %w", l.Run.ID, err)
	}
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	at, err := l.Store.Append(ctx, l.Run.Org, l.Run.ID, l.At, message.Bytes())
	if err != nil {
		return err
	}
	l.At, l.last = at, e
	return nil
}
