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
	maxWord        = proto.MaxAgentSessionField // bytes of a name
	maxAttachments = 100
	maxAnswers     = 100
	maxAnswer      = 64 << 10 // bytes of all answers to a question
)

// wire is implemented by bodies of requests.
type wire interface {
	// check returns what of a decoded body is missing, with the error for the client.
	check() error
}

// unfit returns the error about a body that is JSON and not that of a request.
func unfit(format string, args ...any) error {
	return text(http.StatusUnprocessableEntity, "Failed to deserialize the JSON body into the target type: %s",
		fmt.Sprintf(format, args...))
}

// missing returns the error about a field that is not in a body.
func missing(field string) error {
	return unfit("missing field `%s`", field)
}

// decode reads and decodes the body of a request. Unknown fields are ignored. A body that may be
// left out may be empty.
func decode(host Host, w http.ResponseWriter, r *http.Request, to wire, optional bool) error {
	return host.ReadBody(w, func(body []byte) error {
		if optional && len(bytes.TrimSpace(body)) == 0 {
			return nil
		}
		if err := checkJSON(r.Header.Get("Content-Type")); err != nil {
			return err
		}
		if !json.Valid(body) {
			return text(http.StatusBadRequest, "Failed to parse the request body as JSON: %v",
				json.Unmarshal(body, &json.RawMessage{}))
		}
		if err := json.Unmarshal(body, to); err != nil {
			if known, ok := errors.AsType[*textError](err); ok {
				return known
			}
			return unfit("%v", err)
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
	return text(http.StatusUnsupportedMediaType, "Expected request with `Content-Type: application/json`")
}

// query has the parameters of a request.
type query struct{ url.Values }

func queryOf(r *http.Request) (query, error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return query{}, badQuery("%v", err)
	}
	return query{values}, nil
}

func badQuery(format string, args ...any) error {
	return text(http.StatusBadRequest, "Failed to deserialize query string: %s", fmt.Sprintf(format, args...))
}

// get returns the first parameter that has one of these names, and whether there is one.
func (q query) get(names ...string) (value string, ok bool) {
	for _, name := range names {
		if values := q.Values[name]; len(values) > 0 {
			return values[0], true
		}
	}
	return "", false
}

// flag returns a parameter that is true or false.
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

// number returns a parameter that is a number, other if there is none.
func (q query) number(name string, other int64) (int64, error) {
	value, ok := q.get(name)
	if !ok {
		return other, nil
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

// createRequest is the body of a request for a session.
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
		return missing("agent")
	}
	return nil
}

// mcpServer describes a server of the Model Context Protocol. It has the names of the API's
// answers; requests may have others.
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
	var also struct {
		Environment    map[string]string `json:"environment"`
		Timeout        *int64            `json:"timeout"`
		BearerTokenEnv string            `json:"bearer_token_env_var"`
		EnvHTTPHeaders map[string]string `json:"envHttpHeaders"`
		EnvHeaders     map[string]string `json:"env_http_headers"`
	}
	if err := json.Unmarshal(body, (*plain)(m)); err != nil {
		return err
	}
	if err := json.Unmarshal(body, &also); err != nil {
		return err
	}
	if m.Env == nil {
		m.Env = also.Environment
	}
	if m.TimeoutMS == nil {
		m.TimeoutMS = also.Timeout
	}
	if m.BearerTokenEnv == "" {
		m.BearerTokenEnv = also.BearerTokenEnv
	}
	for _, headers := range []map[string]string{also.EnvHTTPHeaders, also.EnvHeaders} {
		if m.EnvHeaders == nil {
			m.EnvHeaders = headers
		}
	}
	return m.check()
}

// check returns the error for a server that cannot be one, and sets its type to the name of
// answers.
func (m *mcpServer) check() error {
	switch m.Type {
	case "local", "stdio":
		m.Type = "local"
		var command string
		var words []string
		if json.Unmarshal(m.Command, &command) != nil && json.Unmarshal(m.Command, &words) != nil {
			return missing("command")
		}
	case "remote", "http":
		if m.Type = "remote"; m.URL == "" {
			return missing("url")
		}
		if m.Transport != "" && m.Transport != "http" && m.Transport != "sse" {
			return unfit("mcp: unknown variant `%s`, expected `http` or `sse`", proto.Shorten(m.Transport))
		}
		var off bool
		if len(m.OAuth) > 0 && json.Unmarshal(m.OAuth, &off) != nil && json.Unmarshal(m.OAuth, &struct{}{}) != nil {
			return missing("oauth")
		}
	default:
		return unfit("mcp: unknown variant `%s`, expected `local` or `remote`", proto.Shorten(m.Type))
	}
	return nil
}

// skills are where an agent finds its skills.
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

// messageRequest is the body of a message. Its model and variant are an extension.
type messageRequest struct {
	Message     *string               `json:"message"`
	Attachments []sessions.Attachment `json:"attachments"`
	Model       string                `json:"model"`
	Variant     string                `json:"variant"`
}

func (m *messageRequest) check() error {
	if m.Message == nil {
		return missing("message")
	}
	if len(m.Attachments) > maxAttachments {
		return sessions.Invalidf("attachments: must not be more than %d", maxAttachments)
	}
	if len(m.Model) > maxWord || len(m.Variant) > maxWord {
		return sessions.Invalidf("model and variant: must not be longer than %d bytes", maxWord)
	}
	for _, a := range m.Attachments {
		if a.Path == "" {
			return missing("path")
		}
		if len(a.Path) > proto.MaxFilePathBytes || len(a.MIME) > maxWord || len(a.Filename) > maxWord {
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
		return missing("answers")
	}
	size, count := 0, len(a.Answers)
	for _, list := range a.Answers {
		count += len(list)
		for _, answer := range list {
			size += len(answer)
		}
	}
	if count > maxAnswers || size > maxAnswer {
		return sessions.Invalidf("answers: must not be more than %d with %d bytes together", maxAnswers, maxAnswer)
	}
	return nil
}

// permissionRequest is the body of an answer to a permission.
type permissionRequest struct {
	Reply *string `json:"reply"`
}

func (p *permissionRequest) check() error {
	if p.Reply == nil {
		return missing("reply")
	}
	if _, ok := replies[*p.Reply]; !ok {
		return unfit("reply: unknown variant `%s`, expected one of `once`, `always`, `reject`", proto.Shorten(*p.Reply))
	}
	return nil
}

// replies are the answers to permissions.
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
		return missing("from")
	case m.To == nil:
		return missing("to")
	default:
		return nil
	}
}
