package store

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Rows returns the names of all streams, buckets and object stores.
func Rows() []string {
	names := make([]string, len(table))
	for i := range table {
		names[i] = table[i].name
	}
	return names
}

// JobPatternOf matches the jobs of an organisation.
func JobPatternOf(org string) string { return root + "job.*." + org + ".>" }

// ParseJobSubject returns the organisation and the id in the subject of a job.
func ParseJobSubject(subject string) (org, id string) {
	const tokens = 6 // bullpen.job.CLASS.ORG.KEY.ID
	parts := strings.Split(subject, ".")
	if len(parts) != tokens {
		return "", ""
	}
	return parts[3], parts[5]
}

// AllOutput matches the output of all executions.
const AllOutput = root + "out.*.*"

// LastToken returns the last token of a subject: the id in that of a record or of a dead letter.
func LastToken(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }

// OutputTrace returns the id in the subject of an output message.
func OutputTrace(subject string) string {
	id, _, _ := strings.Cut(strings.TrimPrefix(subject, root+"out."), ".")
	return id
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

// bodyMeta begins the subjects of the descriptions of bodies, which end with the encoded name.
const bodyMeta = "$O." + bodiesName + ".M."

// BodiesOf returns the names of the bodies of an organisation, and those of which a marker remains.
// executes reports whether an execution is one of the organisation's.
func (s *Store) BodiesOf(ctx context.Context, org string, executes func(id string) bool) (names []string, err error) {
	subjects, err := s.Subjects(ctx, s.bodyStream, bodyMeta+">")
	if err != nil {
		return nil, err
	}
	for subject := range subjects {
		name, err := base64.URLEncoding.DecodeString(strings.TrimPrefix(subject, bodyMeta))
		if err != nil {
			return nil, fmt.Errorf("decode the name of the body on %s: %w", subject, err)
		}
		owner, id := bodyOwner(string(name))
		if owner == org || owner == "" && executes(id) {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	return names, nil
}

// bodyName returns the name of the body of a message. It includes the organisation, which the
// headers of records and dead letters name. id is unique to the write.
func bodyName(subject string, h nats.Header, id string) string {
	var record struct {
		Org  string
		Meta struct{ Org string }
	}
	parts := []string{strings.TrimPrefix(subject, root), id}
	// A long summary is not in the header, and malformed headers name nobody.
	header := cmp.Or(h.Get(HeaderSummary), h.Get(HeaderDead))
	if json.Unmarshal([]byte(header), &record) == nil && cmp.Or(record.Org, record.Meta.Org) != "" {
		parts = slices.Insert(parts, 1, cmp.Or(record.Org, record.Meta.Org))
	}
	return strings.Join(parts, ".")
}

// bodyOwner returns the organisation in the name of a body. Names of records and dead letters may
// lack it, as those of earlier versions do: it is empty then, and id is that of the execution.
func bodyOwner(name string) (org, id string) {
	parts := strings.Split(name, ".")
	at := map[string]int{"job": 2, "delivery": 1, "thread": 1, "exec": 2, "dead": 3, "agentlog": 1}[parts[0]]
	if at == 0 || at >= len(parts)-1 { // the last part is unique to the write
		return "", parts[max(0, len(parts)-2)]
	}
	return parts[at], ""
}

// EraseBody removes the body of a message, and the marker that its removal would leave.
func (s *Store) EraseBody(ctx context.Context, name string) error {
	info, err := s.bodies.GetInfo(ctx, name, jetstream.GetObjectInfoShowDeleted())
	if IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the body %s: %w", name, err)
	}
	if err := s.PurgeSubject(ctx, s.bodyStream, "$O."+bodiesName+".C."+info.NUID); err != nil {
		return err
	}
	return s.PurgeSubject(ctx, s.bodyStream, bodyMeta+base64.URLEncoding.EncodeToString([]byte(name)))
}
