package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

const profilesPath = "/v1/admin/profiles"

// bound creates a key that is bound to a profile, and returns the harness of a client with that
// key.
func (h *harness) bound(sandbox string) *harness {
	h.t.Helper()
	return h.boundWithEnv(sandbox, nil)
}

// boundWithEnv is bound with the variables of the key.
func (h *harness) boundWithEnv(sandbox string, env map[string]string) *harness {
	h.t.Helper()
	text, err := json.Marshal(map[string]any{"name": "n", "org": "acme", "plan": "pro", "profile": sandbox, "env": env})
	if err != nil {
		h.t.Fatal(err)
	}
	a := h.do("POST", "/v1/admin/keys", string(text)).want(201, "")
	with := *h
	with.key = a.json()["key"].(string)
	return &with
}

func (h *harness) jobOf(a *reply) *proto.Job {
	h.stub.mu.Lock()
	defer h.stub.mu.Unlock()
	return h.stub.runs[a.trace()].job
}

// The limit of open files is optional, and reaches the job.
func TestOpenFiles(t *testing.T) {
	h := newHarness(t)
	for body, want := range map[string]int{`{"name":"a","open_files":4096}`: 4096, `{"name":"b"}`: 0} {
		created := h.do("POST", profilesPath, body).want(201, "")
		if _, ok := created.json()["open_files"]; ok != (want > 0) {
			t.Errorf("got %s", created.body)
		}
		run := h.bound(created.json()["name"].(string))
		if got := run.jobOf(run.do("POST", "/v1/sandbox/execute", `{"code":"1","language":"python"}`)).
			Sandbox.OpenFiles; got != want {
			t.Errorf("%s: the job has %d", body, got)
		}
	}
	for _, n := range []string{"0", "255", "4097", "1.5"} {
		h.do("POST", profilesPath, `{"name":"c","open_files":`+n+`}`).want(400, "validation_error")
	}
}

// Where no sandbox names an image, programs run in the default image, also with profiles that were
// stored before there was one.
func TestDefaultImage(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.do("POST", profilesPath, `{"name":"old"}`).want(201, "")
	h.registry.images["py"] = &proto.Image{
		Name: "py", Digest: "sha256:1", Languages: map[proto.Language]string{proto.Python: "/bin/python3"},
	}
	h.registry.images["own"] = &proto.Image{
		Name: "own", Digest: "sha256:2", Languages: map[proto.Language]string{proto.Python: "/bin/python3"},
	}
	h.admission.Default.Image = "py"
	h.do("POST", profilesPath, `{"name":"new"}`).want(201, "")
	h.do("POST", profilesPath, `{"name":"own","image":"own"}`).want(201, "")
	for sandbox, want := range map[string]string{
		"default": "sha256:1", "old": "sha256:1", "new": "sha256:1", "own": "sha256:2",
	} {
		run := h.bound(sandbox)
		if got := run.jobOf(run.execute(hello).want(200, "")).Sandbox.ImageDigest; got != want {
			t.Errorf("sandbox %s: image %q, want %q", sandbox, got, want)
		}
	}
	h.do("DELETE", "/v1/admin/images/py", "").want(409, "conflict", "default")
	delete(h.registry.images, "py")
	h.execute(hello).want(409, "conflict", `"py"`, `"default"`)
}

// A profile adds only calls that are in the list.
func TestSystemCallsOfAProfile(t *testing.T) {
	h := newHarness(t)
	h.do("POST", profilesPath, `{"name":"a","system_calls":["ptrace"]}`).want(400, "validation_error", "system_calls",
		"ptrace", "none may", "cachestat")
}

// An administrator sees why the modules of a profile are not preloaded.
func TestProfilePreload(t *testing.T) {
	h := newHarness(t)
	const none = `{"error":null,"worker":null,"at":null}`
	h.do("POST", profilesPath, `{"name":"web","preload":["numpy"]}`).want(201, "")
	for _, name := range []string{"web", "default"} {
		if a := h.do("GET", profilesPath+"/"+name+"/preload", "").want(200, ""); strings.TrimSpace(string(a.body)) != none {
			t.Errorf("%s: got %s", name, a.body)
		}
	}
	h.do("GET", profilesPath+"/other/preload", "").want(404, "not_found")
	p, err := h.registry.Profile(t.Context(), "web")
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	h.registry.failures = append(
		h.registry.failures, preloadFailure{p.Sandbox(""), proto.PreloadFailure{Error: "no numpy", Worker: "w1", At: at}})
	if a := h.do("GET", profilesPath+"/web/preload", "").want(200, ""); strings.TrimSpace(
		string(a.body)) != `{"error":"no numpy","worker":"w1","at":"2026-01-02T03:04:05.000Z"}` {
		t.Errorf("got %s", a.body)
	}
	h.bound("web").do("GET", profilesPath+"/web/preload", "").want(403, "forbidden")
}

func TestProfileAdministration(t *testing.T) {
	h := newHarness(t)
	h.admission.Default.Output = 5 * proto.MiB
	const complete = `{"name":"web","image":"","cpu":2,"memory":"512MiB","pids":256,"disk":{"home":"256MiB",` +
		`"tmp":"128MiB","inodes":65536},` +
		`"network":{"policy":"blocked"},"env":{"STAGE":"test"},"output":"5MiB"}`
	is := func(a *reply, want string) {
		t.Helper()
		var got, wanted any
		if json.Unmarshal(a.body, &got) != nil || json.Unmarshal([]byte(want), &wanted) != nil || !cmp.Equal(got, wanted) {
			t.Errorf("got %s, want %s", a.body, want)
		}
	}
	a := h.do("POST", profilesPath, `{"name":"web","cpu":2,"memory":536870912,"env":{"STAGE":"test"}}`).want(201, "")
	is(a, complete)
	if got := a.header.Get("Location"); got != profilesPath+"/web" {
		t.Errorf("Location %q", got)
	}
	h.do("POST", profilesPath, `{"name":"web"}`).want(409, "conflict", "already")
	is(h.do("GET", profilesPath+"/web", "").want(200, ""), complete)
	h.do("GET", profilesPath+"/other", "").want(404, "not_found")
	h.do("GET", profilesPath+"/%2e%2e", "").want(404, "not_found")

	list := h.do("GET", profilesPath, "").want(200, "").json()["profiles"].([]any)
	if len(list) != 3 || list[0].(map[string]any)["name"] != "default" || list[1].(map[string]any)["name"] != "agents" ||
		list[2].(map[string]any)["name"] != "web" {
		t.Errorf("%v", list)
	}
	if got := h.do("GET", profilesPath+"/default", "").want(200, "").json(); got["memory"] != "1GiB" ||
		got["output"] != "5MiB" {
		t.Errorf("default is %v", got)
	}

	is(h.do("GET", profilesPath+"/agents", "").want(200, ""),
		`{"name":"agents","image":"","cpu":1,"memory":"5GiB","pids":256,`+
			`"disk":{"home":"2560MiB","tmp":"1280MiB","inodes":65536},"network":{"policy":"blocked"},"env":{},"output":"5MiB"}`)

	is(h.do("PUT", profilesPath+"/web", `{"pids":20}`).want(200, ""),
		`{"name":"web","image":"","cpu":1,"memory":"1GiB","pids":20,`+
			`"disk":{"home":"512MiB","tmp":"256MiB","inodes":65536},"network":{"policy":"blocked"},"env":{},"output":"5MiB"}`)
	for _, fields := range []string{`"isolation":"strict"`, `"preload":["numpy","matplotlib.pyplot"]`} {
		want := `{"name":"web","image":"","cpu":1,"memory":"1GiB","pids":20,"disk":{"home":"512MiB","tmp":"256MiB",` +
			`"inodes":65536},` +
			`"network":{"policy":"blocked"},"env":{},"output":"5MiB",` + fields + `}`
		is(h.do("PUT", profilesPath+"/web", `{"pids":20,`+fields+`}`).want(200, ""), want)
		is(h.do("GET", profilesPath+"/web", "").want(200, ""), want)
	}
	h.do("PUT", profilesPath+"/web", `{"name":"other"}`).want(400, "validation_error", "name must be web")
	h.do("PUT", profilesPath+"/other", `{}`).want(404, "not_found")

	for _, method := range []string{"PUT", "DELETE"} {
		for _, name := range []string{"default", "agents"} {
			h.do(method, profilesPath+"/"+name, `{}`).want(400, "validation_error", "name", "built in")
		}
		h.do(method, profilesPath+"/A", `{}`).want(400, "validation_error", "name")
	}
	h.do("POST", profilesPath, `{"name":"default"}`).want(400, "validation_error", "name", "built in")
	h.do("POST", profilesPath, `{"name":"b","memory":"31MiB"}`).want(400, "validation_error",
		"memory must be from 32MiB to 1024GiB")
	h.do("POST", profilesPath, `{"name":"b","isolation":"none"}`).want(400, "validation_error", "isolation must be strict")
	h.do("POST", profilesPath, `{"name":"b","isolation":"strict","preload":["numpy"]}`).want(400, "validation_error",
		"preload", "leave out one")
	h.do("POST", profilesPath, ``).want(400, "validation_error", "body")

	h.registry.images["py"] = &proto.Image{Name: "py"}
	h.do("POST", profilesPath, `{"name":"b","image":"py"}`).want(201, "")
	h.do("POST", profilesPath, `{"name":"c","image":"node"}`).want(400, "validation_error", "image", `"node"`)
	h.do("PUT", profilesPath+"/b", `{"image":"node"}`).want(400, "validation_error", "image", `"node"`)
	h.do("POST", profilesPath, `{"name":"c","image":"/srv/py"}`).want(201, "")

	if got := h.do("DELETE", profilesPath+"/web", "").want(200, "").json(); got["pids"] != 20.0 {
		t.Errorf("removed %v", got)
	}
	h.do("DELETE", profilesPath+"/web", "").want(404, "not_found")
	h.do("GET", profilesPath+"/web", "").want(404, "not_found")
}

func TestProfileAdministrationNeedsGlobalAdministrator(t *testing.T) {
	h := newHarness(t)
	user := *h
	user.key = h.stub.addKey("acme", "enterprise", asUser)
	for _, r := range [][2]string{
		{"POST", profilesPath},
		{"GET", profilesPath},
		{"GET", profilesPath + "/web"},
		{"PUT", profilesPath + "/web"},
		{"DELETE", profilesPath + "/web"},
	} {
		user.do(r[0], r[1], `{"name":"web"}`).want(403, "forbidden")
		h.do(r[0], r[1], `{"name":"web"}`, "Authorization", "").want(401, "unauthorized")
	}
	if len(h.registry.profiles) != 0 {
		t.Errorf("%v", h.registry.profiles)
	}
}

// Only a global administrator opens the operator's private network. An organisation's administrator
// neither changes a profile nor gives a key a profile that no key of the organisation has.
func TestPrivateDestinationsNeedGlobalAdministrator(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	const network = `"network":{"policy":"allowlist","private":["mirror.corp:443","10.1.2.3:5432"]}`
	h.do("POST", profilesPath, `{"name":"mirror",`+network+`}`).want(201, "")
	h.do("POST", profilesPath, `{"name":"own"}`).want(201, "")
	h.bound("own")
	admin := h.orgAdmin("acme")
	for _, r := range [][2]string{
		{"POST", profilesPath}, {"PUT", profilesPath + "/own"}, {"PUT", profilesPath + "/mirror"},
	} {
		admin.do(r[0], r[1], `{`+network+`}`).want(403, "forbidden")
	}
	admin.do("GET", profilesPath+"/mirror", "").want(404, "not_found")
	for _, field := range []string{`"profile":"mirror"`, `"profiles":["mirror"]`} {
		admin.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro",`+field+`}`).want(
			403, "forbidden", "mirror")
	}
	own := h.bound("own")
	own.execute(body("profile", "mirror")).want(403, "forbidden", "mirror")
	// No request adds a destination.
	request := body("network", map[string]any{"policy": "unrestricted", "private": []string{"mirror.corp:443"}})
	job := own.jobOf(own.execute(request).want(200, ""))
	if job.NetworkExtended || len(job.Sandbox.Network.Private) > 0 || job.Network != proto.NetworkBlocked {
		t.Errorf("the request decides: %+v", job.Sandbox.Network)
	}

	granted := h.bound("mirror")
	job = granted.jobOf(granted.execute(hello).want(200, ""))
	if diff := cmp.Diff([]string{"mirror.corp:443", "10.1.2.3:5432"}, job.Sandbox.Network.Private); diff != "" ||
		!job.NetworkExtended {
		t.Errorf("extended %v: %s", job.NetworkExtended, diff)
	}
}

func TestKeyIsBoundToASandbox(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","profile":"web"}`).want(400, "validation_error",
		"profile", `"web"`)
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","profile":"../web"}`).want(
		400, "validation_error", "profile")
	h.do("POST", profilesPath, `{"name":"web"}`).want(201, "")
	for sandbox, want := range map[string]string{
		`"web"`: "web", `"default"`: "default", `null`: "default", `"agents"`: "agents",
	} {
		a := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"pro","profile":`+sandbox+`}`).want(201, "")
		if got := a.json()["profile"]; got != want {
			t.Errorf("%s: bound to %v", sandbox, got)
		}
		if want == "web" {
			id := a.json()["id"].(string)
			h.do("DELETE", profilesPath+"/web", "").want(409, "conflict", "web", id, "revoke")
			h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, "")
			h.do("DELETE", profilesPath+"/web", "").want(200, "")
		}
	}
	for _, k := range h.do("GET", "/v1/admin/keys", "").want(200, "").json()["keys"].([]any) {
		if k.(map[string]any)["profile"] == "" {
			t.Errorf("no sandbox: %v", k)
		}
	}
}

func TestJobHasTheSandboxOfItsKey(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.registry.images["py"] = &proto.Image{
		Name: "py", Digest: "sha256:1", Architecture: "arm64",
		Languages: map[proto.Language]string{proto.Python: "/bin/python3"},
	}
	h.do("POST", profilesPath,
		`{"name":"web","image":"py","cpu":0.5,"memory":"64MiB","pids":20,"disk":{"home":"2MiB","tmp":"3MiB","inodes":300},
		"network":{"policy":"allowlist","allow":["pypi.org"]},"env":{"A":"profile","B":"profile"},"output":7,
		"preload":["numpy","matplotlib.pyplot"],"system_calls":["cachestat"]}`).want(201, "")
	user := h.bound("web")
	// No field of a tenant's request changes a setting of the profile.
	a := user.execute(
		`{"code":"1","env_vars":{"B":"request","C":"request"},"cpu":64,"memory":"1024GiB",
		"network":{"policy":"unrestricted"},"pids":9999,"isolation":"strict",
		"preload":["os"],"system_calls":["process_madvise"]}`).want(200, "")
	job := h.jobOf(a)
	want := proto.Sandbox{
		Image: "py", ImageDigest: "sha256:1", Architecture: "arm64", CPU: 0.5, Memory: 64 << 20, Pids: 20, HomeBytes: 2 << 20,
		TmpBytes: 3 << 20, Inodes: 300,
		Network: proto.Network{Policy: proto.NetworkAllowlist, Allow: []string{"pypi.org"}}, OutputBytes: 7,
		Preload: []string{"numpy", "matplotlib.pyplot"}, SystemCalls: []string{"cachestat"},
	}
	if d := cmp.Diff(want, job.Sandbox); d != "" || job.Profile != "web" || job.Image != "py" ||
		job.Architecture != "arm64" {
		t.Errorf("%s, %s: %s", job.Profile, job.Image, d)
	}
	if d := cmp.Diff(map[string]string{"A": "profile", "B": "request", "C": "request"}, job.Env); d != "" {
		t.Error(d)
	}
	if got := user.do("GET", "/v1/executions/"+string(a.trace()), "").want(200, "").json()["profile"]; got != "web" {
		t.Errorf("the execution reports the sandbox %v", got)
	}

	h.do("PUT", profilesPath+"/web", `{"isolation":"strict"}`).want(200, "")
	if job := h.jobOf(user.execute(hello).want(200, "")); job.Sandbox.Isolation != proto.IsolationStrict ||
		job.Sandbox.Preload != nil {
		t.Errorf("after the profile became strict: %+v", job)
	}
	h.do("PUT", profilesPath+"/web", `{"pids":30}`).want(200, "")
	if job := h.jobOf(user.execute(hello).want(200, "")); job.Sandbox.Pids != 30 || job.Sandbox.Isolation != "" ||
		job.Sandbox.Image != "" || job.Architecture != "" || len(job.Env) != 0 {
		t.Errorf("after the profile was replaced: %+v", job)
	}
	if job := h.jobOf(h.execute(hello).want(200, "")); job.Profile != "default" ||
		!cmp.Equal(job.Sandbox, proto.DefaultSandbox()) {
		t.Errorf("a key that is bound to none: %+v", job)
	}
}

func TestLanguageMissingInTheImage(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.registry.images["py"] = &proto.Image{Name: "py", Languages: map[proto.Language]string{proto.Python: "/bin/python3"}}
	for name, image := range map[string]string{"host": "", "dir": "/srv/py", "py": "py"} {
		h.do("POST", profilesPath, fmt.Sprintf(`{"name":%q,"image":%q}`, name, image)).want(201, "")
	}
	node := body("language", "node")
	h.bound("host").execute(node).want(200, "")
	h.bound("dir").execute(node).want(200, "") // only the worker knows its languages
	h.bound("py").execute(hello).want(200, "")
	a := h.bound("py").execute(node).want(400, "validation_error")
	if got := a.json()["message"]; got != "language 'node' is not available in this sandbox image, which has python" {
		t.Errorf("message %q", got)
	}
}

// A missing profile must not be replaced by another one, least of all by the default.
func TestKeyWithoutItsSandboxRunsNothing(t *testing.T) {
	h := newHarness(t)
	h.registry.images["py"] = &proto.Image{Name: "py", Languages: map[proto.Language]string{proto.Python: "/bin/python3"}}
	h.do("POST", profilesPath, `{"name":"web"}`).want(201, "")
	h.do("POST", profilesPath, `{"name":"py","image":"py"}`).want(201, "")
	lost, py := h.bound("web"), h.bound("py")
	h.registry.lose("web")
	delete(h.registry.images, "py")
	for _, headers := range [][]string{nil, {"Accept", web.TypeNDJSON}, {"Prefer", "respond-async"}} {
		lost.execute(hello, headers...).want(409, "conflict", `the profile "web" does not exist`)
		py.execute(hello, headers...).want(409, "conflict", `the image "py" of the profile "py" does not exist`)
	}
	if len(h.stub.submitted) != 0 {
		t.Error("something was submitted")
	}
}

func TestLimitsOfTheEnvironmentHoldAfterTheMerge(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	profile := func(name string, env map[string]string) *harness {
		text, err := json.Marshal(map[string]any{"name": name, "env": env})
		if err != nil {
			t.Fatal(err)
		}
		h.do("POST", profilesPath, string(text)).want(201, "")
		return h.bound(name)
	}
	many := profile("many", numbered(30, "P%d", "v"))
	many.execute(body("env_vars", numbered(20, "R%d", "v"))).want(200, "")
	many.execute(body("env_vars", numbered(21, "R%d", "v"))).want(400, "validation_error", "env_vars", "50", "51")
	many.execute(body("env_vars", numbered(30, "P%d", "v"))).want(200, "") // the same names

	long := strings.Repeat("v", 4092)
	large := profile("large", numbered(8, "P%03d", long))
	large.execute(body("env_vars", numbered(8, "R%03d", long))).want(200, "")
	more := numbered(7, "R%03d", long)
	more["R007"] = long + "v"
	large.execute(body("env_vars", more)).want(400, "validation_error", "env_vars", "65536", "65537")

	three := h.boundWithEnv("many", numbered(10, "K%d", "v"))
	three.execute(body("env_vars", numbered(10, "R%d", "v"))).want(200, "")
	three.execute(body("env_vars", numbered(11, "R%d", "v"))).want(400, "validation_error", "env_vars", "50", "51")
}

func TestVariablesOfAKeyWinOverItsSandboxAndLoseToTheRequest(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.do("POST", profilesPath, `{"name":"web","env":{"A":"profile","B":"profile","C":"profile"}}`).want(201, "")
	user := h.boundWithEnv("web", map[string]string{"B": "key", "C": "key", "D": "key"})
	job := h.jobOf(user.execute(body("env_vars", map[string]string{"C": "request", "E": "request"})).want(200, ""))
	if d := cmp.Diff(map[string]string{"A": "profile", "B": "key", "C": "request", "D": "key", "E": "request"},
		job.Env); d != "" {
		t.Error(d)
	}
	for _, c := range []struct{ name, value, why string }{
		{"PATH", "x", "reserved"},
		{"A", "s3cret\x01", "control"},
		{"A", strings.Repeat("v", proto.MaxEnvValueRunes+1), "4096"},
	} {
		request, err := json.Marshal(
			map[string]any{"name": "n", "org": "acme", "plan": "pro", "env": map[string]string{c.name: c.value}})
		if err != nil {
			t.Fatal(err)
		}
		h.do("POST", "/v1/admin/keys", string(request)).want(400, "validation_error", "env", c.why)
	}
}

func TestExecutionReportsItsNetwork(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	id := h.execute(hello).want(200, "").trace()
	network := func() any {
		return h.do(http.MethodGet, "/v1/executions/"+string(id), "").want(200, "").json()["network"]
	}
	if got := network(); got != nil {
		t.Errorf("blocked: %v", got)
	}
	usage := &proto.NetworkUsage{Traffic: proto.Traffic{BytesIn: 5, BytesOut: 7}}
	h.stub.update(id, func(x *run) { x.record.Usage = &proto.Usage{Network: usage} })
	want := map[string]any{"bytes_in": 5.0, "bytes_out": 7.0, "blocked_connections": []any{}, "blocked_total": 0.0}
	if d := cmp.Diff(want, network()); d != "" {
		t.Error(d)
	}
	usage.BlockedConnections = []proto.BlockedConnection{{
		Host: "example.com", Address: "203.0.113.7", Port: 443, Protocol: "tcp", Reason: proto.BlockedNotAllowed,
		At: time.Date(2026, 1, 2, 3, 4, 5, 678_900_000, time.UTC),
	}}
	usage.BlockedTotal = 33
	want["blocked_total"] = 33.0
	want["blocked_connections"] = []any{map[string]any{
		"host": "example.com", "address": "203.0.113.7", "port": 443.0, "protocol": "tcp", "reason": "not_allowed",
		"at": "2026-01-02T03:04:05.678Z",
	}}
	if d := cmp.Diff(want, network()); d != "" {
		t.Error(d)
	}
}

// An organisation's administrator sees the profiles that its valid keys use, and no other.
func TestProfilesOfAnOrganisation(t *testing.T) {
	h := newHarness(t)
	for _, name := range []string{"used", "revoked", "others"} {
		h.do("POST", profilesPath, fmt.Sprintf(`{"name":%q}`, name)).want(201, "")
	}
	create := func(org, sandbox string) string {
		body := fmt.Sprintf(`{"name":"n","org":%q,"plan":"enterprise","profile":%q}`, org, sandbox)
		return h.do("POST", "/v1/admin/keys", body).want(201, "").json()["id"].(string)
	}
	create("acme", "used")
	create("other", "others")
	h.do("DELETE", "/v1/admin/keys/"+create("acme", "revoked"), "").want(200, "")
	admin := h.orgAdmin("acme")
	var names []string
	for _, p := range admin.do("GET", profilesPath, "").want(200, "").json()["profiles"].([]any) {
		names = append(names, p.(map[string]any)["name"].(string))
	}
	if fmt.Sprint(names) != "[default agents used]" {
		t.Errorf("got %v", names)
	}
	for name, status := range map[string]int{
		"default": 200, "agents": 200, "used": 200, "revoked": 404, "others": 404,
		"nothing": 404,
	} {
		for _, path := range []string{profilesPath + "/" + name, profilesPath + "/" + name + "/preload"} {
			if a := admin.do("GET", path, ""); a.status != status {
				t.Errorf("%s: %d", path, a.status)
			}
		}
	}
	admin.do("PUT", profilesPath+"/used", `{}`).want(403, "forbidden")
	admin.do("DELETE", profilesPath+"/used", "").want(403, "forbidden")
}
