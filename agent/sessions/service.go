package sessions

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Records stores the records of sessions.
type Records interface {
	// Create stores a new session. It returns [proto.ErrExists] if the id is in use, and a
	// [*proto.QuotaError] if the organisation has too many sessions.
	Create(ctx context.Context, x *proto.AgentSession) error
	// Find returns a session. It returns [proto.ErrNotFound] if there is none.
	Find(ctx context.Context, org, id string) (proto.AgentSession, error)
	// List returns the sessions of an organisation, the newest first.
	List(org string) []proto.AgentSession
	// Change applies change to a session and returns the session. It may call change repeatedly,
	// and returns its error. It returns [proto.ErrNotFound] if there is no such session.
	Change(ctx context.Context, org, id string, change func(*proto.AgentSession) error) (proto.AgentSession, error)
	// Activate marks a session as having work for a runner.
	Activate(ctx context.Context, org, id string) error
	// Remove removes a session with its log. It returns [proto.ErrNotFound] if there is none.
	Remove(ctx context.Context, org, id string) error
}

// Service implements what clients do with sessions. Its fields must be set before use.
type Service struct {
	Records Records
	Logs    Logs
	Agents  []Agent // in the order in which clients see them
}

// Agent returns the agent with an id, and whether there is one.
func (s *Service) Agent(id string) (Agent, bool) {
	at := slices.IndexFunc(s.Agents, func(a Agent) bool { return a.Info().ID == id })
	if at < 0 {
		return nil, false
	}
	return s.Agents[at], true
}

// Kind is the kind of an [Error].
type Kind string

// The kinds.
const (
	InvalidRequest    Kind = "invalid_request"
	UnsupportedAgent  Kind = "unsupported_agent"
	AgentNotInstalled Kind = "agent_not_installed"
	ModeNotSupported  Kind = "mode_not_supported"
	SessionNotFound   Kind = "session_not_found"
	SessionExists     Kind = "session_already_exists"
	AgentExited       Kind = "agent_process_exited"
	// ConversationLost is the kind of an error of [Agent.Start]: the agent no longer has the conversation.
	// The next turn begins a new one.
	ConversationLost Kind = "conversation_lost"
)

// Error is an error that the client of a request sees.
type Error struct {
	Kind    Kind
	Message string
	Agent   string         // the agent concerned; empty for none
	Session string         // the session concerned; empty for none
	Details map[string]any // nil for none
}

func (e *Error) Error() string { return e.Message }

// Invalidf returns an error of the kind InvalidRequest.
func Invalidf(format string, args ...any) error {
	return &Error{Kind: InvalidRequest, Message: "invalid request: " + fmt.Sprintf(format, args...)}
}

func notFound(id string) error {
	return &Error{Kind: SessionNotFound, Message: "session not found: " + shortenID(id), Session: shortenID(id)}
}

// shortenID returns a session's id for an error message. The id in a request may be too long.
func shortenID(id string) string {
	if len(id) <= proto.MaxAgentSessionID {
		return id
	}
	return proto.Shorten(id)
}

// publicError turns a [proto.ErrNotFound] of the store into an [*Error] about the session.
func publicError(err error, id string) error {
	if errors.Is(err, proto.ErrNotFound) {
		return notFound(id)
	}
	return err
}

// FindAgent returns the agent with an id. The error is an [*Error] if there is none.
func (s *Service) FindAgent(id string) (Agent, error) {
	if a, ok := s.Agent(id); ok {
		return a, nil
	}
	return nil, &Error{
		Kind: UnsupportedAgent, Message: "unsupported agent: " + proto.Shorten(id), Agent: proto.Shorten(id),
	}
}

// Permission modes of sessions.
const (
	PermissionDefault     = "default"
	PermissionPlan        = "plan"
	PermissionBypass      = "bypass"
	PermissionAcceptEdits = "acceptEdits"
)

// keyLife is how long an idempotency key prevents a second message.
const keyLife = 24 * time.Hour

// DefaultMode is the agent mode of a session whose request has none.
const DefaultMode = "build"

// Create stores a new session and sets the defaults and times of x. The caller sets Org, Key, ID
// and Agent. The error is an [*Error] if the request is invalid.
func (s *Service) Create(ctx context.Context, x *proto.AgentSession) error {
	agent, err := s.FindAgent(x.Agent)
	if err != nil {
		return err
	}
	if x.ID == "" || len(x.ID) > proto.MaxAgentSessionID {
		return Invalidf("the session's id must have 1 to %d bytes", proto.MaxAgentSessionID)
	}
	exists := &Error{
		Kind: SessionExists, Message: "session already exists: " + shortenID(x.ID), Session: shortenID(x.ID),
	}
	if _, err := s.open(ctx, x.Org, x.ID); err == nil { // clients expect this error before the errors about modes
		return exists
	}
	if err := setDefaults(x, agent.Info()); err != nil {
		return err
	}
	x.CreatedAt = time.Now().UTC()
	x.UpdatedAt = x.CreatedAt
	switch err := s.Records.Create(ctx, x); {
	case errors.Is(err, proto.ErrExists):
		if err := s.ensureLog(ctx, x); err != nil {
			return err
		}
		return exists
	case err != nil:
		return err
	}
	// A concurrent ensureLog may have created the log.
	if err := s.createLog(ctx, x, agent.Info()); err != nil && !errors.Is(err, proto.ErrConflict) {
		return err
	}
	if x.Prepare {
		return s.Records.Activate(ctx, x.Org, x.ID)
	}
	return nil
}

// ensureLog creates the log of a session that has a record but no log. A gateway may have died
// between the two writes, or the log may have expired.
func (s *Service) ensureLog(ctx context.Context, x *proto.AgentSession) error {
	existing, err := s.Records.Find(ctx, x.Org, x.ID)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := load(ctx, s.Logs, &existing); !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	agent, err := s.FindAgent(existing.Agent)
	if err != nil {
		return err
	}
	if err := s.createLog(ctx, &existing, agent.Info()); !errors.Is(err, proto.ErrConflict) {
		return err
	}
	return nil
}

// createLog appends the first entry of a session's log.
func (s *Service) createLog(ctx context.Context, x *proto.AgentSession, info *Info) error {
	e := &Entry{At: time.Now().UTC()}
	if info.NativeID != nil {
		e.State.Native = info.NativeID(x.ID)
	}
	started, err := event(SessionStarted, Started{Metadata: &Metadata{
		Agent: x.Agent, AgentMode: x.AgentMode, PermissionMode: x.PermissionMode,
		Model: orNil(x.Model), Variant: orNil(x.Variant),
	}})
	if err != nil {
		return err
	}
	e.Events = []Event{started}
	e.number(x)
	message, err := e.encode()
	if err != nil {
		return err
	}
	_, err = s.Logs.Append(ctx, x.Org, x.LogID(), 0, message)
	return err
}

// checkSizes returns an error if a field of a session is too long. Every gateway keeps all sessions in memory.
func checkSizes(x *proto.AgentSession) error {
	for _, field := range []struct {
		name        string
		size, limit int
	}{
		{"agentMode", len(x.AgentMode), proto.MaxAgentSessionField},
		{"permissionMode", len(x.PermissionMode), proto.MaxAgentSessionField},
		{"model", len(x.Model), proto.MaxAgentSessionField},
		{"variant", len(x.Variant), proto.MaxAgentSessionField},
		{"agentVersion", len(x.AgentVersion), proto.MaxAgentSessionField},
		{"directory", len(x.Directory), proto.MaxAgentSessionField},
		{"title", len(x.Title), proto.MaxAgentSessionField},
		{"mcp", len(x.MCP), proto.MaxAgentConfig},
		{"skills", len(x.Skills), proto.MaxAgentConfig},
	} {
		if field.size > field.limit {
			return Invalidf("%s: must not be longer than %d bytes", field.name, field.limit)
		}
	}
	return nil
}

// setDefaults sets the modes and the model that a request leaves out, and checks the fields. Its error
// is an [*Error] if a field is too long or the agent does not support the modes.
func setDefaults(x *proto.AgentSession, info *Info) error {
	if err := checkSizes(x); err != nil {
		return err
	}
	if info.Missing != "" {
		return notInstalled(info, info.Missing)
	}
	if v := x.AgentVersion; v != "" && len(info.Versions) > 0 && !slices.Contains(info.Versions, v) {
		return notInstalled(info, fmt.Sprintf("no worker has version %s, only %s", proto.Shorten(v),
			strings.Join(info.Versions, ", ")))
	}
	if x.AgentMode == "" {
		x.AgentMode = DefaultMode
	}
	if x.PermissionMode == "" {
		x.PermissionMode = PermissionDefault
	}
	known := []string{PermissionDefault, PermissionPlan, PermissionBypass, PermissionAcceptEdits}
	if !slices.Contains(known, x.PermissionMode) {
		return Invalidf("invalid permission mode: %s", proto.Shorten(x.PermissionMode))
	}
	unsupported := func(mode string) error {
		return &Error{
			Kind: ModeNotSupported, Message: "mode not supported: " + info.ID + " " + proto.Shorten(mode), Agent: info.ID,
			Details: map[string]any{"mode": proto.Shorten(mode)},
		}
	}
	if !info.AnyMode && !slices.ContainsFunc(info.Modes, func(m Mode) bool { return m.ID == x.AgentMode }) {
		return unsupported(x.AgentMode)
	}
	if !slices.Contains(info.PermissionModes, x.PermissionMode) {
		if x.PermissionMode != PermissionAcceptEdits {
			return unsupported(x.PermissionMode)
		}
		x.PermissionMode = PermissionDefault
	}
	if x.Model == "" {
		x.Model = info.DefaultModel
	}
	return nil
}

func notInstalled(info *Info, why string) error {
	return &Error{
		Kind: AgentNotInstalled, Message: "agent not installed: " + info.ID + ": " + why, Agent: info.ID,
	}
}

func orNil(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// event returns a synthetic event.
func event(kind EventType, data any) (Event, error) {
	encoded, err := json.Marshal(data)
	if err != nil {
		return Event{}, fmt.Errorf("encode the data of %s: %w", kind, err)
	}
	return Event{Type: kind, Data: encoded, Synthetic: true}, nil
}

// Session is a session as clients see it.
type Session struct {
	proto.AgentSession
	State
	At uint64 // number of the last entry of its log
}

// Get returns a session. The error is an [*Error] if there is none.
func (s *Service) Get(ctx context.Context, org, id string) (*Session, error) {
	l, err := s.open(ctx, org, id)
	if err != nil {
		return nil, err
	}
	return &Session{*l.session, l.state, l.at}, nil
}

// open returns the log of a session. The error is an [*Error] if there is no such session.
func (s *Service) open(ctx context.Context, org, id string) (*log, error) {
	x, err := s.Records.Find(ctx, org, id)
	if err == nil {
		var l *log
		if l, err = load(ctx, s.Logs, &x); err == nil {
			return l, nil
		}
	}
	return nil, publicError(err, id)
}

// List returns the sessions of an organisation, the newest first.
func (s *Service) List(ctx context.Context, org string) ([]Session, error) {
	records := s.Records.List(org)
	list := make([]Session, 0, len(records))
	for i := range records {
		l, err := load(ctx, s.Logs, &records[i])
		if errors.Is(err, proto.ErrNotFound) { // being created or removed, or expired
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, Session{records[i], l.state, l.at})
	}
	return list, nil
}

// Sent identifies an accepted message.
type Sent struct {
	Number int64 // of the message and of its turn
	// After is the number of an entry of the log before the turn.
	After uint64
}

// Send appends a message to a session's queue. If key is not empty and an earlier message has the
// same key, Send returns that message instead. The error is an [*Error] if the request is invalid,
// and an [*api.Error] if the key was used for a different message.
func (s *Service) Send(ctx context.Context, org, id string, m Message, key string) (*Sent, error) {
	if len(m.Text) > proto.MaxAgentMessage {
		return nil, Invalidf("message: must not be longer than %d bytes", proto.MaxAgentMessage)
	}
	l, err := s.open(ctx, org, id)
	if err != nil {
		return nil, err
	}
	var sent *Sent
	if key != "" {
		if sent, err = l.findMessage(ctx, &m, key); err != nil {
			return nil, err
		}
	}
	if sent == nil {
		if sent, err = l.send(ctx, m); err != nil {
			return nil, publicError(err, id)
		}
	}
	if err := s.Records.Activate(ctx, org, id); err != nil {
		return nil, publicError(err, id)
	}
	return sent, nil
}

// send appends a message.
func (l *log) send(ctx context.Context, m Message) (*Sent, error) {
	repeated := func(e *Entry) error {
		if m.Key == "" || e.Message == nil || e.Message.Key != m.Key {
			return nil
		}
		return &repeatedError{e}
	}
	e, err := l.append(ctx, repeated, func(state *State) (*Entry, error) {
		switch {
		case state.Ended == EndTerminated:
			return nil, Invalidf("session terminated")
		case state.Ended == EndError:
			return nil, &Error{
				Kind: AgentExited, Message: "agent process exited: " + l.session.Agent, Agent: l.session.Agent,
				Session: shortenID(l.session.ID), Details: map[string]any{"exitCode": state.ExitCode, "stderr": state.Stderr},
			}
		case state.Queued() >= proto.MaxQueuedAgentMessages:
			return nil, &proto.QuotaError{What: "messages that wait in the session", Limit: proto.MaxQueuedAgentMessages}
		}
		state.Messages++
		m.Number, m.Previous = state.Messages, state.MessageAfter
		if state.MessageAfter = l.at; state.Queued() == 1 {
			state.QueuedAfter = l.at
		}
		return &Entry{Message: new(m)}, nil
	})
	if again, ok := errors.AsType[*repeatedError](err); ok {
		return again.entry.sent(&m)
	}
	if err != nil {
		return nil, err
	}
	return e.sent(&m)
}

// repeatedError is returned if a message with the same key was sent before.
type repeatedError struct{ entry *Entry }

func (*repeatedError) Error() string { return "the message was sent before" }

// sent returns the message of an entry. It returns an error if the message differs from m.
func (e *Entry) sent(m *Message) (*Sent, error) {
	if e.Message.Body != m.Body {
		return nil, api.Errorf(api.CodeConflict,
			"the idempotency key was used for another message in this session; use a new key")
	}
	return &Sent{e.Message.Number, e.State.MessageAfter}, nil
}

// SetKey sets the idempotency key of a message. A caller who knows that the key is new can then
// call [Service.Send] without a key, which saves the search for an earlier message.
func (m *Message) SetKey(key string) error {
	body := sha256.New()
	if err := json.NewEncoder(body).Encode(m); err != nil {
		return fmt.Errorf("encode a message: %w", err)
	}
	digest := sha256.Sum256([]byte(key))
	m.Key, m.Body = hex.EncodeToString(digest[:16]), hex.EncodeToString(body.Sum(nil)[:16])
	return nil
}

// findMessage sets the key of a message. It returns the earlier message with that key, or nil if
// there is none.
func (l *log) findMessage(ctx context.Context, m *Message, key string) (*Sent, error) {
	if err := m.SetKey(key); err != nil {
		return nil, err
	}
	for after := l.state.MessageAfter; after != 0; {
		message, _, err := l.logs.Next(ctx, l.session.Org, l.session.LogID(), after)
		if errors.Is(err, proto.ErrNotFound) || message == nil {
			return nil, nil // expired
		}
		if err != nil {
			return nil, err
		}
		e, err := decodeEntry(message)
		if err != nil {
			return nil, err
		}
		if e.Message == nil || time.Since(e.At) > keyLife {
			return nil, nil
		}
		if e.Message.Key == m.Key {
			return e.sent(m)
		}
		after = e.Message.Previous
	}
	return nil, nil
}

// AnswerPermission grants or rejects a permission. The error is an [*Error] if the permission is
// not pending.
func (s *Service) AnswerPermission(ctx context.Context, org, id, permission string, status PermissionStatus) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		p := state.removePending(permission, false)
		if p == nil {
			return nil, Invalidf("unknown permission id: %s", proto.Shorten(permission))
		}
		resolved := *p.Permission
		resolved.Status = status
		if status == PermissionAlways {
			state.allow(&resolved)
		}
		e, err := event(PermissionResolved, resolved)
		return &Entry{Events: []Event{e}, Answer: &Answer{Permission: &resolved}, Turn: state.currentTurn()}, err
	})
}

// AnswerQuestion answers a question. answers has, for each part of the question, the chosen options
// or other texts. If answers is nil, the question is rejected. The error is an [*Error] if the
// question is not pending.
func (s *Service) AnswerQuestion(ctx context.Context, org, id, question string, answers [][]string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		q := state.removePending(question, true)
		if q == nil {
			return nil, Invalidf("unknown question id: %s", proto.Shorten(question))
		}
		resolved := *q.Question
		resolved.Status = QuestionRejected
		if answers != nil {
			resolved.Status = QuestionAnswered
			if len(answers) > 0 && len(answers[0]) > 0 {
				resolved.Response = &answers[0][0]
			}
		}
		e, err := event(QuestionResolved, resolved)
		answer := &Answer{Question: &resolved, Answers: answers}
		return &Entry{Events: []Event{e}, Answer: answer, Turn: state.currentTurn()}, err
	})
}

func (s *Service) answer(ctx context.Context, org, id string, resolve func(*State) (*Entry, error)) error {
	l, err := s.open(ctx, org, id)
	if err != nil {
		return err
	}
	if _, err = l.append(ctx, nil, resolve); err == nil {
		err = s.Records.Activate(ctx, org, id)
	}
	return publicError(err, id)
}

// currentTurn returns the number of the turn in progress; 0 for none.
func (s *State) currentTurn() int64 {
	if s.Running {
		return s.Turns
	}
	return 0
}

// removePending removes and returns a pending question or permission; nil if there is none with the
// id.
func (s *State) removePending(id string, question bool) *Pending {
	at := slices.IndexFunc(s.Pending, func(p Pending) bool { return p.ID() == id && (p.Question != nil) == question })
	if at < 0 {
		return nil
	}
	p := s.Pending[at]
	s.Pending = slices.Delete(s.Pending, at, at+1)
	return &p
}

// Interrupt requests the end of the turn in progress. It does nothing if there is none.
func (s *Service) Interrupt(ctx context.Context, org, id string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		if !state.Running {
			return nil, nil
		}
		state.Interrupted = state.Turns
		return &Entry{Interrupt: true, Turn: state.Turns}, nil
	})
}

// InterruptAll requests the end of the turn in progress and cancels the turns of all queued
// messages.
func (s *Service) InterruptAll(ctx context.Context, org, id string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		if !state.Running && state.Queued() == 0 {
			return nil, nil
		}
		state.Interrupted = state.Messages
		return &Entry{Interrupt: true, Turn: state.currentTurn()}, nil
	})
}

// Configure changes the modes, the model and the variant of a session from the next turn on. The
// error is an [*Error] if the agent does not support them.
func (s *Service) Configure(ctx context.Context, org, id string, change func(*proto.AgentSession)) (
	*proto.AgentSession, error,
) {
	x, err := s.Records.Change(ctx, org, id, func(x *proto.AgentSession) error {
		agent, err := s.FindAgent(x.Agent)
		if err != nil {
			return err
		}
		change(x)
		return setDefaults(x, agent.Info())
	})
	if errors.Is(err, proto.ErrNotFound) {
		err = notFound(id)
	}
	return &x, err
}

// Terminate ends a session. It does nothing if the session was terminated before.
func (s *Service) Terminate(ctx context.Context, org, id string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		if state.Ended == EndTerminated {
			return nil, nil
		}
		ended, err := event(SessionEnded, Ended{Reason: EndTerminated, TerminatedBy: FromDaemon})
		if err != nil {
			return nil, err
		}
		e := &Entry{Events: []Event{ended}, Turn: state.currentTurn()}
		state.Ended, state.Pending, state.Running = EndTerminated, nil, false
		return e, nil
	})
}

// Remove ends a session and removes it. The error is an [*Error] if there is none.
func (s *Service) Remove(ctx context.Context, org, id string) error {
	err := s.Terminate(ctx, org, id)
	if err == nil {
		err = s.Records.Remove(ctx, org, id)
	}
	return publicError(err, id)
}
