package sessions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Logs stores the logs of sessions. The messages of a log have increasing numbers with gaps.
type Logs interface {
	// Append adds a message after message number after, and returns the new number. It returns
	// [proto.ErrConflict] if message number after is not the last.
	Append(ctx context.Context, org, id string, after uint64, message []byte) (at uint64, err error)
	// AppendTurn is Append for the message that ends a turn. The turn counts as usage of an API
	// key.
	AppendTurn(ctx context.Context, org, id string, after uint64, message []byte, key string) (at uint64, err error)
	// Last returns the last message and its number. It returns [proto.ErrNotFound] if there is
	// none.
	Last(ctx context.Context, org, id string) (message []byte, at uint64, err error)
	// Next returns the first message with a number greater than after, or nil if there is none. It
	// returns [proto.ErrNotFound] if message number after was removed or has expired.
	Next(ctx context.Context, org, id string, after uint64) (message []byte, at uint64, err error)
	// Follow returns a follower of a log.
	Follow(org, id string) (Follower, error)
	// Remove removes a log.
	Remove(ctx context.Context, org, id string) error
}

// Follower waits for messages of a log. It is not safe for concurrent use.
type Follower interface {
	// Next blocks until there is a message with a number greater than after, and returns the first.
	Next(ctx context.Context, after uint64) (message []byte, at uint64, err error)
	Close()
}

// Entry is a message of a session's log.
type Entry struct {
	At     time.Time `json:"at"`
	Events []Event   `json:"events,omitempty"`
	// Message is a user's message. Its turn starts when the turns of earlier messages have ended.
	Message *Message `json:"message,omitempty"`
	Answer  *Answer  `json:"answer,omitempty"` // a user's answer to a question or permission
	// Interrupt requests the end of all turns up to number State.Interrupted.
	Interrupt bool `json:"interrupt,omitempty"`
	// Turn is the turn that the events belong to; 0 for none.
	Turn int64 `json:"turn,omitempty"`
	// Runner is the id of the runner that appended the entry; empty if a client's request did.
	Runner string `json:"runner,omitempty"`
	State  State  `json:"state"`
}

// State is the state of a session after an entry of its log.
type State struct {
	Sequence int64 `json:"sequence"` // of the last event
	Events   int64 `json:"events"`   // count of events
	Items    int64 `json:"items"`    // number of the last item
	Bytes    int64 `json:"bytes"`    // size of the entries before this one
	Messages int64 `json:"messages"` // number of the last message
	Turns    int64 `json:"turns"`    // number of the last message whose turn has started
	// MessageAfter is the number of the entry before the last message; 0 for none.
	MessageAfter uint64 `json:"message_after,omitempty"`
	// Interrupted is the number of a message. Its turn and all earlier ones were interrupted.
	Interrupted int64 `json:"interrupted,omitempty"`
	// QueuedAfter is the number of an entry before the first message in the queue.
	QueuedAfter uint64 `json:"queued_after,omitempty"`
	Running     bool   `json:"running,omitempty"` // whether turn number Turns is in progress
	// TurnAfter is the number of the entry before the first entry of turn number Turns.
	TurnAfter uint64 `json:"turn_after,omitempty"`
	// TurnModel and TurnVariant are those of the last turn whose message named one; empty for those of the session.
	TurnModel   string `json:"turn_model,omitempty"`
	TurnVariant string `json:"turn_variant,omitempty"`
	// Runner is the id of the last runner that appended an entry.
	Runner string `json:"runner,omitempty"`
	// Native is the agent's own id of the session. Cursor is the position in the agent's output up
	// to which the log contains it.
	Native     string            `json:"native,omitempty"`
	Cursor     string            `json:"cursor,omitempty"`
	Open       map[string]string `json:"open,omitempty"` // ids of the items in progress, by the agent's own ids
	Pending    []Pending         `json:"pending,omitempty"`
	Always     []string          `json:"always,omitempty"` // scopes of the permissions granted for the session
	Ended      EndReason         `json:"ended,omitempty"`
	ExitCode   *int              `json:"exit_code,omitempty"` // of the agent's program, if Ended is EndError
	Stderr     string            `json:"stderr,omitempty"`
	Unnotified []Notice          `json:"unnotified,omitempty"`
}

// Notice identifies an event whose webhook has not been created yet.
type Notice struct {
	Sequence int64     `json:"sequence"`
	Type     EventType `json:"type"`
}

// Queued returns the number of messages whose turns have not started.
func (s *State) Queued() int64 { return s.Messages - s.Turns }

// hasWork reports whether the session needs a runner. Webhooks of events up to sequence number
// notified exist.
func (s *State) hasWork(notified int64) bool {
	return s.Ended != EndTerminated && (s.Queued() > 0 || s.Running) || len(s.unnotified(notified)) > 0
}

// unnotified returns the notices with sequence numbers greater than after.
func (s *State) unnotified(after int64) []Notice {
	return slices.DeleteFunc(slices.Clone(s.Unnotified), func(n Notice) bool { return n.Sequence <= after })
}

// clone returns a copy that can be modified independently.
func (s *State) clone() State {
	c := *s
	c.Open = maps.Clone(s.Open)
	c.Pending, c.Always, c.Unnotified = slices.Clone(s.Pending), slices.Clone(s.Always), slices.Clone(s.Unnotified)
	return c
}

// Message is a user's message.
type Message struct {
	Number      int64        `json:"number"` // from 1
	Text        string       `json:"text"`
	Attachments []Attachment `json:"attachments,omitempty"`
	Model       string       `json:"model,omitempty"` // for this turn and later ones
	Variant     string       `json:"variant,omitempty"`
	Previous    uint64       `json:"previous,omitempty"` // State.MessageAfter before it
	// Key is a digest of the request's idempotency key, and Body a digest of the message.
	Key  string `json:"key,omitempty"`
	Body string `json:"body,omitempty"`
}

// Attachment is a file in the session's home that a message refers to.
type Attachment struct {
	Path     string `json:"path"`
	MIME     string `json:"mime,omitempty"`
	Filename string `json:"filename,omitempty"`
}

// Prompt returns the text followed by the paths of the attachments, for agents that accept only
// text.
func (m *Message) Prompt() string {
	if len(m.Attachments) == 0 {
		return m.Text
	}
	var text strings.Builder
	text.WriteString(m.Text + "\n\nAttachments:\n")
	for _, a := range m.Attachments {
		text.WriteString("- " + a.Path + "\n")
	}
	return text.String()
}

// Pending is a question or permission without an answer. Exactly one field is set.
type Pending struct {
	Question   *Question   `json:"question,omitempty"`
	Permission *Permission `json:"permission,omitempty"`
}

// ID returns the id of the question or permission.
func (p *Pending) ID() string {
	if p.Question != nil {
		return p.Question.ID
	}
	return p.Permission.ID
}

// Answer is a user's answer. Either Question or Permission is set, to its form after the answer.
type Answer struct {
	Question   *Question   `json:"question,omitempty"`
	Permission *Permission `json:"permission,omitempty"`
	Answers    [][]string  `json:"answers,omitempty"` // to each part of the question
}

// encode returns the entry as a message of the log.
func (e *Entry) encode() ([]byte, error) {
	var message bytes.Buffer
	enc := json.NewEncoder(&message)
	enc.SetEscapeHTML(false) // an escaped character takes six bytes
	if err := enc.Encode(e); err != nil {
		return nil, fmt.Errorf("encode an entry of a session: %w", err)
	}
	return message.Bytes(), nil
}

// decodeEntry decodes a message of a log.
func decodeEntry(message []byte) (*Entry, error) {
	e := new(Entry)
	if err := json.Unmarshal(message, e); err != nil {
		return nil, fmt.Errorf("decode an entry of a session: %w", err)
	}
	return e, nil
}

// log is the log of a session, as known up to entry number at.
type log struct {
	logs    Logs
	session *proto.AgentSession
	at      uint64 // number of the last known entry
	state   State  // after that entry; Bytes includes its size
}

// advance makes an entry the last known one.
func (l *log) advance(e *Entry, at uint64, size int) {
	l.at, l.state = at, e.State
	l.state.Bytes += int64(size)
}

// load returns the log of a session. It returns [proto.ErrNotFound] if there is none.
func load(ctx context.Context, logs Logs, x *proto.AgentSession) (*log, error) {
	l := &log{logs: logs, session: x}
	message, at, err := logs.Last(ctx, x.Org, x.LogID())
	if err != nil {
		return nil, err
	}
	e, err := decodeEntry(message)
	if err != nil {
		return nil, err
	}
	l.advance(e, at, len(message))
	return l, nil
}

// append appends the entry that fill returns. fill may change the state, and appends nothing by
// returning nil. If another process has appended entries, append calls seen with each of them and
// then fill again.
func (l *log) append(ctx context.Context, seen func(*Entry) error, fill func(*State) (*Entry, error)) (*Entry, error) {
	for {
		state := l.state.clone()
		e, err := fill(&state)
		if err != nil || e == nil {
			return nil, err
		}
		e.At = time.Now().UTC()
		e.State = state
		e.number(l.session)
		message, err := e.encode()
		if err != nil {
			return nil, err
		}
		if e.State.Bytes > proto.MaxAgentSessionBytes && e.State.Ended != EndTerminated {
			return nil, ErrLogFull
		}
		at, err := l.write(ctx, message, l.state.Running && !e.State.Running)
		if err == nil {
			l.advance(e, at, len(message))
			return e, nil
		}
		if !errors.Is(err, proto.ErrConflict) {
			return nil, err
		}
		if err := l.catchUp(ctx, seen); err != nil {
			return nil, err
		}
	}
}

// write writes an entry after the last known one.
func (l *log) write(ctx context.Context, message []byte, endsTurn bool) (uint64, error) {
	x := l.session
	if endsTurn {
		return l.logs.AppendTurn(ctx, x.Org, x.LogID(), l.at, message, x.Key)
	}
	return l.logs.Append(ctx, x.Org, x.LogID(), l.at, message)
}

// number assigns sequence numbers and ids to the events of an entry.
func (e *Entry) number(x *proto.AgentSession) {
	for i := range e.Events {
		v := &e.Events[i]
		e.State.Sequence++
		e.State.Events++
		v.Sequence, v.ID, v.Time, v.Session = e.State.Sequence, fmt.Sprintf("evt_%d", e.State.Sequence), e.At, x.ID
		if e.State.Native != "" {
			v.NativeSession = new(e.State.Native)
		}
		if v.Source = FromAgent; v.Synthetic {
			v.Source = FromDaemon
		}
		switch v.Type {
		case TurnEnded, PermissionRequested, QuestionRequested, SessionEnded:
			e.State.Unnotified = append(e.State.Unnotified, Notice{v.Sequence, v.Type})
		}
	}
}

// catchUp reads the entries that other processes have appended, and calls seen with each.
func (l *log) catchUp(ctx context.Context, seen func(*Entry) error) error {
	for {
		message, at, err := l.logs.Next(ctx, l.session.Org, l.session.LogID(), l.at)
		if err != nil || message == nil {
			return err
		}
		e, err := decodeEntry(message)
		if err != nil {
			return err
		}
		l.advance(e, at, len(message))
		if seen != nil {
			if err := seen(e); err != nil {
				return err
			}
		}
	}
}

// ErrLogFull is returned if a session's log has reached its limit.
var ErrLogFull = errors.New("the log of the session is full")
