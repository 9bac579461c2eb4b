package acp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// rpcMessage is a JSON-RPC 2.0 message. With a method and an id it is a request, with only a method
// a notification, and otherwise a response.
type rpcMessage struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  any             `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

// received is a message of a client.
type received struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
}

func (m *received) isRequest() bool { return m.Method != "" && m.hasID() }

func (m *received) hasID() bool { return len(m.ID) > 0 && string(m.ID) != "null" }

// The codes of errors.
const (
	codeInvalidParams = -32602
	codeNoMethod      = -32601
	codeInternal      = -32603
	codeNotFound      = -32002
)

// rpcError is an error of JSON-RPC.
type rpcError struct {
	Code    int            `json:"code"`
	Message string         `json:"message"`
	Data    map[string]any `json:"data,omitempty"`
}

func (e *rpcError) Error() string { return e.Message }

func invalidf(format string, args ...any) error {
	return &rpcError{Code: codeInvalidParams, Message: fmt.Sprintf(format, args...)}
}

// toRPC returns the error in the form for the client. All errors become JSON-RPC errors, because
// clients give up after a status other than 200.
func toRPC(err error) *rpcError {
	if known, ok := errors.AsType[*rpcError](err); ok {
		return known
	}
	if e, ok := errors.AsType[*sessions.Error](err); ok {
		code := codeInternal
		switch e.Kind {
		case sessions.InvalidRequest, sessions.UnsupportedAgent, sessions.ModeNotSupported:
			code = codeInvalidParams
		case sessions.SessionNotFound:
			code = codeNotFound
		}
		return &rpcError{Code: code, Message: e.Message, Data: map[string]any{"type": string(e.Kind)}}
	}
	if quota, ok := errors.AsType[*proto.QuotaError](err); ok {
		return &rpcError{Code: codeInternal, Message: quota.Error(), Data: map[string]any{"type": "quota_exceeded"}}
	}
	public := agent.Public(err)
	data := map[string]any{"type": string(public.Code)}
	if public.RetryAfter > 0 {
		data["retryAfter"] = public.RetryAfter
	}
	return &rpcError{Code: codeInternal, Message: public.Message, Data: data}
}

// isInternal reports whether an error is a fault of this server and must be logged.
func isInternal(err error) bool {
	return agent.Public(err).Code.Status() >= 500 && !isPublic(err)
}

func isPublic(err error) bool {
	_, rpc := errors.AsType[*rpcError](err)
	_, session := errors.AsType[*sessions.Error](err)
	_, quota := errors.AsType[*proto.QuotaError](err)
	return rpc || session || quota
}

// encode returns the JSON form of v.
func encode(v any) (json.RawMessage, error) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode a message of the agent client protocol: %w", err)
	}
	return bytes.TrimSuffix(text.Bytes(), []byte("\n")), nil
}

// response returns the response to a request: a result, or an error if err is not nil.
func response(id json.RawMessage, result any, err error) (outgoing, error) {
	m := rpcMessage{Version: "2.0", ID: id, Result: result}
	if err != nil {
		m.Result, m.Error = nil, toRPC(err)
	}
	data, err := encode(m)
	return outgoing{Data: data, Answers: id}, err
}

// peek decodes the id and the method from the beginning of a message. Clients write them before the
// parameters.
func peek(body io.Reader) (m received) {
	dec := json.NewDecoder(body)
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return m
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return m
		}
		switch name {
		case "id":
			err = dec.Decode(&m.ID)
		case "method":
			err = dec.Decode(&m.Method)
		case "params", "result":
			if m.ID != nil {
				return m
			}
			err = dec.Decode(new(json.RawMessage))
		default:
			err = dec.Decode(new(json.RawMessage))
		}
		if err != nil {
			return m
		}
	}
	return m
}
