package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	// sdkPrograms is how often a client runs a program in each of its ways while its gateway is killed.
	sdkPrograms = "15"
	// sdkKills is the smallest number of kills that make the test worth something.
	sdkKills = 5
	// sdkTime is how long the tests of a client may take, its installation included.
	sdkTime = 25 * time.Minute
)

// testSDKPython runs the tests of the Python client. Its packages come from PyPI, as tests/requirements.txt pins them.
func testSDKPython(t *testing.T, p *programs) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("../sdk")); err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(dir, "python")
	sys := newSystem(t, p, topologies()[0], manySlots)
	ctx, cancel := context.WithTimeout(t.Context(), sdkTime)
	defer cancel()
	run := func(t *testing.T, program string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "BULLPEN_URL="+sys.base, "BULLPEN_API_KEY="+sys.key)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
		}
		t.Log(summary(string(out)))
	}
	bin := filepath.Join(dir, "venv", "bin")
	python := filepath.Join(bin, "python")
	run(t, "python3", "-m", "venv", "venv")
	run(t, filepath.Join(bin, "pip"), "install", "--quiet", "--requirement", "tests/requirements.txt", ".")
	t.Run("types", func(t *testing.T) { run(t, filepath.Join(bin, "mypy"), "--strict", "src", "tests", "examples") })
	t.Run("unit", func(t *testing.T) { run(t, python, "-m", "pytest", "--quiet", "tests") })
	t.Run("scenario", func(t *testing.T) { run(t, python, "tests/scenario.py") })
	t.Run("adapters", func(t *testing.T) { run(t, python, "tests/adapters.py") })
	t.Run("examples", func(t *testing.T) { run(t, python, "examples/first.py") })
	t.Run("guides", func(t *testing.T) {
		page, err := filepath.Abs("../docs/guides/clients.md")
		if err != nil {
			t.Fatal(err)
		}
		run(t, python, "tests/guide.py", "README.md", page)
	})
	t.Run("notebook", func(t *testing.T) {
		run(t, filepath.Join(bin, "jupyter"), "nbconvert", "--to", "notebook", "--execute", "--stdout", "examples/tour.ipynb")
	})
	t.Run("killed", func(t *testing.T) {
		testSDKKilled(t, p, python, filepath.Join(dir, "tests", "kill.py"), sdkPrograms)
	})
}

// testSDKKilled runs a client that runs programs, and kills the gateway and scheduler whenever a program has ended. A
// listener outside of bullpen counts: each program ran once, as the execution that the client names. The client gets
// the program as CODE, whose standard input is a name, and prints the name and the execution of each that has ended.
func testSDKKilled(t *testing.T, p *programs, client string, args ...string) {
	with := *p
	with.machine = newMachine(t)
	sys := newSystem(t, &with, topology{separate: true}, manySlots)
	outside := newOutside(t, with.machine, newEventLog(t))
	sys.newProfile("sdk", request{"network": request{"policy": "unrestricted"}})
	key, _ := sys.boundKey("sdk")
	sys.args = append(sys.args, "--listen", strings.TrimPrefix(sys.base, "http://"))
	code := `read -r name; name=${name//\"/}` + "\n" + effectCode("$name") + "sleep 0.3; echo done"
	running := with.startProcess(t, "client", nil, "env",
		append([]string{"CODE=" + code, "BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + key, client}, args...)...)
	kills, seen := 0, 0
	for !running.ended() {
		eventually(t, "a program has ended", func() (bool, any) {
			n := strings.Count(running.text(t), "\n")
			progress := n > seen || running.ended()
			seen = n
			return progress, n
		})
		if !running.ended() {
			sys.front.kill()
			sys.startFront(t)
			kills++
		}
	}
	if code := running.exitCode(t); code != 0 {
		t.Fatalf("the client ended with exit code %d after %d kills:\n%s", code, kills, running.tail())
	}
	if kills < sdkKills {
		t.Errorf("the gateway was killed %d times only", kills)
	}
	ended := strings.Split(strings.TrimSpace(running.text(t)), "\n")
	for _, line := range ended {
		name, id, _ := strings.Cut(line, " ")
		effects := outside.effectsOf(name)
		if len(effects) != 1 || effects[id].total != 1 {
			t.Errorf("%s, execution %s, had the effects %v", name, id, effects)
		}
	}
	outside.mu.Lock()
	defer outside.mu.Unlock()
	if n := len(outside.effects); n != len(ended) {
		t.Errorf("%d programs ran, and the client reports %d", n, len(ended))
	}
	t.Logf("%d programs ran once while the gateway was killed %d times", len(ended), kills)
}
