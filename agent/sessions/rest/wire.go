package rest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// Limits of requests.
const (
	maxNameBytes   = proto.MaxAgentSessionField // bytes of a name
	maxAttachments = 100
	maxAnswers     = 100
	maxAnswerBytes = 64 << 10 // of all answers to a question together
)

// requestBody is the body of a request.
type requestBody interface {
	// check returns an error for the client if the decoded body is invalid.
	check() error
}

// bodyErrorf returns the error for a body that is valid JSON but does not fit the request.
func bodyErrorf(format string, args ...any) error {
	return textErrorf(http.StatusUnprocessableEntity, "Failed to deserialize the JSON body into the target type: %s",
		fmt.Sprintf(format, args...))
}

// missingField returns the error for a required field that a body lacks.
func missingField(field string) error {
	return bodyErrorf("missing field `%s`", field)
}

// decode reads and decodes the body of a request. It ignores unknown fields. An optional body may
// be empty.
func decode(host Host, w http.ResponseWriter, r *http.Request, to requestBody, optional bool) error {
	return host.ReadBody(w, func(body []byte) error {
		if optional && len(bytes.TrimSpace(body)) == 0 {
			return nil
		}
		if err := checkJSON(r.Header.Get("Content-Type")); err != nil {
			return err
		}
		if !json.Valid(body) {
			return textErrorf(http.StatusBadRequest, "Failed to parse the request body as JSON: %v",
				json.Unmarshal(body, &json.RawMessage{}))
		}
		if err := json.Unmarshal(body, to); err != nil {
			if known, ok := errors.AsType[*textError](err); ok {
				return known
			}
			return bodyErrorf("%v", err)
		}
		return to.check()
	})
}

// checkJSON checks the media type of a body.
func checkJSON(contentType string) error {
	media, _, err := mime.ParseMediaType(contentType)
	if err == nil && (media == "application/json" || strings.HasPrefix(media, "application/") &&
		strings.HasSuffix(media, "+json")) {
		return nil
	}
	return textErrorf(http.StatusUnsupportedMediaType, "Expected request with `Content-Type: application/json`")
}

// query holds the query parameters of a request.
type query struct{ url.Values }

func queryOf(r *http.Request) (query, error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return query{}, badQuery("%v", err)
	}
	return query{values}, nil
}

func badQuery(format string, args ...any) error {
	return textErrorf(http.StatusBadRequest, "Failed to deserialize query string: %s", fmt.Sprintf(format, args...))
}

// get returns the value of the first of names that the query contains, and whether there is one.
func (q query) get(names ...string) (value string, ok bool) {
	for _, name := range names {
		if values := q.Values[name]; len(values) > 0 {
			return values[0], true
		}
	}
	return "", false
}

// flag returns a boolean parameter; false if there is none.
func (q query) flag(names ...string) (bool, error) {
	switch value, ok := q.get(names...); {
	case !ok || value == "false":
		return false, nil
	case value == "true":
		return true, nil
	default:
		return false, badQuery("%s: provided string was not `true` or `false`", names[0])
	}
}

// number returns a non-negative number, or fallback if the query does not contain it.
func (q query) number(name string, fallback int64) (int64, error) {
	value, ok := q.get(name)
	if !ok {
		return fallback, nil
	}
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < 0 {
		return 0, badQuery("%s: invalid digit found in string", name)
	}
	return n, nil
}

// installRequest is the body of a request to install an agent.
type installRequest struct {
	Reinstall *bool `json:"reinstall"`
}

func (*installRequest) check() error { return nil }

// createRequest is the body of a request to create a session.
type createRequest struct {
	Agent          *string               `json:"agent"`
	AgentMode      string                `json:"agentMode"`
	PermissionMode string                `json:"permissionMode"`
	Model          string                `json:"model"`
	Variant        string                `json:"variant"`
	AgentVersion   string                `json:"agentVersion"`
	Directory      string                `json:"directory"`
	Title          string                `json:"title"`
	MCP            map[string]*mcpServer `json:"mcp"`
	Skills         *skills               `json:"skills"`
}

func (c *createRequest) check() error {
	if c.Agent == nil {
		return missingField("agent")
	}
	return nil
}

// mcpServer describes a server of the Model Context Protocol. Its fields have the names used in
// responses. Requests may use other names, see UnmarshalJSON.
type mcpServer struct {
	Type           string            `json:"type"` // local or remote
	Command        json.RawMessage   `json:"command,omitempty"`
	Args           []string          `json:"args,omitempty"`
	Env            map[string]string `json:"env,omitempty"`
	CWD            string            `json:"cwd,omitempty"`
	URL            string            `json:"url,omitempty"`
	Headers        map[string]string `json:"headers,omitempty"`
	BearerTokenEnv string            `json:"bearerTokenEnvVar,omitempty"`
	EnvHeaders     map[string]string `json:"envHeaders,omitempty"`
	OAuth          json.RawMessage   `json:"oauth,omitempty"`
	Enabled        *bool             `json:"enabled,omitempty"`
	TimeoutMS      *int64            `json:"timeoutMs,omitempty"`
	Transport      string            `json:"transport,omitempty"`
}

// UnmarshalJSON implements [json.Unmarshaler].
func (m *mcpServer) UnmarshalJSON(body []byte) error {
	type plain mcpServer
	var aliases struct {
		Environment    map[string]string `json:"environment"`
		Timeout        *int64            `json:"timeout"`
		BearerTokenEnv string            `json:"bearer_token_env_var"`
		EnvHTTPHeaders map[string]string `json:"envHttpHeaders"`
		EnvHeaders     map[string]string `json:"env_http_headers"`
	}
	if err := json.Unmarshal(body, (*plain)(m)); err != nil {
		return err
	}
	if err := json.Unmarshal(body, &aliases); err != nil {
		return err
	}
	if m.Env == nil {
		m.Env = aliases.Environment
	}
	if m.TimeoutMS == nil {
		m.TimeoutMS = aliases.Timeout
	}
	if m.BearerTokenEnv == "" {
		m.BearerTokenEnv = aliases.BearerTokenEnv
	}
	for _, headers := range []map[string]string{aliases.EnvHTTPHeaders, aliases.EnvHeaders} {
		if m.EnvHeaders == nil {
			m.EnvHeaders = headers
		}
	}
	return m.check()
}

// check returns an error if the description is invalid. It sets the type to the name used in
// responses.
func (m *mcpServer) check() error {
	switch m.Type {
	case "local", "stdio":
		m.Type = "local"
		var command string
		var words []string
		if json.Unmarshal(m.Command, &command) != nil && json.Unmarshal(m.Command, &words) != nil {
			return missingField("command")
		}
	case "remote", "http":
		if m.Type = "remote"; m.URL == "" {
			return missingField("url")
		}
		if m.Transport != "" && m.Transport != "http" && m.Transport != "sse" {
			return bodyErrorf("mcp: unknown variant `%s`, expected `http` or `sse`", proto.Shorten(m.Transport))
		}
		var enabled bool
		if len(m.OAuth) > 0 && json.Unmarshal(m.OAuth, &enabled) != nil && json.Unmarshal(m.OAuth, &struct{}{}) != nil {
			return missingField("oauth")
		}
	default:
		return bodyErrorf("mcp: unknown variant `%s`, expected `local` or `remote`", proto.Shorten(m.Type))
	}
	return nil
}

// skills names the sources of an agent's skills.
type skills struct {
	Sources []skillSource `json:"sources"`
}

type skillSource struct {
	Type    string   `json:"type"`
	Source  string   `json:"source"`
	Skills  []string `json:"skills,omitempty"`
	Ref     string   `json:"ref,omitempty"`
	Subpath string   `json:"subpath,omitempty"`
}

// messageRequest is the body of a message. Model and variant are extensions of the original API.
type messageRequest struct {
	Message     *string               `json:"message"`
	Attachments []sessions.Attachment `json:"attachments"`
	Model       string                `json:"model"`
	Variant     string                `json:"variant"`
}

func (m *messageRequest) check() error {
	if m.Message == nil {
		return missingField("message")
	}
	if len(m.Attachments) > maxAttachments {
		return sessions.Invalidf("attachments: must not be more than %d", maxAttachments)
	}
	if len(m.Model) > maxNameBytes || len(m.Variant) > maxNameBytes {
		return sessions.Invalidf("model and variant: must not be longer than %d bytes", maxNameBytes)
	}
	for _, a := range m.Attachments {
		if a.Path == "" {
			return missingField("path")
		}
		if len(a.Path) > proto.MaxFilePathBytes || len(a.MIME) > maxNameBytes || len(a.Filename) > maxNameBytes {
			return sessions.Invalidf("attachments: have a path or a name that is too long")
		}
	}
	return nil
}

// answersRequest is the body of an answer to a question.
type answersRequest struct {
	Answers [][]string `json:"answers"`
}

func (a *answersRequest) check() error {
	if a.Answers == nil {
		return missingField("answers")
	}
	size, count := 0, len(a.Answers)
	for _, list := range a.Answers {
		count += len(list)
		for _, answer := range list {
			size += len(answer)
		}
	}
	if count > maxAnswers || size > maxAnswerBytes {
		return sessions.Invalidf("answers: must not be more than %d with %d bytes together", maxAnswers, maxAnswerBytes)
	}
	return nil
}

// permissionRequest is the body of an answer to a permission.
type permissionRequest struct {
	Reply *string `json:"reply"`
}

func (p *permissionRequest) check() error {
	if p.Reply == nil {
		return missingField("reply")
	}
	if _, ok := replies[*p.Reply]; !ok {
		return bodyErrorf("reply: unknown variant `%s`, expected one of `once`, `always`, `reject`", proto.Shorten(*p.Reply))
	}
	return nil
}

// replies are the values of permissionRequest.Reply.
var replies = map[string]sessions.PermissionStatus{
	"once": sessions.PermissionAccepted, "always": sessions.PermissionAlways, "reject": sessions.PermissionRejected,
}

// moveRequest is the body of a request to move a file.
type moveRequest struct {
	From      *string `json:"from"`
	To        *string `json:"to"`
	Overwrite bool    `json:"overwrite"`
}

func (m *moveRequest) check() error {
	switch {
	case m.From == nil:
		return missingField("from")
	case m.To == nil:
		return missingField("to")
	default:
		return nil
	}
}
