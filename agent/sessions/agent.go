package sessions

import (
	"context"
	"encoding/json"

	"github.com/bullpen-run/bullpen/proto"
)

// Agent is a kind of coding agent. It is safe for concurrent use.
type Agent interface {
	Info() *Info
	// Start starts the agent's program for a session, or resumes a conversation with it. The
	// conversation ends with ctx.
	Start(ctx context.Context, s *Start) (Conversation, error)
}

// Info describes a kind of agent.
type Info struct {
	ID      string
	Version string // empty if it is unknown
	Path    string // of the program; empty for none
	// Missing says why the agent cannot be used here; empty if it can.
	Missing string
	// Credentials reports whether the agent can reach a model.
	Credentials bool
	Modes       []Mode
	// AnyMode allows modes beside Modes.
	AnyMode bool
	// PermissionModes are those that the agent has. The mode acceptEdits stands for default if the
	// agent lacks it.
	PermissionModes []string
	Models          []Model
	DefaultModel    string // empty for none
	Capabilities    Capabilities
	// NativeID returns the agent's own id of a new session; nil if the agent reports it later.
	NativeID func(session string) string
	// OwnUserItems is set if the agent reports the user's messages as items.
	OwnUserItems bool
	// PendingAssistant makes each turn begin with an empty item of the assistant, which takes the
	// deltas and the completion of the next assistant's message.
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

// Capabilities are what clients may expect of an agent.
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

// Start is what an agent needs to start or resume a conversation.
type Start struct {
	Session *proto.AgentSession
	Native  string // the agent's own id of the session; empty if it has none yet
	Turns   int64  // number of turns that have started
	// Running is set if another process drove the turn in progress. Cursor is the last one in the log,
	// and Pending what waits for an answer.
	Running bool
	Cursor  string
	Pending []Pending
	// Report is called with what happens, in order. It blocks while the log is behind. It returns an
	// error once the conversation is closed.
	Report func(Native) error
}

// Conversation is a running agent in a session. Its methods are not called concurrently, and do not wait for
// a call of Start.Report to return.
type Conversation interface {
	// Resumed reports whether the conversation continues the turn in progress, see Start.Running. The
	// turn is ended with an error otherwise.
	Resumed() bool
	// Send begins a turn, which ends with a report of a TurnEnded or SessionEnded. No other one is in
	// progress.
	Send(ctx context.Context, m *Message) error
	// Answer passes an answer on. After a resumption all answers of the turn are passed on again. The agent
	// ignores those that it has had.
	Answer(ctx context.Context, a *Answer) error
	// Interrupt requests the end of the turn in progress. It may be called again.
	Interrupt(ctx context.Context) error
	// Close ends the agent's program. No process is left when it returns.
	Close()
}

// Native is what an agent has done, before it is an event. Ids of items are the agent's own.
type Native struct {
	Type EventType
	// Data is of the type that belongs to Type. Its ids of items are the agent's own: NativeID and
	// ParentID of an [Item], and NativeItemID of a [Delta].
	Data      any
	Synthetic bool            // the agent did not do it
	Raw       json.RawMessage // the agent's own output; nil if it is unknown
	Cursor    string          // marks the place in the agent's output after it; empty for none
	// NativeSession is the agent's own id of the session, if it is known from now on.
	NativeSession string
}
