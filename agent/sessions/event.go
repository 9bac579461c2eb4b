package sessions

import (
	"encoding/json"
	"fmt"
	"time"
)

// EventType is the type of an [Event]. It determines the type of the event's data.
type EventType string

// The types of events. The comments name the types of their data.
const (
	SessionStarted      EventType = "session.started"      // [Started]
	SessionEnded        EventType = "session.ended"        // [Ended]
	TurnStarted         EventType = "turn.started"         // [Turn]
	TurnEnded           EventType = "turn.ended"           // [Turn]
	ItemStarted         EventType = "item.started"         // [ItemData]
	ItemDelta           EventType = "item.delta"           // [Delta]
	ItemCompleted       EventType = "item.completed"       // [ItemData]
	ErrorEvent          EventType = "error"                // [Failure]
	PermissionRequested EventType = "permission.requested" // [Permission]
	PermissionResolved  EventType = "permission.resolved"  // [Permission]
	QuestionRequested   EventType = "question.requested"   // [Question]
	QuestionResolved    EventType = "question.resolved"    // [Question]
	Unparsed            EventType = "agent.unparsed"       // [UnparsedOutput]
)

// Source is the origin of an event.
type Source string

// The sources.
const (
	FromAgent  Source = "agent"
	FromDaemon Source = "daemon" // this server
)

// Event is an event of a session in the form of the Sandbox Agent API 0.1.11.
type Event struct {
	ID       string    `json:"event_id"`
	Sequence int64     `json:"sequence"` // from 1, increasing, with gaps
	Time     time.Time `json:"time"`
	Session  string    `json:"session_id"`
	// NativeSession is the agent's own id of the session; nil if not known yet.
	NativeSession *string         `json:"native_session_id"`
	Synthetic     bool            `json:"synthetic"` // made by this server; Source is FromDaemon then
	Source        Source          `json:"source"`
	Type          EventType       `json:"type"`
	Data          json.RawMessage `json:"data"`
	Raw           json.RawMessage `json:"raw"` // the agent's own output; null if unknown
}

// DataOf decodes the data of an event.
func DataOf[T any](e *Event) (data T, err error) {
	if err = json.Unmarshal(e.Data, &data); err != nil {
		err = fmt.Errorf("decode the data of event %d: %w", e.Sequence, err)
	}
	return data, err
}

// EndsTurn reports whether a client's stream of one turn ends after the event. The turn itself may
// go on, for example once a question is answered.
func (e *Event) EndsTurn() bool {
	switch e.Type {
	case TurnEnded, SessionEnded, ErrorEvent, Unparsed, PermissionRequested, QuestionRequested:
		return true
	default:
		return false
	}
}

// Started is the data of session.started.
type Started struct {
	Metadata *Metadata `json:"metadata"`
}

// Metadata describes a session at its start.
type Metadata struct {
	Agent          string  `json:"agent"`
	AgentMode      string  `json:"agentMode"`
	PermissionMode string  `json:"permissionMode"`
	Model          *string `json:"model"`
	Variant        *string `json:"variant"`
}

// EndReason is why a session ended.
type EndReason string

// The reasons.
const (
	EndCompleted  EndReason = "completed"
	EndError      EndReason = "error"
	EndTerminated EndReason = "terminated"
)

// Ended is the data of session.ended.
type Ended struct {
	Reason       EndReason `json:"reason"`
	TerminatedBy Source    `json:"terminated_by"`
	Message      string    `json:"message,omitempty"`
	ExitCode     *int      `json:"exit_code,omitempty"`
	Stderr       *Stderr   `json:"stderr,omitempty"`
}

// Stderr is the standard error of an agent's program that has ended.
type Stderr struct {
	Head       string `json:"head,omitempty"`
	Tail       string `json:"tail,omitempty"` // if Head is not all
	Truncated  bool   `json:"truncated"`
	TotalLines *int   `json:"total_lines,omitempty"`
}

// Turn is the data of turn.started and turn.ended.
type Turn struct {
	Phase    string          `json:"phase"` // started or ended
	ID       string          `json:"turn_id,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// ItemData is the data of item.started and item.completed.
type ItemData struct {
	Item Item `json:"item"`
}

// ItemKind is the kind of an item.
type ItemKind string

// The kinds.
const (
	KindMessage    ItemKind = "message"
	KindToolCall   ItemKind = "tool_call"
	KindToolResult ItemKind = "tool_result"
	KindSystem     ItemKind = "system"
	KindStatus     ItemKind = "status"
	KindUnknown    ItemKind = "unknown"
)

// Role is the author of an item.
type Role string

// The roles.
const (
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
	RoleSystem    Role = "system"
	RoleTool      Role = "tool"
)

// ItemStatus is the status of an item.
type ItemStatus string

// The statuses.
const (
	InProgress ItemStatus = "in_progress"
	Completed  ItemStatus = "completed"
	Failed     ItemStatus = "failed"
)

// Item is a message, a tool call, a tool result or the like.
type Item struct {
	ID       string     `json:"item_id"`        // itm_N, the same for all events of the item
	NativeID *string    `json:"native_item_id"` // the agent's own id; nil for none
	ParentID *string    `json:"parent_id"`      // an ID in an event, a NativeID in a [Native]; nil for none
	Kind     ItemKind   `json:"kind"`
	Role     *Role      `json:"role"`
	Content  []Part     `json:"content"`
	Status   ItemStatus `json:"status"`
}

// PartType is the type of a [Part].
type PartType string

// The types of parts.
const (
	PartText       PartType = "text"
	PartJSON       PartType = "json"
	PartToolCall   PartType = "tool_call"
	PartToolResult PartType = "tool_result"
	PartFileRef    PartType = "file_ref"
	PartReasoning  PartType = "reasoning"
	PartImage      PartType = "image"
	PartStatus     PartType = "status"
)

// Part is a part of an item's content. Only the fields of its type are encoded.
type Part struct {
	Type       PartType        `json:"type"`
	Text       string          `json:"text"`       // of text and reasoning
	Visibility string          `json:"visibility"` // of reasoning: public or private
	JSON       json.RawMessage `json:"json"`
	Name       string          `json:"name"`      // of tool_call
	Arguments  string          `json:"arguments"` // of tool_call, usually JSON
	CallID     string          `json:"call_id"`   // of tool_call and tool_result
	Output     string          `json:"output"`    // of tool_result
	Path       string          `json:"path"`      // of file_ref and image
	Action     string          `json:"action"`    // of file_ref: read, write or patch
	Diff       *string         `json:"diff"`      // of file_ref
	MIME       *string         `json:"mime"`      // of image
	Label      string          `json:"label"`     // of status
	Detail     *string         `json:"detail"`    // of status
}

// MarshalJSON implements [json.Marshaler].
func (p Part) MarshalJSON() ([]byte, error) {
	fields := map[string]any{"type": p.Type}
	switch p.Type {
	case PartText:
		fields["text"] = p.Text
	case PartJSON:
		fields["json"] = p.JSON
	case PartToolCall:
		fields["name"], fields["arguments"], fields["call_id"] = p.Name, p.Arguments, p.CallID
	case PartToolResult:
		fields["call_id"], fields["output"] = p.CallID, p.Output
	case PartFileRef:
		fields["path"], fields["action"], fields["diff"] = p.Path, p.Action, p.Diff
	case PartReasoning:
		fields["text"], fields["visibility"] = p.Text, p.Visibility
	case PartImage:
		fields["path"], fields["mime"] = p.Path, p.MIME
	case PartStatus:
		fields["label"], fields["detail"] = p.Label, p.Detail
	default:
		return nil, fmt.Errorf("encode a part of an item: unknown type %q", p.Type)
	}
	return json.Marshal(fields)
}

// Text returns a text part.
func Text(text string) Part { return Part{Type: PartText, Text: text} }

// TextOf returns the concatenated text parts.
func TextOf(parts []Part) (text string) {
	for _, p := range parts {
		if p.Type == PartText {
			text += p.Text
		}
	}
	return text
}

// Delta is the data of item.delta: the next piece of an item's text.
type Delta struct {
	ItemID       string  `json:"item_id"`
	NativeItemID *string `json:"native_item_id"`
	Delta        string  `json:"delta"`
}

// Failure is the data of an error.
type Failure struct {
	Message string          `json:"message"`
	Code    *string         `json:"code"`
	Details json.RawMessage `json:"details"`
}

// PermissionStatus is the status of a permission.
type PermissionStatus string

// The statuses.
const (
	PermissionPending  PermissionStatus = "requested"
	PermissionAccepted PermissionStatus = "accept"
	PermissionAlways   PermissionStatus = "accept_for_session"
	PermissionRejected PermissionStatus = "reject"
)

// Permission is the data of permission.requested and permission.resolved.
type Permission struct {
	ID       string           `json:"permission_id"`
	Action   string           `json:"action"`
	Status   PermissionStatus `json:"status"`
	Metadata json.RawMessage  `json:"metadata"`
}

// QuestionStatus is the status of a question.
type QuestionStatus string

// The statuses.
const (
	QuestionPending  QuestionStatus = "requested"
	QuestionAnswered QuestionStatus = "answered"
	QuestionRejected QuestionStatus = "rejected"
)

// Question is the data of question.requested and question.resolved.
type Question struct {
	ID       string         `json:"question_id"`
	Prompt   string         `json:"prompt"`
	Options  []string       `json:"options"`
	Response *string        `json:"response"`
	Status   QuestionStatus `json:"status"`
}

// UnparsedOutput is the data of agent.unparsed: output of an agent that could not be parsed.
type UnparsedOutput struct {
	Error    string  `json:"error"`
	Location string  `json:"location"`
	RawHash  *string `json:"raw_hash"`
}
