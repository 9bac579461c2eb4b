package store

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"
)

// Rows returns the names of all streams and buckets.
func Rows() []string {
	names := make([]string, len(table))
	for i := range table {
		names[i] = table[i].name
	}
	return names
}

// Subjects returns the subjects of st that match a filter and have messages, and their numbers.
func (s *Store) Subjects(
	ctx context.Context, st jetstream.Stream, filter string,
) (counts map[string]uint64, err error) {
	err = s.RetryLeader(nameOf(st), readTimeout).Do(ctx, func(ctx context.Context) error {
		own, err := s.JS.Stream(ctx, nameOf(st)) // a handle of its own: Info replaces what it caches
		if err != nil {
			return err
		}
		info, err := own.Info(ctx, jetstream.WithSubjectFilter(filter))
		if err != nil {
			return err
		}
		counts = info.State.Subjects
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the subjects %s of stream %s: %w", filter, nameOf(st), err)
	}
	return counts, nil
}

// PurgeSubject removes all messages of st on subjects that match a filter.
func (s *Store) PurgeSubject(ctx context.Context, st jetstream.Stream, filter string) error {
	if err := st.Purge(ctx, jetstream.WithPurgeSubject(filter)); err != nil {
		return fmt.Errorf("purge %s: %w", filter, err)
	}
	return nil
}

// EraseSubject removes all messages of st on subjects that match a filter, and overwrites them in the
// server's files.
func (s *Store) EraseSubject(ctx context.Context, st jetstream.Stream, filter string) error {
	for from := uint64(1); ; {
		m, err := s.Next(ctx, st, from, filter)
		if IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("erase %s: %w", filter, err)
		}
		if err := s.Erase(ctx, st, m.Sequence); err != nil {
			return err
		}
		from = m.Sequence + 1
	}
}

// Erase removes the message of st with sequence number seq, and overwrites it in the server's
// files. It is no error if there is none.
func (s *Store) Erase(ctx context.Context, st jetstream.Stream, seq uint64) error {
	if err := s.unlessGone(ctx, st, seq, st.SecureDeleteMsg(ctx, seq)); err != nil {
		return fmt.Errorf("erase message %d of %s: %w", seq, nameOf(st), err)
	}
	return nil
}

// unlessGone returns the error of a removal of a message, nil if there is no such message. The error
// itself does not say so.
func (s *Store) unlessGone(ctx context.Context, st jetstream.Stream, seq uint64, err error) error {
	if err == nil {
		return nil
	}
	if _, errGet := s.AtWithoutBody(ctx, st, seq); IsNotFound(errGet) {
		return nil
	}
	return err
}
