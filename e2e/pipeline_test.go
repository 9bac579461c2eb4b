package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// testPipelines runs the examples, and kills the gateway that runs a pipeline when it has submitted
// a step and has not stored that.
func testPipelines(t *testing.T, p *programs) {
	sys := &crashSystem{system: newSystem(t, p.faulty(t), topology{separate: true}, 2), died: map[fault.Point]bool{}}
	expect := func(printed string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(printed, part) {
				t.Errorf("no %q in:\n%s", part, printed)
			}
		}
	}
	out := t.TempDir()
	printed := sys.command(t, sys.key, "ci", "run", "--dir", "../examples/python", "--artifacts", out, "../examples/python/ci.yaml")
	expect(printed, "Ran 3 tests", "--- report: success", ": success, ")
	report, err := os.ReadFile(filepath.Join(out, "report", "report", "report.md"))
	if err != nil || !strings.Contains(string(report), "| test_rounds | ok |") {
		t.Errorf("%v: %s", err, report)
	}
	junit := filepath.Join(out, "junit.xml")
	printed = sys.command(t, sys.key, "ci", "run", "--no-input", "--junit", junit, "../examples/matrix/ci.yaml")
	expect(printed, "ZeroDivisionError", "test (divisor=0,base=6): failed with exit code 1", "publish: skipped", "a cell has failed",
		"divisor=2,base=7: 7 / 2 = 3.5", ": failed, ")
	xml, err := os.ReadFile(junit)
	if err != nil {
		t.Error(err)
	}
	expect(string(xml), `<testsuite name="test" tests="6" failures="1" errors="0" skipped="0"`, "ZeroDivisionError", `<skipped message="a step that it needs did not succeed">`)

	testCheckout(t, sys.system)

	sys.front.kill()
	sys.startDying(t, fault.AfterStepBeforeState, sys.startFront)
	file := `
steps:
  - {name: first, run: "echo ran >> log; echo $TOKEN $STORED ${#STORED} $CI $CI_STEP_NAME", secrets: [TOKEN, STORED]}
  - {name: second, run: "cat log"}
`
	var run struct {
		ID     string
		Status proto.PipelineStatus
		Cells  []struct {
			Status  proto.StepStatus
			TraceID string `json:"trace_id"`
		}
	}
	if r := sys.do(http.MethodPut, "/v1/admin/secrets/STORED?org=acme", request{"value": "stored-secret-value!"}); r.status != http.StatusOK {
		t.Fatal(r)
	}
	var made struct{ Key string }
	sys.do(http.MethodPost, "/v1/admin/keys", request{"name": "ci", "org": "acme", "plan": "enterprise", "secrets": []string{"STORED"}}).into(t, &made)
	ci := sys.with(made.Key)
	body := request{"file": file, "secrets": map[string]string{"TOKEN": "s3cret-value"}}
	eventually(t, "the run is accepted", func() (bool, any) { // a new gateway may not know the dispatcher yet
		r, err := ci.try(t.Context(), http.MethodPost, "/v1/pipelines", body)
		if err != nil || r.status != http.StatusCreated {
			return false, r
		}
		r.into(t, &run)
		return true, r
	})
	sys.awaitCrash(t, fault.AfterStepBeforeState, sys.front)
	sys.startFront(t)
	ci = sys.with(made.Key) // at the new address
	eventually(t, "the run ends", func() (bool, any) {
		r := ci.get("/v1/pipelines/" + run.ID)
		return r.status == http.StatusOK && json.Unmarshal(r.body, &run) == nil && run.Status != proto.PipelineRunning, r
	})
	if run.Status != proto.PipelineSuccess {
		t.Fatalf("%+v", run)
	}
	ci.record(run.Cells[0].TraceID).succeeded(t, "*** *** 20 true first\n")
	ci.record(run.Cells[1].TraceID).succeeded(t, "ran\n")
}

// testCheckout runs a pipeline with the files of a Git repository and with one of its commits, goes
// away from a run and comes back, and cancels one.
func testCheckout(t *testing.T, sys *system) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git := func(args ...string) string {
		t.Helper()
		args = append([]string{"-C", dir, "-c", "user.name=test", "-c", "user.email=test@example.com"}, args...)
		out, err := exec.CommandContext(t.Context(), "git", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("git %s: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	write("tracked", "committed\n")
	write(".gitignore", "ignored\n")
	git("init", "--quiet", "--initial-branch=trunk")
	git("add", ".")
	git("commit", "--quiet", "--message=first")
	commit := git("rev-parse", "HEAD")
	write("tracked", "changed\n")
	write("untracked", "")
	write("ignored", "")
	file := filepath.Join(t.TempDir(), "ci.yaml")
	hold := newHold()
	if err := os.WriteFile(file, []byte("steps:\n  - {name: look, run: \"cat tracked; echo $(ls) at $CI_COMMIT_SHA on $CI_COMMIT_BRANCH.; sleep "+
		hold.seconds+" || true\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func(args ...string) (id string) {
		t.Helper()
		printed := sys.command(t, sys.key, append([]string{"ci", "run", "--detach", "--dir", dir}, append(args, file)...)...)
		words := strings.Fields(printed)
		if id = words[len(words)-1]; !strings.HasPrefix(id, "run_") {
			t.Fatal(printed)
		}
		hold.reached(t, 1)
		return id
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "changed\ntracked untracked at " + commit + " on trunk.\n"},
		{[]string{"--ref", "trunk"}, "committed\ntracked at " + commit + " on trunk.\n"},
		{[]string{"--ref", commit}, "committed\ntracked at " + commit + " on .\n"},
	} {
		id := start(c.args...)
		if list := sys.command(t, sys.key, "ci", "list"); !strings.Contains(list, id) {
			t.Errorf("no %s in the list:\n%s", id, list)
		}
		hold.release(t)
		if printed := sys.command(t, sys.key, "ci", "attach", id); !strings.Contains(printed, c.want) || !strings.Contains(printed, ": success, ") {
			t.Errorf("with %q: no %q in:\n%s", c.args, c.want, printed)
		}
	}
	id := start()
	sys.command(t, sys.key, "ci", "cancel", id)
	if printed := sys.command(t, sys.key, "ci", "attach", id); !strings.Contains(printed, ": cancelled, ") {
		t.Errorf("got:\n%s", printed)
	}
}
