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

// Logs stores the logs of sessions, whose messages have numbers that rise with gaps.
type Logs interface {
	// Append adds a message after message number after, and returns its number. It returns
	// [proto.ErrConflict] if another message is the last.
	Append(ctx context.Context, org, id string, after uint64, message []byte) (at uint64, err error)
	// AppendTurn is Append for a message with which a turn ended, which counts as usage of an API key.
	AppendTurn(ctx context.Context, org, id string, after uint64, message []byte, key string) (at uint64, err error)
	// Last returns the last message and its number, or [proto.ErrNotFound].
	Last(ctx context.Context, org, id string) (message []byte, at uint64, err error)
	// Next returns the first message with a number greater than after; nil if there is none. It
	// returns [proto.ErrNotFound] if message number after is gone.
	Next(ctx context.Context, org, id string, after uint64) (message []byte, at uint64, err error)
	// Follow returns a follower of a log.
	Follow(org, id string) (Follower, error)
	// Remove removes a log.
	Remove(ctx context.Context, org, id string) error
}

// Follower waits for messages of a log. It is not safe for concurrent use.
type Follower interface {
	// Next returns the first message with a number greater than after, once there is one.
	Next(ctx context.Context, after uint64) (message []byte, at uint64, err error)
	Close()
}

// Entry is a message of a session's log.
type Entry struct {
	At     time.Time `json:"at"`
	Events []Event   `json:"events,omitempty"`
	// Message is a user's message. It is a turn of its own, once those before it have ended.
	Message *Message `json:"message,omitempty"`
	Answer  *Answer  `json:"answer,omitempty"` // of a user to a question or permission
	// Interrupt requests the end of the turns up to number State.Interrupted.
	Interrupt bool `json:"interrupt,omitempty"`
	// Turn is the turn that the events belong to; 0 for none.
	Turn int64 `json:"turn,omitempty"`
	// Runner is set if a runner appended the entry.
	Runner string `json:"runner,omitempty"`
	State  State  `json:"state"`
}

// State is the state of a session after an entry of its log.
type State struct {
	Sequence int64 `json:"sequence"` // of the last event
	Events   int64 `json:"events"`   // number of them
	Items    int64 `json:"items"`    // number of the last item
	Bytes    int64 `json:"bytes"`    // of the entries before this one
	Messages int64 `json:"messages"` // number of the last message
	Turns    int64 `json:"turns"`    // number of the last message whose turn has started
	// MessageAfter is the number of the entry before the last message; 0 for none.
	MessageAfter uint64 `json:"message_after,omitempty"`
	// Interrupted is the number of the last message whose turn was interrupted, with those before it.
	Interrupted int64 `json:"interrupted,omitempty"`
	// QueuedAfter is the number of an entry before the first message in the queue.
	QueuedAfter uint64 `json:"queued_after,omitempty"`
	Running     bool   `json:"running,omitempty"` // turn number Turns has not ended
	// TurnAfter is the number of the entry before the first one of turn number Turns.
	TurnAfter uint64 `json:"turn_after,omitempty"`
	// Runner is the runner that appended last.
	Runner string `json:"runner,omitempty"`
	// Native is the agent's own id of the session, and Cursor how far its output is in the log.
	Native     string            `json:"native,omitempty"`
	Cursor     string            `json:"cursor,omitempty"`
	Open       map[string]string `json:"open,omitempty"` // ids of the items in progress, by the agent's own ids
	Pending    []Pending         `json:"pending,omitempty"`
	Always     []string          `json:"always,omitempty"` // what permissions were granted for the session
	Ended      EndReason         `json:"ended,omitempty"`
	ExitCode   *int              `json:"exit_code,omitempty"` // of the agent's program, if Ended is EndError
	Stderr     string            `json:"stderr,omitempty"`
	Unnotified []Notice          `json:"unnotified,omitempty"`
}

// Notice is a webhook to be sent for an event.
type Notice struct {
	Sequence int64     `json:"sequence"`
	Type     EventType `json:"type"`
}

// Queued returns the number of messages whose turns have not started.
func (s *State) Queued() int64 { return s.Messages - s.Turns }

// hasWork reports whether a runner has something to do. Notices up to a sequence number were sent.
func (s *State) hasWork(notified int64) bool {
	return s.Ended != EndTerminated && (s.Queued() > 0 || s.Running) || len(s.unnotified(notified)) > 0
}

// unnotified returns the notices after a sequence number.
func (s *State) unnotified(after int64) []Notice {
	return slices.DeleteFunc(slices.Clone(s.Unnotified), func(n Notice) bool { return n.Sequence <= after })
}

// clone returns a copy that shares nothing that is modified.
func (s *State) clone() State {
	c := *s
	c.Open = maps.Clone(s.Open)
	c.Pending, c.Always, c.Unnotified = slices.Clone(s.Pending), slices.Clone(s.Always), slices.Clone(s.Unnotified)
	return c
}

// Message is a message of a user.
type Message struct {
	Number      int64        `json:"number"` // from 1
	Text        string       `json:"text"`
	Attachments []Attachment `json:"attachments,omitempty"`
	Model       string       `json:"model,omitempty"` // for this turn and later ones
	Variant     string       `json:"variant,omitempty"`
	Previous    uint64       `json:"previous,omitempty"` // State.MessageAfter before it
	// Key is a digest of the request's idempotency key, and Body of its body.
	Key  string `json:"key,omitempty"`
	Body string `json:"body,omitempty"`
}

// Attachment is a file in the session's home that belongs to a message.
type Attachment struct {
	Path     string `json:"path"`
	MIME     string `json:"mime,omitempty"`
	Filename string `json:"filename,omitempty"`
}

// Prompt returns the text with the paths of the attachments, for agents that get a text alone.
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

// Pending is a question or a permission without an answer. One of its members is set.
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

// Answer is a user's answer to a question or permission. One of Question and Permission is set, as it
// is after the answer.
type Answer struct {
	Question   *Question   `json:"question,omitempty"`
	Permission *Permission `json:"permission,omitempty"`
	Answers    [][]string  `json:"answers,omitempty"` // of a question: for each of its parts
}

// encode returns the entry as a message of the log.
func (e *Entry) encode() ([]byte, error) {
	var message bytes.Buffer
	enc := json.NewEncoder(&message)
	enc.SetEscapeHTML(false) // six bytes for one
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

// log is the log of a session with its last entry known.
type log struct {
	logs    Logs
	session *proto.AgentSession
	at      uint64 // number of the last known entry
	state   State  // after it, with its size in Bytes
}

// known makes an entry the last known one.
func (l *log) known(e *Entry, at uint64, size int) {
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
	l.known(e, at, len(message))
	return l, nil
}

// append appends an entry that fill makes from the state, which it may change. If another process has
// appended one, seen is called with that, and fill again.
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
			l.known(e, at, len(message))
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

// number numbers the events of an entry.
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
		l.known(e, at, len(message))
		if seen != nil {
			if err := seen(e); err != nil {
				return err
			}
		}
	}
}

// ErrLogFull is returned if a session has as much in its log as it may have.
var ErrLogFull = errors.New("the log of the session is full")
