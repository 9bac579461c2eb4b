package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// previous returns the same programs with the bullpen of the previous release, which it builds from
// the commit in deploy/release/previous.
func (p *programs) previous(t *testing.T) *programs {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	named, err := os.ReadFile(filepath.Join(root, "deploy", "release", "previous"))
	if err != nil {
		t.Fatal(err)
	}
	commit := strings.TrimSpace(string(named))
	source := t.TempDir()
	run := func(dir, script string, args ...string) error {
		cmd := exec.CommandContext(
			t.Context(), "bash", append([]string{"-euo", "pipefail", "-c", script, "bash"}, args...)...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	}
	if err := run(root, `git archive "$1" | tar -x -C "$2"`, commit, source); err != nil {
		t.Fatalf("deploy/release/previous names commit %s, which is not to be had: a shallow clone needs `git fetch "+
			"--unshallow`: %v", commit, err)
	}
	out := *p
	out.bullpen = filepath.Join(source, "bullpen")
	const build = `
		go build -trimpath -buildvcs=false -ldflags='-s -w -E main.entry' \
			-o worker/jail/nsjail/embedded/jailinit ./worker/jail/jailinit
		go build -trimpath -buildvcs=false -ldflags='-X github.com/bullpen-run/bullpen/cmd/internal/app.version=previous' \
			-o "$1" ./cmd/bullpen`
	if err := run(source, build, out.bullpen); err != nil {
		t.Fatalf("build commit %s: %v", commit, err)
	}
	return &out
}

// upgrade is a deployment whose parts change their version, with what must survive that.
type upgrade struct {
	*system
	workerData string
	printed    map[string]string // expected output of the executions that ended, by id
	lines      []string          // of the file in the thread's home
}

// testUpgrade upgrades a gateway and a worker one after the other from the previous release to this
// version, and back, in both orders. Each version accepts jobs that the other one runs, and reads
// what the other one has stored.
func testUpgrade(t *testing.T, p *programs) {
	old := p.previous(t)
	for name, order := range map[string][]string{
		"gateway-first": {"front", "worker"}, "worker-first": {"worker", "front"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hook := startReceiver(t)
			u := &upgrade{
				system: newSystem(t, old, topology{separate: true}, noSlots,
					append(hook.flags, "--slots", "2", "--queue-wait", "1m")...),
				workerData: filepath.Join(t.TempDir(), "worker"), printed: map[string]string{},
			}
			u.worker, _ = u.startWorkerIn(t, u.workerData)
			u.ready(t)
			u.settings(http.MethodPut, "/v1/webhook", request{"url": hook.url + "/200"})
			u.check(t, "before")
			for i, version := range []*programs{p, old} {
				direction := []string{"upgrade", "downgrade"}[i]
				for _, part := range order {
					proc := u.replace(t, part, version)
					if previous := strings.Contains(proc.text(t), `"version":"previous"`); previous != (version == old) {
						t.Errorf("the %s after the %s is the previous version: %t", part, direction, previous)
					}
					u.check(t, fmt.Sprintf("%s of the %s", direction, part))
				}
			}
		})
	}
}

// replace stops a part and starts it with another version, while jobs run and are queued.
func (u *upgrade) replace(t *testing.T, part string, with *programs) *process {
	t.Helper()
	const jobs = 8 // more than there are slots
	accepted := map[string]string{}
	for n := range jobs {
		word := fmt.Sprintf("%s %d", part, n)
		accepted[u.submit(bash("sleep 0.3; echo "+word))] = word + "\n"
	}
	proc := map[string]*process{"front": u.front, "worker": u.worker}[part]
	proc.signal(syscall.SIGTERM)
	if code := proc.exitCode(t); code != 0 {
		t.Errorf("%s ended with exit code %d:\n%s", part, code, proc.tail())
	}
	u.programs = with
	if part == "front" {
		u.startFront(t)
	} else {
		u.worker, _ = u.startWorkerIn(t, u.workerData)
	}
	u.ready(t)
	for id, stdout := range accepted {
		u.ended(id)
		u.printed[id] = stdout
	}
	return map[string]*process{"front": u.front, "worker": u.worker}[part]
}

// check runs programs in each mode and in a thread, and reads everything that ran before.
func (u *upgrade) check(t *testing.T, state string) {
	t.Helper()
	code := bash("echo " + state)
	if r := u.inline(code); !r.Success || r.Stdout != state+"\n" {
		t.Errorf("%s: inline: %+v", state, r)
	}
	if stdout, _, _ := checkEvents(t, u.stream(code), 0); stdout != state+"\n" {
		t.Errorf("%s: the stream is %q", state, stdout)
	}
	u.lines = append(u.lines, state)
	id := u.submit(bash("echo " + state + " >>lines; cat lines").of("upgraded"))
	u.ended(id)
	u.printed[id] = strings.Join(u.lines, "\n") + "\n"
	for id, stdout := range u.printed {
		rec := u.record(id)
		rec.succeeded(t, stdout)
		if rec.Attempt != 1 {
			t.Errorf("%s: attempt %d: %s", state, rec.Attempt, rec)
		}
		if printed, _, _ := checkEvents(t, u.output(id, 0), 0); printed != stdout {
			t.Errorf("%s: the output of %s is %q, want %q", state, id, printed, stdout)
		}
		u.delivered(id).check(t, proto.DeliveryDelivered, 1)
	}
}
