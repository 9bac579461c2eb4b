package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestOrganisations(t *testing.T) {
	h := newHarness(t)
	made := h.do("POST", "/v1/admin/orgs", `{"name":"beta","title":"Beta Ltd.","plan":"pro"}`).want(201, "")
	if got := made.json(); got["name"] != "beta" || got["title"] != "Beta Ltd." || got["plan"] != "pro" ||
		got["suspended"] != false || made.header.Get("Location") != "/v1/admin/orgs/beta" {
		t.Errorf("created %v", got)
	}
	h.do("POST", "/v1/admin/orgs", `{"name":"beta"}`).want(409, "conflict")
	if got := h.do("POST", "/v1/admin/orgs", `{"name":"gamma"}`).want(201, "").json(); got["plan"] != "unlimited" {
		t.Errorf("created %v", got)
	}
	for body, field := range map[string]string{
		`{}`: "name", `{"name":"A"}`: "name", `{"name":"x","plan":"gold"}`: "plan", `{"name":"x","plan":"A"}`: "plan",
		`{"name":"x","suspended":1}`:                              "suspended",
		`{"name":"x","title":"` + strings.Repeat("t", 129) + `"}`: "title", `{"name":"x","limits":1}`: "limits",
	} {
		h.do("POST", "/v1/admin/orgs", body).want(400, "validation_error", field)
	}
	if got := h.do("PUT", "/v1/admin/orgs/beta", `{"plan":"free"}`).want(200, "").json(); got["plan"] != "free" ||
		got["title"] != "" {
		t.Errorf("replaced by %v", got)
	}
	h.do("PUT", "/v1/admin/orgs/beta", `{"name":"gamma"}`).want(400, "validation_error", "name")
	h.do("PUT", "/v1/admin/orgs/nobody", `{}`).want(404, "not_found")
	h.do("GET", "/v1/admin/orgs/nobody", "").want(404, "not_found")
	list := h.do("GET", "/v1/admin/orgs", "").want(200, "").json()["orgs"].([]any)
	if len(list) != 3 || list[1].(map[string]any)["name"] != "beta" {
		t.Errorf("organisations %v", list)
	}
}

// The plan is the organisation's. A key may only narrow it.
func TestAKeyNarrowsThePlanOfItsOrganisation(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	h.do("POST", "/v1/admin/orgs", `{"name":"beta","plan":"pro"}`).want(201, "")
	key := func(settings string) *harness {
		made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta"`+settings+`}`).want(201, "").json()
		return h.as(made["key"].(string))
	}
	whole, timed, free := key(""), key(`,"max_timeout":30,"concurrent":3`), key(`,"plan":"free"`)
	whole.execute(`{"code":"1","timeout":3600}`).want(200, "")
	whole.execute(`{"code":"1","timeout":3601}`).want(429, "rate_limited", "3600 seconds of the Pro plan")
	timed.execute(`{"code":"1","timeout":30}`).want(200, "")
	timed.execute(`{"code":"1","timeout":31}`).want(429, "rate_limited", "30 seconds of this API key")
	free.execute(`{"code":"1","timeout":61}`).want(429, "rate_limited", "60 seconds of the Free plan; ask for less")
	free.execute(hello, "Prefer", "respond-async").want(429, "rate_limited", "not part of the Free plan")
	for h, want := range map[*harness][2]int{whole: {100, 0}, timed: {100, 3}, free: {100, 5}} {
		id := h.execute(`{"code":"1","timeout":30}`).want(200, "").trace()
		if m := h.stub.record(id).Meta; m.Concurrent != want[0] || m.KeyConcurrent != want[1] {
			t.Errorf("limits are %d and %d, want %v", m.Concurrent, m.KeyConcurrent, want)
		}
	}
	for settings, field := range map[string]string{
		`"plan":"enterprise"`: "plan", `"plan":"gold"`: "plan",
		`"concurrent":101`: "concurrent", `"max_timeout":3601`: "max_timeout",
	} {
		h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta",`+settings+`}`).want(400, "validation_error", field)
	}
	h.do("PUT", "/v1/admin/orgs/beta", `{"plan":"free"}`).want(200, "") // at once, for all keys
	whole.execute(`{"code":"1","timeout":61}`).want(429, "rate_limited", "60 seconds of the Free plan; upgrade to Pro")
	h.do("PUT", "/v1/admin/orgs/beta", `{}`).want(200, "")
	id := whole.execute(`{"code":"1","timeout":86400}`).want(200, "").trace()
	if m := h.stub.record(id).Meta; m.Concurrent != proto.NoLimit || m.MaxQueued != proto.NoLimit {
		t.Errorf("limits without a limit are %d and %d", m.Concurrent, m.MaxQueued)
	}
	whole.execute(`{"code":"1","timeout":86401}`).want(
		429, "rate_limited", "86400 seconds of the Unlimited plan; ask for less")
}

func TestAKeyCreatesItsOrganisation(t *testing.T) {
	h := newHarness(t)
	for body, plan := range map[string]string{`"org":"a","plan":"pro"`: "pro", `"org":"b"`: "unlimited"} {
		made := h.do("POST", "/v1/admin/keys", `{"name":"n",`+body+`}`).want(201, "").json()
		org := h.do("GET", "/v1/admin/orgs/"+made["org"].(string), "").want(200, "").json()
		if made["plan"] != nil || org["plan"] != plan {
			t.Errorf("key %v of %v", made, org)
		}
	}
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"c","plan":"gold"}`).want(400, "validation_error", "plan")
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"c","profile":"none"}`).want(400, "validation_error", "profile")
	h.do("GET", "/v1/admin/orgs/c", "").want(404, "not_found")
}

func TestASuspendedOrganisationIsRefused(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	user := h.as(h.stub.addKey("beta", "pro", asUser))
	user.execute(hello).want(200, "")
	h.do("PUT", "/v1/admin/orgs/beta", `{"plan":"pro","suspended":true}`).want(200, "")
	for _, path := range []string{"/v1/executions", "/v1/threads"} {
		refused := user.do("GET", path, "").want(403, "forbidden", "suspended").json()
		if refused["reason"] != "organisation_suspended" {
			t.Errorf("refused with %v", refused)
		}
	}
	user.execute(hello).want(403, "forbidden", "suspended")
	h.do("PUT", "/v1/admin/orgs/acme", `{"suspended":true}`).want(409, "conflict", "API key in use")
	h.do("PUT", "/v1/admin/orgs/beta", `{"plan":"pro"}`).want(200, "")
	user.execute(hello).want(200, "")
}

func TestStoredPlans(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	made := h.do("POST", "/v1/admin/plans", `{"name":"gold","concurrent":7,"max_timeout":90,"next":"enterprise"}`).want(
		201, "").json()
	if made["title"] != "gold" || made["concurrent"] != 7.0 || made["weight"] != 1.0 || made["streaming"] != true ||
		made["async"] != true {
		t.Errorf("created %v", made)
	}
	h.do("POST", "/v1/admin/plans", `{"name":"gold"}`).want(409, "conflict")
	h.do("POST", "/v1/admin/plans", `{"name":"free"}`).want(409, "conflict")
	for body, field := range map[string]string{
		`{}`: "name", `{"name":"A"}`: "name", `{"name":"x","concurrent":0}`: "concurrent",
		`{"name":"x","max_timeout":86401}`: "max_timeout", `{"name":"x","weight":0}`: "weight",
		`{"name":"x","max_queued":-1}`: "max_queued", `{"name":"x","async":false,"max_queued":5}`: "max_queued",
		`{"name":"x","next":"silver"}`:   "next",
		`{"name":"x","title":"a\u0000"}`: "title", `{"name":"x","streaming":"yes"}`: "streaming",
		`{"name":"x","price":1}`: "price",
	} {
		h.do("POST", "/v1/admin/plans", body).want(400, "validation_error", field)
	}
	user := h.as(h.stub.addKey("beta", "gold", asUser))
	user.execute(`{"code":"1","timeout":91}`).want(
		429, "rate_limited", "90 seconds of the gold plan; upgrade to Enterprise for up to 86400 seconds")
	h.do("PUT", "/v1/admin/plans/gold", `{"title":"Gold","max_timeout":91}`).want(200, "")
	user.execute(`{"code":"1","timeout":91}`).want(200, "")
	user.execute(`{"code":"1","timeout":92}`).want(429, "rate_limited", "91 seconds of the Gold plan; ask for less")
	h.do("PUT", "/v1/admin/plans/free", `{"max_timeout":5}`).want(200, "")
	if got := h.do("GET", "/v1/admin/plans/free", "").want(200, "").json(); got["max_timeout"] != 5.0 {
		t.Errorf("the plan free is %v", got)
	}
	h.do("DELETE", "/v1/admin/plans/free", "").want(200, "")
	if got := h.do("GET", "/v1/admin/plans/free", "").want(200, "").json(); got["max_timeout"] != 60.0 {
		t.Errorf("the plan free is %v", got)
	}
	h.do("DELETE", "/v1/admin/plans/free", "").want(404, "not_found")
	h.do("PUT", "/v1/admin/plans/silver", `{}`).want(404, "not_found")
	h.do("DELETE", "/v1/admin/plans/silver", "").want(404, "not_found")
	h.do("GET", "/v1/admin/plans/A", "").want(400, "validation_error")
}

// A change that names an older state in If-Match is refused, so that nobody's change is lost.
func TestOnlyOneOfTwoChangesAtTheSameTimeIsMade(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/admin/orgs", `{"name":"beta"}`).want(201, "")
	h.do("POST", "/v1/admin/plans", `{"name":"gold"}`).want(201, "")
	h.do("POST", "/v1/admin/profiles", `{"name":"web"}`).want(201, "")
	id := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta"}`).want(201, "").json()["id"].(string)
	for path, body := range map[string]string{
		"/v1/admin/orgs/beta": `{"title":"%d"}`, "/v1/admin/plans/gold": `{"title":"%d"}`,
		"/v1/admin/keys/" + id: `{"name":"%d"}`, "/v1/admin/profiles/web": `{"pids":10%d}`,
	} {
		tag := h.do("GET", path, "").want(200, "").header.Get("ETag")
		first := h.do("PUT", path, fmt.Sprintf(body, 1), "If-Match", tag).want(200, "").header.Get("ETag")
		if tag == "" || first == "" || first == tag {
			t.Errorf("%s: tags %s and %s", path, tag, first)
		}
		h.do("PUT", path, fmt.Sprintf(body, 2), "If-Match", tag).want(412, "precondition_failed", first)
		h.do("DELETE", path, "", "If-Match", tag)
		if got := h.do("GET", path, "").want(200, "").header.Get("ETag"); got != first {
			t.Errorf("%s was changed: %s", path, got)
		}
		h.do("PUT", path, fmt.Sprintf(body, 2), "If-Match", `"other", `+first).want(200, "")
		h.do("PUT", path, fmt.Sprintf(body, 3), "If-Match", "*").want(200, "")
	}
}

func TestLastUseOfAKey(t *testing.T) {
	h := newHarness(t)
	made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta"}`).want(201, "").json()
	path := "/v1/admin/keys/" + made["id"].(string)
	before := h.do("GET", path, "").want(200, "")
	h.as(made["key"].(string)).do("GET", "/v1/threads", "").want(200, "")
	after := h.do("GET", path, "").want(200, "")
	if made["last_used_at"] != nil || before.json()["last_used_at"] != nil || after.json()["last_used_at"] == nil {
		t.Errorf("before %s, after %s", before.body, after.body)
	}
	if before.header.Get("ETag") != after.header.Get("ETag") {
		t.Error("its use changed the key's ETag")
	}
}

func TestKeysAreChangedAndRotated(t *testing.T) {
	h := newHarness(t)
	made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta","concurrent":2,"env":{"A":"1"}}`).want(201, "").json()
	path := "/v1/admin/keys/" + made["id"].(string)
	got := h.do("PUT", path, `{"name":"m","scopes":["read"],"max_timeout":5}`).want(200, "").json()
	if got["name"] != "m" || got["concurrent"] != nil || got["max_timeout"] != 5.0 ||
		fmt.Sprint(got["scopes"]) != "[read]" || got["env"] != nil || got["org"] != "beta" || got["key"] != nil {
		t.Errorf("replaced by %v", got)
	}
	for body, field := range map[string]string{
		`{}`: "name", `{"name":"m","org":"acme"}`: "org",
		`{"name":"m","profile":"web"}`: "profile", `{"name":"m","scopes":["x"]}`: "scopes",
	} {
		h.do("PUT", path, body).want(400, "validation_error", field)
	}
	rotated := h.do("POST", path+"/rotate", `{"overlap":60}`).want(200, "").json()
	if rotated["key"] == made["key"] || rotated["key"] == nil || rotated["overlap_until"] == nil {
		t.Errorf("rotated to %v", rotated)
	}
	h.do("POST", path+"/rotate", "").want(200, "")
	h.do("POST", path+"/rotate", `{"overlap":604801}`).want(400, "validation_error", "overlap")
	h.do("POST", path+"/rotate", `{"overlap":-1}`).want(400, "validation_error", "overlap")
	h.do("DELETE", path, "").want(200, "")
	h.do("PUT", path, `{"name":"m"}`).want(409, "conflict", "revoked")
	h.do("POST", path+"/rotate", "").want(409, "conflict", "revoked")
	for _, method := range []string{"GET", "PUT", "DELETE"} {
		h.do(method, "/v1/admin/keys/key_none", `{"name":"m"}`).want(404, "not_found")
	}
}

func TestDeleteAnOrganisation(t *testing.T) {
	h := newHarness(t)
	h.stub.finishAtOnce(proto.Exited(0))
	user := h.as(h.stub.addKey("beta", "pro", asUser))
	stream := user.do("POST", "/v1/executions/"+string(user.execute(hello).want(200, "").trace())+"/stream_url", "").want(
		200, "").json()["url"].(string)
	upload := user.do("POST", "/v1/files/upload_url", `{"source":"thread","id":"t","path":"a","content_length":1}`).want(
		200, "").json()["url"].(string)
	before := h.do("GET", "/v1/admin/orgs/beta", "").want(200, "")
	h.do("PUT", "/v1/admin/orgs/beta", `{"title":"Beta"}`).want(200, "")
	h.do("DELETE", "/v1/admin/orgs/beta", "", "If-Match", before.header.Get("ETag")).want(412, "precondition_failed")
	user.execute(hello).want(200, "")

	if got := h.do("DELETE", "/v1/admin/orgs/beta", "").want(202, "").json(); got["deleting_at"] == nil {
		t.Errorf("deleted: %v", got)
	}
	for _, path := range []string{"/v1/executions", "/v1/threads"} {
		if got := user.do("GET", path, "").want(
			403, "forbidden", "being deleted").json(); got["reason"] != "organisation_deleted" {
			t.Errorf("refused with %v", got)
		}
	}
	user.execute(hello).want(403, "forbidden", "being deleted")
	h.do("GET", strings.TrimPrefix(stream, h.http.URL), "").want(403, "forbidden", "being deleted")
	h.do("PUT", strings.TrimPrefix(upload, h.http.URL), "x").want(403, "forbidden", "being deleted")
	h.do("PUT", "/v1/admin/orgs/beta", `{}`).want(409, "conflict", "being deleted")
	h.do("POST", "/v1/admin/orgs", `{"name":"beta"}`).want(409, "conflict")
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"beta"}`).want(409, "conflict", "being deleted")
	h.do("PUT", "/v1/admin/secrets/A?org=beta", `{"value":"value"}`).want(409, "conflict", "being deleted")
	h.do("POST", "/v1/admin/members", `{"org":"beta","email":"ann@example.com","role":"viewer"}`).want(
		409, "conflict", "being deleted")
	began := h.do("GET", "/v1/admin/orgs/beta", "").want(200, "").json()["deleting_at"]
	if got := h.do("DELETE", "/v1/admin/orgs/beta", "").want(202, "").json()["deleting_at"]; got != began {
		t.Errorf("the deletion began at %v, then at %v", began, got)
	}

	h.do("DELETE", "/v1/admin/orgs/nobody", "").want(404, "not_found")
	h.do("DELETE", "/v1/admin/orgs/A", "").want(400, "validation_error", "name")
	h.do("DELETE", "/v1/admin/orgs/acme", "").want(409, "conflict", "API key in use")
	h.do("POST", "/v1/admin/orgs", `{"name":"default"}`).want(201, "")
	h.do("DELETE", "/v1/admin/orgs/default", "").want(409, "conflict", "first API key")
}

// Somebody must be able to administer the server afterwards.
func TestTheOrganisationOfTheLastAdministratorIsKept(t *testing.T) {
	h := newHarness(t)
	lasting := h.stub.addKey("beta", "pro", asAdmin)
	h.do("PUT", "/v1/admin/keys/key_1",
		`{"name":"n","scopes":["admin"],"global":true,"expires_at":"2999-01-01T00:00:00Z"}`).want(200, "")
	h.do("DELETE", "/v1/admin/orgs/beta", "").want(409, "conflict", "global administrators")
	h.as(lasting).do("DELETE", "/v1/admin/orgs/acme", "").want(202, "")
}

func TestDataOfAnOrganisation(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/admin/orgs", `{"name":"beta"}`).want(201, "")
	for org, total := range map[string]float64{"beta": 1, "gone": 0} {
		got := h.do("GET", "/v1/admin/orgs/"+org+"/data", "").want(200, "").json()
		if got["org"] != org || got["total"] != total || len(got["data"].([]any)) != 1 {
			t.Errorf("data of %s: %v", org, got)
		}
	}
	h.do("GET", "/v1/admin/orgs/A/data", "").want(400, "validation_error", "org")
}

// A body may arrive for as long as its client likes. What it leads to is not stored once the
// organisation is being deleted.
func TestABodyThatEndsAfterTheDeletionIsRefused(t *testing.T) {
	h := newHarness(t)
	user := h.as(h.stub.addKey("beta", "pro", asUser))
	conn, err := h.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	body := `{"code":"1"}`
	_, err = fmt.Fprintf(conn,
		"POST /v1/sandbox/execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\nExpect: "+
			"100-continue\r\n\r\n", user.key, len(body))
	if err != nil {
		t.Fatal(err)
	}
	answers := bufio.NewReader(conn)
	// the key was accepted
	if line, err := answers.ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
		t.Fatal(line, err)
	}
	if _, err := answers.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	h.do("DELETE", "/v1/admin/orgs/beta", "").want(202, "")
	if _, err := io.WriteString(conn, body); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(answers, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	if text, _ := io.ReadAll(answer.Body); answer.StatusCode != http.StatusForbidden ||
		!strings.Contains(string(text), "organisation_deleted") {
		t.Errorf("%s: %s", answer.Status, text)
	}
}
