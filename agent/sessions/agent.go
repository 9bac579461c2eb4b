package sessions

import (
	"context"
	"encoding/json"

	"github.com/bullpen-run/bullpen/proto"
)

// Agent is a kind of coding agent. It is safe for concurrent use.
type Agent interface {
	Info() *Info
	// Start starts the agent's program for a session, or resumes its conversation. The conversation
	// ends when ctx is done.
	Start(ctx context.Context, s *Start) (Conversation, error)
}

// Info describes a kind of agent.
type Info struct {
	ID string
	// Installation describes the agent's program. It is empty if the agent has none.
	Installation
	// Sandboxed is set if the agent runs in the sandbox of the session.
	Sandboxed bool
	// SkillsDir is where the agent looks for skills, relative to the home; empty if it knows none.
	SkillsDir string
	// Credentials reports whether the agent can reach a model.
	Credentials bool
	Modes       []Mode
	// AnyMode allows modes that are not in Modes.
	AnyMode bool
	// PermissionModes are the permission modes that the agent supports. A session that asks for an
	// unsupported acceptEdits gets default instead.
	PermissionModes []string
	Models          []Model
	DefaultModel    string // empty for none
	Capabilities    Capabilities
	// NativeID returns the agent's own id of a new session. It is nil if the agent reports that id
	// later.
	NativeID func(session string) string
	// OwnUserItems is set if the agent itself reports the user's messages as items.
	OwnUserItems bool
	// PendingAssistant makes each turn begin with an empty item of the assistant, a placeholder.
	// The first message of the assistant takes over its id.
	PendingAssistant bool
}

// Mode is a mode of an agent.
type Mode struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	Description string `json:"description"`
}

// Model is a model that an agent can use.
type Model struct {
	ID             string   `json:"id"`
	Name           string   `json:"name,omitempty"`
	Variants       []string `json:"variants,omitempty"`
	DefaultVariant string   `json:"defaultVariant,omitempty"`
}

// Capabilities are the features of an agent.
type Capabilities struct {
	PlanMode         bool `json:"planMode"`
	Permissions      bool `json:"permissions"`
	Questions        bool `json:"questions"`
	ToolCalls        bool `json:"toolCalls"`
	ToolResults      bool `json:"toolResults"`
	TextMessages     bool `json:"textMessages"`
	Images           bool `json:"images"`
	FileAttachments  bool `json:"fileAttachments"`
	SessionLifecycle bool `json:"sessionLifecycle"`
	ErrorEvents      bool `json:"errorEvents"`
	Reasoning        bool `json:"reasoning"`
	Status           bool `json:"status"`
	CommandExecution bool `json:"commandExecution"`
	FileChanges      bool `json:"fileChanges"`
	MCPTools         bool `json:"mcpTools"`
	StreamingDeltas  bool `json:"streamingDeltas"`
	ItemStarted      bool `json:"itemStarted"`
	SharedProcess    bool `json:"sharedProcess"`
}

// Start holds the arguments of [Agent.Start].
type Start struct {
	Session *proto.AgentSession
	Sandbox Sandbox // nil unless Info.Sandboxed
	Native  string  // the agent's own id of the session; empty if it has none yet
	Turns   int64   // number of turns that have started
	// Running is set if another process drove the turn in progress. Cursor is then the last cursor
	// in the log, and Pending the questions and permissions without an answer.
	Running bool
	Cursor  string
	Pending []Pending
	// Report stores what the agent does. The agent calls it in order. Report blocks while the log
	// is behind, and returns an error once the conversation is closed.
	Report func(Native) error
}

// Conversation is an agent running in a session. Its methods are not called concurrently. They must
// not wait for a call of Start.Report to return.
type Conversation interface {
	// Resumed reports whether the conversation continues the turn in progress, see Start.Running.
	// If not, the runner ends the turn with an error.
	Resumed() bool
	// Send begins a turn. The agent ends it by reporting TurnEnded or SessionEnded. Send is never
	// called during a turn. A model or variant of an earlier message is set in later ones, too.
	Send(ctx context.Context, m *Message) error
	// Answer delivers an answer to the agent. After a resumption the runner delivers all answers of
	// the turn again, and the agent ignores the ones it already has.
	Answer(ctx context.Context, a *Answer) error
	// Interrupt requests the end of the turn in progress. It may be called repeatedly.
	Interrupt(ctx context.Context) error
	// Close ends the agent's program. It returns when all its processes have ended.
	Close()
}

// Native is a report of an agent, from which the normaliser makes events.
type Native struct {
	Type EventType
	// Data has the type that belongs to Type. It identifies items by the agent's own ids: NativeID
	// and ParentID of an [Item], and NativeItemID of a [Delta]. PermissionResolved and QuestionResolved
	// withdraw a request, unless it has an answer.
	Data      any
	Synthetic bool            // not caused by the agent
	Raw       json.RawMessage // the agent's own output; nil if unknown
	Cursor    string          // position in the agent's output after this report; empty for none
	// NativeSession is the agent's own id of the session, in the report that first contains it.
	NativeSession string
}
