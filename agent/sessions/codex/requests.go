package codex

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// maxQuestions bounds the questions of a request, and maxRequests the requests without an answer.
const (
	maxQuestions = 20
	maxRequests  = 100
)

// request is a request of Codex without an answer.
type request struct {
	id json.RawMessage
	// allowed and declined are the results for a permission.
	allowed, declined any
	// fields are the names of what questions ask for, by the ids of the questions without an answer.
	fields map[string]string
	// answers are those that have arrived, by field. rejected is set if the user has rejected a question.
	answers  map[string][]string
	rejected bool
	result   func(*request) any
}

// The codes of errors in the answers to requests.
const (
	codeUnknownMethod = -32601
	codeInvalidParams = -32602
)

func (p *program) refuse(l *line, code int, message string) bool {
	return p.write(map[string]any{"id": l.ID, "error": rpcError{code, message}}) == nil
}

// handleRequest handles a request of Codex. It answers at once what no user can answer, so that Codex does not wait.
func (p *program) handleRequest(l *line) bool {
	t := p.current()
	p.mu.Lock()
	full := t != nil && len(t.requests) >= maxRequests
	p.mu.Unlock()
	if t == nil || full {
		return p.refuse(l, codeInvalidParams, "nobody can answer the request now")
	}
	switch l.Method {
	case "item/commandExecution/requestApproval", "item/fileChange/requestApproval":
		return p.approval(t, l)
	case "item/tool/requestUserInput":
		return p.questions(t, l)
	case "mcpServer/elicitation/request":
		return p.elicitation(t, l)
	default:
		return p.refuse(l, codeUnknownMethod, "the method is not supported")
	}
}

// newID returns the id of a permission or question. It differs from those of other processes of Codex, whose requests
// are numbered from 0.
func (t *turn) newID() string {
	t.asks++
	return fmt.Sprintf("%s-%d", t.native, t.asks)
}

// register adds a request under the ids of its permissions and questions.
func (p *program) register(t *turn, r *request, ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		t.requests[id] = r
	}
}

// approval asks for the permission to run a command or to change files. In plan mode it is refused.
func (p *program) approval(t *turn, l *line) bool {
	var q struct {
		Thread  string  `json:"threadId"`
		Turn    string  `json:"turnId"`
		Item    string  `json:"itemId"`
		Reason  *string `json:"reason"`
		Command *string `json:"command"`
		CWD     string  `json:"cwd"`
	}
	if json.Unmarshal(l.Params, &q) != nil {
		return p.refuse(l, codeInvalidParams, "the parameters have another form")
	}
	decision := func(word string) any { return map[string]any{"decision": word} }
	x := t.items[q.Item]
	if x == nil {
		x = &item{native: q.Item}
	}
	if t.plan {
		x.refused = true
		return p.respond(l.ID, decision("decline")) == nil
	}
	metadata := map[string]any{"threadId": q.Thread, "turnId": q.Turn, "itemId": x.native, "reason": q.Reason}
	action := typeFileChange
	if strings.Contains(l.Method, typeCommand) {
		action = typeCommand
		if q.Command == nil {
			q.Command = &x.command
		}
		metadata["command"], metadata["cwd"] = shorten(scriptOf(*q.Command), maxText), q.CWD
	} else {
		describe(metadata, x.changes)
	}
	metadata["codexRequestKind"] = action
	// Codex's own acceptForSession would hide requests from the log.
	r := &request{id: l.ID, allowed: decision("accept"), declined: decision("decline")}
	return p.askPermission(t, r, action, metadata)
}

// describe adds the paths and the diff of changes to the metadata of a permission.
func describe(metadata map[string]any, changes []change) {
	var diff strings.Builder
	var paths []string
	for i := range changes {
		paths = append(paths, changes[i].Path)
		if diff.Len() < maxDiff {
			diff.WriteString(changes[i].unified())
		}
	}
	if len(paths) > 0 {
		metadata["path"] = paths[0]
	}
	if len(paths) > 1 {
		metadata["paths"] = paths[:min(len(paths), maxQuestions)]
	}
	metadata["diff"] = shorten(diff.String(), maxDiff)
}

func (p *program) askPermission(t *turn, r *request, action string, fields map[string]any) bool {
	metadata, err := json.Marshal(fields)
	if err != nil {
		return true // they were decoded from JSON
	}
	id := t.newID()
	p.register(t, r, id)
	return p.send(sessions.PermissionRequested, sessions.Permission{
		ID: id, Action: action, Status: sessions.PermissionPending, Metadata: metadata,
	})
}

// questions asks what the model wants to know. Codex asks in the same form for the permission to use an MCP tool.
func (p *program) questions(t *turn, l *line) bool {
	var q struct {
		Thread    string `json:"threadId"`
		Turn      string `json:"turnId"`
		Item      string `json:"itemId"`
		Questions []struct {
			ID       string `json:"id"`
			Question string `json:"question"`
			Options  []struct {
				Label string `json:"label"`
			} `json:"options"`
		} `json:"questions"`
	}
	if json.Unmarshal(l.Params, &q) != nil || len(q.Questions) == 0 || len(q.Questions) > maxQuestions {
		return p.refuse(l, codeInvalidParams, "there must be 1 to "+strconv.Itoa(maxQuestions)+" questions")
	}
	r := &request{id: l.ID, result: func(r *request) any {
		answers := map[string]any{}
		for field, list := range r.answers {
			answers[field] = map[string]any{"answers": list}
		}
		return map[string]any{"answers": answers}
	}}
	if x := t.items[q.Item]; x != nil && x.kind == typeMCP && len(q.Questions) == 1 {
		choose := func(label string) any {
			chosen := &request{answers: map[string][]string{q.Questions[0].ID: {label}}}
			return r.result(chosen)
		}
		r.allowed, r.declined = choose("Allow"), choose("Cancel")
		return p.askPermission(t, r, x.tool, map[string]any{
			"toolName": x.tool, "threadId": q.Thread, "turnId": q.Turn, "itemId": x.native, "reason": q.Questions[0].Question,
		})
	}
	var list []field
	for _, one := range q.Questions {
		f := field{name: one.ID, prompt: one.Question, options: []string{}}
		for _, o := range one.Options {
			f.options = append(f.options, o.Label)
		}
		list = append(list, f)
	}
	return p.ask(t, r, list)
}

// field is what a question asks for.
type field struct {
	name, prompt string
	options      []string
}

// ask asks a question for each field. Codex gets the answers together.
func (p *program) ask(t *turn, r *request, list []field) bool {
	r.fields, r.answers = map[string]string{}, map[string][]string{}
	var ids []string
	for _, f := range list {
		id := t.newID()
		ids = append(ids, id)
		r.fields[id] = f.name
	}
	p.register(t, r, ids...)
	for i, f := range list {
		if !p.send(sessions.QuestionRequested, sessions.Question{
			ID: ids[i], Prompt: f.prompt, Options: f.options, Status: sessions.QuestionPending,
		}) {
			return false
		}
	}
	return true
}

// schema is what a field of an elicitation may contain.
type schema struct {
	Type  string   `json:"type"`
	Title string   `json:"title"`
	Enum  []string `json:"enum"`
	OneOf []struct {
		Const string `json:"const"`
	} `json:"oneOf"`
	Items *schema `json:"items"`
}

// options returns the values of which a user can choose.
func (s *schema) options() []string {
	options := append([]string{}, s.Enum...)
	for _, o := range s.OneOf {
		options = append(options, o.Const)
	}
	switch {
	case s.Type == "boolean":
		return []string{"true", "false"}
	case s.Items != nil:
		return s.Items.options()
	}
	return options
}

// value returns answers as a value of the field.
func (s *schema) value(answers []string) any {
	switch text := strings.Join(answers, ","); s.Type {
	case "array":
		return answers
	case "boolean":
		return text == "true"
	case "number", "integer":
		if n, err := strconv.ParseFloat(text, 64); err == nil {
			return n
		}
		return text // which the MCP server refuses
	default:
		return text
	}
}

// elicitation asks what an MCP server wants to know: each field of a form, or whether to accept.
func (p *program) elicitation(t *turn, l *line) bool {
	var q struct {
		Message string `json:"message"`
		URL     string `json:"url"`
		Schema  struct {
			Properties map[string]schema `json:"properties"`
		} `json:"requestedSchema"`
	}
	fields := &q.Schema.Properties
	if json.Unmarshal(l.Params, &q) != nil || len(*fields) > maxQuestions {
		return p.refuse(l, codeInvalidParams, "there must be at most "+strconv.Itoa(maxQuestions)+" fields")
	}
	r := &request{id: l.ID, result: func(r *request) any {
		content := map[string]any{}
		for name, answers := range r.answers {
			if s, ok := (*fields)[name]; ok {
				content[name] = s.value(answers)
			} else if !slices.Contains(answers, "accept") {
				r.rejected = true
			}
		}
		if r.rejected {
			return map[string]any{"action": "decline", "content": nil, "_meta": nil}
		}
		return map[string]any{"action": "accept", "content": content, "_meta": nil}
	}}
	if len(*fields) == 0 {
		question := field{prompt: strings.TrimSpace(q.Message + " " + q.URL), options: []string{"accept", "decline"}}
		return p.ask(t, r, []field{question})
	}
	var list []field
	for _, name := range slices.Sorted(maps.Keys(*fields)) {
		s := (*fields)[name]
		title := s.Title
		if title == "" {
			title = name
		}
		list = append(list, field{name: name, prompt: q.Message + " (" + title + ")", options: s.options()})
	}
	return p.ask(t, r, list)
}

// withdraw forgets a request that Codex no longer waits for.
func (p *program) withdraw(t *turn, id json.RawMessage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(t.requests, func(_ string, r *request) bool { return string(r.id) == string(id) })
}

// Answer implements [sessions.Conversation].
func (c *conversation) Answer(_ context.Context, a *sessions.Answer) error {
	id := (&sessions.Pending{Question: a.Question, Permission: a.Permission}).ID()
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.turn
	if t == nil {
		return nil
	}
	if id == t.question && id != "" {
		return c.answerPlan(t, a)
	}
	r := t.requests[id]
	delete(t.requests, id)
	if r == nil || c.program == nil { // withdrawn by Codex
		return nil
	}
	if a.Permission != nil {
		if a.Permission.Status == sessions.PermissionRejected {
			return c.program.respond(r.id, r.declined)
		}
		return c.program.respond(r.id, r.allowed)
	}
	if a.Question.Status == sessions.QuestionRejected {
		r.rejected = true
	} else {
		r.answers[r.fields[id]] = slices.Concat(a.Answers...)
	}
	if delete(r.fields, id); len(r.fields) > 0 {
		return nil
	}
	return c.program.respond(r.id, r.result(r))
}

// answerPlan carries out the plan of the turn, or ends the turn.
func (c *conversation) answerPlan(t *turn, a *sessions.Answer) error {
	t.question = ""
	if a.Question.Response == nil || *a.Question.Response != approve {
		c.turn = nil
		c.reportLater(sessions.TurnEnded, nil)
		return nil
	}
	t.plan, t.native, t.input = false, "", []map[string]any{textInput(implement)}
	return c.proceed()
}
