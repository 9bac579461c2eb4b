package mcp

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
)

// ErrID is returned for a request whose id or progress token is neither a string nor an integer.
var ErrID = errors.New("id and progressToken must be a string or an integer")

// InvalidResponse returns the line that answers a request with an invalid id, which it does not
// repeat.
func InvalidResponse() []byte {
	return fmt.Appendf(nil, `{"jsonrpc":"2.0","id":null,"error":{"code":%d,"message":%q}}`+"\n",
		jsonrpc.CodeInvalidRequest, ErrID)
}

// IDs keeps the original ids and progress tokens of requests. The SDK reads numbers as
// floating-point and would change them in answers, so it only gets names generated here.
type IDs struct {
	mu    sync.Mutex
	names map[string]*pending // by the name of the id
}

// pending is a request without a response.
type pending struct {
	id            json.RawMessage
	token         string // the name of the progress token; empty for none
	cancelled     bool
	progressValue json.RawMessage
}

var integer = regexp.MustCompile(`^-?(0|[1-9][0-9]*)$`)

func isID(raw json.RawMessage) bool {
	return len(raw) > 0 && (raw[0] == '"' || integer.Match(raw))
}

// Request metadata members that later protocol versions require.
const (
	metaVersion      = "io.modelcontextprotocol/protocolVersion"
	metaCapabilities = "io.modelcontextprotocol/clientCapabilities"
)

// Hide returns a client's message with names instead of its id, its progress token, and the id of
// the request that it cancels. version, if not empty, is the transport's, and the default for a
// request without one. Anything but an object is returned unchanged. The error is [ErrID].
func (m *IDs) Hide(message []byte, version string) ([]byte, error) {
	var members, params, meta map[string]json.RawMessage
	if json.Unmarshal(message, &members) != nil || members == nil {
		return message, nil
	}
	_ = json.Unmarshal(members["params"], &params) // the SDK answers what is malformed
	_ = json.Unmarshal(params["_meta"], &meta)
	if string(members["method"]) == `"notifications/cancelled"` {
		if name := m.cancel(params["requestId"]); name != "" {
			params["requestId"] = quote(name)
			return encode(members, params)
		}
		return message, nil
	}
	id := members["id"]
	if len(id) == 0 || string(id) == "null" || members["method"] == nil {
		return message, nil
	}
	p := &pending{id: id}
	if token := meta["progressToken"]; len(token) > 0 && string(token) != "null" {
		p.token, p.progressValue = rand.Text(), token
		meta["progressToken"] = quote(p.token)
	}
	if !isID(id) || p.token != "" && !isID(p.progressValue) {
		return nil, ErrID
	}
	if version != "" && meta[metaVersion] == nil {
		if meta == nil {
			meta = map[string]json.RawMessage{}
		}
		if params == nil {
			params = map[string]json.RawMessage{}
		}
		meta[metaVersion], _ = json.Marshal(version) // a text
		if meta[metaCapabilities] == nil {
			meta[metaCapabilities] = json.RawMessage("{}")
		}
	}
	if meta != nil {
		params["_meta"], _ = json.Marshal(meta) // raw messages that were decoded
	}
	name := rand.Text()
	members["id"] = quote(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.names == nil {
		m.names = map[string]*pending{}
	}
	m.names[name] = p
	return encode(members, params)
}

// quote returns the JSON form of a name of this side's.
func quote(name string) json.RawMessage { return json.RawMessage(`"` + name + `"`) }

func encode(members, params map[string]json.RawMessage) (text []byte, err error) {
	if params != nil {
		if members["params"], err = json.Marshal(params); err != nil {
			return nil, err
		}
	}
	return json.Marshal(members)
}

// Cancel drops the response of a request: a client that cancels a request expects none.
func (m *IDs) Cancel(id json.RawMessage) { m.cancel(id) }

func (m *IDs) cancel(id json.RawMessage) (name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, p := range m.names {
		if bytes.Equal(p.id, id) {
			p.cancelled = true
			return name
		}
	}
	return ""
}

// Restore returns a server's message, or an event with one, with the client's ids. It is empty for
// the response of a cancelled request.
func (m *IDs) Restore(message []byte) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name, p := range m.names {
		if p.token != "" {
			message = bytes.ReplaceAll(message, quote(p.token), p.progressValue)
		}
		if !bytes.Contains(message, quote(name)) {
			continue
		}
		delete(m.names, name)
		if p.cancelled {
			return nil
		}
		message = bytes.ReplaceAll(message, quote(name), p.id)
	}
	return message
}
