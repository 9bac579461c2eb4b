package gateway

import (
	"net/http"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api/apitest"
)

// The memory of a message of the Model Context Protocol is bounded, whatever it is.
func TestMemoryOfHostileMessages(t *testing.T) {
	h := newHarness(t)
	const valid = `"jsonrpc":"2.0","id":1,"method":"tools/call"`
	apitest.CheckMessages(t, "/mcp", valid, map[string][]string{
		"": {"id", "method", "params"}, `"params":{*}`: {"name", "arguments", "_meta"},
		`"params":{"name":"sandbox_execute","arguments":{*}}`: {"code", "env_vars", "args"},
	}, func(body []byte) {
		h.do(http.MethodPost, "/mcp", string(body), "Accept", "application/json, text/event-stream", "Content-Type",
			"application/json")
	})
	h.nothingReserved()
}
