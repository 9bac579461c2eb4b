package proto

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"
)

// Limits of agent sessions.
const (
	// MaxAgentSessions bounds the agent sessions of an organisation.
	MaxAgentSessions = 1000
	// MaxAgentServers bounds the servers of the Agent Client Protocol of an organisation.
	MaxAgentServers = 1000
	// MaxAgentSessionID is the largest length of a session's id, in bytes.
	MaxAgentSessionID = 200
	// MaxAgentSessionField bounds each of the texts that describe a session, in bytes, but its servers of
	// tools and its skills, which have MaxAgentConfig each.
	MaxAgentSessionField = 1 << 10
	// MaxAgentMessage is the largest length of a message, in bytes.
	MaxAgentMessage = 1 << 20
	// MaxQueuedAgentMessages bounds the messages of a session whose turns have not started.
	MaxQueuedAgentMessages = 100
	// MaxAgentSessionBytes bounds the log of a session.
	MaxAgentSessionBytes = 256 << 20
	// MaxAgentConfigs bounds the tool configurations of an organisation. MaxAgentConfig bounds each
	// of them, and MaxAgentConfigName its directory and its name, in bytes.
	MaxAgentConfigs    = 1000
	MaxAgentConfig     = 64 << 10
	MaxAgentConfigName = 1024
)

// AgentConfigKind is a kind of tool configuration.
type AgentConfigKind string

// The kinds.
const (
	AgentConfigMCP    AgentConfigKind = "mcp"
	AgentConfigSkills AgentConfigKind = "skills"
)

// AgentConfig is a tool configuration for the agent sessions in a directory.
type AgentConfig struct {
	Org       string          `json:"org"`
	Kind      AgentConfigKind `json:"kind"`
	Directory string          `json:"directory"`
	Name      string          `json:"name"`
	Value     json.RawMessage `json:"value"` // an object
}

// AgentSession is the record of a session of a coding agent. The session's log has its content.
type AgentSession struct {
	ID             string          `json:"id"` // chosen by the client, unique in the organisation
	Org            string          `json:"org"`
	Key            string          `json:"key"` // the id of the API key under which it runs
	Agent          string          `json:"agent"`
	AgentMode      string          `json:"agent_mode"`
	PermissionMode string          `json:"permission_mode"`
	Model          string          `json:"model,omitempty"`
	Variant        string          `json:"variant,omitempty"`
	AgentVersion   string          `json:"agent_version,omitempty"`
	Directory      string          `json:"directory,omitempty"`
	Title          string          `json:"title,omitempty"`
	MCP            json.RawMessage `json:"mcp,omitempty"`
	Skills         json.RawMessage `json:"skills,omitempty"`
	CreatedAt      time.Time       `json:"created_at"`
	// UpdatedAt is when the session was last used. The retention time starts then.
	UpdatedAt time.Time `json:"updated_at"`
	// Prepare is set if the agent's program starts before the first message.
	Prepare bool `json:"prepare,omitempty"`
	// Active is set while the session has work for a runner.
	Active bool `json:"active,omitempty"`
	// Notified is the sequence number of the last event whose webhook exists.
	Notified int64 `json:"notified,omitempty"`
}

// LogID returns the id of the session's log.
func (s *AgentSession) LogID() string { return AgentSessionKey(s.ID) }

// ThreadID returns the id of the thread that is the session's home.
func (s *AgentSession) ThreadID() string { return "agent-session-" + AgentSessionKey(s.ID)[1:] }

// AgentSessionKey returns the name under which a session is stored. It is a digest, because an id
// may be any text and the name is part of NATS subjects.
func AgentSessionKey(id string) string {
	sum := sha256.Sum256([]byte(id))
	return "s" + hex.EncodeToString(sum[:16])
}

// AgentHomeThread returns the id of the thread for an API key's files that belong to no session.
func AgentHomeThread(key string) string { return "agent-files-" + AgentSessionKey(key)[1:] }
