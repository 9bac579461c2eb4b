// Package deadletters keeps what nobody can act on: jobs that no worker lived to start, and messages that are malformed. One stored message
// for each, changed by compare-and-set. It decides about nothing and runs nothing.
package deadletters

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// readTimeout bounds reading one dead letter, which is tried again within it.
const readTimeout = 5 * time.Second

// Store is the dead letters in JetStream.
type Store struct{ Store *store.Store }

// SetAsideJob stores the dead letter of a job that has ended because its workers were lost, as rec tells. seq is where the job lies, which is
// left there. That the dead letter is stored already, or that the job is gone, is no error. It tries until ctx ends.
func (s *Store) SetAsideJob(ctx context.Context, rec *proto.Record, seq uint64) error {
	m, err := s.Store.At(ctx, s.Store.Jobs, seq)
	if store.IsNotFound(err) {
		return nil // whoever removed it had stored the dead letter
	}
	if err != nil {
		return fmt.Errorf("set aside job %s: %w", rec.TraceID, err)
	}
	letter := &proto.DeadLetter{ID: string(rec.TraceID), At: time.Now().UTC(), Attempt: rec.Attempt + 1, Workers: rec.Lost}
	job, err := store.DecodeJob(m, rec.TraceID)
	if err != nil {
		letter.Reason, letter.Message = proto.DeadMalformed, notJob(err)
		return s.create(ctx, letter, &proto.DeadMessage{Subject: store.JobSubject(&rec.Meta), Header: m.Header, Data: m.Data})
	}
	letter.Reason, letter.Meta = proto.DeadWorkersLost, &job.Meta
	letter.Message = fmt.Sprintf("%d workers were lost with this job, each before it started the program.", len(rec.Lost))
	return s.create(ctx, letter, job)
}

func notJob(why error) string { return "This message is no job: " + why.Error() + "." }

// SetAsideMessage moves a malformed message from where jobs lie to the dead letters; why says what is wrong with it.
func (s *Store) SetAsideMessage(ctx context.Context, seq uint64, why error) error {
	m, err := s.Store.AtWithoutBody(ctx, s.Store.Jobs, seq) // not its body: nothing that it says of that need be true
	if store.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("set aside message %d: %w", seq, err)
	}
	letter := &proto.DeadLetter{
		ID: "dead_" + strconv.FormatUint(seq, 10), Reason: proto.DeadMalformed, At: time.Now().UTC(), Message: notJob(why),
	}
	maps.DeleteFunc(m.Header, func(name string, _ []string) bool { return strings.HasPrefix(name, "Nats-") }) // which are of the way that it took
	if err := s.create(ctx, letter, &proto.DeadMessage{Subject: m.Subject, Header: m.Header, Data: m.Data}); err != nil {
		return err
	}
	if err := s.Store.Jobs.DeleteMsg(ctx, seq); err != nil && !store.IsNotFound(err) {
		return fmt.Errorf("set aside message %d: %w", seq, err)
	}
	return nil
}

func (s *Store) create(ctx context.Context, letter *proto.DeadLetter, content any) error {
	_, err := s.write(ctx, letter, content, 0)
	if store.IsConflict(err) {
		return nil
	}
	return err
}

func (s *Store) write(ctx context.Context, letter *proto.DeadLetter, content any, revision uint64) (uint64, error) {
	head, err := json.Marshal(letter)
	if err != nil {
		return 0, fmt.Errorf("encode dead letter %s: %w", letter.ID, err)
	}
	body, err := json.Marshal(content)
	if err != nil {
		return 0, fmt.Errorf("encode dead letter %s: %w", letter.ID, err)
	}
	seq, err := s.Store.Write(ctx, store.DeadLetterSubject(letter.ID), nats.Header{store.HeaderDead: {string(head)}}, body, revision)
	if err != nil {
		return 0, fmt.Errorf("store dead letter %s: %w", letter.ID, err)
	}
	return seq, nil
}

// removed reports whether this is the mark that is left of a dead letter.
func removed(h nats.Header) bool { return h.Get(store.HeaderDead) == "" }

// decode reads what the header of a dead letter tells of it.
func decode(h nats.Header, subject string, seq uint64) (*proto.DeadLetter, error) {
	letter := &proto.DeadLetter{Revision: seq}
	if err := json.Unmarshal([]byte(h.Get(store.HeaderDead)), letter); err != nil {
		return nil, fmt.Errorf("decode the dead letter on %s: %w", subject, err)
	}
	if store.DeadLetterSubject(letter.ID) != subject || !proto.ValidDeadLetterID(letter.ID) || (letter.Meta == nil) != (letter.Reason == proto.DeadMalformed) {
		return nil, fmt.Errorf("decode the dead letter on %s: it says that it is %q, set aside as %q", subject, letter.ID, letter.Reason)
	}
	return letter, nil
}

// List gives the dead letters that come after the one given, nil for the first, the newest first, and at most limit of them. What cannot be
// read is told to wrong, and passed over.
func (s *Store) List(ctx context.Context, after *proto.DeadLetter, limit int, wrong func(error)) ([]proto.DeadLetter, error) {
	var page []proto.DeadLetter
	err := s.Store.ReadHeaders(ctx, s.Store.DeadLetters, store.DeadLetterPattern, func(m jetstream.Msg) {
		if removed(m.Headers()) {
			return
		}
		letter, err := decode(m.Headers(), m.Subject(), 0)
		if err != nil {
			wrong(err)
			return
		}
		page = slices.DeleteFunc(page, func(l proto.DeadLetter) bool { return l.ID == letter.ID }) // it was replaced meanwhile
		if after != nil && order(*letter, *after) <= 0 {
			return
		}
		at, _ := slices.BinarySearchFunc(page, *letter, order)
		page = slices.Insert(page, at, *letter)
		page = page[:min(len(page), limit)]
	})
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	return page, nil
}

// order has the newest first.
func order(a, b proto.DeadLetter) int {
	return cmp.Or(b.At.Compare(a.At), strings.Compare(a.ID, b.ID))
}

// Get gives a dead letter with what it is about. Its error is [proto.ErrNotFound] where there is none.
func (s *Store) Get(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error) {
	letter, m, err := s.read(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	content := &proto.DeadContent{}
	if letter.Meta != nil {
		content.Job, err = store.DecodeJob(m, letter.Meta.TraceID)
	} else {
		content.Message = &proto.DeadMessage{}
		err = json.Unmarshal(m.Data, content.Message)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("decode dead letter %s: %w", id, err)
	}
	return letter, content, nil
}

func (s *Store) read(ctx context.Context, id string) (*proto.DeadLetter, *store.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	m, err := s.Store.LastFromLeader(ctx, s.Store.DeadLetters, store.DeadLetterSubject(id))
	if store.IsNotFound(err) || err == nil && removed(m.Header) {
		return nil, nil, fmt.Errorf("dead letter %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, nil, err
	}
	letter, err := decode(m.Header, store.DeadLetterSubject(id), m.Seq)
	return letter, m, err
}

// Mark stores which execution was made of the job of a dead letter, as letter says, in place of the dead letter as it was at its revision, and
// gives letter the new one. It is kept for a whole retention from then on, its job too. Its error is [proto.ErrConflict] where somebody else
// changed or removed it.
func (s *Store) Mark(ctx context.Context, letter *proto.DeadLetter) error {
	old, m, err := s.read(ctx, letter.ID)
	if errors.Is(err, proto.ErrNotFound) || err == nil && old.Revision != letter.Revision {
		return fmt.Errorf("dead letter %s: %w", letter.ID, proto.ErrConflict)
	}
	if err != nil {
		return err
	}
	seq, err := s.write(ctx, letter, json.RawMessage(m.Data), letter.Revision)
	if store.IsConflict(err) {
		return fmt.Errorf("dead letter %s: %w", letter.ID, proto.ErrConflict)
	}
	if err != nil {
		return err
	}
	letter.Revision = seq
	s.Store.DiscardBody(ctx, m)
	return nil
}

// Remove removes a dead letter with what it is about. A mark stays in its place, so that nobody who meets the job once more sets it aside again.
// Its error is [proto.ErrNotFound] where there is none.
func (s *Store) Remove(ctx context.Context, id string) error {
	for {
		letter, m, err := s.read(ctx, id)
		if err != nil {
			return err
		}
		_, err = s.Store.Write(ctx, store.DeadLetterSubject(id), nats.Header{}, nil, letter.Revision)
		if store.IsConflict(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("remove dead letter %s: %w", id, err)
		}
		s.Store.DiscardBody(ctx, m)
		return nil
	}
}
