package responses_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// An item of the input may be named by its id, if the response that has it is stored. Nothing is carried
// out again for that.
func TestItemReferences(t *testing.T) {
	const weather = `"tools":[{"type":"code_interpreter","container":{"type":"auto"}},{"type":"function",` +
		`"name":"weather","parameters":{"type":"object"}}]`
	w := newWorld(t, `rules:
  - {role: user, match: both, text: "I ask.", calls: [{name: code_interpreter, arguments: {code: "print(42)"}}, {name: weather, arguments: {city: Paris}}]}
  - {text: ok}`)
	w.host.Result = proto.Exited(0)
	w.host.Result.Stdout = "42\n"
	_, answer := w.ask(openAI, weather, `"input":"both"`)
	r := decode(t, answer)
	if r.types() != "message code_interpreter_call function_call" || r.Output[1]["status"] != "completed" {
		t.Fatalf("%s", answer)
	}
	var refs []string
	for _, item := range r.Output {
		refs = append(refs, fmt.Sprintf(`{"type":"item_reference","id":%q}`, item["id"]))
	}
	conversation := func(refs string) string {
		return fmt.Sprintf(`"input":[{"role":"user","content":"both"},%s,{"type":"function_call_output","call_id":%q,`+
			`"output":"sunny"}]`, refs, r.Output[2]["call_id"])
	}
	if status, answer := w.ask(openAI, weather, conversation(strings.Join(refs, ","))); status != http.StatusOK ||
		decode(t, answer).types() != "message" || len(w.host.Requests()) != 1 {
		t.Errorf("%d %s", status, answer)
	}
	for _, part := range []string{"I ask.", "print(42)", "42", "sunny", "Paris"} {
		if !strings.Contains(w.lastRequest(), part) {
			t.Errorf("the model was not told %q: %s", part, w.lastRequest())
		}
	}
	for _, id := range []string{"msg_other_1", "msg", "", refsID(t, answer) + "9"} {
		status, answer := w.ask(openAI, weather, conversation(fmt.Sprintf(`{"type":"item_reference","id":%q}`, id)))
		if status != http.StatusNotFound || !strings.Contains(answer, "not found") {
			t.Errorf("%q: %d %s", id, status, answer)
		}
	}
	// A response of the other API has no items here.
	if status, answer := w.ask(perplexity, `"input":[`+refs[0]+`]`); status != http.StatusNotFound {
		t.Errorf("%d %s", status, answer)
	}
}

// refsID returns the id of the first item of a response.
func refsID(t *testing.T, answer string) string {
	t.Helper()
	id, _ := decode(t, answer).Output[0]["id"].(string)
	return id
}

// The input of a stored response is a list of items with ids, which can be referred to.
func TestInputItems(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	_, answer := w.ask(openAI,
		`"input":[{"role":"user","content":"one"},{"role":"assistant","content":"two"},{"type":"message","role":"user",`+
			`"content":[{"type":"input_text","text":"three"}]}]`)
	path := openAI + "/" + decode(t, answer).ID + "/input_items"
	var list struct {
		Object string
		Data   []struct {
			ID, Type, Role string
			Content        []struct{ Type, Text string }
		}
		HasMore bool `json:"has_more"`
	}
	read := func(query string) string {
		t.Helper()
		status, answer := w.do(http.MethodGet, path+query, "")
		list.Data = nil
		if err := json.Unmarshal([]byte(answer), &list); err != nil || status != http.StatusOK {
			t.Fatalf("%d %s: %v", status, answer, err)
		}
		var all []string
		for _, item := range list.Data {
			all = append(all, item.Role+" "+item.Content[0].Type+" "+item.Content[0].Text)
		}
		return strings.Join(all, ", ")
	}
	if got := read(""); got != "user input_text three, assistant output_text two, user input_text one" {
		t.Errorf("%s", got)
	}
	if got := read("?order=asc&limit=2"); got != "user input_text one, assistant output_text two" || !list.HasMore {
		t.Errorf("%s", got)
	}
	last := list.Data[1].ID
	if got := read("?order=asc&after=" + last); got != "user input_text three" || list.HasMore {
		t.Errorf("%s", got)
	}
	if status, answer := w.ask(
		openAI, fmt.Sprintf(`"input":[{"type":"item_reference","id":%q},{"role":"user","content":"four"}]`,
			last)); status != http.StatusOK || !strings.Contains(w.lastRequest(), "two") {
		t.Errorf("%d %s", status, answer)
	}
	if status, _ := w.do(http.MethodGet, openAI+"/resp_other/input_items", ""); status != http.StatusNotFound {
		t.Errorf("%d", status)
	}
}

// Calls beyond max_tool_calls are not carried out and no items; the model is told.
func TestMaxToolCalls(t *testing.T) {
	w := newWorld(t, `rules:
  - {role: user, calls: [{name: code_interpreter, arguments: {code: "1"}}, {name: code_interpreter, arguments: {code: "2"}}]}
  - {role: tool, match: "allows", text: enough}
  - {calls: [{name: code_interpreter, arguments: {code: "3"}}]}`)
	w.host.Result = proto.Exited(0)
	for limit, types := range map[int]string{
		1: "code_interpreter_call message", 2: "code_interpreter_call code_interpreter_call message",
	} {
		before := len(w.host.Requests())
		_, answer := w.ask(openAI, interpreter, fmt.Sprintf(`"max_tool_calls":%d`, limit))
		r := decode(t, answer)
		if r.types() != types || len(w.host.Requests())-before != limit ||
			!strings.Contains(answer, fmt.Sprintf(`"max_tool_calls":%d`, limit)) {
			t.Errorf("%d: %s", limit, answer)
		}
	}
	if status, answer := w.ask(openAI, interpreter, `"max_tool_calls":0`); status != http.StatusBadRequest ||
		!strings.Contains(answer, `"param":"max_tool_calls"`) {
		t.Errorf("%d %s", status, answer)
	}
}

// Files and images in a message are passed on to the model. The model's server is to fetch none.
func TestFilesInMessages(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	ask := func(part string) (status int, answer string) {
		return w.ask(openAI, `"input":[{"role":"user","content":[`+part+`,{"type":"input_text","text":"Sum it up"}]}]`)
	}
	for part, want := range map[string]string{
		`{"type":"input_file","filename":"a.pdf","file_data":"data:application/pdf;base64,eA=="}`: `"file":{"filename":` +
			`"a.pdf","file_data":"data:application/pdf;base64,eA=="}`,
		`{"type":"input_image","image_url":"data:image/png;base64,eA=="}`: `"image_url":{"url":"data:image/png;base64,eA=="}`,
	} {
		if status, answer := ask(part); status != http.StatusOK || !strings.Contains(w.lastRequest(), want) ||
			!strings.Contains(w.lastRequest(), "Sum it up") {
			t.Errorf("%s: %d %s, the model was asked %s", part, status, answer, w.lastRequest())
		}
	}
	for _, part := range []string{
		`{"type":"input_file","file_url":"http://10.0.0.1/a.pdf"}`, `{"type":"input_file","file_id":"file_x"}`,
		`{"type":"input_file","file_data":"x"}`, `{"type":"input_image","image_url":"http://10.0.0.1/a.png"}`,
	} {
		if status, answer := ask(part); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", part, status, answer)
		}
	}
}

// The content of an uploaded file can be read again.
func TestUploadContent(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	f := proto.NewAgentFile("data.csv", 3)
	w.host.Meta, w.host.Homes[f.Thread()+"/"+proto.AgentFileContent] = []proto.AgentFile{*f}, []byte("a,1")
	if status, answer := w.do(http.MethodGet, "/openai/v1/files/"+f.ID+"/content", ""); status != http.StatusOK ||
		answer != "a,1" {
		t.Errorf("%d %s", status, answer)
	}
	if status, _ := w.do(http.MethodGet, "/openai/v1/files/file_x/content", ""); status != http.StatusNotFound {
		t.Errorf("%d", status)
	}
}
