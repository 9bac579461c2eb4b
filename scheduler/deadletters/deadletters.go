// Package deadletters stores messages that cannot be processed: jobs whose workers were all lost
// before they started the program, and malformed messages. Each dead letter is one message, changed
// by compare-and-set.
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

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// readTimeout bounds reading one dead letter, including retries.
const readTimeout = 5 * time.Second

// Store stores dead letters in JetStream.
type Store struct {
	Store *store.Store
	// Added, if not nil, is called with the reason of each stored dead letter.
	Added func(proto.DeadReason)
}

// AddJob stores the dead letter of a job whose execution ended, according to rec, because its
// workers were lost. seq is the sequence number of the job, which stays where it is. It is no error
// if the dead letter exists or the job is gone. AddJob retries until ctx is done.
func (s *Store) AddJob(ctx context.Context, rec *proto.Record, seq uint64) error {
	m, err := s.Store.Jobs.At(ctx, seq)
	if store.IsNotFound(err) {
		return nil // it is removed only once the dead letter is stored
	}
	if err != nil {
		return fmt.Errorf("dead-letter job %s: %w", rec.TraceID, err)
	}
	letter := &proto.DeadLetter{
		ID: string(rec.TraceID), Org: rec.Org, At: time.Now().UTC(), Attempt: rec.Attempt + 1, Workers: rec.Lost,
	}
	job, err := store.DecodeJob(m, rec.Org, rec.TraceID)
	if err != nil {
		letter.Reason, letter.Message = proto.DeadMalformed, notJob(err)
		return s.create(ctx, letter, &proto.DeadMessage{Subject: store.JobSubject(&rec.Meta), Header: m.Header, Data: m.Data})
	}
	letter.Reason, letter.Meta = proto.DeadWorkersLost, &job.Meta
	letter.Message = fmt.Sprintf("%d workers were lost with this job, each before it started the program.", len(rec.Lost))
	return s.create(ctx, letter, job)
}

func notJob(cause error) string { return "This message is no job: " + cause.Error() + "." }

// MoveMessage moves a malformed message from the jobs to the dead letters. cause describes the
// mistake.
func (s *Store) MoveMessage(ctx context.Context, seq uint64, cause error) error {
	m, err := s.Store.Jobs.At(ctx, seq, store.WithoutBody) // the name of its body cannot be trusted
	if store.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("dead-letter message %d: %w", seq, err)
	}
	letter := &proto.DeadLetter{
		ID: "dead_" + strconv.FormatUint(seq, 10), Reason: proto.DeadMalformed, At: time.Now().UTC(), Message: notJob(cause),
	}
	if org, _ := store.ParseJobSubject(m.Subject); proto.ValidOrg(org) {
		letter.Org = org
	}
	// which describe its delivery
	maps.DeleteFunc(m.Header, func(name string, _ []string) bool { return strings.HasPrefix(name, "Nats-") })
	if err := s.create(ctx, letter, &proto.DeadMessage{Subject: m.Subject, Header: m.Header, Data: m.Data}); err != nil {
		return err
	}
	if err := s.Store.Jobs.DeleteMsg(ctx, seq); err != nil && !store.IsNotFound(err) {
		return fmt.Errorf("dead-letter message %d: %w", seq, err)
	}
	return nil
}

func (s *Store) create(ctx context.Context, letter *proto.DeadLetter, content any) error {
	_, err := s.write(ctx, letter, content, 0)
	if store.IsConflict(err) {
		return nil
	}
	if err == nil && s.Added != nil {
		s.Added(letter.Reason)
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
	seq, err := s.Store.DeadLetters.Write(ctx, letterSubject(letter), nats.Header{store.HeaderDead: {string(head)}}, body,
		revision)
	if err != nil {
		return 0, fmt.Errorf("store dead letter %s: %w", letter.ID, err)
	}
	return seq, nil
}

func letterSubject(l *proto.DeadLetter) string { return store.DeadLetterSubject(l.Org, l.ID) }

// removed reports whether a message is the marker of a removed dead letter.
func removed(h nats.Header) bool { return h.Get(store.HeaderDead) == "" }

// decode decodes the header of a dead letter.
func decode(m *store.Message) (*proto.DeadLetter, error) {
	letter := &proto.DeadLetter{Revision: m.Seq}
	if err := json.Unmarshal([]byte(m.Header.Get(store.HeaderDead)), letter); err != nil {
		return nil, fmt.Errorf("decode the dead letter on %s: %w", m.Subject, err)
	}
	if letterSubject(letter) != m.Subject || !proto.ValidDeadLetterID(letter.ID) ||
		(letter.Meta == nil) != (letter.Reason == proto.DeadMalformed) ||
		letter.Meta != nil && letter.Meta.Org != letter.Org {
		return nil, fmt.Errorf("decode the dead letter on %s: its id is %q, its reason %q", m.Subject, letter.ID,
			letter.Reason)
	}
	return letter, nil
}

// List returns at most limit dead letters, newest first, after the given one if it is not nil. It
// skips malformed ones, and calls malformed with the error.
func (s *Store) List(
	ctx context.Context, after *proto.DeadLetter, limit int, malformed func(error),
) ([]proto.DeadLetter, error) {
	var page []proto.DeadLetter
	err := s.Store.DeadLetters.Read(ctx, store.Range{}, func(m *store.Message) {
		if removed(m.Header) {
			return
		}
		letter, err := decode(m)
		if err != nil {
			malformed(err)
			return
		}
		page = slices.DeleteFunc(page, func(l proto.DeadLetter) bool { return l.ID == letter.ID }) // replaced meanwhile
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

// order sorts the newest dead letter first.
func order(a, b proto.DeadLetter) int {
	return cmp.Or(b.At.Compare(a.At), strings.Compare(a.ID, b.ID))
}

// Get returns a dead letter and its content, or [proto.ErrNotFound] if there is none.
func (s *Store) Get(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error) {
	letter, m, err := s.read(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	content := &proto.DeadContent{}
	if letter.Meta != nil {
		content.Job, err = store.DecodeJob(m, letter.Org, letter.Meta.TraceID)
	} else {
		content.Message = &proto.DeadMessage{}
		err = json.Unmarshal(m.Data, content.Message)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("decode dead letter %s: %w", id, err)
	}
	return letter, content, nil
}

// read finds a dead letter by its id alone, which is all that an administrator has.
func (s *Store) read(ctx context.Context, id string) (*proto.DeadLetter, *store.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	m, err := s.Store.DeadLetters.Last(ctx, store.DeadLetterSubject("*", id), store.FromLeader)
	if store.IsNotFound(err) || err == nil && removed(m.Header) {
		return nil, nil, fmt.Errorf("dead letter %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, nil, err
	}
	letter, err := decode(m)
	return letter, m, err
}

// Mark replaces the dead letter with letter's revision by letter, which names the new execution of
// its job. It sets the new revision. Letter and job are kept for a whole retention from then on.
// Mark returns [proto.ErrConflict] if the dead letter was changed or removed.
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
	s.Store.Bodies.Discard(ctx, m.Header)
	return nil
}

// Remove removes a dead letter and its content. A marker prevents the job from being dead-lettered
// again. Remove returns [proto.ErrNotFound] if there is no such dead letter.
func (s *Store) Remove(ctx context.Context, id string) error {
	return store.Update(ctx, func() error {
		letter, m, err := s.read(ctx, id)
		if err != nil {
			return err
		}
		if _, err := s.Store.DeadLetters.Write(ctx, letterSubject(letter), nats.Header{}, nil, letter.Revision); err != nil {
			return fmt.Errorf("remove dead letter %s: %w", id, err)
		}
		s.Store.Bodies.Discard(ctx, m.Header)
		return nil
	})
}
