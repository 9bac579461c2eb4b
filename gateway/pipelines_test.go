package gateway

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// pipelineStub keeps runs in memory. Their steps wait.
type pipelineStub struct {
	mu     sync.Mutex
	order  []string
	stored map[string]*proto.Pipeline // by organisation and id
	states map[string]*proto.PipelineState
	full   bool
}

func (*pipelineStub) Parse(file string) (*proto.Pipeline, error) { return spec.Parse(file) }
func (*pipelineStub) Schema() []byte                             { return spec.Schema }

func (s *pipelineStub) Create(
	ctx context.Context, p *proto.Pipeline, prepare func(context.Context) error,
) (*proto.PipelineState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.full {
		return nil, &proto.Rejection{Reason: proto.RejectedPipelines, Used: 20, Limit: 20}
	}
	if err := prepare(ctx); err != nil {
		return nil, err
	}
	state := &proto.PipelineState{
		ID: p.ID, Org: p.Org, Name: p.Name, Commit: p.Commit, Branch: p.Branch,
		CreatedAt: p.CreatedAt, Status: proto.PipelineRunning,
	}
	for i := range p.Steps {
		for _, cell := range p.Steps[i].Cells {
			state.Cells = append(state.Cells, proto.CellState{Step: p.Steps[i].Name, Cell: cell.Name, Status: proto.StepWaiting})
		}
	}
	id := p.Org + p.ID
	s.order, s.stored[id], s.states[id] = append(s.order, id), p, state
	return state, nil
}

func (s *pipelineStub) Page(
	org, after string, limit int, keep func(*proto.PipelineState) bool,
) ([]proto.PipelineState, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []proto.PipelineState
	for _, id := range s.order {
		all = append(all, *s.states[id])
	}
	place := func(p *proto.PipelineState) string { return fmt.Sprintf("%03d", slices.Index(s.order, p.Org+p.ID)) }
	return pageOf(slices.Values(all), func(p *proto.PipelineState) string { return p.Org }, place, org, after, limit, keep)
}

func (s *pipelineStub) Get(_ context.Context, org, id string) (*proto.PipelineState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state := s.states[org+id]; state != nil {
		return state, nil
	}
	return nil, proto.ErrNotFound
}

func (s *pipelineStub) Definition(_ context.Context, org, id string) (*proto.Pipeline, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.stored[org+id]; p != nil {
		return p, nil
	}
	return nil, proto.ErrNotFound
}

func (s *pipelineStub) Cancel(ctx context.Context, org, id string) (*proto.PipelineState, error) {
	state, err := s.Get(ctx, org, id)
	if err != nil {
		return nil, err
	}
	cancelling := *state
	cancelling.Cancelling = true
	return &cancelling, nil
}

func newPipelineHarness(t *testing.T) (*harness, *pipelineStub) {
	h, stub := newHarness(t),
		&pipelineStub{stored: map[string]*proto.Pipeline{}, states: map[string]*proto.PipelineState{}}
	h.server.Pipelines = stub
	h.remount()
	return h, stub
}

// pipelineBody returns the body of a request with a file.
func pipelineBody(file, rest string) string { return fmt.Sprintf(`{"file":%q%s}`, file, rest) }

const smallPipeline = "name: small\nsteps:\n  - {name: build, run: make, secrets: [TOKEN]}\n  - {name: test, run: " +
	"x, matrix: {k: [1, 2]}, artifacts: {all: [out]}}\n"

func TestPipelines(t *testing.T) {
	h, stub := newPipelineHarness(t)
	const secret = `,"secrets":{"TOKEN":"s3cret-value"}`
	made := h.do("POST", "/v1/pipelines", pipelineBody(smallPipeline, `,"commit":"4f2a91c","branch":"main"`+secret)).
		want(201, "")
	run := made.json()
	id := run["id"].(string)
	path := "/v1/pipelines/" + id
	if made.header.Get("Location") != path || run["name"] != "small" || run["status"] != "running" ||
		run["commit"] != "4f2a91c" || run["ended_at"] != nil {
		t.Errorf("created %v", run)
	}
	cells := run["cells"].([]any)
	if last := cells[2].(map[string]any); len(cells) != 3 || last["cell"] != "k=2" ||
		last["needs"].([]any)[0] != "build" || last["trace_id"] != nil {
		t.Errorf("cells %v", cells)
	}
	shown := h.do("GET", path, "").want(200, "")
	list := h.do("GET", "/v1/pipelines", "").want(200, "")
	if n := len(list.json()["pipelines"].([]any)); n != 1 || shown.json()["id"] != id {
		t.Errorf("%d runs; %v", n, shown.json())
	}
	if run := h.do("POST", path+"/cancel", "").want(200, "").json(); run["cancelling"] != true {
		t.Errorf("cancelled %v", run)
	}
	h.do("GET", "/v1/pipelines/schema", "").want(200, "")
	for _, r := range []*reply{made, shown, list} {
		if bytes.Contains(r.body, []byte("s3cret")) {
			t.Errorf("an answer has the secret: %s", r.body)
		}
	}
	if strings.Contains(h.log.String(), "s3cret") {
		t.Error("the log has the secret")
	}

	other := h.in(t)
	other.key = h.stub.addKey("other", "enterprise", asAdmin)
	for _, unknown := range []string{id, proto.NewPipelineID(), "run_x", "RUN_" + id[4:], id + "a"} {
		other.do("GET", "/v1/pipelines/"+unknown, "").want(404, "not_found")
		other.do("POST", "/v1/pipelines/"+unknown+"/cancel", "").want(404, "not_found")
	}
	if list := other.do("GET", "/v1/pipelines", "").want(200, "").json(); len(list["pipelines"].([]any)) != 0 {
		t.Errorf("another organisation sees %v", list)
	}
	nobody := h.in(t)
	nobody.key = "sk-local-zzzzzzzzzzzzzzzzzzzzzzzz"
	for _, route := range []string{
		"POST /v1/pipelines", "GET /v1/pipelines", "GET " + path, "POST " + path + "/cancel",
		"GET /v1/pipelines/schema",
	} {
		method, at, _ := strings.Cut(route, " ")
		nobody.do(method, at, "{}").want(401, "unauthorized")
	}
	h.addThread("acme", "notebook")
	made = h.do("POST", "/v1/pipelines", pipelineBody(smallPipeline, secret+`,"thread_id":"notebook"`)).want(201, "")
	if _, err := h.threads.Get(t.Context(), "acme", proto.RunThread(made.json()["id"].(string))); err != nil {
		t.Errorf("the copy of the thread: %v", err)
	}
	// Threads of another organisation are unknown.
	other.do("POST", "/v1/pipelines", pipelineBody(smallPipeline, secret+`,"thread_id":"notebook"`)).want(404, "not_found")
	stub.full = true
	r := h.do("POST", "/v1/pipelines", pipelineBody(smallPipeline, secret)).want(
		429, "rate_limited", "limit of pipelines that run at the same time reached (20/20)")
	if r.header.Get("Retry-After") != "30" {
		t.Errorf("headers %v", r.header)
	}
}

func TestArtifactsAndCaches(t *testing.T) {
	h, stub := newPipelineHarness(t)
	run := h.do("POST", "/v1/pipelines", pipelineBody(`
steps:
  - {name: build, run: x, artifacts: {out: [dist, "*.log"]}}
  - {name: test, run: x, matrix: {k: [1, 2]}, artifacts: {all: ["**"]}}
`, "")).want(201, "").json()["id"].(string)
	cells := stub.states["acme"+run].Cells
	for i := range 2 { // the last cell has not ended
		cells[i].Thread = proto.CellThread(run, i)
		h.addThread("acme", cells[i].Thread)
	}
	cells[0].Warnings = []string{"the cache deps is not saved: too large"}
	shown := h.do("GET", "/v1/pipelines/"+run, "").want(200, "").json()["cells"].([]any)
	first, last := shown[0].(map[string]any), shown[2].(map[string]any)
	if first["artifacts_kept"] != true || first["warnings"].([]any)[0] != cells[0].Warnings[0] ||
		last["artifacts_kept"] != false || len(last["warnings"].([]any)) != 0 {
		t.Errorf("%v", shown)
	}
	other := h.in(t)
	other.key = h.stub.addKey("other", "enterprise", asAdmin)
	for _, c := range []struct {
		query string
		code  int
		want  string
	}{
		{"?step=build&artifact=out", 200, "dist *.log"},
		{"?step=test&cell=k%3D1&artifact=all", 200, "**"},
		{"?step=test&cell=k%3D2&artifact=all", 404, "has not ended"},
		{"?step=test&artifact=all", 404, "no such cell"},
		{"?step=build&cell=k%3D1&artifact=out", 404, "no such cell"},
		{"?step=build&artifact=all", 404, "no such artifact"},
		{"?step=nothing&artifact=all", 404, "no such step"},
		{"?artifact=all", 400, "step must be given"},
		{"?step=build", 400, "artifact must be given"},
	} {
		path := "/v1/pipelines/" + run + "/artifacts" + c.query
		if r := h.do("GET", path, ""); r.status != c.code || !strings.Contains(string(r.body), c.want) ||
			c.code == 200 && r.header.Get("Content-Type") != "application/x-tar" {
			t.Errorf("%s: %d %.300s, want %d %s", c.query, r.status, r.body, c.code, c.want)
		}
		if c.code == 200 {
			other.do("GET", path, "").want(404, "not_found")
		}
	}
	for _, key := range []string{"a", "b", "c"} {
		h.addThread("acme", proto.OwnerCache.Thread(key))
	}
	page := h.do("GET", "/v1/pipelines/caches?limit=2", "").want(200, "").json()
	if list := page["caches"].([]any); len(list) != 2 || list[0].(map[string]any)["key"] != "a" ||
		page["next_cursor"] != "b" {
		t.Errorf("%v", page)
	}
	page = h.do("GET", "/v1/pipelines/caches?cursor=b", "").want(200, "").json()
	if list := page["caches"].([]any); len(list) != 1 || list[0].(map[string]any)["key"] != "c" ||
		page["next_cursor"] != nil {
		t.Errorf("%v", page)
	}
	user := h.in(t)
	user.key = h.stub.addKey("acme", "enterprise", proto.Key{Scopes: proto.UserScopes()})
	user.do("DELETE", "/v1/admin/caches/a", "").want(403, "forbidden")
	other.do("DELETE", "/v1/admin/caches/a", "").want(404, "not_found")
	h.do("DELETE", "/v1/admin/caches/a?org=acme", "").want(204, "")
	h.do("DELETE", "/v1/admin/caches/a?org=acme", "").want(404, "not_found")
	h.do("DELETE", "/v1/admin/caches/b%3Dc?org=acme", "").want(404, "not_found")
}

// What one cell alone would be refused for is refused with the line, with all values of the matrix in
// place. One byte order mark is left out, of the body and of the file.
func TestMatrixOfPipelines(t *testing.T) {
	h, _ := newPipelineHarness(t)
	body := pipelineBody("\ufeffsteps:\n  - name: a\n    matrix: {v: [x, y]}\n    run: echo ${{ matrix.v }}\n    env: "+
		"{V: \"v-${{ matrix.v }}\"}\n", "")
	h.do("POST", "/v1/pipelines", "\ufeff"+body).want(201, "")
	p, err := spec.Parse("steps:\n  - name: a\n    matrix: {v: [x, y]}\n    run: echo ${{ matrix.v }}\n    env: {V: " +
		"\"v-${{ matrix.v }}\"}\n")
	if err != nil {
		t.Fatal(err)
	}
	p.ID, p.Org, p.Key = proto.NewPipelineID(), "acme", "key_1"
	id, refused, err := h.admission.StartStep(t.Context(), p, 0, 1, proto.CellThread(p.ID, 1))
	if err != nil || refused != "" {
		t.Fatal(refused, err)
	}
	if job := h.stub.runs[id].job; job.Code != "set -eo pipefail; echo y" || job.Env["V"] != "v-y" ||
		job.Env["MATRIX_V"] != "y" {
		t.Errorf("%q %v", job.Code, job.Env)
	}
}

func TestInvalidPipelines(t *testing.T) {
	h, stub := newPipelineHarness(t)
	const step = "steps: [{name: a, run: x, secrets: [TOKEN]}]"
	token := `,"secrets":{"TOKEN":"long enough"}`
	for _, test := range []struct{ body, want string }{
		{`{}`, "file must be"},
		{`{"file":""}`, "file must be"},
		{`{"file":7}`, "file must be a string"},
		{`{"file":"` + strings.Repeat("#", proto.MaxPipelineFile+1) + `"}`, "file must be"},
		{`[]`, "body must be a JSON object"},
		{`{"file":"x","file":"y"}`, "file must be given only once"},
		{pipelineBody(step, `,"secrets":["TOKEN"]`), "secrets must be an object of strings"},
		{pipelineBody(step, `,"secrets":{"TOKEN":12345}`), "secrets.TOKEN must be a string"},
		{pipelineBody(step, token+`,"thread_id":7`), "thread_id must be a string"},
		{pipelineBody(step, token+`,"commit":7`), "commit must be a string"},
		{pipelineBody(step, token+`,"branch":["main"]`), "branch must be a string"},
		{pipelineBody("steps: []", ""), "line 1: "},
		{pipelineBody("steps: {}", ""), "line 1: "},
		{pipelineBody("steps: [{name: a}]", ""), "line 1: "},
		{pipelineBody("steps: [{name: a, run: x, timeout: soon}]", ""), "line 1: timeout"},
		{pipelineBody("steps: [{name: a, run: x, needs: {}}]", ""), "line 1: "},
		{pipelineBody("steps: [{name: a, run: x, matrix: {k: []}}]", ""), "line 1: "},
		{pipelineBody("steps: [{name: a, run: x}, {name: a, run: y}]", ""), "line 1: "},
		{pipelineBody("timeout: 8d\nsteps: [{name: a, run: x}]", ""), "line 1: timeout"},
		{pipelineBody(step, token+`,"secret":{}`), "secret is not known here"},
		{pipelineBody(step, ""), "secrets must have a value of TOKEN, which step a names; or"},
		{
			pipelineBody("steps: [{name: a, run: x, secrets: [TOKEN]}, {name: b, run: x, secrets: [TOKEN, OTHER]}]", ""),
			"secrets must have a value of TOKEN, which step a names, and of OTHER, which step b names; or",
		},
		{pipelineBody(step, `,"secrets":{"TOKEN":"abc"}`), "secrets must have at least 4 bytes"},
		{
			pipelineBody(step, `,"secrets":{"TOKEN":"long enough","OTHER":"long enough"}`),
			"secrets has OTHER, which no step names",
		},
		{pipelineBody(step, `,"secrets":{"token":"long enough"}`), "secrets"},
		{pipelineBody(step, token+`,"commit":"a\nb"`), "commit must be at most 256 characters"},
		{pipelineBody(step, token+`,"branch":"`+strings.Repeat("x", 257)+`"`), "branch must be at most 256 characters"},
		{pipelineBody(step, token+`,"thread_id":"../x"`), "thread_id"},
		{pipelineBody("steps:\n  - name: a\n    run: x\n    rnu: y\n", ""), "line 4"},
		{pipelineBody("steps:\n  - name: a\n    run: x\n  - name: b\n    run: x\n    needs: [c]\n", ""), "line "},
		{pipelineBody("steps:\n  - {name: a, run: x, needs: [b]}\n  - {name: b, run: x, needs: [a]}\n", ""), "line "},
		{pipelineBody("steps: [\n\n{", ""), "line "},
		{pipelineBody("steps:\n  - &a {name: a, run: x}\n  - *a\n", ""), "line "},
		{pipelineBody("steps: [{name: a, language: cobol, code: x}]", ""), "line 1"},
		{pipelineBody("steps: [{name: a, run: x, timeout: 7h}]", ""), "line 1: timeout must be"},
		{pipelineBody("steps: [{name: a, run: x, profile: gone}]", ""), `line 1: step a: the profile "gone" does not exist`},
		{
			pipelineBody("steps:\n  - name: a\n    run: x\n    matrix: {s: [gone]}\n    profile: ${{ matrix.s }}\n", ""),
			`line 5: step a: the profile "gone" does not exist`,
		},
		{pipelineBody("steps: [{name: a, run: x, env: {A=B: x}}]", ""), "env"},
	} {
		r := h.do("POST", "/v1/pipelines", test.body)
		if r.status != 400 {
			t.Errorf("%.100s: %d", test.body, r.status)
			continue
		}
		if message := r.json()["message"].(string); !strings.Contains(message, test.want) {
			t.Errorf("%.100s: %s, want %s", test.body, message, test.want)
		}
	}
	h.do("POST", "/v1/pipelines", `{"file":"`+strings.Repeat("#", web.DefaultMaxBody)+`"}`).want(413, "payload_too_large")
	if len(stub.order) != 0 {
		t.Errorf("runs %v", stub.order)
	}
}

func TestPipelineSandboxes(t *testing.T) {
	h, _ := newPipelineHarness(t)
	for _, name := range []string{"web", "own"} {
		profile := proto.DefaultProfile()
		profile.Name = name
		h.registry.put(profile)
	}
	file := "steps: [{name: a, run: x, profile: web}]"
	h.do("POST", "/v1/pipelines", pipelineBody(file, "")).want(201, "")
	limited := h.in(t)
	limited.key = h.stub.addKey("acme", "enterprise", asUser)
	id := h.stub.keys[len(h.stub.keys)-1].ID
	h.stub.change(id, func(k *proto.Key) { k.Profile = "own" })
	limited.do("POST", "/v1/pipelines", pipelineBody(file, "")).want(
		403, "forbidden", `step a: the profile "web" is not allowed for this API key, which may use own;`)
	h.stub.change(id, func(k *proto.Key) { k.Profiles = []string{"web"} })
	limited.do("POST", "/v1/pipelines", pipelineBody(file, "")).want(201, "")
	limited.do("POST", "/v1/pipelines", pipelineBody("steps: [{name: a, run: x, profile: own}]", "")).want(201, "")
	pro := h.in(t)
	pro.key = h.stub.addKey("medium", "pro", asUser)
	pro.do("POST", "/v1/pipelines", pipelineBody("steps: [{name: a, run: x, timeout: 2h}]", "")).want(
		429, "rate_limited", "step a: timeout is above the maximum")
	free := h.in(t)
	free.key = h.stub.addKey("small", "free", asUser)
	free.do("POST", "/v1/pipelines", pipelineBody("steps: [{name: a, run: x, timeout: 10m}]", "")).want(
		429, "rate_limited", "step a: Async execution requires")
}

// A step starts once, in its thread. One that cannot start any more has a reason.
func TestPipelineSteps(t *testing.T) {
	h, stub := newPipelineHarness(t)
	made := h.do("POST", "/v1/pipelines",
		pipelineBody(smallPipeline, `,"commit":"4f2a91c","branch":"main","secrets":{"TOKEN":"s3cret-value"}`)).want(
		201, "").json()
	ctx, p := t.Context(), stub.stored["acme"+made["id"].(string)]
	first, refused, err := h.admission.StartStep(ctx, p, 0, 0, p.ID)
	again, _, errAgain := h.admission.StartStep(ctx, p, 0, 0, p.ID)
	if err != nil || errAgain != nil || refused != "" || first == "" || first != again {
		t.Fatalf("started %s and %s: %q, %v, %v", first, again, refused, err, errAgain)
	}
	job := h.stub.runs[first].job
	if job.ThreadID != p.ID || job.PipelineID != p.ID || job.Step != "build" || len(job.Secrets) != 1 ||
		job.Secrets[0] != "TOKEN" || job.Env["TOKEN"] != "s3cret-value" ||
		job.Env["CI"] != "true" || job.Env["CI_COMMIT_SHA"] != "4f2a91c" || job.Env["CI_COMMIT_BRANCH"] != "main" ||
		job.Mode != proto.ModeAsync {
		t.Errorf("job %+v", job)
	}
	second, _, err := h.admission.StartStep(ctx, p, 1, 1, p.ID+"-2")
	if err != nil {
		t.Fatal(err)
	}
	job = h.stub.runs[second].job
	if _, has := job.Env["TOKEN"]; has || len(job.Secrets) != 0 || job.Env["MATRIX_K"] != "2" || job.Step != "test (k=2)" {
		t.Errorf("job %+v", job)
	}
	most, refused, err := h.admission.StepSpace(ctx, p, 0, 0)
	if err != nil || refused != "" || most.Bytes == 0 {
		t.Errorf("%+v, %q, %v", most, refused, err)
	}
	now := time.Now()
	h.stub.keys[0].RevokedAt = &now
	if _, refused, err := h.admission.StartStep(ctx, p, 1, 0, p.ID+"-1"); err != nil ||
		!strings.Contains(refused, "is revoked") {
		t.Errorf("with a revoked key: %q, %v", refused, err)
	}
	if _, refused, err := h.admission.StepSpace(ctx, p, 1, 0); err != nil || !strings.Contains(refused, "is revoked") {
		t.Errorf("with a revoked key: %q, %v", refused, err)
	}
}

// A step that names a secret which programs never get does not get it as a variable either.
func TestPipelineHasInjectedSecrets(t *testing.T) {
	h, stub := newPipelineHarness(t)
	h.do("PUT", "/v1/admin/secrets/API",
		`{"value":"s3cret","injection":{"hosts":["api.example.com"],"header":"Authorization","template":"{{value}}"}}`).
		want(200, "")
	h.do("POST", profilesPath, `{"name":"open","network":{"policy":"unrestricted"}}`).want(201, "")
	user := h.in(t)
	user.key = h.do("POST", "/v1/admin/keys",
		`{"name":"ci","org":"acme","plan":"enterprise","profile":"open","secrets":["API"]}`).want(
		201, "").json()["key"].(string)
	id := user.do("POST", "/v1/pipelines", pipelineBody("steps: [{name: a, run: x, secrets: [API]}]", "")).want(
		201, "").json()["id"].(string)
	trace, refused, err := h.admission.StartStep(t.Context(), stub.stored["acme"+id], 0, 0, id)
	if err != nil || refused != "" {
		t.Fatalf("%q, %v", refused, err)
	}
	job := h.stub.runs[trace].job
	if len(job.Bound) != 1 || job.Bound[0].Env != "" || job.Bound[0].Injection == nil || !job.HasInjections {
		t.Errorf("%+v", job)
	}
}

// The secrets that steps name and a run does not bring are those that an administrator has bound to
// the key, and no others.
func TestPipelineHasStoredSecrets(t *testing.T) {
	h, stub := newPipelineHarness(t)
	for _, name := range []string{"TOKEN", "ALIAS", "UNBOUND"} {
		h.do("PUT", "/v1/admin/secrets/"+name, `{"value":"s3cret-of-`+name+`"}`).want(200, "")
	}
	user := h.in(t)
	made := h.do("POST", "/v1/admin/keys",
		`{"name":"ci","org":"acme","plan":"enterprise","secrets":["TOKEN","ALIAS=OTHER","GONE"]}`).want(201, "")
	user.key = made.json()["key"].(string)
	file := func(names string) string {
		return pipelineBody("steps: [{name: a, run: x, secrets: ["+names+"]}]", "")
	}
	user.do("POST", "/v1/pipelines", file("TOKEN, UNBOUND, ALIAS, GONE, NEVER")).want(400, "validation_error",
		"of UNBOUND, which step a names, and of GONE, which step a names, and of NEVER, which step a names;")
	user.do("POST", "/v1/pipelines", pipelineBody("steps: [{name: a, run: x, profile: none, secrets: [TOKEN]}]", "")).want(
		403, "forbidden", "step a: the profile")
	h.do("PUT", "/v1/admin/secrets/GONE", `{"value":"s3cret-of-GONE"}`).want(200, "")
	id := user.do("POST", "/v1/pipelines", file("TOKEN, OTHER, GONE")).want(201, "").json()["id"].(string)
	p := stub.stored["acme"+id]
	trace, refused, err := h.admission.StartStep(t.Context(), p, 0, 0, id)
	if err != nil || refused != "" {
		t.Fatalf("%q, %v", refused, err)
	}
	job := h.stub.runs[trace].job
	var bound []string
	for _, b := range job.Bound {
		bound = append(bound, b.String())
	}
	if got := strings.Join(bound, " "); got != "TOKEN=TOKEN! ALIAS=OTHER! GONE=GONE! TOKEN GONE" ||
		len(job.Secrets) != 0 || job.Sealed == nil || !job.HasSecrets {
		t.Errorf("bound %s; %+v", got, job)
	}
	for _, name := range []string{"TOKEN", "OTHER", "GONE"} {
		if _, ok := job.Env[name]; ok {
			t.Errorf("the job has %s readable", name)
		}
	}
	h.do("DELETE", "/v1/admin/secrets/GONE", "").want(204, "")
	late := *p
	late.ID = proto.NewPipelineID()
	if _, refused, err := h.admission.StartStep(t.Context(), &late, 0, 0, late.ID); err != nil ||
		!strings.Contains(refused, "GONE") {
		t.Errorf("without a secret that was removed: %q, %v", refused, err)
	}
}
