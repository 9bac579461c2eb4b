package acp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// call is a message of a client while it is handled.
type call struct {
	*received
	host     Host
	org, key string
	server   string
	log      serverLog
}

// post handles a message of a client. Every response to a valid message has the status 200 or 202,
// because clients give up after any other.
func (s *Server) post(w http.ResponseWriter, r *http.Request) error {
	id, err := serverID(r)
	if err != nil {
		return invalid(w, http.StatusBadRequest, err.Error())
	}
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return writeProblem(w, http.StatusUnsupportedMediaType, "unsupported_media_type",
			"the Content-Type must be application/json")
	}
	if !accepts(r, "application", "json") {
		return invalid(w, http.StatusNotAcceptable, "the Accept header must allow application/json")
	}
	// The id of a request must be known even if its body is rejected.
	head := &headReader{from: r.Body}
	body := r.WithContext(r.Context())
	body.Body = head
	c := &call{received: new(received), host: s.Host(body), server: id}
	c.org, c.key = c.host.Caller()
	c.log = serverLog{logs: s.Logs, org: c.org, id: logID(id)}
	malformed := ""
	err = c.host.ReadBody(w, func(text []byte) error {
		switch err := json.Unmarshal(text, c.received); {
		case err != nil || c.Method == "" && !c.hasID():
			malformed = "the body must be one message of JSON-RPC"
		case len(c.ID) > maxID:
			malformed = fmt.Sprintf("the id must not be longer than %d bytes", maxID)
		}
		return nil
	})
	switch {
	case malformed != "":
		return invalid(w, http.StatusBadRequest, malformed)
	case err != nil:
		_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, maxRefused)) // see WriteError
		m := peek(bytes.NewReader(head.head))
		s.answer(w, &m, err)
		return nil
	}
	if err = c.log.load(r.Context()); err == nil {
		var answered bool
		if answered, err = c.checkAgent(w, r.URL.Query().Get("agent")); answered {
			return nil
		}
	}
	if err == nil {
		err = s.handle(r.Context(), w, c)
	}
	if err == nil {
		return nil
	}
	if r.Context().Err() == nil && isInternal(err) {
		s.Log.WarnContext(r.Context(), "agent client protocol: request failed", "org", c.org, "server", proto.Shorten(id),
			"method", proto.Shorten(c.Method), "error", err)
	}
	s.answer(w, c.received, err)
	return nil
}

// maxID bounds the ids of requests, in bytes. Every entry of the log contains those of open prompts.
const maxID = 256

// maxHead is the size of the part of a body that is kept to find the id of its message, in bytes.
const maxHead = 4 << 10

// headReader keeps the first maxHead bytes that are read.
type headReader struct {
	from io.ReadCloser
	head []byte
}

func (h *headReader) Read(p []byte) (int, error) {
	n, err := h.from.Read(p)
	h.head = append(h.head, p[:min(n, maxHead-len(h.head))]...)
	return n, err
}

func (h *headReader) Close() error { return h.from.Close() }

// checkAgent writes a response if the agent in the query is missing or is not the server's.
func (c *call) checkAgent(w http.ResponseWriter, agent string) (answered bool, err error) {
	known := c.log.state.Agent
	switch {
	case known == "" && agent == "" && c.Method != methodInitialize:
		return false, &rpcError{
			Code: codeNotFound, Message: "this connection has expired or was removed; create another client",
		}
	case known == "" && agent == "":
		return true, invalid(w, http.StatusBadRequest,
			"missing required 'agent' query parameter for first POST to /v1/acp/"+proto.Shorten(c.server))
	case known != "" && agent != "" && agent != known:
		return true, writeProblem(w, http.StatusConflict, "conflict",
			"the server "+proto.Shorten(c.server)+" runs the agent "+known+", not "+proto.Shorten(agent))
	case known == "":
		c.log.state.Agent = agent
	}
	return false, nil
}

// handle handles a message. It writes the response unless it returns an error.
func (s *Server) handle(ctx context.Context, w http.ResponseWriter, c *call) error {
	if _, err := s.Sessions.FindAgent(c.log.state.Agent); err != nil {
		return err
	}
	if !c.isRequest() {
		err := s.handleOther(ctx, c)
		if err == nil {
			w.WriteHeader(http.StatusAccepted)
		}
		return err
	}
	if c.Method == methodPrompt {
		return s.handlePrompt(ctx, w, c)
	}
	// A turn can be ended without room.
	full := s.checkRoom(ctx, c)
	if full != nil && c.Method != methodCancel && c.Method != methodClose {
		return full
	}
	result, created, err := s.call(ctx, c)
	if err != nil && isInternal(err) {
		s.Log.WarnContext(ctx, "agent client protocol: request failed", "org", c.org, "server", proto.Shorten(c.server),
			"method", proto.Shorten(c.Method), "error", err)
	}
	out, errEncode := response(c.ID, result, err)
	if errEncode != nil {
		return errEncode
	}
	if full != nil {
		writeResponse(w, out.Data)
		return nil //nolint:nilerr // the response has the error
	}
	agent := c.log.state.Agent
	err = c.log.append(ctx, func(e *entry) (bool, error) {
		if e.State.Server == "" {
			e.State.Server, e.State.Agent, e.State.CreatedAt = c.server, agent, e.At
		}
		if c.Method == methodInitialize {
			e.State.begin()
		}
		e.Messages, e.Created = []outgoing{out}, created
		return true, nil
	})
	if err != nil {
		return err
	}
	writeResponse(w, out.Data)
	return nil
}

// checkRoom returns an error if a request may not add to the log of its server.
func (s *Server) checkRoom(ctx context.Context, c *call) error {
	if c.log.state.Bytes > maxLog {
		return errFull
	}
	if err := c.host.AllowStored(ctx, false); err != nil || c.log.at > 0 {
		return err
	}
	ids, err := s.Logs.IDs(ctx, c.org, logPrefix)
	if err == nil && len(ids) >= proto.MaxAgentServers {
		err = &proto.QuotaError{What: "agent servers", Limit: proto.MaxAgentServers}
	}
	return err
}

// begin starts a new connection. It discards the prompts and requests of an earlier client with the
// same server id.
func (s *state) begin() {
	s.Connection++
	s.First, s.Sessions, s.Prompts, s.Answered, s.Requests = s.Number+1, nil, nil, nil, nil
}

// handlePrompt sends a prompt and waits up to s.Wait for its response. A repeated request does not
// send the prompt again.
func (s *Server) handlePrompt(ctx context.Context, w http.ResponseWriter, c *call) error {
	for _, a := range c.log.state.Answered {
		if bytes.Equal(a.ID, c.ID) {
			data, err := c.log.find(ctx, a.Number)
			if err == nil && data != nil {
				writeResponse(w, data)
				return nil
			}
		}
	}
	p, message, err := s.preparePrompt(ctx, c)
	if err != nil {
		return err
	}
	after := c.log.at
	// Register the prompt before sending it: otherwise its turn could end and be translated without
	// it.
	repeated, err := s.register(ctx, c, p)
	if err != nil {
		return err
	}
	if err := s.send(ctx, c, p, message, repeated); err != nil {
		return s.refuse(ctx, w, c, &p.prompt, err)
	}
	release := s.project(ctx, c.host, c.server)
	defer release()
	data, err := s.await(ctx, c, after)
	if err == nil && data != nil {
		writeResponse(w, data)
		return nil
	}
	// The client receives the response over the stream, from this gateway or another.
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// register stores a prompt. It reports whether an earlier request has already stored it.
func (s *Server) register(ctx context.Context, c *call, p *preparedPrompt) (repeated bool, err error) {
	known := c.log.at
	err = c.log.append(ctx, func(e *entry) (bool, error) {
		repeated = slices.ContainsFunc(e.State.Prompts, func(known prompt) bool {
			return bytes.Equal(known.ID, p.ID) && known.Session == p.Session
		})
		if repeated {
			return false, nil
		}
		if len(e.State.Prompts) >= maxPrompts {
			return false, errPrompts
		}
		if e.State.Sessions[p.Session] == nil {
			if c.log.at != known { // events of the session may have been translated meanwhile
				x, err := s.find(ctx, c, p.Session)
				if err != nil {
					return false, err
				}
				p.after = x.At
			}
			e.State.Sessions[p.Session] = &session{After: p.after}
		}
		e.State.Prompts = append(e.State.Prompts, p.prompt)
		return true, nil
	})
	return repeated, err
}

// send sends the message of a prompt. If repeated is set, an earlier request may have sent it.
func (s *Server) send(ctx context.Context, c *call, p *preparedPrompt, m sessions.Message, repeated bool) error {
	if repeated {
		_, err := s.Sessions.Send(ctx, c.org, p.Session, m, p.key)
		return err
	}
	if err := m.SetKey(p.key); err != nil {
		return err
	}
	_, err := s.Sessions.Send(ctx, c.org, p.Session, m, "")
	return err
}

// refuse responds to a prompt with an error and appends the response to the log. p is nil if the
// prompt was not registered.
func (s *Server) refuse(ctx context.Context, w http.ResponseWriter, c *call, p *prompt, cause error) error {
	out, err := response(c.ID, nil, cause)
	if err != nil {
		return err
	}
	out.prompt = true
	if err := c.log.append(ctx, func(e *entry) (bool, error) {
		e.Messages = []outgoing{out}
		e.State.remove(p)
		e.State.release(p.Session)
		return true, nil
	}); err != nil {
		return cause
	}
	if isInternal(cause) {
		s.Log.WarnContext(ctx, "agent client protocol: prompt failed", "org", c.org, "server", proto.Shorten(c.server),
			"error", cause)
	}
	writeResponse(w, out.Data)
	return nil
}

// await blocks until an entry after number after contains the response to the request. It returns
// an error after s.Wait or when the server drains.
func (s *Server) await(ctx context.Context, c *call, after uint64) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Wait)
	defer cancel()
	ctx, end := c.host.UntilDrain(ctx)
	defer end()
	follower, err := s.Logs.Follow(c.org, c.log.id)
	if err != nil {
		return nil, err
	}
	defer follower.Close()
	for {
		message, at, err := follower.Next(ctx, after)
		if err != nil {
			return nil, err
		}
		e, err := decodeEntry(message)
		if err != nil {
			return nil, err
		}
		for _, m := range e.Messages {
			if bytes.Equal(m.Answers, c.ID) {
				return m.Data, nil
			}
		}
		after = at
	}
}

// outcome is the client's result of a request for a permission.
type outcome struct {
	Outcome struct {
		Outcome  string `json:"outcome"` // selected or cancelled
		OptionID string `json:"optionId"`
	} `json:"outcome"`
}

// handleOther handles a notification or a response.
func (s *Server) handleOther(ctx context.Context, c *call) error {
	switch c.Method {
	case methodCancel:
		_, err := s.cancel(ctx, c)
		return err
	case "":
		return s.handleResponse(ctx, c)
	default:
		return nil
	}
}

// handleResponse answers a permission or a question. The request ends when the resulting event is
// translated.
func (s *Server) handleResponse(ctx context.Context, c *call) error {
	var id string
	if err := json.Unmarshal(c.ID, &id); err != nil {
		return nil //nolint:nilerr // not a request of this server
	}
	for _, r := range c.log.state.Requests {
		if r.ID != id {
			continue
		}
		var result outcome
		_ = json.Unmarshal(c.Result, &result) // an error response counts as a rejection
		if result.Outcome.Outcome != "selected" {
			result.Outcome.OptionID = rejectOnce
		}
		err := s.answerRequest(ctx, c.org, &r, result.Outcome.OptionID)
		if _, ok := errors.AsType[*sessions.Error](err); ok { // already answered
			return nil
		}
		return err
	}
	return nil
}

const answerTimeout = 30 * time.Second

// answerRequest answers a permission or a question with an option.
func (s *Server) answerRequest(ctx context.Context, org string, r *request, option string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTimeout)
	defer cancel()
	if r.Permission != "" {
		status := sessions.PermissionRejected
		switch option {
		case allowOnce:
			status = sessions.PermissionAccepted
		case allowAlways:
			status = sessions.PermissionAlways
		}
		return s.Sessions.AnswerPermission(ctx, org, r.Session, r.Permission, status)
	}
	return s.Sessions.AnswerQuestion(ctx, org, r.Session, r.Question, r.answers(option))
}
