package claude

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/streamjson"
)

// The options of the question that asks for the approval of a plan.
const (
	approve = "approve"
	reject  = "reject"
)

// request is a request of Claude Code to use a tool.
type request struct {
	id    string // of the control request
	input json.RawMessage
	plan  bool // whether the request is for the approval of a plan
	asked sessions.Pending
}

// toolRequest is a line that asks whether Claude Code may use a tool.
type toolRequest struct {
	ID      string `json:"request_id"`
	Request struct {
		Subtype     string          `json:"subtype"`
		Tool        string          `json:"tool_name"`
		Input       json.RawMessage `json:"input"`
		ToolUse     string          `json:"tool_use_id"`
		Suggestions json.RawMessage `json:"permission_suggestions"`
		Blocked     *string         `json:"blocked_path"`
	} `json:"request"`
}

// questions is the input of AskUserQuestion.
type questions struct {
	Questions []struct {
		Question string `json:"question"`
		Options  []struct {
			Label string `json:"label"`
		} `json:"options"`
	} `json:"questions"`
}

// readOnlyTools are the tools that change nothing but the state of the agent. In plan mode, others are
// refused, such as Bash and those of MCP servers. A subagent needs permissions like the agent itself.
var readOnlyTools = []string{
	"Agent", "Task", "AskUserQuestion", "EnterPlanMode", "ExitPlanMode", "Glob", "Grep", "LS", "NotebookRead", "Read",
	"Skill", "TaskOutput", "TodoWrite", "ToolSearch", "WebFetch", "WebSearch",
}

// request handles a control request.
func (c *conversation) request(l *streamjson.Line) error {
	var q toolRequest
	if err := l.Decode(&q); err != nil {
		return c.Unparsed(err.Error())
	}
	if q.Request.Subtype != "can_use_tool" {
		_ = c.write(map[string]any{"type": "control_response", "response": map[string]any{
			"subtype": "error", "request_id": q.ID, "error": "not supported: " + q.Request.Subtype,
		}})
		return nil
	}
	c.mu.Lock()
	hasBegun, planning := c.hasBegun(), c.planning
	c.mu.Unlock()
	switch tool := q.Request.Tool; {
	case !hasBegun:
		_ = c.respond(q.ID, denial("no user is waiting for this turn"))
		return nil
	case planning && !slices.Contains(readOnlyTools, tool):
		_ = c.respond(q.ID, denial("The session is in plan mode, in which nothing is changed. "+
			"Finish the plan and ask for its approval with ExitPlanMode."))
		return nil
	}
	return c.ask(&q)
}

// ask reports a request as a question or a permission.
func (c *conversation) ask(q *toolRequest) error {
	r := request{id: q.ID, input: q.Request.Input}
	question := &sessions.Question{ID: q.Request.ToolUse, Options: []string{}, Status: sessions.QuestionPending}
	if question.ID == "" {
		question.ID = q.ID
	}
	var asked questions
	switch tool := q.Request.Tool; {
	case tool == "ExitPlanMode":
		r.plan, r.asked.Question = true, question
		question.Prompt, question.Options = "Approve plan execution?", []string{approve, reject}
	case tool == "AskUserQuestion" && json.Unmarshal(r.input, &asked) == nil && len(asked.Questions) > 0:
		first := asked.Questions[0]
		r.asked.Question, question.Prompt = question, first.Question
		for _, o := range first.Options {
			question.Options = append(question.Options, o.Label)
		}
	default:
		metadata, err := json.Marshal(map[string]any{
			"toolName": tool, "input": r.input, "permissionSuggestions": q.Request.Suggestions, "blockedPath": q.Request.Blocked,
		})
		if err != nil {
			return c.Unparsed(err.Error())
		}
		r.asked.Permission = &sessions.Permission{
			ID: q.ID, Action: tool, Status: sessions.PermissionPending, Metadata: metadata,
		}
	}
	id := r.asked.ID()
	c.mu.Lock()
	c.requests[id] = r
	c.mu.Unlock()
	if r.asked.Permission != nil {
		return c.Emit(sessions.PermissionRequested, *r.asked.Permission)
	}
	return c.Emit(sessions.QuestionRequested, *r.asked.Question)
}

// withdraw handles that Claude Code no longer waits for the answer to a request.
func (c *conversation) withdraw(l *streamjson.Line) error {
	var line struct {
		ID string `json:"request_id"`
	}
	if err := l.Decode(&line); err != nil {
		return c.Unparsed(err.Error())
	}
	var withdrawn []sessions.Pending
	c.mu.Lock()
	for id, r := range c.requests {
		if r.id == line.ID {
			delete(c.requests, id)
			withdrawn = append(withdrawn, r.asked)
		}
	}
	c.mu.Unlock()
	for _, p := range withdrawn {
		var err error
		if p.Permission != nil {
			err = c.Emit(sessions.PermissionResolved, *p.Permission)
		} else {
			err = c.Emit(sessions.QuestionResolved, *p.Question)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Answer implements [sessions.Conversation].
func (c *conversation) Answer(_ context.Context, a *sessions.Answer) error {
	id := (&sessions.Pending{Question: a.Question, Permission: a.Permission}).ID()
	c.mu.Lock()
	r, ok := c.requests[id]
	delete(c.requests, id)
	c.mu.Unlock()
	if !ok { // withdrawn by Claude Code
		return nil
	}
	response, err := c.decide(r, a)
	if err != nil {
		return err
	}
	return c.respond(r.id, response)
}

// decide returns the response to a request. It grants nothing beyond that: Claude Code would grant more than
// the user's answer covers, and write it into the session's directory.
func (c *conversation) decide(r request, a *sessions.Answer) (any, error) {
	input := any(struct{}{}) // unchanged
	switch {
	case r.plan:
		if a.Question.Response == nil || *a.Question.Response != approve {
			return denial("The user did not approve the plan." + comment(a.Question)), nil
		}
		c.mu.Lock()
		c.planning = false
		c.mu.Unlock()
	case a.Question != nil:
		if a.Question.Status == sessions.QuestionRejected {
			return denial("The user did not answer the question."), nil
		}
		var err error
		if input, err = withAnswers(r.input, a.Answers); err != nil {
			return nil, err
		}
	case a.Permission.Status == sessions.PermissionRejected:
		return denial("The user refused this use of the tool. Do not try it in another way."), nil
	}
	return map[string]any{"behavior": "allow", "updatedInput": input}, nil
}

// comment returns what a user answered instead of an option.
func comment(q *sessions.Question) string {
	if q.Response == nil || *q.Response == reject {
		return ""
	}
	return " The answer was: " + *q.Response
}

func denial(message string) any { return map[string]any{"behavior": "deny", "message": message} }

func (c *conversation) respond(id string, response any) error {
	return c.write(map[string]any{"type": "control_response", "response": map[string]any{
		"subtype": "success", "request_id": id, "response": response,
	}})
}

// withAnswers returns the input of AskUserQuestion with answers, keyed by the texts of its
// questions. It joins several answers to one question with commas.
func withAnswers(input json.RawMessage, answers [][]string) (map[string]any, error) {
	var fields map[string]any
	if err := json.Unmarshal(input, &fields); err != nil {
		return nil, fmt.Errorf("decode the questions of Claude Code: %w", err)
	}
	var asked questions
	if err := json.Unmarshal(input, &asked); err != nil {
		return nil, fmt.Errorf("decode the questions of Claude Code: %w", err)
	}
	byText := map[string]string{}
	for i, q := range asked.Questions {
		if i < len(answers) {
			byText[q.Question] = strings.Join(answers[i], ",")
		}
	}
	fields["answers"] = byText
	return fields, nil
}
