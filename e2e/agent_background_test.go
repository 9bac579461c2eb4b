package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// agentRuns is a deployment with responses in the background.
type agentRuns struct {
	*system
	hooks  *receiver
	secret string // of webhooks
	// Ids of webhooks by those of their responses: those that came, and those of them that may come again
	// because their sender was killed.
	came, again map[string]string
}

// testAgentBackground kills the process that carries out responses in the background, and reads,
// cancels and deletes them as their clients and as strangers do.
func testAgentBackground(t *testing.T, p *programs, in topology) {
	hooks := startReceiver(t)
	sys := &agentRuns{
		system: newAgentsIn(t, p.faulty(t), in, "background", hooks.flags...), hooks: hooks,
		came: map[string]string{}, again: map[string]string{},
	}
	sys.secret = sys.settings(http.MethodPut, "/v1/webhook", request{"url": hooks.url + "/200"})
	sys.killed(t)
	for _, at := range fault.AgentPoints() {
		if at != fault.AfterAgentChangeBeforeResult { // message-batches-killed has that
			sys.killedAt(t, at)
		}
	}
	if in.separate {
		sys.storeRestarted(t)
	}
	t.Run("cancelled", sys.cancelled)
	t.Run("deleted", sys.deleted)
	t.Run("key revoked", sys.keyRevoked)
	t.Run("strangers", sys.strangers)
}

func inBackground(input string) request {
	return request{
		"model": "any", "input": input, "background": true,
		"tools": []request{{"type": "shell", "environment": request{"type": "container_auto"}}},
	}
}

// respond creates a response in the background, and returns its id.
func (a *api) respond(input string) string {
	a.t.Helper()
	answer := a.do(http.MethodPost, openAIPath, inBackground(input))
	var r agentResponse
	if answer.into(a.t, &r); answer.status != http.StatusOK || r.Status != "queued" {
		a.t.Fatalf("%s", answer)
	}
	return r.ID
}

// response returns a response after its end.
func (a *api) response(id string) *agentResponse {
	a.t.Helper()
	var r agentResponse
	eventually(a.t, id+" ends", func() (bool, any) {
		answer := a.get(openAIPath + "/" + id)
		r = agentResponse{}
		answer.into(a.t, &r)
		return answer.status == http.StatusOK && r.Status != "queued" && r.Status != "in_progress", answer
	})
	return &r
}

// calls waits until the index has n executions of a response, and returns them, the oldest first.
func (a *api) calls(run string, n int) []record {
	a.t.Helper()
	var list struct{ Executions []record }
	eventually(a.t, fmt.Sprintf("there are %d executions of %s", n, run), func() (bool, any) {
		r := a.get("/v1/executions?metadata.agent_run=" + run)
		list.Executions = nil
		r.into(a.t, &list)
		return len(list.Executions) == n, r
	})
	slices.SortFunc(list.Executions, func(x, y record) int { return x.CreatedAt.Compare(y.CreatedAt) })
	return list.Executions
}

// agentStream is the events of a stream of a response that were read, in short form.
type agentStream struct {
	id     string
	events []string
}

// read reads events whose numbers go on from those that were read, until one has a type, or to the end.
func (s *agentStream) read(t testing.TB, a *api, method, path string, body any, until string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := a.open(ctx, method, path, body)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	for in := bufio.NewScanner(resp.Body); in.Scan(); {
		data, ok := strings.CutPrefix(in.Text(), "data: ")
		if !ok {
			continue
		}
		var e struct {
			Type     string
			Delta    json.RawMessage
			Number   int `json:"sequence_number"`
			Response struct{ ID string }
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil || e.Number != len(s.events) {
			t.Fatalf("%v: event %d is %s", err, len(s.events), data)
		}
		if s.id == "" {
			s.id = e.Response.ID
		}
		if s.events = append(s.events, e.Type+" "+string(e.Delta)); e.Type == until {
			return
		}
	}
	if until != "" {
		t.Fatalf("the stream ended without %s: %s with %q", until, resp.Status, s.events)
	}
}

// resume reads the rest of a stream that was cut.
func (s *agentStream) resume(t testing.TB, a *api) {
	t.Helper()
	s.read(t, a, http.MethodGet,
		fmt.Sprintf("%s/%s?stream=true&starting_after=%d", openAIPath, s.id, len(s.events)-1), nil, "")
	var whole agentStream
	whole.read(t, a, http.MethodGet, openAIPath+"/"+s.id+"?stream=true", nil, "")
	if !slices.Equal(whole.events, s.events) || s.events[len(s.events)-1] != "response.completed " {
		t.Errorf("in parts %q\nat once %q", s.events, whole.events)
	}
}

// killed kills the process that carries out runs while one has an execution, one is in the first of
// two calls, and one in a turn of the model.
func (sys *agentRuns) killed(t *testing.T) {
	h := []hold{newHold(), newHold(), newHold()}
	one := sys.respond("hold " + h[0].seconds)
	var two, talk agentStream
	two.read(t, sys.api, http.MethodPost, openAIPath,
		inBackground("hold "+h[1].seconds+" then "+h[2].seconds).and("stream", true), "response.shell_call_command.done")
	talk.read(t, sys.api, http.MethodPost, openAIPath, inBackground("hang once").and("stream", true),
		"response.output_text.delta")
	h[0].reached(t, 1)
	h[1].reached(t, 1)
	sys.front.kill()
	h[1].release(t)
	if sys.separate { // the call ends while nobody waits for it
		h[1].reached(t, 0)
	}
	sys.startFront(t)
	sys.ready(t)
	talk.resume(t, sys.api)
	r := sys.response(talk.id)
	if r.Status != "completed" || len(r.Output) != 2 ||
		!strings.HasPrefix("I begin to talk", r.Output[0].Content[0].Text) || r.Output[1].Content[0].Text != "This is all." {
		t.Errorf("%+v", r)
	}
	h[2].reached(t, 1)
	if sys.separate {
		h[0].reached(t, 1)
	}
	h[0].release(t)
	h[2].release(t)
	two.resume(t, sys.api)
	for id, n := range map[string]int{one: 1, two.id: 2} {
		r := sys.response(id)
		if r.Status != "completed" || r.Output[len(r.Output)-1].Content[0].Text != "I have the results." {
			t.Errorf("%+v", r)
		}
		if answer := sys.get(openAIPath + "/" + id); bytes.Contains(answer.body, []byte("was lost")) == sys.separate {
			t.Errorf("a call whose worker is lost says so, and no other: %s", answer.body)
		}
		for i, x := range sys.calls(id, n) {
			switch {
			case !sys.separate && i == 0:
				sys.ended(x.TraceID).failed(t, "failed", "worker_lost", "was lost")
			case sys.separate:
				sys.ended(x.TraceID).succeeded(t, "one\ntwo\n"[:4*(i+1)])
			}
		}
	}
	sys.notified(t, "completed", one, two.id, talk.id)
}

// notified waits for one webhook for each of these responses, and checks that no other comes before.
func (sys *agentRuns) notified(t *testing.T, status string, ids ...string) {
	t.Helper()
	got := map[string]string{}
	for len(got) < len(ids) {
		p := sys.hooks.next(t)
		p.verify(t, sys.secret)
		var body struct {
			ID, Object, Type string
			CreatedAt        int64 `json:"created_at"`
			Data             struct{ ID string }
		}
		if err := json.Unmarshal(p.body, &body); err != nil {
			t.Fatal(err)
		}
		id := body.Data.ID
		if first, ok := sys.again[id]; ok && first == p.id {
			continue
		}
		if body.Type != "response."+status || body.Object != "event" || !strings.HasPrefix(body.ID, "evt_") ||
			body.CreatedAt == 0 || !slices.Contains(ids, id) || got[id] != "" {
			t.Errorf("webhook %s, want one that says that one of %q is %s", p.body, ids, status)
		}
		got[id] = p.id
	}
	maps.Copy(sys.came, got)
}

// killedAt kills the process that carries out runs at a step at the end of one.
func (sys *agentRuns) killedAt(t *testing.T, at fault.Point) {
	eventually(t, "no run is active", func() (bool, any) { // it would pass the step at the start
		data := sys.stored(t, "default")
		return data["active runs of agents"] == 0, data
	})
	sys.front.kill()
	maps.Copy(sys.again, sys.came)
	clean := sys.env
	sys.env = append(slices.Clone(clean), "BULLPEN_CRASH_AT="+string(at))
	sys.startFront(t)
	sys.ready(t)
	sys.env = clean
	id := sys.respond("Hello")
	sys.front.exitCode(t)
	sys.startFront(t)
	sys.ready(t)
	if r := sys.response(id); r.Status != "completed" || len(r.Output) != 1 || r.Output[0].Content[0].Text != "Hello!" {
		t.Errorf("%s: %+v", at, r)
	}
	if sys.notified(t, "completed", id); at == fault.AfterAgentWebhookBeforeFinish {
		sys.again[id] = sys.came[id]
	}
	// Another one ends, and its webhook is the only one that comes then.
	sys.notified(t, "completed", sys.respond("Hello"))
}

func (sys *agentRuns) storeRestarted(t *testing.T) {
	t.Helper()
	a, h := sys.api, newHold()
	id := a.respond("hold " + h.seconds)
	h.reached(t, 1)
	sys.broker.kill()
	sys.broker.restart(t, sys.programs)
	sys.ready(t)
	h.release(t)
	if r := a.response(id); r.Status != "completed" {
		t.Errorf("%+v", r)
	}
	a.ended(a.calls(id, 1)[0].TraceID).succeeded(t, "one\n")
	sys.notified(t, "completed", id)
}

func (sys *agentRuns) cancelled(t *testing.T) {
	a, h := sys.in(t), newHold()
	id := a.respond("hold " + h.seconds)
	h.reached(t, 1)
	var r agentResponse
	answer := a.do(http.MethodPost, openAIPath+"/"+id+"/cancel", nil)
	answer.into(t, &r)
	if answer.status != http.StatusOK || r.Status != "cancelled" && r.Status != "in_progress" { // if its end takes longer
		t.Errorf("%s", answer)
	}
	if r := a.response(id); r.Status != "cancelled" {
		t.Errorf("%+v", r)
	}
	if x := a.ended(a.calls(id, 1)[0].TraceID); x.Status != string(proto.StatusCancelled) {
		t.Errorf("%s", x)
	}
	h.reached(t, 0)
	sys.notified(t, "cancelled", id)
}

func (sys *agentRuns) deleted(t *testing.T) {
	secret, _ := sys.in(t).newKey("acme", "enterprise") // without webhooks, of which one may come
	a, h := sys.in(t).with(secret), newHold()
	var s agentStream
	s.read(t, a, http.MethodPost, openAIPath, inBackground("hold "+h.seconds).and("stream", true),
		"response.shell_call_command.done")
	h.reached(t, 1)
	follower := a.begin(http.MethodGet, openAIPath+"/"+s.id+"?stream=true", nil)
	if r := a.do(http.MethodDelete, openAIPath+"/"+s.id, nil); r.status != http.StatusOK ||
		!bytes.Contains(r.body, []byte(`"deleted":true`)) {
		t.Errorf("%s", r)
	}
	if r := a.get(openAIPath + "/" + s.id); r.status != http.StatusNotFound {
		t.Errorf("%s", r)
	}
	h.reached(t, 0)
	if x := a.ended(a.calls(s.id, 1)[0].TraceID); x.Status != string(proto.StatusCancelled) {
		t.Errorf("%s", x)
	}
	// It is cancelled first, and who is late finds nothing.
	if r := follower.answer(t); !bytes.Contains(r.body, []byte("response.cancelled")) &&
		!bytes.Contains(r.body, []byte("response.failed")) && r.status != http.StatusNotFound {
		t.Errorf("who follows it: %s", r)
	}
}

func (sys *agentRuns) keyRevoked(t *testing.T) {
	a, h := sys.in(t), newHold()
	secret, key := a.newKey("acme", "enterprise")
	other, _ := a.newKey("acme", "enterprise")
	id := a.with(secret).respond("hold " + h.seconds + " then 0")
	h.reached(t, 1)
	if r := a.do(http.MethodDelete, "/v1/admin/keys/"+key, nil); r.status != http.StatusOK {
		t.Fatalf("%s", r)
	}
	reader := a.with(other)
	r := reader.response(id)
	answer := reader.get(openAIPath + "/" + id)
	if r.Status != "failed" || !bytes.Contains(answer.body, []byte("revoked")) {
		t.Errorf("%s", answer)
	}
	if x := reader.ended(reader.calls(id, 1)[0].TraceID); x.Status != string(proto.StatusCancelled) {
		t.Errorf("%s", x)
	}
	if bytes.Contains(answer.body, []byte(secret)) || strings.Contains(sys.front.text(t), secret) {
		t.Error("the response or the log has the secret of the key")
	}
	if sys.separate {
		if found := messagesWith(t, connect(t, sys.programs, sys.broker), secret); len(found) > 0 {
			t.Errorf("the secret of the key is in %q", found)
		}
	}
}

// strangers checks what other organisations and invalid requests get.
func (sys *agentRuns) strangers(t *testing.T) {
	a, h := sys.in(t), newHold()
	id := a.respond("hold " + h.seconds)
	h.reached(t, 1)
	secret, _ := a.newKey("strangers", "enterprise")
	other := a.with(secret)
	absent := func(a *api, id string) {
		t.Helper()
		path := openAIPath + "/" + id
		for _, r := range []*reply{
			a.get(path), a.get(path + "?stream=true"), a.do(http.MethodPost, path+"/cancel", nil),
			a.do(http.MethodDelete, path, nil),
		} {
			if r.status != http.StatusNotFound {
				t.Errorf("%s: %s", id, r)
			}
		}
		r := a.do(http.MethodPost, openAIPath, inBackground("Hello").and("previous_response_id", id))
		if r.status != http.StatusBadRequest || !bytes.Contains(r.body, []byte(`"param":"previous_response_id"`)) {
			t.Errorf("%s: %s", id, r)
		}
	}
	absent(other, id)
	for _, bad := range []string{
		"resp_*", "resp_.%2A", "resp_%3E", "*", "%3E", "resp_a.b", "resp_%20", "resp_%00",
		"resp_" + strings.Repeat("x", 200), "resp_%2e%2e", "resp_a%2Fb", id + ".x", "strangers." + id,
	} {
		absent(a, bad)
	}
	for _, query := range []string{
		"?starting_after=x&stream=true", "?starting_after=-2&stream=true",
		"?starting_after=99999999999999999999&stream=true", "?starting_after=0", "?stream=true",
	} {
		if r := a.get(openAIPath + "/" + id + query); r.status != http.StatusBadRequest {
			t.Errorf("%s: %s", query, r)
		}
	}
	h.reached(t, 1) // nothing has ended it
	h.release(t)
	if r := a.response(id); r.Status != "completed" {
		t.Errorf("%+v", r)
	}
	sys.notified(t, "completed", id)
}

// testAgentRolling stops each gateway that may carry out a run, while another one is there. A response
// that is not in the background fails with its gateway.
func testAgentRolling(t *testing.T, p *programs) {
	sys := newAgentsIn(t, p, topology{separate: true}, "background", "--drain", "1s")
	gateway := func(name string) (*process, *api) {
		args := append([]string{"--data", filepath.Join(t.TempDir(), name), "--roles", frontRole}, sys.args...)
		proc, base := p.startServe(t, name+" front", sys.env, args...)
		return proc, &api{t, base, sys.key, sys.http}
	}
	second, _ := gateway("second")
	h := []hold{newHold(), newHold()}
	id := sys.respond("hold " + h[0].seconds + " then " + h[1].seconds)
	resp, err := sys.open(t.Context(), http.MethodPost, openAIPath,
		inBackground("hang once").and("background", false, "stream", true))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	cut, events := "", bufio.NewScanner(resp.Body)
	for events.Scan() && !strings.Contains(events.Text(), "output_text.delta") {
		if _, rest, ok := strings.Cut(events.Text(), `"id":"resp_`); ok {
			cut, _, _ = strings.Cut("resp_"+rest, `"`)
		}
	}
	for i, stopped := range []*process{sys.front, second} {
		h[i].reached(t, 1)
		if i == 1 {
			_, sys.api = gateway("third")
		}
		stopped.signal(syscall.SIGTERM)
		if code := stopped.exitCode(t); code != 0 {
			t.Errorf("%s ended with %d:\n%s", stopped.name, code, stopped.tail())
		}
		h[i].release(t)
	}
	if r := sys.response(id); r.Status != "completed" ||
		r.Output[len(r.Output)-1].Content[0].Text != "I have the results." {
		t.Errorf("%+v", r)
	}
	for i, x := range sys.calls(id, 2) {
		sys.ended(x.TraceID).succeeded(t, "one\ntwo\n"[:4*(i+1)])
	}
	last := ""
	for events.Scan() {
		last = cmp.Or(events.Text(), last)
	}
	answer := sys.get(openAIPath + "/" + cut)
	for _, text := range []string{last, string(answer.body)} {
		if !strings.Contains(text, `"status":"failed"`) || !strings.Contains(text, "this server is shutting down") {
			t.Errorf("the response in the foreground: %s", text)
		}
	}
}

// testAgentFlood has an organisation begin as many runs as it may, whose models do not answer. Others
// are served meanwhile, and nothing of it remains after its deletion.
func testAgentFlood(t *testing.T, p *programs) {
	sys := newAgentsIn(t, p, topology{separate: true}, "background")
	const marker, clients = "marker-of-flood", 32
	secret, _ := sys.newKey("flood", "enterprise")
	flood := sys.with(secret)
	begin := func() (*reply, error) {
		return flood.try(t.Context(), http.MethodPost, openAIPath, inBackground("hang "+marker))
	}
	var all errgroup.Group
	all.SetLimit(clients)
	for range proto.MaxAgentRuns {
		all.Go(func() error {
			r, err := begin()
			if err == nil && r.status != http.StatusOK {
				err = errors.New(r.String())
			}
			return err
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
	r, err := begin()
	if err != nil {
		t.Fatal(err)
	}
	if r.retryAfter(t); r.status != http.StatusTooManyRequests || !bytes.Contains(r.body, []byte("rate_limit_error")) {
		t.Errorf("one more: %s", r)
	}
	if r := sys.response(sys.respond("Hello")); r.Status != "completed" {
		t.Errorf("meanwhile: %+v", r)
	}
	if peak := sys.front.status(t, "VmHWM"); peak > agentMemory {
		t.Errorf("the server used %s", peak)
	}
	if data := sys.stored(t, "flood"); data["active runs of agents"] != proto.MaxAgentRuns {
		t.Errorf("%v", data)
	}
	sys.command(t, sys.key, "org", "delete", "flood", "--yes")
	eventually(t, "the organisation is gone", func() (bool, any) {
		r := sys.get("/v1/admin/orgs/flood")
		return r.status == http.StatusNotFound, r
	})
	for kind, n := range sys.stored(t, "flood") {
		if n > 0 {
			t.Errorf("%d %s are left", n, kind)
		}
	}
	if found := messagesWith(t, connect(t, p, sys.broker), marker); len(found) > 0 {
		t.Errorf("the marker is in messages on %v", found)
	}
}
