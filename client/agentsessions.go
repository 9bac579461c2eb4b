package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

const agentSessionsPath = "/sandbox-agent/v1/sessions"

func agentSessionPath(id string) string { return agentSessionsPath + "/" + url.PathEscape(id) }

// AgentSessionRequest describes a new session of a coding agent. Empty fields select the agent's
// defaults.
type AgentSessionRequest struct {
	Agent          string `json:"agent"` // such as mock or claude
	AgentMode      string `json:"agentMode,omitempty"`
	PermissionMode string `json:"permissionMode,omitempty"`
	Model          string `json:"model,omitempty"`
	Variant        string `json:"variant,omitempty"` // of the model
	Directory      string `json:"directory,omitempty"`
	Title          string `json:"title,omitempty"`
	// MCP describes the servers of the Model Context Protocol whose tools the agent can use, by name: see
	// docs/guides/sandbox-agent.md. It is a JSON object, or nil for none.
	MCP json.RawMessage `json:"mcp,omitempty"`
}

// CreatedAgentSession is the response to a request to create a session.
type CreatedAgentSession struct {
	ID     string `json:"sessionId"`
	Native string `json:"nativeSessionId,omitempty"` // the agent's own id; empty if not known yet
}

// AgentSession is a session of a coding agent. Times are in milliseconds since 1970.
type AgentSession struct {
	ID             string  `json:"sessionId"`
	Agent          string  `json:"agent"`
	AgentMode      string  `json:"agentMode"`
	PermissionMode string  `json:"permissionMode"`
	Model          *string `json:"model"`
	Variant        *string `json:"variant"`
	Native         *string `json:"nativeSessionId"`
	Ended          bool    `json:"ended"`
	Events         int64   `json:"eventCount"`
	CreatedAt      int64   `json:"createdAt"`
	UpdatedAt      int64   `json:"updatedAt"`
	Directory      *string `json:"directory"`
	Title          *string `json:"title"`
	// Questions and Permissions are pending. They are not set in lists of sessions.
	Questions   []AgentQuestion   `json:"pendingQuestions,omitempty"`
	Permissions []AgentPermission `json:"pendingPermissions,omitempty"`
}

// AgentPermission is the data of the events permission.requested and permission.resolved.
type AgentPermission struct {
	ID       string          `json:"permission_id"`
	Action   string          `json:"action"`
	Status   string          `json:"status"` // requested, accept, accept_for_session or reject
	Metadata json.RawMessage `json:"metadata"`
}

// AgentQuestion is the data of the events question.requested and question.resolved.
type AgentQuestion struct {
	ID       string   `json:"question_id"`
	Prompt   string   `json:"prompt"`
	Options  []string `json:"options"`
	Response *string  `json:"response"`
	Status   string   `json:"status"` // requested, answered or rejected
}

// AgentEvent is an event of a session. Its type determines the content of Data: see
// docs/guides/sandbox-agent.md.
type AgentEvent struct {
	Sequence  int64           `json:"sequence"` // position in the session, to resume a stream after
	Time      time.Time       `json:"time"`
	Synthetic bool            `json:"synthetic"` // made by the server, not by the agent
	Type      string          `json:"type"`
	Data      json.RawMessage `json:"data"`
	// Line is the event as received: JSON with a line break.
	Line []byte `json:"-"`
}

// EndsTurn reports whether the agent does nothing more until it receives a message or an answer.
func (e *AgentEvent) EndsTurn() bool {
	switch e.Type {
	case "turn.ended", "session.ended", "permission.requested", "question.requested":
		return true
	default:
		return false
	}
}

// AgentMessage is a message for an agent.
type AgentMessage struct {
	Text        string            `json:"message"`
	Attachments []AgentAttachment `json:"attachments,omitempty"`
	Model       string            `json:"model,omitempty"` // empty for the session's model
	Variant     string            `json:"variant,omitempty"`
}

// AgentAttachment names a file in the session's home.
type AgentAttachment struct {
	Path string `json:"path"`
}

// CreateAgentSession creates a session of a coding agent. The server chooses the id if id is empty.
// The request is not resent if the connection breaks.
func (c *Client) CreateAgentSession(
	ctx context.Context, id string, r *AgentSessionRequest,
) (*CreatedAgentSession, error) {
	path := agentSessionsPath
	if id != "" {
		path = agentSessionPath(id)
	}
	created, err := get[CreatedAgentSession](ctx, c, call{method: http.MethodPost, path: path, body: r})
	if err == nil && created.ID == "" { // the response contains the id only if the server chose it
		created.ID = id
	}
	return created, err
}

// AgentSessions returns the sessions of the key's organisation, newest first.
func (c *Client) AgentSessions(ctx context.Context) iter.Seq2[AgentSession, error] {
	return pages[AgentSession](ctx, c, agentSessionsPath, "sessions", nil)
}

// AgentSession returns a session.
func (c *Client) AgentSession(ctx context.Context, id string) (*AgentSession, error) {
	return read[AgentSession](ctx, c, agentSessionPath(id))
}

// SendAgentMessage adds a message to a session's queue. It adds the message exactly once, even if
// the connection breaks and it retries.
func (c *Client) SendAgentMessage(ctx context.Context, id string, m *AgentMessage) error {
	return c.empty(ctx, call{
		method: http.MethodPost, path: agentSessionPath(id) + "/messages", body: m, header: c.idempotent(nil),
		resend: !c.cfg.NoRetry,
	})
}

// StreamAgentMessage sends a message and returns the events of its turn as they happen, each once
// and in order. It ends with the first event for which [AgentEvent.EndsTurn] is true, and resumes
// after a broken connection. Each use of the returned iterator sends the message again.
func (c *Client) StreamAgentMessage(ctx context.Context, id string, m *AgentMessage) iter.Seq2[*AgentEvent, error] {
	return func(yield func(*AgentEvent, error) bool) {
		s := &agentStream{client: c, session: id, yield: yield, ends: (*AgentEvent).EndsTurn}
		s.run(ctx, call{
			method: http.MethodPost, path: agentSessionPath(id) + "/messages/stream", body: m,
			header: c.idempotent(map[string]string{"Accept": eventStream}), resend: !c.cfg.NoRetry,
		})
	}
}

// FollowAgentSession returns the events of a session with sequence numbers greater than after, as
// they happen. It resumes like [Client.StreamAgentMessage], and ends with the session.
func (c *Client) FollowAgentSession(ctx context.Context, id string, after int64) iter.Seq2[*AgentEvent, error] {
	return func(yield func(*AgentEvent, error) bool) {
		s := &agentStream{
			client: c, session: id, yield: yield, after: after,
			ends: func(e *AgentEvent) bool { return e.Type == "session.ended" },
		}
		s.run(ctx, s.remaining())
	}
}

// AgentSessionEvents returns the stored events of a session with sequence numbers greater than
// after. It does not wait for new ones.
func (c *Client) AgentSessionEvents(ctx context.Context, id string, after int64) iter.Seq2[*AgentEvent, error] {
	return func(yield func(*AgentEvent, error) bool) {
		query := url.Values{"offset": {strconv.FormatInt(after, 10)}, "limit": {strconv.Itoa(maxPage)}}
		for {
			page, err := read[struct {
				Events []json.RawMessage `json:"events"`
				More   bool              `json:"hasMore"`
			}](ctx, c, withQuery(agentSessionPath(id)+"/events", query))
			if err != nil {
				yield(nil, err)
				return
			}
			for _, text := range page.Events {
				e, err := decodeAgentEvent(text)
				if err != nil {
					yield(nil, err)
					return
				}
				if !yield(e, nil) {
					return
				}
				query.Set("offset", strconv.FormatInt(e.Sequence, 10))
			}
			if !page.More {
				return
			}
		}
	}
}

// AgentReply is an answer to a permission.
type AgentReply string

// The answers.
const (
	AllowOnce   AgentReply = "once"
	AllowAlways AgentReply = "always" // for the session
	Reject      AgentReply = "reject"
)

// AnswerAgentPermission grants or rejects a pending permission.
func (c *Client) AnswerAgentPermission(ctx context.Context, id, permission string, reply AgentReply) error {
	return c.empty(ctx, call{
		method: http.MethodPost, path: agentSessionPath(id) + "/permissions/" + url.PathEscape(permission) + "/reply",
		body: map[string]AgentReply{"reply": reply},
	})
}

// AnswerAgentQuestion answers a pending question. Without answers, it rejects the question.
func (c *Client) AnswerAgentQuestion(ctx context.Context, id, question string, answers ...string) error {
	path := agentSessionPath(id) + "/questions/" + url.PathEscape(question)
	if len(answers) == 0 {
		return c.empty(ctx, call{method: http.MethodPost, path: path + "/reject"})
	}
	body := map[string][][]string{"answers": {answers}}
	return c.empty(ctx, call{method: http.MethodPost, path: path + "/reply", body: body})
}

// InterruptAgentSession interrupts the turn in progress. It does nothing if there is none. The turn has
// ended once the event turn.ended arrives.
func (c *Client) InterruptAgentSession(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodPost, path: agentSessionPath(id) + "/interrupt", resend: true})
}

// EndAgentSession ends a session and keeps its events. It does nothing if the session has ended.
func (c *Client) EndAgentSession(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodPost, path: agentSessionPath(id) + "/terminate", resend: true})
}

// DeleteAgentSession ends a session and deletes it with its files.
func (c *Client) DeleteAgentSession(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: agentSessionPath(id)})
}

const eventStream = "text/event-stream"

func decodeAgentEvent(text []byte) (*AgentEvent, error) {
	e := &AgentEvent{Line: append(bytes.Clone(text), '\n')}
	if err := json.Unmarshal(text, e); err != nil {
		return nil, fmt.Errorf("decode an event of a session: %w", err)
	}
	return e, nil
}

// agentStream is a sequence of connections that carry events of one session.
type agentStream struct {
	client  *Client
	session string
	yield   func(*AgentEvent, error) bool
	ends    func(*AgentEvent) bool // reports whether an event is the last
	after   int64                  // sequence number of the last returned event
	paused  bool                   // the server ends the stream after the last event, but the turn continues
}

// remaining returns the request for the events after the last one.
func (s *agentStream) remaining() call {
	return call{
		method: http.MethodGet, resend: true, header: map[string]string{"Accept": eventStream},
		path: agentSessionPath(s.session) + "/events/sse?offset=" + strconv.FormatInt(s.after, 10),
	}
}

// run reconnects until all events have arrived or the caller stops. Until the first event of a
// turn, it resends the message with the same idempotency key.
func (s *agentStream) run(ctx context.Context, next call) {
	retry := s.client.newRetry()
	lost := func(err error) {
		s.yield(nil, fmt.Errorf("lost the server while following session %s after event %d: %w", s.session, s.after, err))
	}
	for {
		last, began := s.after, time.Now()
		done, err := s.client.eachLine(ctx, next, s.handle)
		_, refused := errors.AsType[*Error](err)
		switch {
		case done:
			return
		case err != nil && next.redial && !refused && ctx.Err() == nil:
			lost(err)
			return
		case err != nil:
			s.yield(nil, err)
			return
		case s.paused:
			s.paused, next = false, s.remaining()
			continue
		case s.client.cfg.NoRetry:
			lost(errBrokenOff)
			return
		}
		again, err := retry.wait(ctx, s.after > last, began, errBrokenOff)
		if err != nil {
			s.yield(nil, err)
			return
		}
		if !again {
			lost(errBreaks)
			return
		}
		if s.after > 0 {
			next = s.remaining()
		}
		next.redial = true
	}
}

// handle returns the event in line to the caller, unless it came before. It reports whether all
// events have arrived or the caller has stopped.
func (s *agentStream) handle(line []byte) (done bool, err error) {
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return false, nil // the end of an event, its id, or a comment that keeps the connection alive
	}
	e, err := decodeAgentEvent(bytes.TrimSpace(data))
	if err != nil || e.Sequence <= s.after {
		return false, err
	}
	s.after, s.paused = e.Sequence, e.Type == "error" || e.Type == "agent.unparsed"
	return !s.yield(e, nil) || s.ends(e), nil
}
