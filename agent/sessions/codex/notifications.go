package codex

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// notification has the parameters of the notifications that are handled. Others are ignored.
type notification struct {
	ThreadID  string          `json:"threadId"`
	RequestID json.RawMessage `json:"requestId"`
	Item      json.RawMessage `json:"item"`
	ItemID    string          `json:"itemId"`
	Delta     string          `json:"delta"`
	Turn      struct {
		ID     string     `json:"id"`
		Status string     `json:"status"`
		Error  *turnError `json:"error"`
	} `json:"turn"`
	Error     turnError `json:"error"`
	WillRetry bool      `json:"willRetry"`
	Plan      []struct {
		Step   string `json:"step"`
		Status string `json:"status"`
	} `json:"plan"`
}

type turnError struct {
	Message string `json:"message"`
	// Info is a name, or an object whose one key is a name.
	Info    json.RawMessage `json:"codexErrorInfo"`
	Details string          `json:"additionalDetails"`
}

// handleNotification handles a notification about the conversation's thread.
func (p *program) handleNotification(l *line) bool {
	var n notification
	if json.Unmarshal(l.Params, &n) != nil { // of a form that is not handled
		return true
	}
	p.mu.Lock()
	t, ours := p.turn, p.open && n.ThreadID == p.thread
	p.mu.Unlock()
	if t == nil || !ours {
		return true
	}
	switch l.Method {
	case "turn/started":
		p.turnStarted(n.Turn.ID)
	case "item/started":
		return p.itemStarted(t, n.Item)
	case "item/agentMessage/delta", "item/plan/delta":
		return p.itemDelta(t, n.ItemID, n.Delta)
	case "item/completed":
		return p.itemCompleted(t, n.Item)
	case "turn/plan/updated":
		var steps []sessions.Part
		for _, s := range n.Plan {
			steps = append(steps, sessions.Part{Type: sessions.PartStatus, Label: s.Step, Detail: &s.Status})
		}
		return p.note(steps...)
	case "error":
		if n.WillRetry {
			return p.status(n.Error.Message, n.Error.Details)
		}
	case "serverRequest/resolved":
		p.withdraw(t, n.RequestID)
	case "turn/completed":
		return p.turnCompleted(t, &n)
	}
	return true
}

// note reports a status.
func (p *program) note(parts ...sessions.Part) bool {
	return p.send(sessions.ItemCompleted, sessions.ItemData{Item: sessions.Item{
		Kind: sessions.KindStatus, Role: new(sessions.RoleAssistant), Content: parts, Status: sessions.Completed,
	}})
}

func (p *program) status(label, detail string) bool {
	return p.note(sessions.Part{Type: sessions.PartStatus, Label: label, Detail: &detail})
}

// The options of the question that asks for the approval of a plan, and the message that carries it out. Codex's own
// user interface sends that message.
const (
	approve   = "approve"
	reject    = "reject"
	implement = "Implement the plan."
)

// turnCompleted reports the end of the turn, unless its plan needs an approval.
func (p *program) turnCompleted(t *turn, n *notification) bool {
	p.mu.Lock()
	known, stopped := t.native == n.Turn.ID, t.interrupted
	p.mu.Unlock()
	switch {
	case !known:
		return true
	case n.Turn.Status == "interrupted":
		p.stop() // the children of an interrupted command go on
		p.endTurn(interrupted)
		return false
	case n.Turn.Status == "failed":
		return p.turnFailed(n.Turn.Error)
	case t.plan && t.planned && !stopped:
		return p.askApproval(t)
	default:
		return p.endTurn(nil)
	}
}

// turnFailed ends the turn with the error of Codex.
func (p *program) turnFailed(e *turnError) bool {
	if e == nil {
		e = &turnError{Message: "the turn failed"}
	}
	failure := sessions.Failure{Message: e.Message, Code: new("api_error")}
	var body struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal([]byte(e.Message), &body) == nil && body.Error.Message != "" { // the body of a response
		failure.Message = body.Error.Message
	}
	var name string
	var info map[string]struct {
		Status *int `json:"httpStatusCode"`
	}
	if json.Unmarshal(e.Info, &info) == nil {
		for _, name = range slices.Sorted(maps.Keys(info)) {
			if status := info[name].Status; status != nil {
				failure.Details, _ = json.Marshal(map[string]int{"status": *status}) // it cannot fail
			}
		}
	} else {
		_ = json.Unmarshal(e.Info, &name) // another form has no name
	}
	if name != "" && name != "other" {
		failure.Code = &name
	}
	return p.send(sessions.ErrorEvent, failure) && p.endTurn(nil)
}

// askApproval asks whether to carry out the plan. Another process does that: only it has the session's MCP servers.
func (p *program) askApproval(t *turn) bool {
	if !p.closeItems(t) {
		return false
	}
	p.stop()
	p.mu.Lock()
	t.question = t.native + "-plan"
	clear(t.requests)
	p.mu.Unlock()
	p.send(sessions.QuestionRequested, sessions.Question{
		ID: t.native + "-plan", Prompt: "Approve plan execution?", Options: []string{approve, reject},
		Status: sessions.QuestionPending,
	})
	p.mu.Lock()
	t.asked = true
	stopped := t.interrupted && t.question != ""
	if stopped {
		p.turn = nil
	}
	p.mu.Unlock()
	if stopped {
		p.send(sessions.TurnEnded, interrupted)
	}
	return false
}
