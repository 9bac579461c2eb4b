package responses_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/agentruns"
	"github.com/bullpen-run/bullpen/scheduler/engine"
)

// runBackground carries out responses in the background until the test ends.
func (w *world) runBackground() {
	ctx, cancel := context.WithCancel(w.t.Context())
	log := slog.New(slog.DiscardHandler)
	background := &agent.Background{
		Store: w.runs, Upstream: w.answers.Upstream, APIs: map[string]agent.API{"openai": w.answers, "perplexity": w.answers},
		Log: log, Host: func(string, string) agent.BackgroundHost { return w.host },
	}
	queue := new(engine.Queue[proto.ActiveAgentRun])
	w.runs.Follow(func(run proto.ActiveAgentRun, active bool) {
		queue.Change(engine.Item{Org: run.Org, ID: run.ID}, func(known *proto.ActiveAgentRun) bool {
			*known = run
			return active
		})
	})
	done := make(chan struct{})
	go func() { defer close(done); agentruns.NewEngine(queue, background.CarryOut, log).Lead(ctx) }()
	w.t.Cleanup(func() { cancel(); <-done })
}

// poll asks for a response until it has ended.
func (w *world) poll(path string) (r *response, answer string) {
	w.t.Helper()
	added, stop, err := w.runs.Watch("acme", path[strings.LastIndex(path, "/")+1:])
	if err != nil {
		w.t.Fatal(err)
	}
	defer stop()
	for late := time.After(time.Minute); ; {
		status, answer := w.do(http.MethodGet, path, "")
		if r = decode(w.t, answer); status != http.StatusOK || r.Status != "queued" && r.Status != "in_progress" {
			return r, answer
		}
		select {
		case <-added:
		case <-late:
			w.t.Fatalf("%s has not ended", path)
		}
	}
}

// events returns the events of a stream by their numbers, without the text [DONE].
func events(t *testing.T, answer string) (list []string) {
	t.Helper()
	for frame := range strings.SplitSeq(strings.TrimSpace(answer), "\n\n") {
		_, data, _ := strings.Cut(frame, "data: ")
		var e struct {
			Type   string
			Number int `json:"sequence_number"`
		}
		if data != "[DONE]" && json.Unmarshal([]byte(data), &e) == nil {
			list = append(list, fmt.Sprint(e.Number, " ", e.Type))
		}
	}
	return list
}

func TestResponsesInTheBackground(t *testing.T) {
	for _, path := range []string{openAI, perplexity} {
		w := newWorld(t, allRules)
		w.host.Result = proto.Exited(0)
		w.runBackground()
		tools := map[string]string{openAI: interpreter, perplexity: sandbox}[path]
		status, answer := w.ask(path, `"background":true`, tools)
		r := decode(t, answer)
		if status != http.StatusOK || r.Status != "queued" || len(r.Output) != 0 ||
			!strings.Contains(answer, `"background":true`) {
			t.Fatalf("%d %s", status, answer)
		}
		ended, answer := w.poll(path + "/" + r.ID)
		if ended.ID != r.ID || ended.Status != "completed" || len(ended.Output) != 3 || len(w.host.Requests()) != 1 {
			t.Errorf("%s", answer)
		}
		if _, again := w.do(http.MethodGet, path+"/"+r.ID, ""); again != answer {
			t.Errorf("another answer:\n%s\n%s", again, answer)
		}
		// Only what was created as a stream is one later.
		if status, answer := w.do(http.MethodGet, path+"/"+r.ID+"?stream=true", ""); status != http.StatusBadRequest {
			t.Errorf("%d %s", status, answer)
		}
		if status, answer := w.do(http.MethodGet, path+"/resp_other", ""); status != http.StatusNotFound {
			t.Errorf("%d %s", status, answer)
		}
		status, answer = w.do(http.MethodPost, path+"/"+r.ID+"/cancel", "")
		if path == openAI && (status != http.StatusOK || decode(t, answer).Status != "completed") || path == perplexity &&
			status != http.StatusBadRequest {
			t.Errorf("cancelled after the end: %d %s", status, answer)
		}
		if path == perplexity {
			continue
		}
		if body := <-w.notified; !strings.Contains(body, `"type":"response.completed"`) || !strings.Contains(body, r.ID) {
			t.Errorf("webhook: %q", body)
		}
	}
}

// A stream that is cut is continued after any number, with the same events.
func TestStreamsOfTheBackground(t *testing.T) {
	for _, path := range []string{openAI, perplexity} {
		w := newWorld(t, allRules)
		w.host.Result = proto.Exited(0)
		w.runBackground()
		tools := map[string]string{openAI: interpreter, perplexity: sandbox}[path]
		_, answer := w.ask(path, `"background":true`, `"stream":true`, tools)
		all := events(t, answer)
		if len(all) < 8 || !strings.HasPrefix(all[0], "0 response.created") ||
			!strings.HasSuffix(all[len(all)-1], " response.completed") {
			t.Fatalf("%q", all)
		}
		id := streamed(t, answer)
		for after := range len(all) {
			_, answer := w.do(http.MethodGet, fmt.Sprintf("%s/%s?stream=true&starting_after=%d", path, id, after), "")
			if got := events(t, answer); strings.Join(got, "\n") != strings.Join(all[after+1:], "\n") {
				t.Errorf("after %d:\n got %q\nwant %q", after, got, all[after+1:])
			}
		}
	}
}

// untilDone is a model that never ends its answer.
type untilDone struct {
	agent.Upstream
	asked chan struct{}
}

func (u untilDone) Stream(ctx context.Context, _ *agent.Turn, text func(string) error) (*agent.Reply, error) {
	if err := text("I begin"); err != nil {
		return nil, err
	}
	close(u.asked)
	<-ctx.Done()
	return nil, ctx.Err()
}

// A stored response that its server ends has failed, and one that its client leaves is cancelled.
func TestInterruptedResponses(t *testing.T) {
	for _, path := range []string{openAI, perplexity} {
		for _, c := range []struct {
			cause        error
			status, text string
		}{
			{api.Unavailable(1, "this server goes away"), "failed", "this server goes away"},
			{context.Canceled, "cancelled", `"status":"cancelled"`},
		} {
			w, asked := newWorld(t, allRules), make(chan struct{})
			w.answers.Upstream = untilDone{w.answers.Upstream, asked}
			ctx, end := context.WithCancelCause(t.Context())
			go func() { <-asked; end(c.cause) }()
			tools := map[string]string{openAI: interpreter, perplexity: sandbox}[path]
			out := httptest.NewRecorder()
			body := `{"model":"m","input":"x","stream":true,"store":true,` + tools + "}"
			w.server.Config.Handler.ServeHTTP(
				out, httptest.NewRequestWithContext(ctx, http.MethodPost, path, strings.NewReader(body)))
			_, answer := w.do(http.MethodGet, path+"/"+streamed(t, out.Body.String()), "")
			if r := decode(t, answer); r.Status != c.status || !strings.Contains(answer, c.text) {
				t.Errorf("%s: %v: %s", path, c.cause, answer)
			}
		}
	}
}

// Reading responses is limited in memory, and a stream of one that is deleted ends with an event: it was cancelled, or
// its log is gone.
func TestReadingResponses(t *testing.T) {
	w := newWorld(t, `rules: [{match: hang, fault: hang, text: "a text"}, {text: "a long enough text"}]`)
	w.runBackground()
	_, answer := w.ask(openAI, `"input":"x"`, `"background":true`, `"stream":true`)
	id := streamed(t, answer)
	w.host.SetMemory(w.host.Reserved() + 200) // the request has less, and the log more
	if status, answer := w.do(http.MethodGet, openAI+"/"+id, ""); status != http.StatusServiceUnavailable {
		t.Errorf("%d %s", status, answer)
	}
	w.host.SetMemory(w.host.Reserved() + 200)
	cut, err := w.server.Client().Get(w.server.URL + openAI + "/" + id + "?stream=true")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cut.Body.Close() }()
	// it has not failed
	if text, err := io.ReadAll(cut.Body); !errors.Is(err, io.ErrUnexpectedEOF) ||
		strings.Contains(string(text), "response.failed") {
		t.Errorf("%v: %s", err, text)
	}
	w.host.SetMemory(0)

	body := `{"model":"m","input":"hang","background":true,"stream":true}`
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.server.URL+openAI, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := w.server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	for in := bufio.NewScanner(resp.Body); in.Scan(); {
		data := strings.HasPrefix(in.Text(), "data: ")
		if data && strings.Contains(in.Text(), "response.created") {
			id = streamed(t, in.Text())
		}
		if data && strings.Contains(in.Text(), "output_text.delta") {
			if status, answer := w.do(http.MethodDelete, openAI+"/"+id, ""); status != http.StatusOK {
				t.Errorf("%d %s", status, answer)
			}
		}
		if strings.Contains(in.Text(), "response.failed") || strings.Contains(in.Text(), "response.cancelled") {
			return
		}
	}
	t.Error("the stream of a response that was deleted ended without an event")
}

// streamed returns the id of the response of a stream.
func streamed(t *testing.T, answer string) string {
	t.Helper()
	var first struct{ Response struct{ ID string } }
	_, data, _ := strings.Cut(answer, "data: ")
	if err := json.NewDecoder(strings.NewReader(data)).Decode(&first); err != nil {
		t.Fatal(err)
	}
	return first.Response.ID
}

// A response goes on from another one, in the container of that.
func TestPreviousResponses(t *testing.T) {
	w := newWorld(t, `rules: [{role: user, match: first, calls: [{name: code_interpreter, arguments: {code: "1"}}]}, `+
		`{role: user, match: second, calls: [{name: code_interpreter, arguments: {code: "2"}}]}, {text: ok}]`)
	w.host.Result = proto.Exited(0)
	w.host.Result.Stdout = "forty-two"
	_, answer := w.ask(openAI, interpreter, `"input":"first"`)
	one := decode(t, answer)
	_, answer = w.ask(openAI, interpreter, `"input":"second"`, `"previous_response_id":"`+one.ID+`"`)
	two := decode(t, answer)
	if two.Status != "completed" || two.Output[0]["container_id"] != one.Output[0]["container_id"] {
		t.Errorf("%s", answer)
	}
	status, answer := w.ask(openAI, `"input":"third"`, `"previous_response_id":"`+two.ID+`"`)
	if said := w.lastRequest(); status != http.StatusOK || strings.Count(said, "forty-two") != 2 ||
		!strings.Contains(said, "first") || !strings.Contains(said, "second") {
		t.Errorf("%d %s: the model was asked %s", status, answer, said)
	}
	if status, answer := w.do(http.MethodDelete, openAI+"/"+two.ID, ""); status != http.StatusOK ||
		!strings.Contains(answer, `"deleted":true`) {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := w.ask(openAI, `"input":"x"`, `"previous_response_id":"`+two.ID+
		`"`); status != http.StatusBadRequest || *decode(t, answer).param() != "previous_response_id" {
		t.Errorf("%d %s", status, answer)
	}
	_, answer = w.ask(openAI, `"input":"x"`, `"store":false`)
	if status, answer := w.do(http.MethodGet, openAI+"/"+decode(t, answer).ID, ""); status != http.StatusNotFound {
		t.Errorf("%d %s", status, answer)
	}
}

// A conversation does not grow without end, and no request needs more memory than there is.
func TestLongChains(t *testing.T) {
	w := newWorld(t, allRules)
	input, previous, links := `"input":"`+strings.Repeat("<b> ", 512<<10)+`"`, `"previous_response_id":null`, 0
	for {
		status, answer := w.ask(openAI, input, previous)
		r := decode(t, answer)
		if status != http.StatusOK {
			if status != http.StatusBadRequest || *r.param() != "previous_response_id" || links != 3 {
				t.Errorf("after %d links: %d %s", links, status, answer)
			}
			break
		}
		previous = `"previous_response_id":"` + r.ID + `"`
		links++
	}
	w.host.SetMemory(w.host.Reserved() + 1<<20)
	if status, answer := w.ask(openAI, `"input":"x"`, previous); status != http.StatusServiceUnavailable {
		t.Errorf("%d %s", status, answer)
	}
}

// A response of Perplexity is stored unless it says otherwise, and another one goes on from it.
func TestPreviousResponsesOfPerplexity(t *testing.T) {
	w := newWorld(t, `rules: [{role: user, match: first, calls: [{name: sandbox, arguments: {language: bash, code: `+
		`"1"}}, {name: f}]}, {text: ok}]`)
	w.host.Result = proto.Exited(0)
	w.host.Result.Stdout = "forty-two"
	const tools = `"tools":[{"type":"sandbox"},{"type":"function","name":"f"}]`
	_, answer := w.ask(perplexity, tools, `"input":"first"`)
	one := decode(t, answer)
	if one.Status != "requires_action" || len(one.Output) != 2 {
		t.Fatalf("%s", answer)
	}
	if status, again := w.do(http.MethodGet, perplexity+"/"+one.ID, ""); status != http.StatusOK ||
		decode(t, again).Status != "requires_action" {
		t.Errorf("%d %s", status, again)
	}
	result := fmt.Sprintf(`"input":[{"type":"function_call_output","call_id":"%v","output":"sunny"}]`,
		one.Output[1]["call_id"])
	status, answer := w.ask(perplexity, tools, result, `"previous_response_id":"`+one.ID+`"`)
	if said := w.lastRequest(); status != http.StatusOK || !strings.Contains(answer, one.ID) ||
		!strings.Contains(said, "first") || !strings.Contains(said, "forty-two") || !strings.Contains(said, "sunny") {
		t.Errorf("%d %s: the model was asked %s", status, answer, said)
	}
	_, answer = w.ask(perplexity, `"input":"x"`, `"store":false`)
	id := decode(t, answer).ID
	if status, answer := w.do(http.MethodGet, perplexity+"/"+id, ""); status != http.StatusNotFound {
		t.Errorf("%d %s", status, answer)
	}
	_, answer = w.ask(openAI, `"input":"x"`)
	for _, previous := range []string{id, decode(t, answer).ID} { // the other one is OpenAI's
		if status, answer := w.ask(perplexity, `"input":"x"`, `"previous_response_id":"`+previous+
			`"`); status != http.StatusBadRequest || *decode(t, answer).param() != "previous_response_id" {
			t.Errorf("%d %s", status, answer)
		}
	}
}

// OpenAI's SDK for Go asks for a stream in the body of a GET request.
func TestStreamsThatABodyAsksFor(t *testing.T) {
	w := newWorld(t, allRules)
	w.runBackground()
	_, answer := w.ask(openAI, `"background":true`, `"stream":true`)
	all := events(t, answer)
	_, id, _ := strings.Cut(answer, `"id":"`)
	id, _, _ = strings.Cut(id, `"`)
	path := openAI + "/" + id + "?starting_after=1"
	if _, answer := w.do(http.MethodGet, path, `{"stream":true}`); len(all) < 3 ||
		!slices.Equal(events(t, answer), all[2:]) {
		t.Errorf("%s", answer)
	}
	for _, body := range []string{`{"stream":false}`, `{`, "true"} {
		if status, answer := w.do(http.MethodGet, path, body); status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
}

func (r *response) param() *string { return &r.Error.Param }

// The model's server gets the schema that a client gives for the texts.
func TestSchemasArePassedOn(t *testing.T) {
	w := newWorld(t, allRules)
	for path, member := range map[string]string{
		openAI: `"text":{"format":{"type":"json_schema","name":"n","strict":true,"schema":{"type":"object"}}}`,
		perplexity: `"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,` +
			`"schema":{"type":"object"}}}`,
	} {
		status, answer := w.ask(path, member)
		const want = `"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object"},` +
			`"strict":true}}`
		if said := w.lastRequest(); status != http.StatusOK || !strings.Contains(said, want) {
			t.Errorf("%d %s: the model was asked %s", status, answer, said)
		}
		if path == openAI && !strings.Contains(answer, member) {
			t.Errorf("the response does not repeat the format: %s", answer)
		}
	}
}
