package proto

import (
	"encoding/json"
	"errors"
	"time"
)

// MaxAgentRuns is the most unfinished background runs of an organisation's agents.
const MaxAgentRuns = 1000

// MaxAgentRunBytes bounds the requests of these runs together.
const MaxAgentRunBytes = 256 << 20

// AgentRun is a request to an agent whose run is stored.
type AgentRun struct {
	Org string `json:"org"`
	ID  string `json:"id"`
	// Key is the id of the API key with whose rights and limits it runs.
	Key string `json:"key"`
	// API is whose API the request is made for, such as "openai".
	API     string          `json:"api"`
	Request json.RawMessage `json:"request"`
	// Background is set if the run continues without its client, in any process.
	Background bool `json:"background,omitempty"`
	// Stream is set if its log has the parts of texts, so that clients can follow it.
	Stream    bool      `json:"stream,omitempty"`
	CreatedAt time.Time `json:"created_at"`
}

// ActiveAgentRun is a run in the background that has not ended.
type ActiveAgentRun struct {
	Org       string    `json:"org"`
	ID        string    `json:"id"`
	CreatedAt time.Time `json:"created_at"`
	Bytes     int64     `json:"bytes"`               // of the request
	Cancelled bool      `json:"cancelled,omitempty"` // its end was requested
}

// ErrRunCancelled is the cause of the end of a run whose end was requested.
var ErrRunCancelled = errors.New("the run was cancelled")
