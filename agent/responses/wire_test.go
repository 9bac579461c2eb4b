package responses_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/agent/responses"
	"github.com/bullpen-run/bullpen/proto/api"
)

// nullable are the members that OpenAI's own clients declare to be null or a value. Perplexity's
// declare none of those that this server sends. Strict clients refuse null for all others.
var nullable = []string{
	"error", "incomplete_details", "usage", "completed_at", "instructions", "max_output_tokens", "max_tool_calls",
	"previous_response_id", "effort", "summary",
	"outputs", "timeout_ms", "max_output_length", "param", "code",
}

// No answer has an explicit null where the vendor's clients expect absence.
func TestNulls(t *testing.T) {
	w := newWorld(t, `rules:
  - {role: user, match: run, tool: code_interpreter, text: "I run it.", calls: [{name: code_interpreter, arguments: {code: "1"}}]}
  - {role: user, match: run, tool: shell, calls: [{name: shell, arguments: {commands: [ls]}}]}
  - {role: user, match: run, tool: sandbox, calls: [{name: sandbox, arguments: {language: python, code: "1"}}]}
  - {role: user, match: wrong, tool: code_interpreter, calls: [{name: code_interpreter, raw: "["}]}
  - {role: user, match: wrong, tool: shell, calls: [{name: shell, arguments: {commands: 1}}]}
  - {role: user, match: wrong, tool: sandbox, calls: [{name: sandbox, raw: "["}, {name: sandbox, arguments: {language: cobol, code: "1"}}, {name: sandbox, arguments: {code: 1}}]}
  - {role: user, match: client, calls: [{name: get_weather, arguments: {city: Paris}}]}
  - {role: user, match: fail, status: 400, text: no}
  - {match: "", role: user, text: "I am cut", finish: length, times: 3}
  - {text: ok}`)
	w.host.Leaves = map[string]string{"chart.png": "png"}
	const weather = `"tools":[{"type":"function","name":"get_weather","parameters":{"type":"object"}}]`
	for path, tools := range map[string][]string{openAI: {interpreter, shell, weather}, perplexity: {sandbox, weather}} {
		allowed := nullable
		if path == perplexity {
			allowed = []string{"param", "code"} // of errors, whose form Perplexity does not document
		}
		for _, tool := range tools {
			for _, input := range []string{"run", "wrong", "client", "hello", "fail"} {
				for _, stream := range []string{`"stream":false`, `"stream":true`} {
					_, answer := w.ask(path, `"input":"`+input+`"`, tool, stream, outputs)
					agenttest.CheckNulls(t, path+" "+input, answer, allowed)
				}
			}
		}
	}
	for _, path := range []string{
		"/openai/v1/models", "/openai/v1/files", "/openai/v1/containers",
		"/perplexity/v1/models", "/perplexity/v1/responses/resp_x/files",
	} {
		_, answer := w.do(http.MethodGet, path, "")
		agenttest.CheckNulls(t, path, answer, nullable)
	}
}

// Items of Perplexity have no values that its clients do not know, whatever the model writes.
func TestItemsOfPerplexity(t *testing.T) {
	w := newWorld(t, `rules:
  - {role: user, match: run, calls: [{name: sandbox, raw: "["}, {name: sandbox, arguments: {language: cobol, code: "1"}}, {name: sandbox, arguments: {code: 1}}, {name: sandbox, arguments: {language: bash, code: "1"}}]}
  - {role: tool, text: "I am brok", fault: drop}`)
	_, answer := w.ask(perplexity, sandbox, `"input":"run"`)
	var r struct {
		Status string
		Output []struct{ Type, Status, Language string }
	}
	if err := json.Unmarshal([]byte(answer), &r); err != nil {
		t.Fatal(err)
	}
	if r.Status != "failed" || len(r.Output) != 5 {
		t.Errorf("%s", answer)
	}
	for _, item := range r.Output {
		languages := []string{"python", "bash"}
		if item.Type == "message" {
			languages = []string{""}
		}
		if !slices.Contains(languages, item.Language) || item.Status != "completed" && item.Status != "failed" {
			t.Errorf("%+v", item)
		}
	}
}

// An error after calls has a status after which no client repeats the request.
func TestErrorsAfterCallsAreFinal(t *testing.T) {
	w := httptest.NewRecorder()
	e := api.Unavailable(3, "full")
	e.Reason, e.Permanent = api.ReasonCallsMade, true
	responses.WriteError(w, httptest.NewRequest(http.MethodPost, "/openai/v1/responses", http.NoBody), e)
	if w.Code != http.StatusFailedDependency || w.Header().Get("X-Should-Retry") != "false" ||
		!strings.Contains(w.Body.String(), `"code":"calls_carried_out"`) {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}
