package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// restoreTimeout bounds what a restore does before it creates the streams.
const restoreTimeout = 30 * time.Second

// restoreAckTimeout is how long a restore waits for the acknowledgement of a message. It is long,
// because a restore that fails must begin again on an empty store.
const restoreAckTimeout = 30 * time.Second

// MaxPendingRestores bounds the messages of a backup that are being stored at the same time.
const MaxPendingRestores = 64

// Restore stores the messages of a backup.
type Restore struct{ store *Store }

// OpenForRestore opens JetStream alone. It returns the names of bullpen's streams that are not
// empty.
func OpenForRestore(ctx context.Context, nc *nats.Conn) (*Restore, []string, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(restoreAckTimeout),
		jetstream.WithPublishAsyncMaxPending(MaxPendingRestores))
	if err != nil {
		return nil, nil, fmt.Errorf("open JetStream: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	var used []string
	for i := range table {
		name := table[i].streamName()
		st, err := find(ctx, js, name)
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound):
		case err != nil:
			return nil, nil, err
		case st.CachedInfo().State.Msgs > 0:
			used = append(used, name)
		}
	}
	return &Restore{&Store{Conn: nc, JS: js}}, used, nil
}

func find(ctx context.Context, js jetstream.JetStream, name string) (st jetstream.Stream, err error) {
	err = Retry{}.Do(ctx, func(ctx context.Context) error {
		st, err = js.Stream(ctx, name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w: check the NATS server's JetStream and permissions", name, err)
	}
	return st, nil
}

// Unfinished reports whether the restore of a backup was begun here and not finished.
func (r *Restore) Unfinished(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	_, err := find(ctx, r.store.JS, restoringName)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Begin marks that a backup is being restored, so that no server starts on half of it, and
// replaces all streams by empty ones.
func (r *Restore) Begin(ctx context.Context, cfg Config, log *slog.Logger) error {
	js := r.store.JS
	bounded, cancel := context.WithTimeout(ctx, restoreTimeout)
	defer cancel()
	err := Retry{Transient: isForming}.Do(bounded, func(ctx context.Context) error {
		_, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: restoringName, Subjects: []string{root + "restoring"}, Replicas: cfg.Replicas, Storage: jetstream.FileStorage,
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("create stream %s: %w: check the NATS server's JetStream and permissions", restoringName, err)
	}
	for i := range table {
		name := table[i].streamName()
		err := Retry{}.Do(bounded, func(ctx context.Context) error { return js.DeleteStream(ctx, name) })
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("delete stream %s: %w", name, err)
		}
	}
	cfg.Restoring = true
	if r.store, err = open(ctx, r.store.Conn, cfg, log); err != nil {
		return err
	}
	r.store.JS = js // which bounds the pending messages
	return nil
}

// End marks that the whole backup is restored.
func (r *Restore) End(ctx context.Context) error {
	if err := r.store.JS.DeleteStream(ctx, restoringName); err != nil {
		return fmt.Errorf("delete stream %s: %w", restoringName, err)
	}
	return nil
}

// BackupStreams returns the streams of a backup, including those of buckets, in reading order.
func BackupStreams(ctx context.Context, s *Store) ([]Stream, error) {
	var streams []Stream
	for i := range table {
		r := &table[i]
		switch {
		case !r.backup:
		case r.stream != nil:
			streams = append(streams, *r.stream(s))
		default:
			st, err := find(ctx, s.JS, r.streamName())
			if err != nil {
				return nil, err
			}
			streams = append(streams, Stream{st, s})
		}
	}
	return streams, nil
}

// InBackup reports whether messages on a subject are part of a backup. Elected leaders are not, and
// bodies are part of the messages that name them.
func InBackup(subject string) bool {
	r := rowOf(subject)
	return r != nil && r.backup
}

// IsDeleteMarker reports whether a message of a bucket means that its key was removed.
func IsDeleteMarker(h nats.Header) bool {
	return h.Get(jetstream.MarkerReasonHeader) != "" || slices.Contains([]string{"DEL", "PURGE"}, h.Get("KV-Operation"))
}

// BackupHeader returns the header of a message in a backup. It omits conditions of the write, and
// the name of the body, which the backup contains itself.
func BackupHeader(h nats.Header) nats.Header {
	out := nats.Header{}
	for name, values := range h {
		if !strings.HasPrefix(name, "Nats-") && name != headerBody && name != headerWrite {
			out[name] = values
		}
	}
	return out
}

// Place is the place of a message in a stream.
type Place struct {
	Stream string // see [StreamID]
	Seq    uint64
}

// StreamID identifies a stream. A stream that is created again is another one.
func StreamID(st jetstream.Stream) string {
	return strconv.FormatInt(st.CachedInfo().Created.UnixNano(), 36)
}

// Places returns the places that a message with header h had in the streams that it was restored
// from.
func Places(h nats.Header) []Place {
	var places []Place
	for _, text := range h.Values(headerPlace) {
		id, seq, _ := strings.Cut(text, " ")
		if n, err := strconv.ParseUint(seq, 10, 64); err == nil { // written by AddPlace
			places = append(places, Place{id, n})
		}
	}
	return places
}

// AddPlace adds a place to the header of a message in a backup.
func AddPlace(h nats.Header, p Place) {
	h[headerPlace] = append(slices.Clone(h[headerPlace]), p.Stream+" "+strconv.FormatUint(p.Seq, 10))
}

// Put stores a message of a backup, after all those passed before. at is when the message was
// first stored. The returned future reports when it is stored.
func (r *Restore) Put(
	ctx context.Context, subject string, h nats.Header, body []byte, at time.Time,
) (jetstream.PubAckFuture, error) {
	if h == nil {
		h = nats.Header{}
	}
	if h.Get(headerStored) == "" {
		h.Set(headerStored, at.UTC().Format(time.RFC3339Nano))
	}
	m := &nats.Msg{Subject: subject, Header: h, Data: body}
	if len(body) > r.store.MaxInline {
		var err error
		if m, err = r.store.Bodies.stage(ctx, subject, h, body, r.store.MaxInline); err != nil {
			return nil, err
		}
	}
	ack, err := r.store.JS.PublishMsgAsync(m, jetstream.WithStallWait(restoreAckTimeout))
	if err != nil {
		return nil, fmt.Errorf("restore %s: %w", subject, err)
	}
	return ack, nil
}
