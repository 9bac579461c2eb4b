package responses_test

import (
	"net/http"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api/apitest"
)

// The memory of a request to a model is bounded, whatever its body is.
func TestMemoryOfHostileBodies(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	for _, path := range []string{openAI, perplexity} {
		apitest.CheckMessages(t, path, `"model":"m","store":false,"input":"x"`, map[string][]string{
			"": {
				"input", "tools", "tool_choice", "include", "metadata", "skills", "response_format",
				"text", "models",
			},
			`"input":[{"role":"user",*}]`: {"content"}, `"input":[{"type":"function_call_output","call_id":"c",*}]`: {"output"},
			`"input":[{"type":"code_interpreter_call","id":"c",*}]`: {"outputs"}, `"tools":[{"type":"function","name":"f",*}]`: {
				"parameters",
			},
		}, func(body []byte) { w.do(http.MethodPost, path, string(body)) })
	}
	const chat = "/openai/v1/chat/completions"
	apitest.CheckMessages(t, chat, `"model":"m","messages":[{"role":"user","content":"x"}]`, map[string][]string{
		"": {"messages", "tools", "logit_bias"}, `"messages":[{"role":"user",*}]`: {"content"},
	}, func(body []byte) { w.do(http.MethodPost, chat, string(body)) })
	apitest.CheckMessages(t, "containers", `"name":"x"`, map[string][]string{"": {"name", "file_ids", "expires_after"}},
		func(body []byte) { w.do(http.MethodPost, "/openai/v1/containers", string(body)) })
}
