package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// newProfilesHarness returns a harness with profiles of these names, whose executions end at once.
func newProfilesHarness(t *testing.T, names ...string) *harness {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	for _, name := range names {
		h.do("POST", profilesPath, fmt.Sprintf(`{"name":%q,"env":{"PROFILE":%[1]q}}`, name)).want(201, "")
	}
	return h
}

// keyWith creates a key of acme with more fields, and returns its id and the same client with it.
func (h *harness) keyWith(fields string) (string, *harness) {
	h.t.Helper()
	created := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"enterprise",`+fields+`}`).want(201, "")
	return created.json()["id"].(string), h.as(created.json()["key"].(string))
}

func TestRequestChoosesAProfile(t *testing.T) {
	h := newProfilesHarness(t, "own", "web", "other", "lost")
	const own, builtIn = `"profile":"own","profiles":["web","agents"]`, `"scopes":["execute"]`
	for name, c := range map[string]struct {
		key    string // fields of the key
		choose string // the member profile of the request, as JSON
		want   string // the profile of the job
		status int
		reason string
		text   string
	}{
		"none":                  {key: own, choose: `null`, want: "own"},
		"empty":                 {key: own, choose: `""`, want: "own"},
		"its own":               {key: own, choose: `"own"`, want: "own"},
		"another one":           {key: own, choose: `"web"`, want: "web"},
		"built in":              {key: own, choose: `"agents"`, want: "agents"},
		"not allowed":           {own, `"other"`, "", 403, "profile_not_allowed", `"other" is not allowed`},
		"the default of others": {own, `"default"`, "", 403, "profile_not_allowed", "may use own, web, agents;"},
		"does not exist":        {own, `"nowhere"`, "", 403, "profile_not_allowed", `"nowhere" is not allowed`},
		"removed": {
			`"profiles":["lost"]`, `"lost"`, "", 409, "missing_reference", `the profile "lost" does not exist`,
		},
		"form":                     {own, `"../web"`, "", 400, "", "profile"},
		"type":                     {own, `["web"]`, "", 400, "", "profile must be a string"},
		"default":                  {key: builtIn, choose: `"default"`, want: "default"},
		"none of the default":      {key: builtIn, choose: `null`, want: "default"},
		"not of the default":       {builtIn, `"agents"`, "", 403, "profile_not_allowed", "may use default;"},
		"default among others":     {key: `"profile":"own","profiles":["default"]`, choose: `"default"`, want: "default"},
		"its own twice":            {key: `"profile":"own","profiles":["own"]`, choose: `"own"`, want: "own"},
		"a global administrator's": {key: `"scopes":["execute","admin"],"global":true`, choose: `"web"`, want: "web"},
		"an organisation's administrator's": {
			`"scopes":["execute","admin"]`, `"web"`, "", 403, "profile_not_allowed", "may use default;",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := h.in(t)
			_, user := h.keyWith(c.key)
			if name == "removed" {
				h.registry.lose("lost")
			}
			request := `{"code":"1","profile":` + c.choose + `}`
			if c.status == 0 {
				job := user.jobOf(user.execute(request).want(200, ""))
				env := map[string]string{"PROFILE": c.want}
				if proto.BuiltInProfile(c.want) {
					env = nil
				}
				if job.Profile != c.want || len(env) > 0 && !cmp.Equal(job.Env, env) || len(job.Env) != len(env) {
					t.Errorf("profile %q, env %v", job.Profile, job.Env)
				}
				return
			}
			for _, headers := range [][]string{nil, {"Accept", web.TypeNDJSON}, {"Prefer", "respond-async"}} {
				a := user.execute(request, headers...)
				got := a.json()
				if a.status != c.status || got["reason"] != any(c.reason) && c.reason != "" ||
					!strings.Contains(got["message"].(string), c.text) || a.header.Get("Retry-After") != "" {
					t.Errorf("%d %s", a.status, a.body)
				}
			}
		})
	}
}

// Only global administrators choose an image. Others, even those whose profiles name the image, would
// combine it with the network and the secrets of another profile.
func TestRequestChoosesAnImage(t *testing.T) {
	h := newProfilesHarness(t, "own")
	for _, name := range []string{"data", "other"} {
		h.registry.images[name] = &proto.Image{
			Name: name, Digest: name, Languages: map[proto.Language]string{proto.Python: "/usr/bin/python3"},
		}
	}
	h.do("POST", profilesPath, `{"name":"with-data","image":"data","network":{"policy":"blocked"}}`).want(201, "")
	const admin = `"scopes":["execute","admin"],"global":true,"profile":"with-data"`
	for name, c := range map[string]struct {
		key    string // fields of the key
		choose string // members of the request
		want   string // the image of the job
		status int
		reason string
		text   string
	}{
		"an administrator":      {key: admin, choose: `"image":"other"`, want: "other"},
		"none":                  {key: admin, choose: `"image":""`, want: "data"},
		"with a profile":        {key: admin, choose: `"profile":"own","image":"data"`, want: "data"},
		"missing":               {admin, `"image":"nowhere"`, "", 400, "", `image "nowhere" does not exist`},
		"a directory":           {admin, `"image":"/usr"`, "", 400, "", "image must be the name of an image"},
		"a language it lacks":   {admin, `"image":"other","language":"ruby"`, "", 400, "", "ruby"},
		"the profile's own":     {`"profile":"with-data"`, `"image":"data"`, "", 403, "image_not_allowed", "with-data"},
		"of an allowed profile": {`"profiles":["with-data"]`, `"image":"data"`, "", 403, "image_not_allowed", "default"},
		"does not exist":        {`"profile":"own"`, `"image":"nowhere"`, "", 403, "image_not_allowed", "own"},
		"of an organisation":    {`"scopes":["execute","admin"]`, `"image":"data"`, "", 403, "image_not_allowed", ""},
		"with a foreign profile": {
			`"profile":"own"`, `"profile":"with-data","image":"data"`, "", 403, "profile_not_allowed", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, user := h.in(t).keyWith(c.key)
			request := `{"code":"1",` + c.choose + `}`
			if c.status == 0 {
				job := user.jobOf(user.execute(request).want(200, ""))
				if job.Sandbox.Image != c.want || job.Sandbox.ImageDigest != c.want || job.Image != c.want {
					t.Errorf("image %q, %+v", job.Image, job.Sandbox)
				}
				return
			}
			for _, headers := range [][]string{nil, {"Accept", web.TypeNDJSON}, {"Prefer", "respond-async"}} {
				a := user.execute(request, headers...)
				got := a.json()
				if a.status != c.status || got["reason"] != any(c.reason) && c.reason != "" ||
					!strings.Contains(got["message"].(string), c.text) {
					t.Errorf("%d %s", a.status, a.body)
				}
			}
		})
	}
}

// A repeated request is the same one only if it chooses the same profile.
func TestProfileAndIdempotency(t *testing.T) {
	h := newProfilesHarness(t, "web")
	_, user := h.keyWith(`"profiles":["web"]`)
	first := user.execute(hello, "Idempotency-Key", "k").want(200, "").trace()
	again := strings.TrimSuffix(hello, "}") + `,"profile":`
	if got := user.execute(again+`""}`, "Idempotency-Key", "k").want(200, "").trace(); got != first {
		t.Errorf("an empty profile makes another request: %s, %s", got, first)
	}
	user.execute(again+`"web"}`, "Idempotency-Key", "k").want(422, "idempotency_mismatch")
}

func TestProfilesOfAKey(t *testing.T) {
	h := newProfilesHarness(t, "web", "gpu")
	many := make([]string, 17)
	for i := range many {
		many[i] = fmt.Sprintf(`"p%d"`, i)
	}
	const form = `{"name":"n","org":"acme","profiles":[%s]}`
	for list, text := range map[string]string{
		`"web","web"`:           "profiles must name web only once",
		`"Web"`:                 "profiles",
		`7`:                     "profiles must be an array of strings",
		strings.Join(many, ","): "profiles must have at most 16 profiles",
		`"web","nowhere"`:       `profiles "nowhere" does not exist; make it first`,
	} {
		h.do("POST", "/v1/admin/keys", fmt.Sprintf(form, list)).want(400, "validation_error", text)
	}
	created := h.do("POST", "/v1/admin/keys", fmt.Sprintf(form, `"web","agents","default"`)).want(201, "")
	id := created.json()["id"].(string)
	path := "/v1/admin/keys/" + id
	profiles := func() any { return h.do("GET", path, "").want(200, "").json()["profiles"] }
	if d := cmp.Diff([]any{"web", "agents", "default"}, profiles()); d != "" {
		t.Error(d)
	}
	h.do("DELETE", profilesPath+"/web", "").want(409, "conflict", id, "remove it from their profiles")
	h.do("PUT", path, `{"name":"n","profiles":["nowhere"]}`).want(400, "validation_error", `"nowhere" does not exist`)
	h.do("PUT", path, `{"name":"n","profiles":["gpu"]}`).want(200, "")
	h.do("DELETE", profilesPath+"/web", "").want(200, "")
	h.do("DELETE", profilesPath+"/gpu", "").want(409, "conflict", id)
	h.do("PUT", path, `{"name":"n"}`).want(200, "")
	if got := profiles(); got != nil {
		t.Errorf("got %v", got)
	}
	h.do("DELETE", profilesPath+"/gpu", "").want(200, "")
}

// The administrator of an organisation grants and sees the profiles that its keys have, also the
// further ones.
func TestAdministratorGrantsProfilesOfTheOrganisation(t *testing.T) {
	h := newProfilesHarness(t, "web", "gpu", "other")
	admin := h.orgAdmin("acme")
	create := func(fields string) *reply {
		return admin.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme",`+fields+`}`)
	}
	create(`"profiles":["web"]`).want(403, "forbidden", `"web"`)
	id, _ := h.keyWith(`"profile":"gpu","profiles":["web"]`)
	create(`"profiles":["web","gpu","default"]`).want(201, "")
	create(`"profile":"web","profiles":["other"]`).want(403, "forbidden", `"other"`)
	admin.do("PUT", "/v1/admin/keys/"+id, `{"name":"n","profiles":["other"]}`).want(403, "forbidden", `"other"`)
	admin.do("PUT", "/v1/admin/keys/"+id, `{"name":"n","profiles":["web"]}`).want(200, "")
	for name, status := range map[string]int{"web": 200, "gpu": 200, "other": 404} {
		if a := admin.do("GET", profilesPath+"/"+name, ""); a.status != status {
			t.Errorf("%s: %d", name, a.status)
		}
	}
}

// What was accepted for later starts only if its key still allows the profile.
func TestProfilesOfLaterExecutions(t *testing.T) {
	h, batches := newBatchHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.do("POST", profilesPath, `{"name":"web"}`).want(201, "")
	id, user := h.keyWith(`"profiles":["web"]`)

	_, other := h.keyWith(`"scopes":["execute"]`)
	other.batch(`{"request":{"profile":"web"},"items":[{"code":"1"}]}`).
		want(403, "forbidden", `items[0]: the profile "web"`)
	user.batch(`{"request":{"profile":"web"},"items":[{"code":"1"},{"code":"2","profile":"default"}]}`).want(
		http.StatusCreated, "")
	b, shared := &batches.stored[0].Batch, []byte(batches.uploads[len(batches.uploads)-1].shared)
	items := batches.uploads[len(batches.uploads)-1].items
	submit, err := h.admission.OpenBatch(b, shared)
	if err != nil {
		t.Fatal(err)
	}
	schedule := &proto.Schedule{
		ID: proto.NewScheduleID(), Org: "acme", Key: id,
		Request: []byte(`{"code":"1","language":"python","timeout":60,"max_attempts":1,"profile":"web"}`),
	}
	tick := time.Unix(1e9, 0)
	if err := h.admission.CheckScheduled(t.Context(), schedule, &proto.Key{ID: id}); err != nil {
		t.Fatal(err)
	}
	trace, refused, err := h.admission.StartScheduled(t.Context(), schedule, tick)
	if err != nil || refused != "" || h.stub.runs[trace].job.Profile != "web" {
		t.Fatalf("%q, %v", refused, err)
	}
	for i, want := range []string{"web", "default"} {
		trace := b.ItemTrace(i, 0)
		if refused, err := submit(t.Context(), []byte(items[i]), i, trace); err != nil || refused != "" {
			t.Fatalf("%q, %v", refused, err)
		}
		if got := h.stub.runs[trace].job.Profile; got != want {
			t.Errorf("item %d has the profile %s", i, got)
		}
	}

	h.do("PUT", "/v1/admin/keys/"+id, `{"name":"n"}`).want(200, "")
	const reason = `the profile "web" is not allowed for this API key, which may use default;`
	_, refused, err = h.admission.StartScheduled(t.Context(), schedule, tick.Add(time.Hour))
	if err != nil || !strings.Contains(refused, reason) {
		t.Errorf("schedule: %q, %v", refused, err)
	}
	if refused, err := submit(t.Context(), []byte(items[0]), 0, b.ItemTrace(0, 1)); err != nil ||
		!strings.Contains(refused, reason) {
		t.Errorf("batch: %q, %v", refused, err)
	}
}

// Another key of the organisation, which may change what a schedule executes, must not choose as the
// global administrator whose key the schedule has.
func TestScheduleOfAGlobalAdministrator(t *testing.T) {
	h, _ := newScheduleHarness(t)
	for _, name := range []string{"own", "web"} {
		h.do("POST", profilesPath, `{"name":"`+name+`"}`).want(201, "")
	}
	h.registry.images["data"] = &proto.Image{
		Name: "data", Digest: "data", Languages: map[proto.Language]string{proto.Python: "/usr/bin/python3"},
	}
	const admin = `"scopes":["execute","admin"],"global":true,"profile":"own"`
	_, owner := h.keyWith(admin)
	_, other := h.keyWith(`"scopes":["execute","admin"]`)
	_, colleague := h.keyWith(admin)
	path := "/v1/schedules/" + owner.do("POST", "/v1/schedules",
		`{"name":"a","every":60,"request":{"code":"1","profile":"web","image":"data"}}`).want(201, "").json()["id"].(string)
	for request, reason := range map[string]string{
		`{"code":"2","profile":"web"}`: "profile_not_allowed",
		`{"code":"2","image":"data"}`:  "image_not_allowed",
	} {
		if got := other.do("PATCH", path, `{"request":`+request+`}`).want(403, "forbidden").json()["reason"]; got != reason {
			t.Errorf("%s: %v", request, got)
		}
		colleague.do("PATCH", path, `{"request":`+request+`}`).want(200, "")
	}
	other.do("PATCH", path, `{"paused":true}`).want(200, "")
	other.do("PATCH", path, `{"request":{"code":"2","profile":"own"}}`).want(200, "")
}
