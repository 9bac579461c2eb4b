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
	// Key is the id of the API key whose rights and limits apply.
	Key string `json:"key"`
	// API is the vendor API of the request, such as "openai".
	API     string          `json:"api"`
	Request json.RawMessage `json:"request"`
	// Background is set if the run outlives its client's connection and may continue in any
	// process.
	Background bool `json:"background,omitempty"`
	// Stream is set if the run's log includes text deltas for clients that follow it.
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

// ErrRunCancelled is the cause with which a run ends after a client cancelled it.
var ErrRunCancelled = errors.New("the run was cancelled")
