package api

import (
	"net/http"
	"strings"
)

// The bodies of the endpoint of the Model Context Protocol.
type (
	// RPCMessage is a JSON-RPC message.
	RPCMessage struct {
		_ struct{} `additionalProperties:"true" doc:"A JSON-RPC 2.0 message. Its other members are as the Model Context Protocol defines them."`

		Version string `json:"jsonrpc" enum:"2.0" required:"true"`
	}
	// RPCError answers a message that the protocol, or this server, does not accept.
	RPCError struct {
		_ struct{} `additionalProperties:"true" doc:"A JSON-RPC 2.0 error, or an Error."`

		Version string `json:"jsonrpc,omitempty" enum:"2.0"`
		Message string `json:"message,omitempty"`
	}
)

func mcpRoutes() []Route {
	var names []string
	for _, t := range Tools() {
		names = append(names, t.Name)
	}
	const example = "event: message\n" + `data: {"jsonrpc":"2.0","id":1,"result":{"tools":[]}}` + "\n\n"
	return []Route{{
		Method: http.MethodPost, Path: MCPPath, ID: "mcp", Tag: tagMCP, ScopeByTool: true,
		Summary: "Call tools by the Model Context Protocol",
		Doc: "Streamable HTTP, without sessions on the server. The tools are " + strings.Join(names, ", ") +
			". They have the limits, the rights and the errors of the routes of the same purpose. " +
			"The result of a tool that failed has isError and the message; a program that fails is a result.",
		Params: []Param{
			{
				Name: "Accept", In: "header", Required: true, Doc: "Both application/json and text/event-stream.",
				schema: object{"type": "string", "const": typeJSON + ", " + typeSSE},
			},
			header("Mcp-Protocol-Version", "The version of the protocol.", text()),
			header("Mcp-Session-Id", "That of the answer to initialize.", text()),
		},
		Request: RPCMessage{Version: "2.0"},
		Responses: []Response{
			{
				Status: http.StatusOK, Doc: "The answers, as server-sent events.", Text: map[string]string{typeSSE: example},
				Headers: map[string]string{"Mcp-Session-Id": "Of the answer to initialize."},
			},
			{Status: http.StatusAccepted, Doc: "The message needs no answer."},
			{Status: http.StatusBadRequest, Doc: "The message is not valid.", Body: RPCError{Version: "2.0"}},
			{Status: http.StatusNotFound, Doc: "The method does not exist.", Body: RPCError{Version: "2.0"}},
		},
		Errors: []int{http.StatusForbidden},
	}}
}
