package gateway

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Two versions of a thread or a volume are compared, and the text of one file.
func TestCompareFiles(t *testing.T) {
	h := newHarness(t)
	h.do("PUT", "/v1/admin/secrets/KEYS", `{"value":"value"}`).want(200, "")
	h.do("POST", "/v1/admin/connections", `{"slug":"work","kind":"volume","bytes":"1GiB"}`).want(201, "")
	h.do("POST", "/v1/admin/connections", bucket).want(201, "")
	h.mount("key_1", proto.KeyMount{Connection: "work", Prefix: "part"}, proto.KeyMount{Connection: "data"})
	lines := strings.Repeat("line\n", 3)
	large := strings.Repeat("a", 256<<10)
	for at, content := range map[string]string{
		"t@1/a": lines + "old\n", "t@2/a": lines + "new", "t@1/gone": "x\n", "t@2/bin": "a\x00b", "t@2/latin": "\xff",
		"t@1/same": "s", "t@2/same": "s", "t@1/edge": large, "t@2/edge": large[1:], "t@2/big": large + "a", "t/a": "now\n",
		"t@2/a\nb": "<script>\n", "volume=work@1/part/a": "1\n", "volume=work@2/part/a": "2\n",
		"volume=work@2/other": "hidden",
	} {
		h.threads.files["acme/"+at] = []byte(content)
	}
	compare := func(more string) (d api.FileDifference) {
		a := h.do("POST", "/v1/files/compare", `{"source":"thread","id":"t",`+more+`}`).want(200, "")
		if err := json.Unmarshal(a.body, &d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	var got []string
	d := compare(`"from":1,"to":2`)
	for _, c := range d.Changes {
		got = append(got, c.Change+" "+c.Path)
	}
	const want = "changed a,added a\nb,added big,added bin,changed edge,removed gone,added latin"
	if strings.Join(got, ",") != want || d.Truncated || d.Diff != nil {
		t.Errorf("%q, %+v", got, d)
	}
	if c := d.Changes[0]; c.Before.Size != 19 || c.After.Size != 18 || c.After.Mode != "0644" ||
		c.After.Type != proto.FileRegular || d.Changes[1].Before != nil || d.Changes[5].After != nil {
		t.Errorf("%+v", d.Changes)
	}
	for more, want := range map[string]api.FileDiff{
		`"from":1,"to":2,"path":"a"`: {
			Kind: "text", Text: "--- version 1\n+++ version 2\n@@ -1,4 +1,4 @@\n line\n line\n line\n-old\n+new\n" +
				"\\ No newline at end of file\n",
		},
		`"from":2,"path":"./a"`: {
			Kind: "text", Text: "--- version 2\n+++ now\n@@ -1,4 +1,1 @@\n-line\n-line\n-line\n-new\n" +
				"\\ No newline at end of file\n+now\n",
		},
		`"from":1,"to":2,"path":"gone"`:  {Kind: "text", Text: "--- version 1\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x\n"},
		`"from":0,"to":2,"path":"a\nb"`:  {Kind: "text", Text: "--- /dev/null\n+++ version 2\n@@ -0,0 +1,1 @@\n+<script>\n"},
		`"from":1,"to":2,"path":"bin"`:   {Kind: "binary"},
		`"from":1,"to":2,"path":"latin"`: {Kind: "binary"},
		`"from":1,"to":2,"path":"big"`:   {Kind: "too_large"},
	} {
		if d := compare(more); d.Diff == nil || *d.Diff != want || len(d.Changes) != 1 {
			t.Errorf("%s: %+v", more, d)
		}
	}
	if d := compare(`"from":1,"to":2,"path":"edge"`); d.Diff.Kind != "text" || !strings.Contains(d.Diff.Text, large) {
		t.Errorf("the largest file: %s", d.Diff.Kind)
	}
	if d := compare(`"from":1,"to":2,"path":"same"`); d.Diff != nil || d.Changes == nil || len(d.Changes) != 0 {
		t.Errorf("equal files: %+v", d)
	}
	volume := h.do("POST", "/v1/files/compare", `{"source":"volume","id":"work","from":1,"to":2}`).want(200, "").json()
	if list := volume["changes"].([]any); len(list) != 1 || list[0].(map[string]any)["path"] != "part/a" {
		t.Errorf("the volume: %v", volume)
	}
	h.do("POST", "/v1/files/compare", `{"source":"volume","id":"work","from":1,"to":2,"path":"other"}`).want(
		404, "not_found", "other")
	h.do("POST", "/v1/files/compare", `{"source":"volume","id":"data","from":1}`).want(400, "validation_error", "id")
	for _, missing := range []string{`"from":1,"to":9`, `"from":9`} {
		h.do("POST", "/v1/files/compare", `{"source":"thread","id":"t",`+missing+`}`).want(404, "not_found", "no version 9")
	}
	for more, field := range map[string]string{
		`"to":2`: "from", `"from":-1`: "from", `"from":1,"to":0`: "to", `"from":1,"path":"../a"`: "path",
	} {
		h.do("POST", "/v1/files/compare", `{"source":"thread","id":"t",`+more+`}`).want(400, "validation_error", field)
	}
	other := "Bearer " + h.stub.addKey("other", "enterprise", asAdmin)
	h.do("POST", "/v1/files/compare", `{"source":"thread","id":"t","from":1,"to":2}`, "Authorization", other).want(
		404, "not_found")
	h.threads.broken = true
	if d := compare(`"from":1,"to":2`); !d.Truncated {
		t.Error("the answer does not say that it is not complete")
	}
}

// A global administrator lets the server verify its audit log.
func TestVerifyAudit(t *testing.T) {
	h := newHarness(t)
	verify := func(body string) (v api.AuditVerification) {
		if err := json.Unmarshal(h.do("POST", "/v1/admin/audit/verify", body).want(200, "").body, &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	if v := verify(""); !v.Valid || v.Records != 0 || v.Problem != nil || v.HeadHash != "" {
		t.Errorf("an empty log: %+v", v)
	}
	h.do("POST", "/v1/admin/profiles", `{"name":"web","cpu":2}`).want(201, "")
	h.do("PUT", "/v1/admin/profiles/web", `{"cpu":1}`).want(200, "")
	v := verify("{}")
	head := h.audit.all()[3].Hash
	if !v.Valid || v.Records != 4 || v.First != 1 || v.Last != 4 || v.HeadHash != head || v.Problem != nil ||
		len(v.Unfinished) != 0 {
		t.Errorf("%+v", v)
	}
	if n := len(h.audit.all()); n != 4 {
		t.Errorf("%d records: verifying changes the log", n)
	}
	if v := verify(`{"expect":"` + head + `"}`); !v.Valid {
		t.Errorf("with its head: %+v", v)
	}
	if v := verify(`{"expect":"` + strings.Repeat("0", 64) + `"}`); v.Valid || v.Records != 4 ||
		!strings.Contains(*v.Problem, "the end of the log was removed") {
		t.Errorf("with another head: %+v", v)
	}
	h.do("POST", "/v1/admin/audit/verify", `{"expect":"x"}`).want(400, "validation_error", "expect")
	boss := "Bearer " + h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}})
	h.do("POST", "/v1/admin/audit/verify", "", "Authorization", boss).want(403, "forbidden", "global")
	h.audit.mu.Lock()
	h.audit.lines[2] = []byte(strings.Replace(string(h.audit.lines[2]), "profile.replace", "profile.removed", 1))
	h.audit.mu.Unlock()
	if v := verify(""); v.Valid || v.Records != 2 || v.Last != 2 || fmt.Sprint(v.Unfinished) != "[]" ||
		!strings.Contains(*v.Problem, "record 3 was altered") {
		t.Errorf("an altered record: %+v", v)
	}
}
