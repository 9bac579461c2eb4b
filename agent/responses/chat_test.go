package responses_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/upstream"
)

// Chat completions are the model's server's own, also their streams, with none of this side's tools.
func TestChatCompletions(t *testing.T) {
	w := newWorld(t, `rules: [{match: limit, status: 429, retry_after: 7, text: slow}, {match: hello, text: "Hello!"}]`)
	w.answers.Completions.(*upstream.Client).Models = map[string]string{
		"*": "script",
	} //nolint:forcetypeassert // newWorld has set it
	for _, path := range []string{"/openai/v1/chat/completions", "/perplexity/chat/completions", "/v1/chat/completions"} {
		status, answer := w.do(http.MethodPost, path,
			`{"model":"m","messages":[{"role":"user","content":"hello"}],"temperature":0.5,"user":null,"store":null}`)
		if status != http.StatusOK || !strings.Contains(answer, `"Hello!"`) ||
			!strings.Contains(answer, `"object":"chat.completion"`) {
			t.Errorf("%s: %d %s", path, status, answer)
		}
		if asked := w.lastRequest(); !strings.Contains(asked, `"model":"script"`) ||
			!strings.Contains(asked, `"temperature":0.5`) || strings.Contains(asked, `"tools"`) {
			t.Errorf("the model was asked %s", asked)
		}
		status, answer = w.do(http.MethodPost, path,
			`{"model":"m","stream":true,"messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}]}`)
		if status != http.StatusOK || !strings.HasPrefix(answer, "data: {") ||
			!strings.HasSuffix(strings.TrimSpace(answer), "data: [DONE]") {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	const message = `"model":"m","messages":[{"role":"user","content":`
	for body, status := range map[string]int{
		`{` + message + `"limit"}]}`:                       http.StatusTooManyRequests,
		`{"messages":[{"role":"user","content":"hello"}]}`: http.StatusBadRequest,
		`{"model":"m"}`:                                    http.StatusBadRequest,
		`[`:                                                http.StatusBadRequest,
		`{` + message + `"hello"}],"store":true}`:                                           http.StatusBadRequest,
		`{` + message + `"hello"}],"web_search_options":{}}`:                                http.StatusBadRequest,
		`{` + message + `[{"type":"image_url","image_url":{"url":"http://10.0.0.1/x"}}]}]}`: http.StatusBadRequest,
		`{` + message + `[{"type":"video_url","video_url":{"url":"http://10.0.0.1/x"}}]}]}`: http.StatusBadRequest,
		`{` + message + `[{"type":"file","file":{"file_id":"file_x"}}]}]}`:                  http.StatusBadRequest,
		`{` + message + `[{"type":"text","text":"hello"},{"type":"image_url",` +
			`"image_url":{"url":"data:image/png;base64,"}}]}]}`: http.StatusOK,
	} {
		if got, answer := w.do(http.MethodPost, "/openai/v1/chat/completions", body); got != status ||
			status != http.StatusOK && !strings.HasPrefix(answer, `{"error":{"message":`) {
			t.Errorf("%s: %d %s, want %d", body, got, answer, status)
		}
	}
}
