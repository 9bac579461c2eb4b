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

// maxLog is the size of a server's log, in bytes, beyond which requests are refused.
const maxLog = proto.MaxAgentSessionBytes

// outgoing is a message to a client.
type outgoing struct {
	Data json.RawMessage `json:"data"`
	// Answers is the id of the request that the message answers; empty if it is no response.
	Answers json.RawMessage `json:"answers,omitempty"`

	asks   string // the id of the request that the message is; empty for none
	prompt bool   // whether it answers a prompt
}

// entry is a message of a server's log.
type entry struct {
	At       time.Time  `json:"at"`
	Messages []outgoing `json:"messages,omitempty"`
	// Created is a session that was created for the server; empty for none.
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
	Bytes     int64     `json:"bytes"`  // of the entries before this one
	// Connection is the number of initialize requests, and First that of the first message after the last
	// of them. A server's id may be used again by another client, whose requests have the same ids.
	Connection int64 `json:"connection"`
	First      int64 `json:"first"`
	// Sessions are the sessions whose events are translated, by id: those with Prompts, Requests, or turns
	// that were not over when they were loaded.
	Sessions map[string]*session `json:"sessions,omitempty"`
	Prompts  []prompt            `json:"prompts,omitempty"`  // without a response
	Answered []answered          `json:"answered,omitempty"` // the last ones
	Requests []request           `json:"requests,omitempty"` // of the client, without an answer
	Asked    int64               `json:"asked,omitempty"`    // number of requests that were made
}

// session is how far the log of a session is translated.
type session struct {
	After uint64 `json:"after"` // number of the last translated entry
	// Thoughts is the number of reasoning parts that were sent of items in progress, by the items' ids.
	Thoughts map[string]int `json:"thoughts,omitempty"`
	Calls    []string       `json:"calls,omitempty"` // ids of calls of tools without a result
	// Failure is the last error of the turn in progress that no message of the agent follows.
	Failure string `json:"failure,omitempty"`
	// Loaded is the number of the last turn that was not over when the client loaded the session, and that
	// another client may have begun; 0 for none.
	Loaded int64 `json:"loaded,omitempty"`
}

// prompt is a prompt whose turn has not ended. It is registered before it is sent.
type prompt struct {
	ID      json.RawMessage `json:"id"` // of the request
	Session string          `json:"session"`
	Key     string          `json:"key"`  // of its message
	Turn    int64           `json:"turn"` // 0 until the message is found in the session's log
}

// answered is a prompt with a response.
type answered struct {
	ID     json.RawMessage `json:"id"`     // of the request
	Number int64           `json:"number"` // of the message
}

// maxAnswered is how many of the last responses to prompts are known to repeated requests.
const maxAnswered = 16

// request is a request of the client for an answer to a permission or a question.
type request struct {
	ID         string   `json:"id"`
	Session    string   `json:"session"`
	Permission string   `json:"permission,omitempty"` // id; empty for a question
	Question   string   `json:"question,omitempty"`   // id; empty for a permission
	Options    []string `json:"options,omitempty"`    // of a question
}

// clone returns a copy that shares nothing that is modified.
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

// release stops the translation of a session, unless a turn or request is left.
func (s *state) release(id string) {
	if x := s.Sessions[id]; x != nil && x.Loaded > 0 ||
		slices.ContainsFunc(s.Prompts, func(p prompt) bool { return p.Session == id }) ||
		slices.ContainsFunc(s.Requests, func(r request) bool { return r.Session == id }) {
		return
	}
	delete(s.Sessions, id)
}

// logID returns the id of a server's log. Ids of servers are any text.
func logID(server string) string {
	sum := sha256.Sum256([]byte(server))
	return logPrefix + hex.EncodeToString(sum[:16])
}

// logPrefix begins the ids of servers' logs. No ids of other logs begin with it.
const logPrefix = "a"

// serverLog is a server's log with its last entry known.
type serverLog struct {
	logs    sessions.Logs
	org, id string
	at      uint64 // number of the last known entry; 0 if there is none
	state   state  // after it, with its size in Bytes
}

// load reads the last entry.
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

// errFull is the error of a server whose log is full.
var errFull = &rpcError{
	Code:    codeInternal,
	Message: fmt.Sprintf("this connection has %d MiB of messages, which is the limit; create another client", maxLog>>20),
}

// maxPrompts bounds the prompts of a server without a response, which are in every entry of its log.
const maxPrompts = 256

var errPrompts = &rpcError{
	Code:    codeInternal,
	Message: fmt.Sprintf("this connection has %d prompts without a response, which is the limit", maxPrompts),
}

// append appends the entry that fill makes. fill may change the state of the entry, is called again if
// another process has appended one, and returns false to append nothing.
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

// find returns the message with a number; nil if it is gone.
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

// seek returns a number after which the entries begin that have messages with numbers greater than last.
func (l *serverLog) seek(ctx context.Context, last int64) (uint64, error) {
	if last <= 0 || l.at == 0 {
		return 0, nil
	}
	if last >= l.state.Number {
		return l.at, nil
	}
	low, high := uint64(0), l.at-1 // the entry after high has such messages
	for low < high {
		middle := low + (high-low)/2
		message, _, err := l.logs.Next(ctx, l.org, l.id, middle)
		if errors.Is(err, proto.ErrNotFound) { // removed meanwhile
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		if message == nil {
			return 0, nil
		}
		e, err := decodeEntry(message)
		if err != nil {
			return 0, err
		}
		if e.State.Number > last {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low, nil
}
