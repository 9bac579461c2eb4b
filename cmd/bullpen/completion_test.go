package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api"
)

// complete returns the completions of the last word.
func complete(t *testing.T, words ...string) []string {
	t.Helper()
	var out, errs strings.Builder
	code := run(append([]string{"__complete"}, words...), streams{out: &out, err: &errs})
	if code != exitOK || errs.Len() > 0 {
		t.Errorf("complete %q: exit code %d: %s", words, code, errs.String())
	}
	return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
}

// TestCompletionAsksServer completes names and ids that a server has, and nothing that a shell would interpret.
func TestCompletionAsksServer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/executions":
			_, _ = fmt.Fprint(w, `{"executions":[{"trace_id":"trc_1","status":"running"},`+
				`{"trace_id":"trc_2","status":"success"}]}`)
		case "/v1/threads":
			_, _ = fmt.Fprint(w, `{"threads":[{"id":"plain"},{"id":"$(reboot)"},{"id":"-rf"},{"id":"a b"},{"id":"c\nd"}]}`)
		case "/v1/admin/orgs":
			_, _ = fmt.Fprint(w, `{"orgs":[{"name":"acme","title":"Acme\nLtd"},{"name":"beta","title":null}]}`)
		default:
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	defer server.Close()
	t.Setenv("BULLPEN_URL", server.URL)
	t.Setenv("BULLPEN_API_KEY", "sk-local-"+strings.Repeat("a", 43))
	for _, c := range []struct {
		words []string
		want  []string
	}{
		{[]string{"get", ""}, []string{"trc_1\trunning", "trc_2\tsuccess"}},
		{[]string{"logs", "--follow", "trc_2"}, []string{"trc_2\tsuccess"}},
		{[]string{"run", "--thread", ""}, []string{"plain\t"}},
		{[]string{"run", "--thread=p"}, []string{"--thread=plain\t"}},
		{[]string{"thread", "show", ""}, []string{"plain\t"}},
		{[]string{"org", "show", "a"}, []string{"acme\tAcme�Ltd"}},
		{[]string{"org", "create", ""}, []string{""}},
		{[]string{"usage", "--org", "b"}, []string{"beta\t"}},
		{[]string{"sandbox", "show", ""}, []string{""}}, // which the key may not list
		{[]string{"completion", "z"}, []string{"zsh\t"}},
	} {
		if got := complete(t, c.words...); !slices.Equal(got, c.want) {
			t.Errorf("%q is completed with %q, want %q", c.words, got, c.want)
		}
	}
}

// TestCompletedObjects checks that the API has the lists that completion reads, and that the commands exist.
func TestCompletedObjects(t *testing.T) {
	text, err := api.OpenAPI("test")
	if err != nil {
		t.Fatal(err)
	}
	type schema struct {
		Ref        string `json:"$ref"`
		Properties map[string]*schema
		Items      *schema
	}
	var document struct {
		Paths map[string]map[string]struct {
			Responses map[string]struct {
				Content map[string]struct{ Schema *schema }
			}
		}
		Components struct{ Schemas map[string]*schema }
	}
	if err := json.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	resolve := func(s *schema) *schema {
		for s != nil && s.Ref != "" {
			s = document.Components.Schemas[strings.TrimPrefix(s.Ref, "#/components/schemas/")]
		}
		if s == nil {
			s = new(schema)
		}
		return s
	}
	used := map[int]bool{}
	for _, command := range docsParser(t, streams{}).Model.Leaves(true) {
		var parameters []string
		for _, a := range command.Positional {
			parameters = append(parameters, a.Name)
		}
		for _, f := range command.Flags {
			parameters = append(parameters, "--"+f.Name)
		}
		for _, p := range parameters {
			if o := findObjects(command, p); o != nil {
				used[slices.IndexFunc(completed, func(other objects) bool { return other == *o })] = true
			}
		}
	}
	for i, o := range completed {
		if !used[i] {
			t.Errorf("no command has %s of %q", o.parameter, o.command)
		}
		if strings.HasPrefix(o.path, "/sandbox-agent/") {
			continue // whose document is another
		}
		answer := resolve(document.Paths[o.path]["get"].Responses["200"].Content["application/json"].Schema)
		list := answer.Properties[o.field]
		if list == nil {
			t.Errorf("the answer of %s has no %s", o.path, o.field)
			continue
		}
		object := resolve(resolve(list).Items)
		if object.Properties[o.id] == nil || o.help != "" && object.Properties[o.help] == nil {
			t.Errorf("an object of %s has no %s or no %s", o.path, o.id, o.help)
		}
	}
}
