package sessions

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Records stores the records of sessions.
type Records interface {
	// Create stores a new session. It returns [proto.ErrExists] if there is one with its id, and a
	// [*proto.QuotaError] if the organisation has too many.
	Create(ctx context.Context, x *proto.AgentSession) error
	// Find returns a session, or [proto.ErrNotFound].
	Find(ctx context.Context, org, id string) (proto.AgentSession, error)
	// List returns the sessions of an organisation, the newest first.
	List(org string) []proto.AgentSession
	// Change changes a session, and returns it. It returns [proto.ErrNotFound] if there is none, and the
	// errors of change, which may be called again.
	Change(ctx context.Context, org, id string, change func(*proto.AgentSession) error) (proto.AgentSession, error)
	// Activate stores that a session has work for a runner.
	Activate(ctx context.Context, org, id string) error
	// Remove removes a session with its log. It returns [proto.ErrNotFound] if there is none.
	Remove(ctx context.Context, org, id string) error
}

// Service has what clients do with sessions. Its fields are set before its use.
type Service struct {
	Records Records
	Logs    Logs
	Agents  []Agent // in the order of lists
}

// Agent returns an agent.
func (s *Service) Agent(id string) (Agent, bool) {
	at := slices.IndexFunc(s.Agents, func(a Agent) bool { return a.Info().ID == id })
	if at < 0 {
		return nil, false
	}
	return s.Agents[at], true
}

// Kind is what is wrong with a request.
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
)

// Error is an error of a request, for its client.
type Error struct {
	Kind    Kind
	Message string
	Agent   string         // it is about; empty for none
	Session string         // it is about; empty for none
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

// shortenID returns a session's id for a message. Clients may choose long ones.
func shortenID(id string) string {
	if len(id) <= proto.MaxAgentSessionID {
		return id
	}
	return proto.Shorten(id)
}

// publicError returns an error of the store as what clients are told about a session.
func publicError(err error, id string) error {
	if errors.Is(err, proto.ErrNotFound) {
		return notFound(id)
	}
	return err
}

// FindAgent returns an agent. Its error is an [*Error] if there is none.
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

// keyLife is how long an idempotency key stands for its message.
const keyLife = 24 * time.Hour

// DefaultMode is the mode of a session that names none.
const DefaultMode = "build"

// Create stores a new session, whose Org, Key, ID and Agent are set, and completes x. Its error is an [*Error] if
// the request is wrong.
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
	if _, err := s.open(ctx, x.Org, x.ID); err == nil { // clients expect this error before those about modes
		return exists
	}
	if err := complete(x, agent.Info()); err != nil {
		return err
	}
	x.CreatedAt = time.Now().UTC()
	x.UpdatedAt = x.CreatedAt
	switch err := s.Records.Create(ctx, x); {
	case errors.Is(err, proto.ErrExists):
		if err := s.beginExisting(ctx, x); err != nil {
			return err
		}
		return exists
	case err != nil:
		return err
	}
	if err := s.begin(ctx, x, agent.Info()); !errors.Is(err, proto.ErrConflict) {
		return err
	}
	return nil // beginExisting was faster
}

// beginExisting begins the log of a session that has a record, if it has none: a gateway may have died between
// the two writes, and a log may have expired.
func (s *Service) beginExisting(ctx context.Context, x *proto.AgentSession) error {
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
	if err := s.begin(ctx, &existing, agent.Info()); !errors.Is(err, proto.ErrConflict) {
		return err
	}
	return nil
}

// begin appends the first entry of a session's log.
func (s *Service) begin(ctx context.Context, x *proto.AgentSession, info *Info) error {
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

// checkSizes returns an error if a field of a session is too long. Every gateway holds all sessions in memory.
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

// complete sets the modes of a session that its request leaves out, and checks its fields.
func complete(x *proto.AgentSession, info *Info) error {
	if err := checkSizes(x); err != nil {
		return err
	}
	if info.Missing != "" {
		return notInstalled(info)
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

func notInstalled(info *Info) error {
	return &Error{
		Kind: AgentNotInstalled, Message: "agent not installed: " + info.ID + ": " + info.Missing, Agent: info.ID,
	}
}

func orNil(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// event returns an event made by this server.
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

// Get returns a session. Its error is an [*Error] if there is none.
func (s *Service) Get(ctx context.Context, org, id string) (*Session, error) {
	l, err := s.open(ctx, org, id)
	if err != nil {
		return nil, err
	}
	return &Session{*l.session, l.state, l.at}, nil
}

// open returns the log of a session.
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
		if errors.Is(err, proto.ErrNotFound) { // it is being created or removed, or has expired
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, Session{records[i], l.state, l.at})
	}
	return list, nil
}

// Sent is a message that was accepted.
type Sent struct {
	Number int64 // of the message, and of its turn
	// After is the number of an entry of the log before the turn.
	After uint64
}

// Send appends a message to a session's queue. An earlier message with the same key is returned
// instead, if the key is not empty. Its error is an [*Error] if the request is wrong, among others if the key
// came with another message.
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

// repeatedError is returned if a message was sent before.
type repeatedError struct{ entry *Entry }

func (*repeatedError) Error() string { return "the message was sent before" }

// sent returns the message of an entry, which must be the same as m.
func (e *Entry) sent(m *Message) (*Sent, error) {
	if e.Message.Body != m.Body {
		return nil, api.Errorf(api.CodeConflict,
			"the idempotency key was used for another message in this session; use a new key")
	}
	return &Sent{e.Message.Number, e.State.MessageAfter}, nil
}

// SetKey gives a message an idempotency key, for a caller of [Service.Send] who knows that it is new.
func (m *Message) SetKey(key string) error {
	body := sha256.New()
	if err := json.NewEncoder(body).Encode(m); err != nil {
		return fmt.Errorf("encode a message: %w", err)
	}
	digest := sha256.Sum256([]byte(key))
	m.Key, m.Body = hex.EncodeToString(digest[:16]), hex.EncodeToString(body.Sum(nil)[:16])
	return nil
}

// findMessage sets the key of a message, and returns the earlier message with that key; nil for none.
func (l *log) findMessage(ctx context.Context, m *Message, key string) (*Sent, error) {
	if err := m.SetKey(key); err != nil {
		return nil, err
	}
	for after := l.state.MessageAfter; after != 0; {
		message, _, err := l.logs.Next(ctx, l.session.Org, l.session.LogID(), after)
		if errors.Is(err, proto.ErrNotFound) || message == nil {
			return nil, nil // it has expired
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

// AnswerPermission answers a permission. Its error is an [*Error] if it does not wait for an answer.
func (s *Service) AnswerPermission(ctx context.Context, org, id, permission string, status PermissionStatus) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		p := state.take(permission, false)
		if p == nil {
			return nil, Invalidf("unknown permission id: %s", proto.Shorten(permission))
		}
		resolved := *p.Permission
		resolved.Status = status
		if status == PermissionAlways {
			state.allow(&resolved)
		}
		e, err := event(PermissionResolved, resolved)
		return &Entry{Events: []Event{e}, Answer: &Answer{Permission: &resolved}, Turn: state.turn()}, err
	})
}

// AnswerQuestion answers a question: each of its parts with some of its options or other texts. Without
// answers, nil, the question is rejected. Its error is an [*Error] if it does not wait for an answer.
func (s *Service) AnswerQuestion(ctx context.Context, org, id, question string, answers [][]string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		q := state.take(question, true)
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
		return &Entry{Events: []Event{e}, Answer: &Answer{Question: &resolved, Answers: answers}, Turn: state.turn()}, err
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

// turn returns the turn in progress, 0 for none.
func (s *State) turn() int64 {
	if s.Running {
		return s.Turns
	}
	return 0
}

// take removes what waits for an answer, and returns it; nil if it does not wait.
func (s *State) take(id string, question bool) *Pending {
	at := slices.IndexFunc(s.Pending, func(p Pending) bool { return p.ID() == id && (p.Question != nil) == question })
	if at < 0 {
		return nil
	}
	p := s.Pending[at]
	s.Pending = slices.Delete(s.Pending, at, at+1)
	return &p
}

// Interrupt requests the end of the turn in progress, if there is one.
func (s *Service) Interrupt(ctx context.Context, org, id string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		if !state.Running {
			return nil, nil
		}
		state.Interrupted = state.Turns
		return &Entry{Interrupt: true, Turn: state.Turns}, nil
	})
}

// InterruptAll requests the end of the turn in progress, and of those of the messages in the queue.
func (s *Service) InterruptAll(ctx context.Context, org, id string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		if !state.Running && state.Queued() == 0 {
			return nil, nil
		}
		state.Interrupted = state.Messages
		return &Entry{Interrupt: true, Turn: state.turn()}, nil
	})
}

// Configure changes the modes, the model and the variant of a session, which its agent has from the next
// turn on. Its error is an [*Error] if the agent does not have them.
func (s *Service) Configure(ctx context.Context, org, id string, change func(*proto.AgentSession)) (
	*proto.AgentSession, error,
) {
	x, err := s.Records.Change(ctx, org, id, func(x *proto.AgentSession) error {
		agent, err := s.FindAgent(x.Agent)
		if err != nil {
			return err
		}
		change(x)
		return complete(x, agent.Info())
	})
	if errors.Is(err, proto.ErrNotFound) {
		err = notFound(id)
	}
	return &x, err
}

// Terminate ends a session. It does nothing if it has been terminated.
func (s *Service) Terminate(ctx context.Context, org, id string) error {
	return s.answer(ctx, org, id, func(state *State) (*Entry, error) {
		if state.Ended == EndTerminated {
			return nil, nil
		}
		ended, err := event(SessionEnded, Ended{Reason: EndTerminated, TerminatedBy: FromDaemon})
		if err != nil {
			return nil, err
		}
		e := &Entry{Events: []Event{ended}, Turn: state.turn()}
		state.Ended, state.Pending, state.Running = EndTerminated, nil, false
		return e, nil
	})
}

// Remove ends a session and removes it. Its error is an [*Error] if there is none.
func (s *Service) Remove(ctx context.Context, org, id string) error {
	err := s.Terminate(ctx, org, id)
	if err == nil {
		err = s.Records.Remove(ctx, org, id)
	}
	return publicError(err, id)
}
