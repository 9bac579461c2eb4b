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

// Bodies is the stream of bodies too large for a message, in chunks.
type Bodies struct{ Stream }

// BodyName returns the name of the body that is stored apart from its message, empty if the message
// contains it.
func BodyName(h nats.Header) string {
	name, _, _ := strings.Cut(h.Get(headerBody), " ")
	return name
}

// stage prepares a message for writing. It stores a body of more than limit bytes apart.
func (b Bodies) stage(ctx context.Context, subject string, h nats.Header, body []byte, limit int) (*nats.Msg, error) {
	h.Set(headerWrite, nuid.Next())
	if len(body) > limit {
		r, err := b.put(ctx, subject, body)
		if err != nil {
			return nil, err
		}
		h.Set(headerBody, r.String())
		body = nil
	}
	return &nats.Msg{Subject: subject, Header: h, Data: body}, nil
}

// put stores a body of the organisation in the subject of its message. A failed call leaves chunks
// until the end of their retention.
func (b Bodies) put(ctx context.Context, subject string, body []byte) (bodyRef, error) {
	digest := sha256.Sum256(body)
	r := bodyRef{orgOf(subject) + "." + nuid.Next(), len(body), hex.EncodeToString(digest[:])}
	seq := uint64(0)
	// The largest chunks possible: each is a durable write that the caller waits for.
	for chunk := range slices.Chunk(body, b.store.MaxInline) {
		var err error
		m := &nats.Msg{Subject: bodySubject(r.name), Header: nats.Header{headerWrite: {nuid.Next()}}, Data: chunk}
		if seq, err = b.write(ctx, m, seq, false); err != nil {
			return bodyRef{}, fmt.Errorf("store the body of %s: %w", subject, err)
		}
	}
	return r, nil
}

// Load returns a message that was not read from its stream, with its body.
func (b Bodies) Load(ctx context.Context, m *nats.Msg) (*Message, error) {
	out := &Message{Subject: m.Subject, Header: m.Header, Data: m.Data}
	if err := b.load(ctx, out, bodyTimeout); err != nil {
		return nil, err
	}
	return out, nil
}

// errIncompleteBody means that a body is being deleted.
var errIncompleteBody = errors.New("a part is gone")

// load reads the body of a message that is stored apart, within timeout.
func (b Bodies) load(ctx context.Context, m *Message, timeout time.Duration) error {
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
		chunk, err := b.fetch(ctx, query{Seq: seq, Next: bodySubject(r.name)}, false)
		if IsNotFound(err) && len(body) > 0 {
			err = errIncompleteBody
		}
		if err != nil {
			return fmt.Errorf("body %s: %w", r.name, err)
		}
		body, seq = append(body, chunk.Data...), chunk.Seq+1
		_, _ = digest.Write(chunk.Data) // it never fails
	}
	if hex.EncodeToString(digest.Sum(nil)) != r.digest {
		return fmt.Errorf("body %s: %w", r.name, jetstream.ErrDigestMismatch)
	}
	m.Data = body
	return nil
}

// remove removes a body, if there is one.
func (b Bodies) remove(ctx context.Context, name string) error {
	if !bodyNamePattern.MatchString(name) {
		return fmt.Errorf("remove body %q: %w", name, ErrMalformed)
	}
	return b.PurgeSubject(ctx, bodySubject(name))
}

// Discard removes the body of a message with header h, which was replaced or will not be written. If
// that fails, the body is removed at the end of its retention.
func (b Bodies) Discard(ctx context.Context, h nats.Header) {
	if name := BodyName(h); name != "" {
		_ = b.remove(ctx, name)
	}
}
