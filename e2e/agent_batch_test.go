package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	schema "github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

const messageBatches = messagesPath + "/batches"

type messageBatch struct {
	ID     string
	Status string         `json:"processing_status"`
	Counts map[string]int `json:"request_counts"`
	URL    *string        `json:"results_url"`

	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

// messageResult is a line of the results of a batch of messages.
type messageResult struct {
	CustomID string `json:"custom_id"`
	Result   struct {
		Type    string
		Message agentMessage
		Error   struct {
			Error struct{ Type, Message string }
		}
	}
}

// newMessages returns a batch with a message for each text.
func newMessages(texts ...string) request {
	var list []request
	for i, text := range texts {
		list = append(list, request{"custom_id": fmt.Sprint("r", i), "params": agentRequest("20250825", text)})
	}
	return request{"requests": list}
}

// messagesEnded waits for the end of a batch, and returns it with its results.
func (a *api) messagesEnded(t *testing.T, id string) (*messageBatch, []messageResult) {
	t.Helper()
	var b messageBatch
	eventually(t, "the batch has ended", func() (bool, any) {
		r := a.get(messageBatches + "/" + id)
		r.into(t, &b)
		return b.Status == "ended", r
	})
	if b.URL == nil || !strings.HasPrefix(*b.URL, a.base) {
		t.Fatalf("the results are at %v", b.URL)
	}
	var results []messageResult
	for line := range bytes.Lines(a.get(strings.TrimPrefix(*b.URL, a.base)).body) {
		var one messageResult
		if err := json.Unmarshal(line, &one); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		results = append(results, one)
	}
	return &b, results
}

// testMessageBatches runs batches of messages.
func testMessageBatches(t *testing.T, sys *system) {
	t.Run("each request has a result of its own", func(t *testing.T) {
		t.Parallel()
		a := sys.in(t)
		body := newMessages("mean and standard deviation", "Fail", "Break", "Hi")
		list, _ := body["requests"].([]request)
		body["requests"] = append(list, request{"custom_id": "none", "params": request{"model": "m"}})
		var b messageBatch
		a.do(http.MethodPost, messageBatches, body).into(t, &b)
		ended, results := a.messagesEnded(t, b.ID)
		var types []string
		for _, r := range results {
			types = append(types, r.CustomID+" "+r.Result.Type+" "+r.Result.Error.Error.Type)
		}
		want := []string{
			"r0 succeeded ", "r1 succeeded ", "r2 errored api_error", "r3 succeeded ",
			"none errored invalid_request_error",
		}
		if !slices.Equal(types, want) || ended.Counts["succeeded"] != 3 || ended.Counts["errored"] != 2 {
			t.Errorf("%q, %v", types, ended.Counts)
		}
		if out := results[0].Result.Message.result(t).Content.Stdout; out != "5.5 2.8723\n" {
			t.Errorf("%q", out)
		}
		if code := results[1].Result.Message.result(t).Content.ReturnCode; code != 3 ||
			results[1].Result.Message.Container.ID == "" {
			t.Errorf("%+v", results[1])
		}
		var page struct {
			Data []messageBatch
			More bool `json:"has_more"`
		}
		if a.get(messageBatches+"?limit=1").into(t, &page); len(page.Data) != 1 {
			t.Errorf("%+v", page)
		}
		// They are not among the batches of executions, and not another organisation's.
		own := "/v1/batches/bat_" + strings.TrimPrefix(b.ID, "msgbatch_")
		secret, _ := a.newKey("batch-strangers", "enterprise")
		for _, c := range []struct {
			a            *api
			method, path string
		}{
			{a, http.MethodGet, own},
			{a, http.MethodPost, own + "/cancel"},
			{a, http.MethodDelete, own},
			{a, http.MethodGet, own + "/results"},
			{a.with(secret), http.MethodGet, messageBatches + "/" + b.ID},
			{a.with(secret), http.MethodGet, messageBatches + "/" + b.ID + "/results"},
			{a.with(secret), http.MethodPost, messageBatches + "/" + b.ID + "/cancel"},
			{a.with(secret), http.MethodDelete, messageBatches + "/" + b.ID},
		} {
			if r := c.a.do(c.method, c.path, nil); r.status != http.StatusNotFound {
				t.Errorf("%s %s: %s", c.method, c.path, r)
			}
		}
		if r := a.do(http.MethodDelete, messageBatches+"/"+b.ID, nil); r.status != http.StatusOK {
			t.Errorf("%s", r)
		}
		if r := a.get(messageBatches + "/" + b.ID); r.status != http.StatusNotFound {
			t.Errorf("%s", r)
		}
	})
	t.Run("a batch is cancelled", func(t *testing.T) {
		t.Parallel()
		a := sys.in(t)
		var b messageBatch
		a.do(http.MethodPost, messageBatches, newMessages("Hi", "Sleep", "Sleep")).into(t, &b)
		eventually(t, "a request has ended", func() (bool, any) {
			r := a.get(messageBatches + "/" + b.ID)
			r.into(t, &b)
			return b.Counts["succeeded"] == 1, r
		})
		if r := a.do(http.MethodDelete, messageBatches+"/"+b.ID, nil); r.status != http.StatusBadRequest {
			t.Errorf("a batch that goes on was deleted: %s", r)
		}
		if r := a.do(http.MethodPost, messageBatches+"/"+b.ID+"/cancel", nil); r.status != http.StatusOK ||
			!bytes.Contains(r.body, []byte(`"canceling"`)) {
			t.Errorf("%s", r)
		}
		ended, results := a.messagesEnded(t, b.ID)
		if ended.Counts["canceled"] != 2 || len(results) != 3 || results[1].Result.Type != "canceled" {
			t.Errorf("%+v %+v", ended, results)
		}
	})
	t.Run("batches are checked", func(t *testing.T) {
		t.Parallel()
		twice := newMessages("Hi", "Hi")
		list, _ := twice["requests"].([]request)
		list[1]["custom_id"] = "r0"
		for _, body := range []request{
			{},
			{"requests": []request{}},
			twice,
			{"requests": []request{{"custom_id": "x"}}},
			{"requests": []request{{"params": request{}}}},
		} {
			if r := sys.in(t).do(http.MethodPost, messageBatches, body); r.status != http.StatusBadRequest ||
				!bytes.Contains(r.body, []byte("invalid_request_error")) {
				t.Errorf("%v: %s", body, r)
			}
		}
		many := request{"model": "m", "stop_sequences": make([]int, schema.MaxValues)}
		body := request{"requests": []request{{"custom_id": "x", "params": many}}}
		if r := sys.in(t).do(http.MethodPost, messageBatches, body); r.status != http.StatusBadRequest ||
			!bytes.Contains(r.body, []byte("must have at most 100000 values")) {
			t.Errorf("too many values: %s", r)
		}
	})
}

// testMessageBatchesKilled kills the server while a batch of messages runs. Each request has one
// result, and ran once.
func testMessageBatchesKilled(t *testing.T, p *programs) {
	sys := &crashSystem{system: newAgents(t, p.faulty(t), "anthropic"), died: map[fault.Point]bool{}}
	texts := slices.Repeat([]string{"Write a file with a random number"}, 40)
	var b messageBatch
	sys.do(http.MethodPost, messageBatches, newMessages(texts...)).into(t, &b)
	for some := 5; some < 40; some += 15 {
		eventually(t, "some requests have ended", func() (bool, any) {
			r := sys.get(messageBatches + "/" + b.ID)
			r.into(t, &b)
			return b.Counts["succeeded"] >= some, r
		})
		sys.front.kill()
		sys.startFront(t)
		sys.ready(t)
	}
	ended, results := sys.messagesEnded(t, b.ID)
	if ended.Counts["succeeded"] != len(texts) || len(results) != len(texts) {
		t.Errorf("%+v, %d results", ended, len(results))
	}
	for _, r := range results {
		if r.Result.Type != "succeeded" ||
			strings.Count(fmt.Sprint(r.Result.Message.Content), "bash_code_execution_tool_result") != 1 {
			t.Errorf("%+v", r)
		}
		var list struct{ Executions []record }
		eventually(t, "the index has the executions", func() (bool, any) {
			answer := sys.get("/v1/executions?metadata.agent_run=" + r.Result.Message.ID)
			answer.into(t, &list)
			return len(list.Executions) > 0, answer
		})
		if len(list.Executions) != 1 {
			t.Errorf("%s ran %d times", r.CustomID, len(list.Executions))
		}
	}
	sys.testEditsKilled(t)
}

// testEditsKilled kills the server after each edit of a message and before its result is stored, and again
// when it goes on with the first one. The file is edited once.
func (sys *crashSystem) testEditsKilled(t *testing.T) {
	first := fault.AfterAgentChangeBeforeResult
	sys.front.kill()
	sys.startDying(t, first, sys.startFront)
	sys.ready(t)
	var b messageBatch
	sys.do(http.MethodPost, messageBatches, newMessages("Grow a file")).into(t, &b)
	sys.awaitCrash(t, first, sys.front)
	for _, at := range []fault.Point{first, first + ":2"} { // it may die before it is listening
		sys.startDying(t, at, func(t *testing.T) {
			t.Helper()
			sys.front = sys.programs.launchServe(t, "front", sys.env, append([]string{"--data", sys.data}, sys.args...)...)
		})
		sys.awaitCrash(t, at, sys.front)
	}
	sys.startFront(t)
	sys.ready(t)
	_, results := sys.messagesEnded(t, b.ID)
	var content []agentBlock
	for _, block := range results[0].Result.Message.Content {
		if strings.HasSuffix(block.Type, "_tool_result") {
			content = append(content, block)
		}
	}
	if len(content) != 3 || content[0].Content.IsFileUpdate ||
		!slices.Equal(content[1].Content.Lines, []string{"-x", "+xy"}) || content[2].Content.Stdout != "xy" {
		t.Errorf("%+v", results)
	}
}

// testMessageBatchesExpired has a batch of messages expire while no gateway runs. The one that finds it
// has no server with models. The batch is deleted then, and all gateways are killed.
func testMessageBatchesExpired(t *testing.T, p *programs) {
	sys := newAgentsIn(t, p, topology{separate: true}, "anthropic")
	var b messageBatch
	sys.do(http.MethodPost, messageBatches, newMessages("Hi", "Sleep", "Sleep")).into(t, &b)
	if life := b.ExpiresAt.Sub(b.CreatedAt); life != 24*time.Hour {
		t.Errorf("it expires after %s", life)
	}
	eventually(t, "a request has ended", func() (bool, any) {
		r := sys.get(messageBatches + "/" + b.ID)
		r.into(t, &b)
		return b.Counts["succeeded"] == 1, r
	})
	sys.front.kill()
	js, err := jetstream.New(connect(t, p, sys.broker))
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := js.KeyValue(t.Context(), "bullpen_batches")
	if err != nil {
		t.Fatal(err)
	}
	key := "def.default.bat_" + strings.TrimPrefix(b.ID, "msgbatch_")
	entry, err := bucket.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	var stored request
	if err := json.Unmarshal(entry.Value(), &stored); err != nil {
		t.Fatal(err)
	}
	stored["expires_at"] = time.Now()
	body, err := json.Marshal(stored)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bucket.Update(t.Context(), key, body, entry.Revision()); err != nil {
		t.Fatal(err)
	}
	settings := sys.args
	sys.args = sys.broker.flags(p)
	sys.startFront(t)
	eventually(t, "the batch is stopped", func() (bool, any) {
		_, ok := sys.front.findLog(t, "batch stopped")
		return ok, sys.front.tail()
	})
	second, base := p.startServe(t, "second front", sys.env,
		append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", frontRole}, settings...)...)
	a := &api{t, base, sys.key, sys.http}
	ended, results := a.messagesEnded(t, b.ID)
	if ended.Counts["succeeded"] != 1 || ended.Counts["expired"] != 2 || len(results) != 3 {
		t.Fatalf("%+v, %+v", ended, results)
	}
	for i, want := range []string{"succeeded", "expired", "expired"} {
		if results[i].Result.Type != want {
			t.Errorf("%+v, want %s", results[i], want)
		}
	}
	logs := func() uint64 {
		t.Helper()
		s, err := js.Stream(t.Context(), "BULLPEN_AGENT_LOGS")
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.Msgs
	}
	if logs() == 0 {
		t.Error("the messages have no logs")
	}
	if r := a.do(http.MethodDelete, messageBatches+"/"+b.ID, nil); r.status != http.StatusOK {
		t.Errorf("%s", r)
	}
	sys.front.kill()
	second.kill()
	sys.startFront(t)
	eventually(t, "the logs of the messages are removed", func() (bool, any) { left := logs(); return left == 0, left })
}
