package rest

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/acp"
	"github.com/bullpen-run/bullpen/proto"
)

// writeJSON writes v as the response.
func writeJSON(w http.ResponseWriter, v any) error {
	body, err := encode(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(body) // the client may be gone
	return nil
}

// encode returns the JSON form of v.
func encode(v any) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode an answer: %w", err)
	}
	return body, nil
}

// agentInfo describes an agent.
type agentInfo struct {
	ID           string                `json:"id"`
	Installed    bool                  `json:"installed"`
	Credentials  bool                  `json:"credentialsAvailable"`
	Version      string                `json:"version,omitempty"`
	Path         string                `json:"path,omitempty"`
	Capabilities sessions.Capabilities `json:"capabilities"`
	ServerStatus *serverStatus         `json:"serverStatus,omitempty"`
	// ConfigOptions are set only if the request asks for them.
	ConfigOptions []acp.ConfigOption `json:"configOptions,omitempty"`
}

// serverStatus describes the process shared by an agent's sessions. This server gives each session
// a process of its own, so the shared one is always stopped.
type serverStatus struct {
	Status       string `json:"status"`
	RestartCount int    `json:"restartCount"`
}

// describe returns the description of an agent. Clients of version 0.4 also request its config
// options.
func describe(info *sessions.Info, r *http.Request) *agentInfo {
	x := &agentInfo{
		ID: info.ID, Installed: info.Missing == "", Credentials: info.Credentials, Version: info.Version,
		Capabilities: info.Capabilities,
	}
	if x.Installed {
		x.Path = info.Dir
	}
	if info.Capabilities.SharedProcess {
		x.ServerStatus = &serverStatus{Status: "stopped"}
	}
	if r.URL.Query().Get("config") == "true" {
		x.ConfigOptions = acp.ConfigOptions(info, nil)
	}
	return x
}

func (s *Server) listAgents(w http.ResponseWriter, r *http.Request) error {
	list := make([]*agentInfo, 0, len(s.Service.Agents))
	for _, a := range s.Service.Agents {
		list = append(list, describe(a.Info(), r))
	}
	return writeJSON(w, map[string]any{"agents": list})
}

func (s *Server) getAgent(w http.ResponseWriter, r *http.Request) error {
	info, err := s.agent(r)
	if err != nil {
		return err
	}
	return writeJSON(w, describe(info, r))
}

// agent returns the agent in the path of a request.
func (s *Server) agent(r *http.Request) (*sessions.Info, error) {
	name, err := param(r, "agent")
	if err != nil {
		return nil, err
	}
	a, err := s.Service.FindAgent(name)
	if err != nil {
		return nil, err
	}
	return a.Info(), nil
}

// install reports whether an agent is installed. It installs nothing: that is the operator's task.
func (s *Server) install(w http.ResponseWriter, r *http.Request) error {
	if err := decode(s.Host(r), w, r, &installRequest{}, true); err != nil {
		return err
	}
	info, err := s.agent(r)
	if err != nil {
		return err
	}
	if info.Missing != "" {
		p := sessions.NewProblem(codeInstallFailed, http.StatusInternalServerError, "install failed: "+info.ID)
		p.Agent, p.Details = info.ID, map[string]any{"stderr": info.Missing}
		return p
	}
	return noContent(w)
}

func (s *Server) listModes(w http.ResponseWriter, r *http.Request) error {
	info, err := s.agent(r)
	if err != nil {
		return err
	}
	return writeJSON(w, map[string]any{"modes": append([]sessions.Mode{}, info.Modes...)})
}

func (s *Server) listModels(w http.ResponseWriter, r *http.Request) error {
	info, err := s.agent(r)
	if err != nil {
		return err
	}
	answer := map[string]any{"models": append([]sessions.Model{}, info.Models...)}
	if info.DefaultModel != "" {
		answer["defaultModel"] = info.DefaultModel
	}
	return writeJSON(w, answer)
}

// created is the response to a request to create a session.
type created struct {
	Session string `json:"sessionId,omitempty"` // set if the server chose the id
	Healthy bool   `json:"healthy"`
	Native  string `json:"nativeSessionId,omitempty"`
}

// createSession creates a session with the id in the path, or with a new one.
func (s *Server) createSession(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	var request createRequest
	if err := decode(host, w, r, &request, false); err != nil {
		return err
	}
	x := &proto.AgentSession{
		Agent: *request.Agent, AgentMode: request.AgentMode, PermissionMode: request.PermissionMode, Model: request.Model,
		Variant: request.Variant, AgentVersion: request.AgentVersion, Directory: request.Directory, Title: request.Title,
	}
	x.Org, x.Key = host.Caller()
	answer := created{Healthy: true}
	if hasParam(r, "id") {
		var err error
		if x.ID, err = param(r, "id"); err != nil {
			return err
		}
	} else {
		x.ID = "ses_" + rand.Text()
		answer.Session = x.ID
	}
	if err := configure(host, x, &request); err != nil {
		return err
	}
	if err := host.AllowStored(r.Context(), false); err != nil {
		return err
	}
	profile, err := host.Profile(r.Context())
	if err != nil {
		return err
	}
	x.Prepare = profile.PrepareAgents
	if err := s.Service.Create(r.Context(), x); err != nil {
		return err
	}
	if a, ok := s.Service.Agent(x.Agent); ok && a.Info().NativeID != nil {
		answer.Native = a.Info().NativeID(x.ID)
	}
	return writeJSON(w, answer)
}

// hasParam reports whether the route of a request has a parameter in its path.
func hasParam(r *http.Request, name string) bool {
	return slices.Contains(chi.RouteContext(r.Context()).URLParams.Keys, name)
}

// configure sets the configuration of a session and checks its directory. The directory and local
// skills must be in the session's home: the server's disk is out of reach.
func configure(host Host, x *proto.AgentSession, request *createRequest) (err error) {
	if x.Directory != "" {
		if _, err := host.CleanPath(x.Directory); err != nil {
			return sessions.Invalidf("directory: %v", err)
		}
	}
	if request.MCP != nil {
		for name, server := range request.MCP {
			if server == nil {
				return missingField("mcp." + proto.Shorten(name))
			}
		}
		if x.MCP, err = json.Marshal(request.MCP); err != nil {
			return err
		}
	}
	if request.Skills == nil {
		return nil
	}
	if request.Skills.Sources == nil {
		return missingField("sources")
	}
	for _, source := range request.Skills.Sources {
		if source.Type == "" || source.Source == "" {
			return missingField("skills.sources")
		}
		if source.Type != "local" {
			continue
		}
		if _, err := host.CleanPath(source.Source); err != nil {
			return sessions.Invalidf("skills: %v", err)
		}
	}
	x.Skills, err = json.Marshal(request.Skills)
	return err
}

// sessionInfo describes a session.
type sessionInfo struct {
	ID             string          `json:"sessionId"`
	Agent          string          `json:"agent"`
	AgentMode      string          `json:"agentMode"`
	PermissionMode string          `json:"permissionMode"`
	Model          *string         `json:"model"`
	Variant        *string         `json:"variant"`
	Native         *string         `json:"nativeSessionId"`
	Ended          bool            `json:"ended"`
	Events         int64           `json:"eventCount"`
	CreatedAt      int64           `json:"createdAt"` // milliseconds since 1970
	UpdatedAt      int64           `json:"updatedAt"`
	Directory      *string         `json:"directory"`
	Title          *string         `json:"title"`
	MCP            json.RawMessage `json:"mcp,omitempty"`
	Skills         json.RawMessage `json:"skills,omitempty"`
}

// sessionDetail is a session with its pending questions and permissions.
type sessionDetail struct {
	sessionInfo
	Questions   []sessions.Question   `json:"pendingQuestions"`
	Permissions []sessions.Permission `json:"pendingPermissions"`
}

func orNull(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

func newSessionInfo(x *sessions.Session) sessionInfo {
	return sessionInfo{
		ID: x.ID, Agent: x.Agent, AgentMode: x.AgentMode, PermissionMode: x.PermissionMode, Model: orNull(x.Model),
		Variant: orNull(x.Variant), Native: orNull(x.Native), Ended: x.Ended != "", Events: x.Events,
		CreatedAt: x.CreatedAt.UnixMilli(), UpdatedAt: x.UpdatedAt.UnixMilli(), Directory: orNull(x.Directory),
		Title: orNull(x.Title), MCP: x.MCP, Skills: x.Skills,
	}
}

func (s *Server) listSessions(w http.ResponseWriter, r *http.Request) error {
	org, _ := s.Host(r).Caller()
	all, err := s.Service.List(r.Context(), org)
	if err != nil {
		return err
	}
	// Sessions may be 128 KiB each, so the answer is sent while it is encoded.
	out := bufio.NewWriterSize(&jsonAnswer{w: w}, bufferSize)
	separator := `{"sessions":[`
	for i := range all {
		body, err := encode(newSessionInfo(&all[i]))
		if err != nil {
			return err
		}
		_, _ = out.WriteString(separator) // the next write returns the error again
		separator = ","
		if _, err := out.Write(body); err != nil {
			return err
		}
	}
	if len(all) == 0 {
		_, _ = out.WriteString(separator) // Flush returns the error
	}
	_, _ = out.WriteString("]}")
	return out.Flush()
}

// find returns the host and the organisation of a request, and the id of the session in its path.
func (s *Server) find(r *http.Request) (host Host, org, id string, err error) {
	host = s.Host(r)
	org, _ = host.Caller()
	id, err = param(r, "id")
	return host, org, id, err
}

func (s *Server) getSession(w http.ResponseWriter, r *http.Request) error {
	_, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	x, err := s.Service.Get(r.Context(), org, id)
	if err != nil {
		return err
	}
	detail := sessionDetail{newSessionInfo(x), []sessions.Question{}, []sessions.Permission{}}
	for _, p := range x.Pending {
		if p.Question != nil {
			detail.Questions = append(detail.Questions, *p.Question)
		} else {
			detail.Permissions = append(detail.Permissions, *p.Permission)
		}
	}
	return writeJSON(w, detail)
}

// deleteSession removes the files of a session first, because they cannot be removed without a
// session.
func (s *Server) deleteSession(w http.ResponseWriter, r *http.Request) error {
	host, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	x, err := s.Service.Get(r.Context(), org, id)
	if err != nil {
		return err
	}
	if err := s.Service.Terminate(r.Context(), org, id); err != nil {
		return err
	}
	if err := host.Home(x.ThreadID()).Remove(r.Context()); err != nil {
		return err
	}
	if err := s.Service.Remove(r.Context(), org, id); err != nil {
		return err
	}
	return noContent(w)
}

// send sends the message in the body of a request.
func (s *Server) send(w http.ResponseWriter, r *http.Request) (host Host, sent *sessions.Sent, err error) {
	host, org, id, err := s.find(r)
	if err != nil {
		return nil, nil, err
	}
	var request messageRequest
	if err := decode(host, w, r, &request, false); err != nil {
		return nil, nil, err
	}
	key := r.Header.Get("Idempotency-Key")
	if len(key) > proto.MaxIdempotencyKeyLen {
		return nil, nil, sessions.Invalidf("Idempotency-Key: must not be longer than %d bytes", proto.MaxIdempotencyKeyLen)
	}
	if err := host.AllowStored(r.Context(), false); err != nil {
		return nil, nil, err
	}
	sent, err = s.Service.Send(r.Context(), org, id, sessions.Message{
		Text: *request.Message, Attachments: request.Attachments, Model: request.Model, Variant: request.Variant,
	}, key)
	return host, sent, err
}

func (s *Server) sendMessage(w http.ResponseWriter, r *http.Request) error {
	if _, _, err := s.send(w, r); err != nil {
		return err
	}
	return noContent(w)
}

// interruptSession ends the turn in progress. It does nothing if there is none.
func (s *Server) interruptSession(w http.ResponseWriter, r *http.Request) error {
	_, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	if err := s.Service.Interrupt(r.Context(), org, id); err != nil {
		return err
	}
	return noContent(w)
}

func (s *Server) terminateSession(w http.ResponseWriter, r *http.Request) error {
	_, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	if err := s.Service.Terminate(r.Context(), org, id); err != nil {
		return err
	}
	return noContent(w)
}

func (s *Server) answerQuestion(w http.ResponseWriter, r *http.Request) error {
	var request answersRequest
	if err := decode(s.Host(r), w, r, &request, false); err != nil {
		return err
	}
	return s.resolveQuestion(w, r, request.Answers)
}

func (s *Server) rejectQuestion(w http.ResponseWriter, r *http.Request) error {
	return s.resolveQuestion(w, r, nil)
}

// resolveQuestion answers a question, or rejects it if answers is nil.
func (s *Server) resolveQuestion(w http.ResponseWriter, r *http.Request, answers [][]string) error {
	_, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	question, err := param(r, "question")
	if err != nil {
		return err
	}
	if err := s.Service.AnswerQuestion(r.Context(), org, id, question, answers); err != nil {
		return err
	}
	return noContent(w)
}

func (s *Server) answerPermission(w http.ResponseWriter, r *http.Request) error {
	host, org, id, err := s.find(r)
	if err != nil {
		return err
	}
	var request permissionRequest
	if err := decode(host, w, r, &request, false); err != nil {
		return err
	}
	permission, err := param(r, "permission")
	if err != nil {
		return err
	}
	if err := s.Service.AnswerPermission(r.Context(), org, id, permission, replies[*request.Reply]); err != nil {
		return err
	}
	return noContent(w)
}
