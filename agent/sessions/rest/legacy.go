package rest

import (
	"encoding/json"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// legacyEvent is an event in the form that the API had before its first release. Its id is the
// sequence number, so an offset has the same meaning in both forms.
type legacyEvent struct {
	ID        int64     `json:"id"`
	Timestamp time.Time `json:"timestamp"`
	Session   string    `json:"sessionId"`
	Agent     string    `json:"agent"`
	// The agent's own id of the session, under both names that were in use.
	AgentSession  *string    `json:"agentSessionId"`
	NativeSession *string    `json:"nativeSessionId"`
	Data          legacyData `json:"data"`
}

// legacyData is the data of an event. Exactly one field is set. Its name is the type of the event.
type legacyData struct {
	Started    *legacyStarted    `json:"started,omitempty"`
	Message    *legacyMessage    `json:"message,omitempty"`
	Error      *legacyError      `json:"error,omitempty"`
	Question   *legacyQuestion   `json:"questionAsked,omitempty"`
	Permission *legacyPermission `json:"permissionAsked,omitempty"`
	Raw        json.RawMessage   `json:"raw,omitempty"`
}

type legacyStarted struct {
	Message string             `json:"message,omitempty"`
	Details *sessions.Metadata `json:"details,omitempty"`
}

type legacyMessage struct {
	Role  string           `json:"role"`
	ID    string           `json:"id,omitempty"`
	Parts []map[string]any `json:"parts"`
}

type legacyError struct {
	Message string          `json:"message"`
	Kind    string          `json:"kind,omitempty"`
	Details json.RawMessage `json:"details,omitempty"`
}

type legacyQuestion struct {
	ID        string                `json:"id"`
	Session   string                `json:"sessionId"`
	Questions []legacyQuestionParts `json:"questions"`
}

type legacyQuestionParts struct {
	Question string         `json:"question"`
	Options  []legacyOption `json:"options"`
}

type legacyOption struct {
	Label string `json:"label"`
}

type legacyPermission struct {
	ID         string          `json:"id"`
	Session    string          `json:"sessionId"`
	Permission string          `json:"permission"`
	Patterns   []string        `json:"patterns"`
	Always     []string        `json:"always"`
	Metadata   json.RawMessage `json:"metadata,omitempty"`
}

// legacyForm returns the legacy form of an event; nil if it has none.
func (v *view) legacyForm(e *sessions.Event) (any, error) {
	form := &legacyEvent{
		ID: e.Sequence, Timestamp: e.Time, Session: e.Session, Agent: v.legacy, AgentSession: e.NativeSession,
		NativeSession: e.NativeSession,
	}
	shown, err := form.Data.set(e)
	if err != nil || !shown {
		return nil, err
	}
	return form, nil
}

// set sets the field for an event. It reports whether there is one.
func (d *legacyData) set(e *sessions.Event) (bool, error) {
	switch e.Type {
	case sessions.SessionStarted:
		data, err := sessions.DataOf[sessions.Started](e)
		d.Started = &legacyStarted{Details: data.Metadata}
		return true, err
	case sessions.ItemCompleted:
		data, err := sessions.DataOf[sessions.ItemData](e)
		d.Message = newLegacyMessage(&data.Item)
		return d.Message != nil, err
	case sessions.ErrorEvent:
		data, err := sessions.DataOf[sessions.Failure](e)
		d.Error = &legacyError{Message: data.Message, Details: data.Details}
		if data.Code != nil {
			d.Error.Kind = *data.Code
		}
		return true, err
	case sessions.SessionEnded:
		data, err := sessions.DataOf[sessions.Ended](e)
		if data.Reason != sessions.EndError {
			return false, err
		}
		d.Error = &legacyError{Message: data.Message, Kind: string(sessions.AgentExited)}
		if d.Error.Message == "" {
			d.Error.Message = "agent process exited"
		}
		return true, err
	case sessions.QuestionRequested:
		data, err := sessions.DataOf[sessions.Question](e)
		parts := legacyQuestionParts{Question: data.Prompt, Options: []legacyOption{}}
		for _, label := range data.Options {
			parts.Options = append(parts.Options, legacyOption{label})
		}
		d.Question = &legacyQuestion{ID: data.ID, Session: e.Session, Questions: []legacyQuestionParts{parts}}
		return true, err
	case sessions.PermissionRequested:
		data, err := sessions.DataOf[sessions.Permission](e)
		d.Permission = &legacyPermission{
			ID: data.ID, Session: e.Session, Permission: data.Action, Patterns: []string{}, Always: []string{},
			Metadata: data.Metadata,
		}
		return true, err
	case sessions.Unparsed:
		if d.Raw = e.Raw; len(d.Raw) == 0 {
			d.Raw = e.Data
		}
		return true, nil
	default:
		return false, nil
	}
}

// newLegacyMessage returns the message for an item; nil if the legacy form has none.
func newLegacyMessage(x *sessions.Item) *legacyMessage {
	switch x.Kind {
	case sessions.KindMessage, sessions.KindToolCall, sessions.KindToolResult:
	default:
		return nil
	}
	m := &legacyMessage{Role: string(sessions.RoleAssistant), ID: x.ID, Parts: []map[string]any{}}
	if x.Role != nil {
		m.Role = string(*x.Role)
	}
	for i := range x.Content {
		m.Parts = append(m.Parts, legacyPart(&x.Content[i], x.Status))
	}
	return m
}

// legacyPart returns the legacy form of a part. status is the item's.
func legacyPart(p *sessions.Part, status sessions.ItemStatus) map[string]any {
	path := map[string]any{"type": "path", "path": p.Path}
	switch p.Type {
	case sessions.PartText:
		return map[string]any{"type": "text", "text": p.Text}
	case sessions.PartToolCall:
		var input any = p.Arguments
		if json.Valid([]byte(p.Arguments)) {
			input = json.RawMessage(p.Arguments)
		}
		return map[string]any{"type": "tool_call", "id": p.CallID, "name": p.Name, "input": input}
	case sessions.PartToolResult:
		return map[string]any{
			"type": "tool_result", "id": p.CallID, "output": p.Output, "is_error": status == sessions.Failed,
		}
	case sessions.PartFileRef:
		return map[string]any{"type": "file", "source": path}
	case sessions.PartImage:
		part := map[string]any{"type": "image", "source": path}
		if p.MIME != nil {
			part["mime_type"] = *p.MIME
		}
		return part
	default:
		return map[string]any{"type": "unknown", "raw": p}
	}
}
