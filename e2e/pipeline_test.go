package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// testPipelines runs the examples, and kills the gateway that runs a pipeline at points of a run: with
// -short at two of them.
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
	printed := sys.command(t, sys.key, "ci", "run", "--dir", "../examples/python", "--artifacts", out,
		"../examples/python/ci.yaml")
	expect(printed, "Ran 3 tests", "--- report: success", ": success, ")
	report, err := os.ReadFile(filepath.Join(out, "report", "report", "report.md"))
	if err != nil || !strings.Contains(string(report), "| test_rounds | ok |") {
		t.Errorf("%v: %s", err, report)
	}
	junit := filepath.Join(out, "junit.xml")
	printed = sys.command(t, sys.key, "ci", "run", "--no-input", "--junit", junit, "../examples/matrix/ci.yaml")
	expect(printed, "ZeroDivisionError", "test (divisor=0,base=6): failed with exit code 1", "publish: skipped",
		"a cell has failed",
		"divisor=2,base=7: 7 / 2 = 3.5", ": failed, ")
	xml, err := os.ReadFile(junit)
	if err != nil {
		t.Error(err)
	}
	expect(string(xml), `<testsuite name="test" tests="6" failures="1" errors="0" skipped="0"`, "ZeroDivisionError",
		`<skipped message="a step that it needs did not succeed">`)

	testCheckout(t, sys.system)

	if r := sys.do(http.MethodPut, "/v1/admin/secrets/STORED?org=acme",
		request{"value": "stored-secret-value!"}); r.status != http.StatusOK {
		t.Fatal(r)
	}
	var made struct{ Key string }
	sys.do(http.MethodPost, "/v1/admin/keys",
		request{"name": "ci", "org": "acme", "plan": "enterprise", "secrets": []string{"STORED"}}).into(t, &made)
	for _, at := range fault.PipelinePoints() {
		if !testing.Short() || at == fault.AfterStepBeforeState || at == fault.AfterKeepBeforeState {
			sys.testPipelineCrash(t, at, made.Key)
		}
	}
}

// pipelineRun is a run as the API returns it.
type pipelineRun struct {
	ID     string
	Status proto.PipelineStatus
	Cells  []struct {
		Step    string
		Status  proto.StepStatus
		TraceID string `json:"trace_id"`
	}
}

// testPipelineCrash kills the only gateway at a point of a run. Each step runs once all the same, and
// the secrets of the run are forgotten.
func (sys *crashSystem) testPipelineCrash(t *testing.T, at fault.Point, key string) {
	t.Helper()
	file := `
steps:
  - name: first
    run: "echo ran >> log; echo $TOKEN $STORED ${#STORED} $CI $CI_STEP_NAME"
    secrets: [TOKEN, STORED]
    artifacts: {log: [log]}
    cache: {key: "` + strings.ReplaceAll(string(at), "_", "-") + `", paths: [log]}
  - {name: second, run: "cat log; echo second >> log"}
  - {name: apart, workspace: own, needs: [first], run: "cat log; echo apart >> log", artifacts: {log: [log]}}
  - {name: last, needs: [second, apart], run: "cat log artifacts/apart/log"}
`
	sys.front.kill()
	point := at
	if at == fault.AfterKeepBeforeState {
		point += ":2" // of a step whose predecessor is done
	}
	sys.startDying(t, point, sys.startFront)
	ci := sys.with(key)
	body := request{"file": file, "secrets": map[string]string{"TOKEN": "s3cret-value"}}
	var run pipelineRun
	submit := func() (bool, any) { // a new gateway may not know the dispatcher yet
		r, err := ci.try(t.Context(), http.MethodPost, "/v1/pipelines", body)
		if err != nil || r.status != http.StatusCreated {
			return err != nil && at == fault.AfterRunBeforeState, r
		}
		r.into(t, &run)
		return true, r
	}
	eventually(t, "the run is accepted", submit)
	sys.awaitCrash(t, point, sys.front)
	sys.startFront(t)
	ci = sys.with(key)                   // at the new address
	if at == fault.AfterRunBeforeState { // nothing of it has started, and its client had no answer
		var list struct{ Pipelines []pipelineRun }
		ci.get("/v1/pipelines").into(t, &list)
		for _, r := range list.Pipelines {
			if r.Status == proto.PipelineRunning {
				t.Errorf("%s: run %+v goes on", at, r)
			}
		}
		eventually(t, "the run is accepted", submit)
	}
	eventually(t, string(at)+": the run ends", func() (bool, any) {
		r := ci.get("/v1/pipelines/" + run.ID)
		return r.status == http.StatusOK && json.Unmarshal(r.body, &run) == nil && run.Status != proto.PipelineRunning, r
	})
	if run.Status != proto.PipelineSuccess || len(run.Cells) != 4 {
		t.Fatalf("%s: %+v", at, run)
	}
	for i, stdout := range []string{"*** *** 20 true first\n", "ran\n", "ran\n", "ran\nsecond\nran\napart\n"} {
		rec := ci.record(run.Cells[i].TraceID)
		if run.Cells[i].Step == "apart" && rec.Stdout != nil && *rec.Stdout == "ran\nsecond\n" {
			continue // its workspace may be that after the second step
		}
		rec.succeeded(t, stdout)
	}
	if got := ci.listed(t, url.Values{"pipeline": {run.ID}}); len(got) != len(run.Cells) {
		t.Errorf("%s: the steps have the executions %v", at, got)
	}
	runs, err := sys.connectStore(t).JS.KeyValue(t.Context(), "bullpen_pipelines")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the secrets are forgotten", func() (bool, any) {
		e, err := runs.Get(t.Context(), "def.acme."+run.ID)
		return err == nil && !bytes.Contains(e.Value(), []byte("s3cret-value")), err
	})
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
	if err := os.WriteFile(file,
		[]byte("steps:\n  - {name: look, run: \"cat tracked; echo $(ls) at $CI_COMMIT_SHA on $CI_COMMIT_BRANCH.; sleep "+
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
		if printed := sys.command(t, sys.key, "ci", "attach", id); !strings.Contains(printed, c.want) ||
			!strings.Contains(printed, ": success, ") {
			t.Errorf("with %q: no %q in:\n%s", c.args, c.want, printed)
		}
	}
	id := start()
	sys.command(t, sys.key, "ci", "cancel", id)
	if printed := sys.command(t, sys.key, "ci", "attach", id); !strings.Contains(printed, ": cancelled, ") {
		t.Errorf("got:\n%s", printed)
	}
}
