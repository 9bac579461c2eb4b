package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// restoringName is a stream that is there while a backup is being restored.
const restoringName = "BULLPEN_RESTORING"

// Names of the streams that JetStream makes of buckets.
const (
	bucketPrefix  = "KV_"
	objectsPrefix = "OBJ_"
)

// names are those of all streams that a [PutJob] makes.
func names() []string {
	all := []string{jobsName, execsName, outName, deadName, hooksName, headsName, objectsPrefix + bodiesName}
	for _, bucket := range []string{keysName, profilesName, bindingsName, controlName, imagesName, webhooksName} {
		all = append(all, bucketPrefix+bucket)
	}
	return all
}

// Used opens JetStream alone, and gives the names of the streams of bullpen that something is in.
func OpenForRestore(ctx context.Context, nc *nats.Conn) (*Store, []string, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(ackTimeout), jetstream.WithPublishAsyncMaxPending(MaxPendingRestores))
	if err != nil {
		return nil, nil, fmt.Errorf("open JetStream: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	var used []string
	for _, name := range names() {
		var st jetstream.Stream
		err := Retry(ctx, IsTransient, func(ctx context.Context) (err error) {
			st, err = js.Stream(ctx, name)
			return err
		})
		switch {
		case errors.Is(err, jetstream.ErrStreamNotFound):
		case err != nil:
			return nil, nil, fmt.Errorf("look for stream %s: %w", name, err)
		case st.CachedInfo().State.Msgs > 0:
			used = append(used, name)
		}
	}
	return &Store{Conn: nc, JS: js}, used, nil
}

// RestoreAhead is how many messages may be on their way to be stored while a backup is restored.
const MaxPendingRestores = 64

// Unfinished reports whether a backup was being restored here, and not to its end.
func (s *Store) RestoreUnfinished(ctx context.Context) (bool, error) {
	err := Retry(ctx, IsTransient, func(ctx context.Context) error {
		_, err := s.JS.Stream(ctx, restoringName)
		return err
	})
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return false, nil
	default:
		return false, fmt.Errorf("look for stream %s: %w: check the NATS server's JetStream and permissions", restoringName, err)
	}
}

// BeginRestore marks that a backup is being restored, so that no server starts on half of it, and removes all that is there.
func (s *Store) BeginRestore(ctx context.Context, cfg Config) error {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	err := Retry(ctx, forming, func(ctx context.Context) error {
		_, err := s.JS.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: restoringName, Subjects: []string{root + "restoring"}, Replicas: cfg.Replicas, Storage: jetstream.FileStorage,
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("make stream %s: %w: check the NATS server's JetStream and permissions", restoringName, err)
	}
	for _, name := range names() {
		err := Retry(ctx, IsTransient, func(ctx context.Context) error { return s.JS.DeleteStream(ctx, name) })
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("remove stream %s: %w", name, err)
		}
	}
	restored, err := open(ctx, s.Conn, cfg)
	if err != nil {
		return err
	}
	restored.JS = s.JS // which has few messages on their way
	*s = *restored
	return nil
}

// EndRestore says that all of a backup is there.
func (s *Store) EndRestore(ctx context.Context) error {
	if err := s.JS.DeleteStream(ctx, restoringName); err != nil {
		return fmt.Errorf("remove stream %s: %w", restoringName, err)
	}
	return nil
}

// Bucket opens the stream of a bucket.
func (s *Store) BucketStream(ctx context.Context, b jetstream.KeyValue) (jetstream.Stream, error) {
	st, err := s.JS.Stream(ctx, bucketPrefix+b.Bucket())
	if err != nil {
		return nil, fmt.Errorf("open the stream of bucket %s: %w", b.Bucket(), err)
	}
	return st, nil
}

// Removed reports whether a message of a bucket says that there is nothing under its name.
func IsDeleteMarker(h nats.Header) bool {
	return h.Get(jetstream.MarkerReasonHeader) != "" || slices.Contains([]string{"DEL", "PURGE"}, h.Get("KV-Operation"))
}

// Restorable reports whether messages on a subject are kept in a backup: all but the seats of those who lead, and bodies, which are in
// the messages that name them.
func InBackup(subject string) bool {
	for _, of := range []string{"job.", "exec.", "out.", "delivery.", "thread.", "image.", "dead."} {
		if strings.HasPrefix(subject, root+of) {
			return true
		}
	}
	for _, bucket := range []string{keysName, profilesName, bindingsName, imagesName, webhooksName} {
		if strings.HasPrefix(subject, "$KV."+bucket+".") {
			return true
		}
	}
	return false
}

// Portable gives the header of a message as a backup has it: without conditions of its write, and without the name of a body that is
// stored apart, which the backup has with it.
func BackupHeader(h nats.Header) nats.Header {
	out := nats.Header{}
	for name, values := range h {
		if !strings.HasPrefix(name, "Nats-") && name != headerBody && name != headerWrite {
			out[name] = values
		}
	}
	return out
}

// Restore stores a message of a backup after those before it, which was first stored at a time. Whether it is there the future tells.
func (s *Store) Restore(ctx context.Context, subject string, h nats.Header, body []byte, at time.Time) (jetstream.PubAckFuture, error) {
	if h == nil {
		h = nats.Header{}
	}
	if h.Get(headerStored) == "" {
		h.Set(headerStored, at.UTC().Format(time.RFC3339Nano))
	}
	m := &nats.Msg{Subject: subject, Header: h, Data: body}
	if len(body) > s.inline {
		var err error
		if m, err = s.stage(ctx, subject, h, body, s.inline); err != nil {
			return nil, err
		}
	}
	ack, err := s.JS.PublishMsgAsync(m, jetstream.WithStallWait(ackTimeout))
	if err != nil {
		return nil, fmt.Errorf("restore %s: %w", subject, err)
	}
	return ack, nil
}
