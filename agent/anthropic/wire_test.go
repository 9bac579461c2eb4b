package anthropic_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/proto/api"
)

// nullable are the members that Anthropic's own clients declare to be null or a value. Strict clients
// refuse null for all others, and expect a member without a value to be absent.
var nullable = []string{
	"stop_reason", "stop_sequence", "container", "skills", "server_tool_use", "expires_at", "first_id", "last_id",
	"next_page", "num_lines", "start_line", "total_lines",
	"error_message", "max_input_tokens", "max_tokens", "capabilities", "line", "deprecated_at", "retires_at",
}

// No answer has an explicit null where Anthropic's clients expect absence.
func TestNulls(t *testing.T) {
	w := newWorld(t, `rules:
  - {role: user, match: bash, text: "I run it.", calls: [{name: bash_code_execution, arguments: {command: ls}}]}
  - {role: user, match: python, calls: [{name: code_execution, arguments: {code: "1"}}]}
  - {role: user, match: wrong, calls: [{name: bash_code_execution, raw: "["}, {name: text_editor_code_execution, arguments: {command: view}}]}
  - {role: user, match: edit, calls: [{name: text_editor_code_execution, arguments: {command: create, path: a.txt, file_text: "x"}},
      {name: text_editor_code_execution, arguments: {command: str_replace, path: a.txt, old_str: x, new_str: y}},
      {name: text_editor_code_execution, arguments: {command: view, path: a.txt}}, {name: text_editor_code_execution, arguments: {command: view, path: b.txt}}]}
  - {role: user, match: client, calls: [{name: get_weather, arguments: {city: Paris}}]}
  - {role: user, match: fail, status: 400, text: no}
  - {text: ok}`)
	w.host.Leaves = map[string]string{".outputs/chart.png": "png"}
	const client = `"tools":[{"type":"code_execution_20250825","name":"code_execution"},{"name":"get_weather",` +
		`"input_schema":{"type":"object"}}]`
	for _, revision := range []string{first, second} {
		for _, text := range []string{"hello", "bash", "python", "wrong", "edit", "client", "fail"} {
			for _, stream := range []string{`"stream":false`, `"stream":true`} {
				more := []string{stream}
				if text == "client" {
					more = append(more, client)
				}
				_, answer := w.ask(revision, text, more...)
				agenttest.CheckNulls(t, text, answer, nullable)
			}
		}
	}
	for _, path := range []string{"/anthropic/v1/models", "/anthropic/v1/files", "/anthropic/v1/files/file_x"} {
		_, answer := w.do(http.MethodGet, path, "")
		agenttest.CheckNulls(t, path, answer, nullable)
	}
}

// An error after calls has a status after which no client repeats the request.
func TestErrorsAfterCallsAreFinal(t *testing.T) {
	w := httptest.NewRecorder()
	e := api.Unavailable(3, "full")
	e.Reason, e.Permanent = api.ReasonCallsMade, true
	anthropic.WriteError(w, nil, e)
	var body struct {
		Error struct {
			Type    string
			Details map[string]string
		}
	}
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Fatal(err)
	}
	if w.Code != http.StatusFailedDependency || w.Header().Get("X-Should-Retry") != "false" ||
		body.Error.Type != "overloaded_error" || body.Error.Details["error_code"] != string(api.ReasonCallsMade) {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}

// A file that a program left and that could not be stored makes the call one that failed, for the model and the client.
func TestLostFilesAreErrors(t *testing.T) {
	for revision, rule := range map[string]string{first: pythonRule, second: bashRule} {
		w := newWorld(t, `rules: [`+rule+`, {role: tool, match: ".*", text: "read: ${0}"}]`)
		w.host.Leaves = map[string]string{"chart.png": "png", ".outputs/chart.png": "png"}
		w.host.ErrSave = api.Errorf(api.CodeRateLimited, "the organisation has 10000 files")
		_, answer := w.ask(revision, "x")
		var m struct {
			Content []struct {
				Text    string
				Content struct {
					Stderr     string
					ReturnCode *int `json:"return_code"`
				}
			}
		}
		if err := json.Unmarshal([]byte(answer), &m); err != nil {
			t.Fatal(err)
		}
		results, read := 0, ""
		for _, b := range m.Content {
			read += b.Text
			if code := b.Content.ReturnCode; code != nil {
				if results++; *code != 1 || !strings.Contains(b.Content.Stderr, "the organisation has 10000 files") {
					t.Errorf("%s: the client has %s", revision, answer)
				}
			}
		}
		if results != 1 || !strings.Contains(read, `"return_code":1`) || !strings.Contains(read, "10000 files") {
			t.Errorf("%s: the model has %q", revision, read)
		}
	}
}

// A program that writes a file again and again leaves one file, with the newest content, which expires with
// the container.
func TestOneFileForEachPath(t *testing.T) {
	w := newWorld(t, `rules: [`+bashRule+`, `+restRule+`]`)
	ids := map[string]bool{}
	container := ""
	for i := range 5 {
		w.host.Leaves = map[string]string{".outputs/chart.png": fmt.Sprint("png ", i), ".outputs/other.png": "x"}
		var more []string
		if container != "" {
			more = []string{fmt.Sprintf(`"container":%q`, container)}
		}
		_, answer := w.ask(second, "x", more...)
		var m struct {
			Container struct{ ID string }
			Content   []struct {
				Type    string
				Content struct {
					Content []struct {
						FileID string `json:"file_id"`
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(answer), &m); err != nil || len(m.Content) != 3 {
			t.Fatalf("%v: %s", err, answer)
		}
		container = m.Container.ID
		for _, f := range m.Content[1].Content.Content {
			ids[f.FileID] = true
		}
	}
	if len(ids) != 2 || len(w.host.Meta) != 2 {
		t.Errorf("%d ids, %d files", len(ids), len(w.host.Meta))
	}
	for _, f := range w.host.Meta {
		if left := time.Until(*f.ExpiresAt); left < 29*24*time.Hour || left > 30*24*time.Hour || f.Container != container {
			t.Errorf("%+v", f)
		}
		if _, content := w.do(http.MethodGet, "/anthropic/v1/files/"+f.ID+"/content", ""); f.Name == "chart.png" &&
			content != "png 4" {
			t.Errorf("content %q", content)
		}
	}
}

// thinker is a model that thinks before each reply.
type thinker struct {
	agent.Upstream
	asked []agent.Turn
}

func (u *thinker) Stream(_ context.Context, turn *agent.Turn, text func(string) error) (*agent.Reply, error) {
	u.asked = append(u.asked, *turn)
	for _, thought := range []*agent.Thinking{{Text: "Hm.", Signature: "sig"}, {Redacted: "secret"}} {
		if err := turn.OnThinking(thought); err != nil {
			return nil, err
		}
	}
	return &agent.Reply{Finish: agent.FinishDone}, text("Hello!")
}

// What a model has thought is passed on to the client, and back to the model. Documents are passed on.
func TestThinkingAndDocuments(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	model := &thinker{}
	w.routes.Upstream = model
	const blocks = `[{"type":"thinking","thinking":"Hm.","signature":"sig"},{"type":"redacted_thinking",` +
		`"data":"secret"},{"type":"text","text":"Hello!"}]`
	const thinking = `"thinking":{"type":"enabled","budget_tokens":1024}`
	if status, answer := w.ask(second, "x", thinking); status != http.StatusOK ||
		!strings.Contains(answer, `"content":`+blocks) {
		t.Errorf("%d %s", status, answer)
	}
	if got := string(model.asked[0].Thinking); `"thinking":`+got != thinking {
		t.Errorf("the model is to think %s", got)
	}
	_, answer := w.ask(second, "x", thinking, `"stream":true`)
	for _, part := range []string{
		`"index":0,"content_block":{"type":"thinking","thinking":"","signature":""}`,
		`"index":0,"delta":{"type":"thinking_delta","thinking":"Hm."}`,
		`"index":0,"delta":{"type":"signature_delta","signature":"sig"}`,
		`"index":1,"content_block":{"type":"redacted_thinking","data":"secret"}`, `"index":2,"content_block":{"type":"text"`,
	} {
		if !strings.Contains(answer, part) {
			t.Errorf("%s is not in %s", part, answer)
		}
	}
	user := `{"role":"user","content":[{"type":"document","title":"a.pdf","source":{"type":"base64",` +
		`"media_type":"application/pdf","data":"eA=="}}]}`
	status, answer := w.ask(second, "", `"messages":[`+user+`,{"role":"assistant","content":`+blocks+
		`},{"role":"user","content":"y"}]`)
	items := model.asked[len(model.asked)-1].Items
	if status != http.StatusOK || len(items) != 5 || items[0].Document.Base64 != "eA==" ||
		*items[1].Thinking != (agent.Thinking{Text: "Hm.", Signature: "sig"}) || items[2].Thinking.Redacted != "secret" {
		t.Errorf("%d %s: %+v", status, answer, items)
	}
	for _, source := range []string{`{"type":"url","url":"http://10.0.0.1/a.pdf"}`, `{"type":"file","file_id":"file_x"}`} {
		body := `"messages":[{"role":"user","content":[{"type":"document","source":` + source + `}]}]`
		if status, answer := w.ask(second, "", body); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", source, status, answer)
		}
	}
}
