package api

import (
	"bytes"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// An administrative route without a mark would leave no trace. A verification only reads.
func TestEveryAdministrativeRouteIsAudited(t *testing.T) {
	form := regexp.MustCompile(`^[a-z_]+\.[a-z_]+$`)
	var actions []string
	for _, route := range Routes() {
		changes := route.Method != http.MethodGet && route.ID != "verifyAudit"
		if route.Scope == proto.ScopeAdmin && changes && route.Audit == "" {
			t.Errorf("the route %s changes administrative objects: give it a value of Audit", route.ID)
		}
		if route.Audit == "" {
			continue
		}
		if !form.MatchString(route.Audit) || slices.Contains(actions, route.Audit) {
			t.Errorf("the action %q of route %s is not kind.verb, or is another route's", route.Audit, route.ID)
		}
		actions = append(actions, route.Audit)
	}
}

// The values are from RFC 8785, 3.2.2 and 3.2.3.
func TestCanonicalJSON(t *testing.T) {
	for in, want := range map[string]string{
		`{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001],` +
			`"string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/","literals":[null,true,false]}`: `{"literals":[null,` +
			`true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}`,
		`{"\u20ac":"Euro Sign","\r":"Carriage Return","1":"One","\u0080":"Control","\u00f6":"o"}`: "{\"\\r\":\"Carriage " +
			"Return\",\"1\":\"One\",\"\u0080\":\"Control\",\"ö\":\"o\",\"€\":\"Euro Sign\"}",
		`"\u2028<&>"`: "\"\u2028<&>\"",
	} {
		var v any
		if err := json.Unmarshal([]byte(in), &v); err != nil {
			t.Fatal(err)
		}
		if got, err := canonical(v); err != nil || string(got) != want {
			t.Errorf("%s\nis  %s, %v\nnot %s", in, got, err, want)
		}
	}
}

// auditLines returns a log of n acts.
func auditLines(t *testing.T, n int) (lines [][]byte) {
	t.Helper()
	var last *AuditRecord
	for i := range 2 * n {
		r := AuditRecord{
			Time: Time{exampleTime()}, Stage: AuditIntent, Action: "key.create",
			Actor:  AuditActor{"key", "key_1", "ci \u2028 <&>", "acme"},
			Object: AuditObject{Kind: "key"}, UserAgent: "agent",
			After: json.RawMessage(`{"cpu":0.05,"env":{"B":"[redacted]","A":"[redacted]"}}`),
		}
		if i%2 == 1 {
			r.Stage, r.Intent = AuditOutcome, new(int64(i))
		}
		line, err := r.Seal(last)
		if err != nil {
			t.Fatal(err)
		}
		last, lines = &r, append(lines, line)
	}
	return lines
}

func verify(lines [][]byte) (c AuditChain, err error) {
	for _, line := range lines {
		if _, err = c.Add(line); err != nil {
			return c, err
		}
	}
	return c, nil
}

func TestAuditChain(t *testing.T) {
	c, err := verify(auditLines(t, 3))
	if err != nil || c.Records != 6 || c.First != 1 || c.Last != 6 || len(c.Unfinished()) != 0 {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err = verify(auditLines(t, 3)[2:5]); err != nil || c.First != 3 || !slices.Equal(c.Unfinished(), []int64{5}) {
		t.Errorf("a part: %+v, %v", c, err)
	}
}

// Whatever is done to a log is found, and the first record that it was done to is named.
func TestAuditChainFindsTampering(t *testing.T) {
	resealed := func(line []byte) []byte {
		var r AuditRecord
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		r.UserAgent = "nobody"
		line, err := r.Seal(&AuditRecord{Sequence: r.Sequence - 1, Hash: r.Previous})
		if err != nil {
			t.Fatal(err)
		}
		return line
	}
	for name, tamper := range map[string]struct {
		change func(lines [][]byte) [][]byte
		word   string
	}{
		"a value": {func(l [][]byte) [][]byte {
			l[2] = bytes.Replace(l[2], []byte("acme"), []byte("evil"), 1)
			return l
		}, "record 3 was altered"},
		"another member": {
			func(l [][]byte) [][]byte { l[2] = append(l[2][:len(l[2])-1], `,"x":1}`...); return l },
			"record 3 was altered",
		},
		"a member twice": {func(l [][]byte) [][]byte {
			l[2] = append([]byte(`{"action":"key.list",`), l[2][1:]...)
			return l
		}, "record 3 was altered"},
		"a hash of its own": {func(l [][]byte) [][]byte { l[2] = resealed(l[2]); return l }, "record 4 does not follow"},
		"removed":           {func(l [][]byte) [][]byte { return slices.Delete(l, 2, 3) }, "record 3 is missing"},
		"given twice":       {func(l [][]byte) [][]byte { return slices.Insert(l, 2, l[1]) }, "record 3 is missing"},
		"another order":     {func(l [][]byte) [][]byte { l[2], l[3] = l[3], l[2]; return l }, "record 3 is missing"},
		"no JSON":           {func(l [][]byte) [][]byte { l[2] = l[2][:20]; return l }, "record 3 is no JSON"},
		"the first one": {func(l [][]byte) [][]byte {
			l[0] = bytes.Replace(l[0], []byte("0000"), []byte("1000"), 1)
			return l
		}, "record 1 was altered"},
	} {
		if _, err := verify(tamper.change(auditLines(t, 3))); err == nil || !strings.Contains(err.Error(), tamper.word) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The form in the API has the same content as the stored line.
func TestAuditRecordKeepsItsHash(t *testing.T) {
	line := auditLines(t, 1)[1]
	var r AuditRecord
	if err := json.Unmarshal(line, &r); err != nil {
		t.Fatal(err)
	}
	if again, err := r.Line(); err != nil || !bytes.Equal(again, line) {
		t.Errorf("%s, %v, not\n%s", again, err, line)
	}
}
