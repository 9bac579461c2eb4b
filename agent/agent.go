// Package agent runs conversations with a language model whose tools run programs here. It knows
// neither vendors' APIs nor the protocols of model servers: package anthropic and its like
// translate requests to a [Run] and events to answers, package upstream talks to the model.
//
// A run is a loop: the model produces a turn; its calls of this server's tools are carried out one
// at a time; their results are part of the next turn. The run ends when a turn has no such calls,
// or at a limit. Everything that happens is an [Event], in order: the source of an answer, a stream
// or a stored log.
package agent

import (
	"context"
	"encoding/json"
	"net/url"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Role is the author of an item in a conversation.
type Role string

// The roles.
const (
	RoleUser      Role = "user"
	RoleAssistant Role = "assistant"
)

// Item is a part of a conversation. Exactly one of its members but Role is set.
type Item struct {
	Role     Role // of Text, Image and Document
	Text     string
	Image    *Image
	Document *Document
	Thinking *Thinking
	Call     *Call
	Result   *Result
	// Cache, if not nil, marks the end of a prefix of the conversation that the model's server is to
	// cache, in the form of Anthropic's protocol. Other servers cache by themselves.
	Cache json.RawMessage
}

// Instruction is a part of what a model is told before the conversation.
type Instruction struct {
	Text  string
	Cache json.RawMessage // as [Item.Cache]
}

// Document is a file from the user for a model that can read files.
type Document struct {
	Name      string
	MediaType string
	Base64    string
}

// Thinking is a model's reasoning before it said something or called a tool. A server may need it
// back unchanged.
type Thinking struct {
	Text      string `json:"text,omitempty"`
	Signature string `json:"signature,omitempty"`
	Redacted  string `json:"redacted,omitempty"` // in place of Text, for the server alone
}

// Image is a picture from the user or a tool: its content in Base64, with its media type. It is never a
// URL, which the model server would fetch from inside the operator's network.
type Image struct {
	MediaType string `json:"media_type"`
	Base64    string `json:"base64"`
}

// Call is a call of a tool by the model.
type Call struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	// Arguments are a JSON object, except that an [Upstream] may return anything.
	Arguments json.RawMessage `json:"arguments"`
	// Malformed is set if the model's arguments were no JSON object; Arguments have no members then.
	Malformed bool `json:"malformed,omitempty"`
}

// Result is the result of a call, as the model reads it.
type Result struct {
	CallID string
	Text   string
	// Items, if not nil, are the result in place of Text: texts, images and documents of the user.
	Items  []Item
	Failed bool
	// Pictures are those of this side's tools. A server whose protocol has none in results does not get them.
	Pictures []Image
}

// Definition describes a tool to the model.
type Definition struct {
	Name        string
	Description string
	Schema      json.RawMessage // JSON schema of the arguments
	Cache       json.RawMessage // as [Item.Cache]
}

// Choice is which tools the model must call.
type Choice struct {
	Mode string // auto, any, none or tool; empty for auto
	Name string // of the tool, with mode tool
}

// Format is the form of the model's texts: JSON with a schema.
type Format struct {
	Name   string
	Schema json.RawMessage
	Strict *bool // nil for what the model's server does
}

// Turn asks a model to continue a conversation.
type Turn struct {
	Model       string
	System      []Instruction
	Items       []Item
	Tools       []Definition
	Choice      Choice
	Format      *Format // nil for any text
	MaxTokens   int     // of the reply; 0 for the model server's maximum
	Temperature *float64
	TopP        *float64
	Stop        []string
	// Serial is set if the model must make at most one call.
	Serial bool
	// Thinking configures the model's thinking, in the form of Anthropic's protocol; nil for its
	// default.
	Thinking json.RawMessage
	// Anthropic and OpenAI are settings for servers with that protocol only: others would refuse them.
	Anthropic AnthropicSettings
	OpenAI    OpenAISettings
	// OnThinking, if not nil, is called with each of a reply's thinking blocks when it is complete.
	OnThinking func(*Thinking) error
	// OnThinkingPart, if not nil, is called with each part of the text of a thinking block as it
	// arrives, before OnThinking.
	OnThinkingPart func(string) error
	// OnCallPart, if not nil, is called with each part of a call as it arrives.
	OnCallPart func(*CallPart) error
	// Patient is set if only this server can retry: it then waits for a busy upstream.
	Patient bool
}

// AnthropicSettings are settings of Anthropic's protocol, in its form.
type AnthropicSettings struct {
	Betas   []string        // names of features that a client needs
	Context json.RawMessage // which parts of the conversation the server removes; nil for none
	Effort  string          // how much work the model puts into its reply; empty for its default
	// AutoCache marks the conversation so far to be cached. It is set for clients of protocols without
	// [Item.Cache], whose servers do so unasked.
	AutoCache bool
}

// OpenAISettings are settings of OpenAI's protocol, in its form. Empty ones are left out.
type OpenAISettings struct {
	Effort    string // of reasoning
	Verbosity string
}

// CallPart is a part of a call by a model.
type CallPart struct {
	Call      int    // the place of the call in [Reply.Calls]
	Name      string // of the tool
	Arguments string // continues those of earlier parts
	End       bool   // the call is complete, if the server says so
}

// Finish is why a model's reply ended.
type Finish string

// The reasons.
const (
	FinishDone    Finish = "done"    // it is complete, or has calls
	FinishLength  Finish = "length"  // MaxTokens was reached
	FinishStop    Finish = "stop"    // one of Stop came
	FinishRefused Finish = "refused" // the model, or a filter, refused
)

// Usage is a number of tokens; 0 if the model's server did not report it.
type Usage struct {
	Input  int `json:"input"` // with those that are cached
	Output int `json:"output"`
	// CacheRead and CacheWrite are the parts of Input that the server has read from and written to
	// its cache.
	CacheRead  int `json:"cache_read,omitempty"`
	CacheWrite int `json:"cache_write,omitempty"`
}

// add adds the usage of another turn.
func (u *Usage) add(v Usage) {
	u.Input += v.Input
	u.Output += v.Output
	u.CacheRead += v.CacheRead
	u.CacheWrite += v.CacheWrite
}

// Reply is a model's output in a turn besides its text.
type Reply struct {
	Calls  []Call `json:"calls,omitempty"` // as the model made them: ids may be missing, arguments may be malformed
	Finish Finish `json:"finish"`
	Stop   string `json:"stop,omitempty"` // the stop sequence, with FinishStop, if it is known
	Usage  Usage  `json:"usage"`
}

// Upstream is a server with models.
type Upstream interface {
	// Stream requests a turn. It calls text with each part of the reply's text as it arrives, and
	// returns the rest of the reply at its end. It returns an error of text unchanged, ctx.Err() if
	// ctx is done, and otherwise an [*UpstreamError].
	Stream(ctx context.Context, turn *Turn, text func(string) error) (*Reply, error)
	// ListModels returns the allowed models' names, and whether others may be used, too. It returns
	// an [*UpstreamError] if the server does not list them.
	ListModels(ctx context.Context) (names []string, others bool, err error)
}

// FindModel returns the model's name encoded in a path. The code of its error is [api.CodeNotFound]
// if the model is not allowed.
func FindModel(ctx context.Context, up Upstream, encoded string) (name string, err error) {
	if name, err = url.PathUnescape(encoded); err != nil {
		return "", proto.FieldErrorf("model", "is not encoded correctly")
	}
	names, others, err := up.ListModels(ctx)
	if err == nil && !others && !slices.Contains(names, name) {
		err = api.Errorf(api.CodeNotFound, "this server has no model %q; GET /v1/models lists them", proto.Shorten(name))
	}
	return name, ClientError(err)
}

// UpstreamKind is the kind of an upstream's failure.
type UpstreamKind string

// The kinds.
const (
	UpstreamRejected    UpstreamKind = "rejected"     // the request cannot be answered; Message says why
	UpstreamTooLong     UpstreamKind = "too_long"     // the conversation is longer than the model can read
	UpstreamNoModel     UpstreamKind = "no_model"     // there is no model of that name
	UpstreamRateLimited UpstreamKind = "rate_limited" // too many requests
	UpstreamOverloaded  UpstreamKind = "overloaded"   // it cannot answer now
	UpstreamTimeout     UpstreamKind = "timeout"      // it did not answer in time
	UpstreamDenied      UpstreamKind = "denied"       // it refuses our key
	UpstreamFailed      UpstreamKind = "failed"       // anything else
)

// UpstreamError is returned if an upstream does not answer. Message is for clients: it has neither
// the upstream's address nor its key. Cause, if not nil, is for the log.
type UpstreamError struct {
	Kind       UpstreamKind
	Message    string
	RetryAfter int // seconds; 0 if unknown
	Cause      error
}

func (e *UpstreamError) Error() string {
	if e.Cause != nil {
		return "upstream " + string(e.Kind) + ": " + e.Message + ": " + e.Cause.Error()
	}
	return "upstream " + string(e.Kind) + ": " + e.Message
}

// Unwrap returns the cause.
func (e *UpstreamError) Unwrap() error { return e.Cause }

// Outcome is the result of a call of one of this side's tools.
type Outcome struct {
	Text   string          `json:"text"` // as the model reads it
	Failed bool            `json:"failed,omitempty"`
	Value  json.RawMessage `json:"value,omitempty"` // for whoever encodes the event
	// Pictures are seen by models that can, in addition to Text.
	Pictures []Image `json:"pictures,omitempty"`
	// Change, if not nil, is applied by [Tool.Apply]. Until then the call has no outcome.
	Change *Change `json:"change,omitempty"`
}

// Change is what a call does that is no execution: it changes a file, or runs at a place. It is logged before it is
// applied, so that a resumed run does not apply it twice.
type Change struct {
	Before string       `json:"before,omitempty"` // the state of the file, as [TextFile.State]
	After  string       `json:"after,omitempty"`
	Place  *proto.Place `json:"place,omitempty"` // nil for a file, and for an execution
}

// Tool is a tool that the model may call.
type Tool struct {
	Definition
	// Execute carries out a call, whose arguments are a JSON object. A program or a call that fails
	// is an Outcome. An error ends the run. Execute is nil for a tool of the client.
	Execute func(ctx context.Context, call *Call) (*Outcome, error)
	// Apply applies the Change of an outcome that Execute returned, in this process or an earlier
	// one, unless it is already applied. It returns the call's outcome as Execute does, without
	// Change. It is set if Execute returns changes.
	Apply func(ctx context.Context, call *Call, planned *Outcome) (*Outcome, error)
	// Malformed returns the outcome of a call whose arguments are not a JSON object. It is set if
	// Execute is.
	Malformed func(call *Call) *Outcome
}

// Run is a conversation to continue.
type Run struct {
	// Turn is the first turn, without its Tools. Its MaxTokens are for all turns together.
	Turn  Turn
	Tools []Tool
	// NewCallID returns an id for a tool call, in the form expected by the run's client. The
	// model's own ids are unusable: some models return none, or duplicates.
	NewCallID func(*Tool) string
	// Reserve reserves memory for n more bytes of text that the run keeps until its end. An error
	// ends the run, which returns it.
	Reserve func(n int64) error
	// Parts is set if the log receives the parts of thinking and of calls, too. A turn's calls of the
	// client's tools are then passed on as they arrive, even with arguments that are no JSON object,
	// unless there are tools of this side.
	Parts bool
	// Defer applies to turns that call the client's tools, too: this server's calls are then left
	// to the continuing run. Otherwise they are carried out before the run ends.
	Defer bool
	// Patient is [Turn.Patient] of all turns. Turns after a call always set it, since a client that
	// retried would repeat the call.
	Patient bool
	// MaxCalls limits this side's calls that are carried out, of all turns; 0 for no limit.
	MaxCalls int
	Steps    int           // limit of turns
	Wall     time.Duration // limit of time since Began; the turn or the call at that time is completed
	// Began is when the run began; zero for now.
	Began time.Time
	// History are the events of a run that was interrupted. The log has them already.
	History []Event
}

// EventKind is a kind of [Event].
type EventKind string

// The kinds.
const (
	EventText    EventKind = "text"    // Text continues the text of an item
	EventTextEnd EventKind = "textEnd" // the item has all its text, which is Text
	// EventThinking continues the thinking of an item by Text. It is not stored.
	EventThinking EventKind = "thinking"
	EventThought  EventKind = "thought" // Thought is an item, or all of the item that was begun
	// EventCallPart continues the arguments of Call, an item without arguments, by Text. It is not
	// stored.
	EventCallPart EventKind = "callPart"
	EventTurn     EventKind = "turn" // Reply is the rest of the model's reply; it is not part of the output
	// EventCall is an item, or all of the call that was begun; arguments that are not executed are empty.
	EventCall   EventKind = "call"
	EventChange EventKind = "change" // Outcome, once its Change is applied; it is not part of the output
	EventResult EventKind = "result" // Outcome of Call is an item
	EventEnd    EventKind = "end"    // End: nothing follows
)

// Event is something that happened in a run. Item counts the items of the output from 0: texts,
// calls and results.
type Event struct {
	Kind    EventKind `json:"kind"`
	Item    int       `json:"item"`
	Text    string    `json:"text,omitempty"`
	Reply   *Reply    `json:"reply,omitempty"`
	Thought *Thinking `json:"thought,omitempty"`
	Call    *Call     `json:"call,omitempty"`
	Server  bool      `json:"server,omitempty"` // Call is of one of this side's tools
	Outcome *Outcome  `json:"outcome,omitempty"`
	End     *End      `json:"end,omitempty"`
}

// Reason is why a run ended.
type Reason string

// The reasons.
const (
	ReasonDone    Reason = "done"    // the model has nothing to add
	ReasonLength  Reason = "length"  // MaxTokens was reached; calls in the last turn were dropped
	ReasonStop    Reason = "stop"    // a stop sequence came
	ReasonCalls   Reason = "calls"   // the client's tools are called
	ReasonPaused  Reason = "paused"  // Steps or Wall was reached; the run can be continued, and calls may lack a result
	ReasonRefused Reason = "refused" // the model refused
)

// End is how a run ended.
type End struct {
	Reason Reason `json:"reason"`
	Stop   string `json:"stop,omitempty"` // with ReasonStop, if it is known
	Usage  Usage  `json:"usage"`          // of all turns
	Calls  int    `json:"calls"`          // of this side's tools that were carried out
}

// Log receives the events of a run, in order and one at a time.
type Log interface {
	// Append adds an event. An error ends the run, which returns it.
	Append(ctx context.Context, e Event) error
}
