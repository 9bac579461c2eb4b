package anthropic_test

import (
	"net/http"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api/apitest"
)

// The memory of a request for a message is bounded, whatever its body is.
func TestMemoryOfHostileBodies(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	for _, path := range []string{"/anthropic/v1/messages", "/anthropic/v1/messages/count_tokens"} {
		const valid = `"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}]`
		apitest.CheckMessages(t, path, valid, map[string][]string{
			"": {
				"messages", "system", "tools", "tool_choice", "stop_sequences", "container",
				"thinking", "output_config", "mcp_servers",
			},
			`"messages":[{"role":"user",*}]`:                                      {"content"},
			`"messages":[{"role":"assistant","content":[{"type":"tool_use",*}]}]`: {"input"},
			`"messages":[{"role":"user","content":[{"type":"tool_result",*}]}]`:   {"content"},
			`"tools":[{"name":"a",*}]`:                                            {"input_schema"},
		}, func(body []byte) { w.do(http.MethodPost, path, string(body)) })
	}
}
