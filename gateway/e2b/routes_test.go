package e2b

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// created returns the id in an answer to a request that creates a sandbox.
func (h *harness) created(a answer) string {
	h.t.Helper()
	id, _ := a.json(h.t)["sandboxID"].(string)
	if a.status != http.StatusCreated || !proto.ValidSandboxID(id) {
		h.t.Fatalf("%d %s", a.status, a.body)
	}
	return id
}

func TestCreate(t *testing.T) {
	h := newHarness(t)
	h.profiles["small"] = proto.Profile{Name: "small", CPU: 0.5, Memory: 64 * proto.MiB}
	for _, c := range []struct {
		path, body string
		timeout    time.Duration
		profile    string
		stop       proto.SandboxStop
	}{
		{"/v2/sandboxes", `{"templateID":"base"}`, 300 * time.Second, "", proto.SandboxKill},
		{"/v2/sandboxes", `{"templateID":"code-interpreter-v1"}`, 300 * time.Second, "", proto.SandboxKill},
		{"/sandboxes", `{"templateID":"base","secure":true}`, 15 * time.Second, "", proto.SandboxKill},
		{
			"/v2/sandboxes", `{"templateID":"small","timeout":7,"autoPause":true,"allow_internet_access":true,"mcp":null,
			"metadata":{"a b":"c&d"},"envVars":{"low":"x","UP":"y"},"iam":{"tokens":{}},"volumeMounts":[],
			"network":{"allowOut":[],"allowPublicTraffic":false},"autoResume":{"enabled":false},"autoPauseMemory":false}`,
			7 * time.Second, "small", proto.SandboxPause,
		},
		{
			"/v2/sandboxes", `{"templateID":"base","allow_internet_access":false,"network":{"denyOut":["0.0.0.0/0"]}}`,
			300 * time.Second, "", proto.SandboxKill,
		},
	} {
		a := h.call(http.MethodPost, c.path, c.body)
		x := h.stored[h.created(a)]
		if time.Duration(x.Timeout) != c.timeout || x.Profile != c.profile || x.OnTimeout != c.stop || x.PublicPorts {
			t.Errorf("%s: %+v", c.body, x)
		}
		fields, tokens := a.json(t), testTokens()
		if fields["envdAccessToken"] != tokens.Access(x.ID) || fields["trafficAccessToken"] != tokens.Traffic(x.ID) ||
			fields["envdVersion"] != guestVersion || fields["domain"] != nil || fields["clientID"] != clientID {
			t.Errorf("%s", a.body)
		}
	}
}

func TestCreateRefusesWhatItCannotGive(t *testing.T) {
	h := newHarness(t)
	open := proto.DefaultProfile()
	open.Network.Policy = proto.NetworkUnrestricted
	h.profiles["open"] = open
	long := strings.Repeat("x", maxMetadataKey+1)
	for body, want := range map[string]string{
		`[]`:                                  "body must be a JSON object",
		`{}`:                                  "templateID must",
		`{"templateID":7}`:                    "templateID must not be a JSON number",
		`{"templateID":"base","timeout":0}`:   "timeout must",
		`{"templateID":"base","timeout":"1"}`: "timeout must not be a JSON string",
		`{"templateID":"base","autoResume":{"enabled":true}}`:             "autoResume.enabled must be false",
		`{"templateID":"base","autoPause":true,"autoPauseMemory":true}`:   "snapshot_memory_unsupported",
		`{"templateID":"base","autoPauseMemory":false}`:                   "autoPauseMemory goes with autoPause",
		`{"templateID":"base","mcp":{"x":{"y":1}}}`:                       "mcp is not supported",
		`{"templateID":"base","iam":{"tokens":{"a":{"b":"c"}}}}`:          "iam is not supported",
		`{"templateID":"base","volumeMounts":[{"name":"a","path":"/b"}]}`: "volumeMounts is not supported",
		`{"templateID":"base","shiny":1}`:                                 "shiny is not supported",
		`{"templateID":"base","network":{"allowOut":["1.1.1.1"]}}`:        "network.allowOut is not supported",
		`{"templateID":"base","network":{"denyOut":["1.1.1.1"]}}`:         "network.denyOut is not supported",
		`{"templateID":"base","network":{"rules":{"a.b":[1]}}}`:           "network.rules is not supported",
		`{"templateID":"base","network":{"maskRequestHost":"a"}}`:         "network.maskRequestHost is not",
		`{"templateID":"base","network":{"allowPublicTraffic":true}}`:     "network.allowPublicTraffic must not",
		`{"templateID":"open","allow_internet_access":false}`:             "allow_internet_access must not be false",
		`{"templateID":"open","network":{"denyOut":["0.0.0.0/0"]}}`:       "allow_internet_access must not be false",
		`{"templateID":"base","metadata":{"a":1}}`:                        "metadata must not be a JSON number",
		`{"templateID":"base","metadata":{"` + long + `":""}}`:            "metadata keys must be",
		`{"templateID":"base","envVars":{"PATH":"/"}}`:                    "reserved name PATH",
		`{"templateID":"base","envVars":{"a-b":"/"}}`:                     "envVars names must be",
		`{"templateID":"base","envVars":{"A":"\u0001"}}`:                  "envVars values must have no control",
	} {
		a := h.call(http.MethodPost, "/v2/sandboxes", body)
		fields := a.json(t)
		if message, _ := fields["message"].(string); a.status != http.StatusBadRequest || fields["code"] != 400.0 ||
			!strings.Contains(message, want) || a.header.Get("Should-Retry") != "false" {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	if a := h.call(http.MethodPost, "/v2/sandboxes", `{"templateID":"base"}`, "Idempotency-Key", "k"); a.status != 400 {
		t.Errorf("%d %s", a.status, a.body)
	}
	for _, name := range []string{"nope", "ns/name", "../x", "BASE"} {
		a := h.call(http.MethodPost, "/v2/sandboxes", fmt.Sprintf(`{"templateID":%q}`, name))
		if a.status != http.StatusNotFound || a.json(t)["code"] != 404.0 {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	if len(h.stored) != 0 {
		t.Errorf("%d sandboxes were created", len(h.stored))
	}
}

func TestErrorsOfCreation(t *testing.T) {
	h := newHarness(t)
	for _, c := range []struct {
		err          error
		status       int
		retry, pause string
	}{
		{api.Unavailable(1, "busy"), 503, "true", "1"},
		{&proto.Rejection{Reason: proto.RejectedConcurrency, Used: 1, Limit: 1}, 429, "true", "1"},
		{&proto.Rejection{Reason: proto.RejectedTimeout, Limit: 1, Plan: &proto.PlanLimit{}}, 400, "false", ""},
		{&proto.Rejection{Reason: proto.RejectedProfile, Name: "p"}, 404, "false", ""},
		{api.Errorf(api.CodeGatewayTimeout, "late"), 504, "false", ""},
		{api.Errorf(api.CodeInternal, "broken"), 500, "false", ""},
	} {
		h.refuse = c.err
		a := h.call(http.MethodPost, "/v2/sandboxes", `{"templateID":"base"}`)
		if a.status != c.status || a.json(t)["code"] != float64(c.status) || a.header.Get("Should-Retry") != c.retry ||
			a.header.Get("Retry-After") != c.pause {
			t.Errorf("%v: %d %v %s", c.err, a.status, a.header, a.body)
		}
	}
}

func TestKeysAndUnknownRoutes(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, nil)
	for _, c := range []struct {
		method, path, key string
		status            int
	}{
		{http.MethodGet, "/sandboxes/" + sandboxID, apiKey, 200},
		{http.MethodGet, "/sandboxes/" + sandboxID + "-client", apiKey, 200},
		{http.MethodGet, "/sandboxes/" + sandboxID, "", 401},
		{http.MethodGet, "/sandboxes/" + sandboxID, "sk-x", 401},
		{http.MethodGet, "/sandboxes/" + sandboxID, foreignKey, 404},
		{http.MethodGet, "/sandboxes/" + otherID, apiKey, 404},
		{http.MethodGet, "/sandboxes/x", apiKey, 404},
		{http.MethodDelete, "/sandboxes/" + sandboxID, foreignKey, 404},
		{http.MethodDelete, "/sandboxes/" + sandboxID, readKey, 403},
		{http.MethodPost, "/v2/sandboxes", readKey, 403},
		{http.MethodGet, "/sandboxes/" + sandboxID + "/nothing", apiKey, 404},
		{http.MethodGet, "/v2/templates/nothing", apiKey, 404},
		{http.MethodPost, "/sandboxes/" + sandboxID + "/fork", apiKey, 501},
		{http.MethodPost, "/sandboxes/" + sandboxID + "/snapshots", apiKey, 501},
		{http.MethodPut, "/sandboxes/" + sandboxID + "/network", apiKey, 501},
		{http.MethodGet, "/volumes", apiKey, 501},
		{http.MethodPost, "/v3/templates", apiKey, 501},
		{http.MethodPost, "/secrets", apiKey, 501},
	} {
		a := h.do(c.method, c.path, "{}", KeyHeader, c.key)
		if a.status != c.status {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.status, a.body)
		}
		if fields := a.json(t); c.status >= 400 && (fields["code"] != float64(c.status) || fields["message"] == "") {
			t.Errorf("%s %s: %s", c.method, c.path, a.body)
		}
	}
	a := h.do(http.MethodGet, "/sandboxes/"+sandboxID, "", KeyHeader, readKey)
	if strings.Contains(a.body, "AccessToken") {
		t.Errorf("a key that may only read gets a token: %s", a.body)
	}
}

func TestLifeOfASandbox(t *testing.T) {
	h := newHarness(t)
	id := h.created(h.call(http.MethodPost, "/v2/sandboxes", `{"templateID":"base","timeout":60,"metadata":{"k":"v"}}`))
	one := "/sandboxes/" + id
	var token any
	expires := func() time.Duration { return time.Until(h.stored[id].ExpiresAt).Round(10 * time.Second) }
	for i, c := range []struct {
		method, path, body string
		status             int
		left               time.Duration
	}{
		{http.MethodGet, one, "", 200, time.Minute},
		{http.MethodPost, one + "/timeout", `{"timeout":600}`, 204, 10 * time.Minute},
		{http.MethodPost, one + "/timeout", `{}`, 400, 10 * time.Minute},
		{http.MethodPost, one + "/timeout", `{"timeout":-1}`, 400, 10 * time.Minute},
		{http.MethodPost, one + "/refreshes", `{"duration":60}`, 204, 10 * time.Minute},
		{http.MethodPost, one + "/refreshes", `{"duration":1200}`, 204, 20 * time.Minute},
		{http.MethodPost, one + "/refreshes", `{"duration":9999}`, 400, 20 * time.Minute},
		{http.MethodPost, "/v2" + one + "/connect", `{"timeout":60}`, 200, 20 * time.Minute},
		{http.MethodPost, one + "/connect", `{"timeout":1800}`, 200, 30 * time.Minute},
		{http.MethodPost, one + "/timeout", `{"timeout":60}`, 204, time.Minute},
		{http.MethodPost, "/v2" + one + "/connect", "", 200, 5 * time.Minute},
		{http.MethodPost, one + "/resume", `{"timeout":60}`, 409, 5 * time.Minute},
		{http.MethodPost, one + "/pause", `{"memory":true}`, 400, 5 * time.Minute},
		{http.MethodPost, one + "/pause", "", 204, 5 * time.Minute},
		{http.MethodPost, one + "/pause", `{"memory":false}`, 409, 5 * time.Minute},
		{http.MethodPost, one + "/timeout", `{"timeout":60}`, 409, 5 * time.Minute},
		{http.MethodGet, one, "", 200, 5 * time.Minute},
		{http.MethodPost, "/v2" + one + "/connect", `{"memory":true}`, 400, 5 * time.Minute},
		{http.MethodPost, "/v2" + one + "/connect", `{"memory":false,"timeout":60}`, 201, time.Minute},
		{http.MethodPost, one + "/pause", `{"requireHealthyGuest":true}`, 204, time.Minute},
		{http.MethodPost, one + "/resume", `{"timeout":600}`, 201, 10 * time.Minute},
		{http.MethodDelete, one, "", 204, 10 * time.Minute},
		{http.MethodDelete, one, "", 404, 10 * time.Minute},
		{http.MethodPost, one + "/pause", "", 404, 10 * time.Minute},
		{http.MethodPost, "/v2" + one + "/connect", "", 404, 10 * time.Minute},
	} {
		a := h.call(c.method, c.path, c.body)
		if a.status != c.status || expires() != c.left {
			t.Fatalf("%d: %s %s %s: %d, left %s: %s", i, c.method, c.path, c.body, a.status, expires(), a.body)
		}
		if a.status == http.StatusOK || a.status == http.StatusCreated {
			fields := a.json(t)
			if token == nil {
				token = fields["envdAccessToken"]
			}
			if fields["envdAccessToken"] != token || token == "" {
				t.Errorf("%d: the token is not stable: %s", i, a.body)
			}
		}
	}
}

// A sandbox that its worker has just stopped is resumed, as one whose record says so.
func TestConnectWhileStopping(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, func(x *proto.LiveSandbox) { x.Execution = proto.NewTraceID() })
	h.stopping = 4
	a := h.call(http.MethodPost, "/v2/sandboxes/"+sandboxID+"/connect", `{"timeout":600}`)
	if a.status != http.StatusCreated || h.stored[sandboxID].State != proto.SandboxRunning {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestPauseOfAnOldClient(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, nil)
	a := h.call(http.MethodPost, "/sandboxes/"+sandboxID+"/pause", `{"memory":true}`, "User-Agent",
		"e2b-python-sdk/2.45.1")
	if a.status != http.StatusNoContent || a.header.Get(headerPauseMode) != filesystemOnly {
		t.Errorf("%d %s", a.status, a.body)
	}
	a = h.call(http.MethodGet, "/sandboxes/"+sandboxID, "")
	if fields := a.json(t); fields["state"] != "paused" || fields["pauseMode"] != filesystemOnly {
		t.Errorf("%s", a.body)
	}
	h.add(sandboxID, nil)
	h.refuse = api.Unavailable(1, "no answer")
	a = h.call(http.MethodPost, "/sandboxes/"+sandboxID+"/pause", `{"requireHealthyGuest":true}`)
	if a.status != http.StatusServiceUnavailable || h.stored[sandboxID].State != proto.SandboxRunning {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestMetrics(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, nil)
	h.guest = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"cpu_count":2,"cpu_used_pct":1.5,"mem_total":4,"mem_used":3,"disk_total":9,"disk_used":8}`))
	})
	path := "/sandboxes/" + sandboxID + "/metrics"
	a := h.call(http.MethodGet, path, "")
	if !strings.Contains(a.body, `"cpuUsedPct":1.5,"memUsed":3,"memTotal":4,"memCache":0,"diskUsed":8,"diskTotal":9`) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := h.call(http.MethodGet, path+"?end=1", ""); a.body != "[]\n" {
		t.Errorf("%s", a.body)
	}
	h.guest = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(strings.Repeat("x", maxBuffer+1)))
	})
	if a := h.call(http.MethodGet, path, ""); a.status != http.StatusServiceUnavailable {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// A log has the entries from a time, and can be read when the sandbox has ended.
func TestLogs(t *testing.T) {
	h := newHarness(t)
	h.add(sandboxID, func(x *proto.LiveSandbox) { x.State = proto.SandboxEnded })
	path := "/sandboxes/" + sandboxID + "/logs"
	const output = `{"timestamp":"1970-01-01T00:00:02.000Z","message":"hello\n","level":"info",` +
		`"fields":{"pid":"7","stream":"stdout","type":"output"}}`
	for query, want := range map[string]string{
		"/v2" + path + "?cursor=2000&limit=1": `{"logs":[` + output + "]}\n",
		path + "?start=2000&limit=1": `{"logEntries":[` + output +
			`],"logs":[{"timestamp":"1970-01-01T00:00:02.000Z","line":"hello\n"}]}` + "\n",
		"/v2" + path + "?cursor=4000": `{"logs":[]}` + "\n",
	} {
		if a := h.call(http.MethodGet, query, ""); a.status != http.StatusOK || a.body != want {
			t.Errorf("%s: %d %s", query, a.status, a.body)
		}
	}
	if a := h.call(http.MethodGet, "/v2"+path, ""); strings.Count(a.body, `"message"`) != 3 {
		t.Errorf("%s", a.body)
	}
	other := strings.Replace(path, sandboxID, proto.NewSandboxID(), 1)
	if a := h.call(http.MethodGet, other, ""); a.status != http.StatusNotFound {
		t.Errorf("an unknown sandbox: %d %s", a.status, a.body)
	}
}

func TestTemplateAliases(t *testing.T) {
	h := newHarness(t)
	h.profiles["small"] = proto.DefaultProfile()
	for name, status := range map[string]int{"base": 200, "small": 200, "nope": 404, "a%2Fb": 404} {
		if a := h.call(http.MethodGet, "/templates/aliases/"+name, ""); a.status != status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}
