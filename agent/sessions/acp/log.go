package acp

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// maxLog is the size of a server's log, in bytes, above which the server refuses requests.
const maxLog = proto.MaxAgentSessionBytes

// outgoing is a message to a client.
type outgoing struct {
	Data json.RawMessage `json:"data"`
	// Answers is the id of the request that the message responds to; empty if it is not a response.
	Answers json.RawMessage `json:"answers,omitempty"`

	requestID string // id of this message, if it is a request to the client; otherwise empty
	prompt    bool   // whether it is the response to a prompt
}

// entry is an entry of a server's log.
type entry struct {
	At       time.Time  `json:"at"`
	Messages []outgoing `json:"messages,omitempty"`
	// Created is the id of a session that was created for the server; empty for none.
	Created string `json:"created,omitempty"`
	State   state  `json:"state"`
}

// first returns the number of the entry's first message.
func (e *entry) first() int64 { return e.State.Number - int64(len(e.Messages)) + 1 }

// state is the state of a server after an entry of its log.
type state struct {
	Server    string    `json:"server"`
	Agent     string    `json:"agent"`
	CreatedAt time.Time `json:"created_at"`
	Number    int64     `json:"number"` // of the last message to the client, from 1
	Bytes     int64     `json:"bytes"`  // size of the entries before this one
	// Connection counts the initialize requests. First is the number of the first message after the
	// last of them. Another client may reuse a server's id, and its requests have the same ids.
	Connection int64 `json:"connection"`
	First      int64 `json:"first"`
	// Sessions are the sessions whose events are translated, by id. They have prompts, requests, or
	// a turn that was in progress when the client loaded them.
	Sessions map[string]*session `json:"sessions,omitempty"`
	Prompts  []prompt            `json:"prompts,omitempty"`  // without a response
	Answered []answered          `json:"answered,omitempty"` // the last prompts with a response
	Requests []request           `json:"requests,omitempty"` // to the client, without an answer
	Asked    int64               `json:"asked,omitempty"`    // count of requests to the client
}

// session is the progress of the translation of a session's log.
type session struct {
	After uint64 `json:"after"` // number of the last translated entry
	// Thoughts counts the reasoning parts that were sent for each item in progress.
	Thoughts map[string]int `json:"thoughts,omitempty"`
	Calls    []string       `json:"calls,omitempty"` // ids of the tool calls without a result
	// Failure is the last error of the turn in progress. A later message of the agent clears it.
	Failure string `json:"failure,omitempty"`
	// Loaded is the number of the last turn that was queued or in progress when the client loaded
	// the session. Another client may have started that turn. It is 0 if there was none.
	Loaded int64 `json:"loaded,omitempty"`
}

// prompt is a prompt without a response. It is registered before its message is sent.
type prompt struct {
	ID      json.RawMessage `json:"id"` // of the request
	Session string          `json:"session"`
	Key     string          `json:"key"`  // Message.Key of its message
	Turn    int64           `json:"turn"` // 0 until the message is found in the session's log
}

// answered is a prompt with a response.
type answered struct {
	ID     json.RawMessage `json:"id"`     // of the request
	Number int64           `json:"number"` // of the response among the server's messages
}

// maxAnswered bounds the responses to prompts that are remembered for repeated requests.
const maxAnswered = 16

// request is a request to the client to answer a permission or a question.
type request struct {
	ID         string   `json:"id"`
	Session    string   `json:"session"`
	Permission string   `json:"permission,omitempty"` // id; empty for a question
	Question   string   `json:"question,omitempty"`   // id; empty for a permission
	Options    []string `json:"options,omitempty"`    // of a question
}

// clone returns a copy that can be modified independently.
func (s *state) clone() state {
	c := *s
	c.Prompts, c.Answered, c.Requests = slices.Clone(s.Prompts), slices.Clone(s.Answered), slices.Clone(s.Requests)
	c.Sessions = make(map[string]*session, len(s.Sessions))
	for id, x := range s.Sessions {
		c.Sessions[id] = &session{x.After, maps.Clone(x.Thoughts), slices.Clone(x.Calls), x.Failure, x.Loaded}
	}
	return c
}

// remove removes a prompt.
func (s *state) remove(p *prompt) {
	s.Prompts = slices.DeleteFunc(s.Prompts, func(other prompt) bool {
		return other.Session == p.Session && bytes.Equal(other.ID, p.ID)
	})
}

// release stops the translation of a session that has no prompts, requests or loaded turns left.
func (s *state) release(id string) {
	if x := s.Sessions[id]; x != nil && x.Loaded > 0 ||
		slices.ContainsFunc(s.Prompts, func(p prompt) bool { return p.Session == id }) ||
		slices.ContainsFunc(s.Requests, func(r request) bool { return r.Session == id }) {
		return
	}
	delete(s.Sessions, id)
}

// logID returns the id of a server's log. It is a digest, because a server's id may be any text.
func logID(server string) string {
	sum := sha256.Sum256([]byte(server))
	return logPrefix + hex.EncodeToString(sum[:16])
}

// logPrefix is the prefix of the ids of servers' logs. Other logs have other prefixes.
const logPrefix = "a"

// serverLog is a server's log, as known up to entry number at.
type serverLog struct {
	logs    sessions.Logs
	org, id string
	at      uint64 // number of the last known entry; 0 if there is none
	state   state  // after that entry; Bytes includes its size
}

// load reads the last entry, if there is one.
func (l *serverLog) load(ctx context.Context) error {
	message, at, err := l.logs.Last(ctx, l.org, l.id)
	if errors.Is(err, proto.ErrNotFound) {
		l.at, l.state = 0, state{}
		return nil
	}
	if err != nil {
		return err
	}
	e, err := decodeEntry(message)
	if err != nil {
		return err
	}
	l.at, l.state = at, e.State
	l.state.Bytes += int64(len(message))
	return nil
}

func decodeEntry(message []byte) (*entry, error) {
	e := new(entry)
	if err := json.Unmarshal(message, e); err != nil {
		return nil, fmt.Errorf("decode an entry of a server: %w", err)
	}
	return e, nil
}

// errFull is returned if a server's log is full.
var errFull = &rpcError{
	Code:    codeInternal,
	Message: fmt.Sprintf("this connection has %d MiB of messages, which is the limit; create another client", maxLog>>20),
}

// maxPrompts bounds a server's prompts without a response. Every entry of its log contains them.
const maxPrompts = 256

var errPrompts = &rpcError{
	Code:    codeInternal,
	Message: fmt.Sprintf("this connection has %d prompts without a response, which is the limit", maxPrompts),
}

// append appends an entry that fill completes. fill may change the entry's state, and returns false
// to append nothing. It is called again if another process has appended an entry.
func (l *serverLog) append(ctx context.Context, fill func(*entry) (bool, error)) error {
	for {
		e := &entry{At: time.Now().UTC(), State: l.state.clone()}
		if ok, err := fill(e); err != nil || !ok {
			return err
		}
		for _, m := range e.Messages {
			if e.State.Number++; m.prompt {
				e.State.Answered = append(e.State.Answered, answered{m.Answers, e.State.Number})
			}
		}
		e.State.Answered = e.State.Answered[max(len(e.State.Answered)-maxAnswered, 0):]
		message, err := encode(e)
		if err != nil {
			return err
		}
		at, err := l.logs.Append(ctx, l.org, l.id, l.at, message)
		if err == nil {
			l.at, l.state = at, e.State
			l.state.Bytes += int64(len(message))
			return nil
		}
		if !errors.Is(err, proto.ErrConflict) {
			return err
		}
		if err := l.load(ctx); err != nil {
			return err
		}
	}
}

// find returns the message with a number; nil if it has expired.
func (l *serverLog) find(ctx context.Context, number int64) (json.RawMessage, error) {
	after, err := l.seek(ctx, number-1)
	if err != nil {
		return nil, err
	}
	message, _, err := l.logs.Next(ctx, l.org, l.id, after)
	if errors.Is(err, proto.ErrNotFound) || err == nil && message == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	e, err := decodeEntry(message)
	if err != nil {
		return nil, err
	}
	if at := number - e.first(); at >= 0 && at < int64(len(e.Messages)) {
		return e.Messages[at].Data, nil
	}
	return nil, nil
}

// seek returns a number after which the entries with messages after number last begin.
func (l *serverLog) seek(ctx context.Context, last int64) (uint64, error) {
	if last <= 0 || l.at == 0 {
		return 0, nil
	}
	if last >= l.state.Number {
		return l.at, nil
	}
	after, err := sessions.Seek(ctx, l.logs, l.org, l.id, l.at, func(message []byte) (bool, error) {
		e, err := decodeEntry(message)
		return err == nil && e.State.Number > last, err
	})
	if errors.Is(err, proto.ErrNotFound) { // removed meanwhile
		return 0, nil
	}
	return after, err
}
