package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	maxBodyGuess = 32 << 20        // bytes that are reserved for a body according to its description
	bodyTimeout  = 2 * time.Second // of the first attempt to read a body; doubled for each further one
)

// bodyRef refers to a body that is stored apart from its message, in chunks on a subject of its own.
type bodyRef struct {
	name   string // the organisation and what is unique to the body, the tokens of its subject
	size   int
	digest string // SHA-256
}

// bodyNamePattern matches the names of bodies. Subjects are made of them.
var bodyNamePattern = regexp.MustCompile(`^[a-z0-9_-]+\.[A-Za-z0-9]+$`)

func (r bodyRef) String() string { return fmt.Sprintf("%s %d %s", r.name, r.size, r.digest) }

// parseBody parses the header of a message whose body is stored apart.
func parseBody(text string) (r bodyRef, ok bool) {
	_, err := fmt.Sscanf(text, "%s %d %s", &r.name, &r.size, &r.digest)
	return r, err == nil && bodyNamePattern.MatchString(r.name) && r.size >= 0
}

// BodyName returns the name of the body that is stored apart from its message, empty if the message
// contains it.
func BodyName(h nats.Header) string {
	name, _, _ := strings.Cut(h.Get(headerBody), " ")
	return name
}

// putBody stores a body of the organisation in the subject of its message. A failed call leaves chunks
// until the end of their retention.
func (s *Store) putBody(ctx context.Context, subject string, body []byte) (bodyRef, error) {
	digest := sha256.Sum256(body)
	r := bodyRef{orgOf(subject) + "." + nuid.Next(), len(body), hex.EncodeToString(digest[:])}
	seq := uint64(0)
	// The largest chunks possible: each is a durable write that the caller waits for.
	for chunk := range slices.Chunk(body, s.maxInline) {
		var err error
		m := &nats.Msg{Subject: bodySubject(r.name), Header: nats.Header{headerWrite: {nuid.Next()}}, Data: chunk}
		if seq, err = s.write(ctx, m, seq, false); err != nil {
			return bodyRef{}, fmt.Errorf("store the body of %s: %w", subject, err)
		}
	}
	return r, nil
}

// errIncompleteBody means that a body is being deleted.
var errIncompleteBody = errors.New("a part is gone")

// loadBody reads the body of a message that is stored apart, within timeout.
func (s *Store) loadBody(ctx context.Context, m *Message, timeout time.Duration) error {
	text := m.Header.Get(headerBody)
	if text == "" {
		return nil
	}
	r, ok := parseBody(text)
	if !ok {
		return fmt.Errorf("body %q: %w", text, jetstream.ErrMsgNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := proto.ReserveRead(ctx, r.size); err != nil {
		return err
	}
	// The chunks are read one by one. A role that may create consumers could have the server send
	// messages on any subject.
	digest, body := sha256.New(), make([]byte, 0, min(r.size, maxBodyGuess))
	for seq := uint64(1); len(body) < r.size; {
		chunk, err := s.Next(ctx, s.Bodies, seq, bodySubject(r.name))
		if IsNotFound(err) && len(body) > 0 {
			err = errIncompleteBody
		}
		if err != nil {
			return fmt.Errorf("body %s: %w", r.name, err)
		}
		body, seq = append(body, chunk.Data...), chunk.Sequence+1
		_, _ = digest.Write(chunk.Data) // it never fails
	}
	if hex.EncodeToString(digest.Sum(nil)) != r.digest {
		return fmt.Errorf("body %s: %w", r.name, jetstream.ErrDigestMismatch)
	}
	m.Data = body
	return nil
}

// removeBody removes a body. It is no error if there is none.
func (s *Store) removeBody(ctx context.Context, name string) error {
	if !bodyNamePattern.MatchString(name) {
		return fmt.Errorf("remove body %q: %w", name, ErrMalformed)
	}
	return s.PurgeSubject(ctx, s.Bodies, bodySubject(name))
}

// DiscardBody removes the body of a message that was replaced. If that fails, the body is removed at the
// end of its retention.
func (s *Store) DiscardBody(ctx context.Context, m *Message) {
	if name := BodyName(m.Header); name != "" {
		_ = s.removeBody(ctx, name)
	}
}
