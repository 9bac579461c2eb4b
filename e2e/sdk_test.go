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
	t.Run("scenario killed", func(t *testing.T) {
		testScenarioKilled(t, p, python, filepath.Join(dir, "tests", "scenario.py"))
	})
	t.Run("killed", func(t *testing.T) {
		testSDKKilled(t, p, python, filepath.Join(dir, "tests", "kill.py"), sdkPrograms)
	})
}

// testSDKTypeScript runs the tests of the TypeScript client, in Node.js, Deno and Bun, and the examples of its guides with
// the package as it is published. Its packages come from npm, as package.json pins them.
func testSDKTypeScript(t *testing.T, p *programs) {
	root := t.TempDir()
	if err := os.CopyFS(root, os.DirFS("../sdk")); err != nil {
		t.Fatal(err)
	}
	deno, err := filepath.Abs("../bin/deno/deno")
	if err != nil {
		t.Fatal(err)
	}
	sys := newSystem(t, p, topologies()[0], manySlots)
	ctx, cancel := context.WithTimeout(t.Context(), clientsTime)
	defer cancel()
	runIn := func(t *testing.T, dir, program string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir = filepath.Join(root, dir)
		cmd.Env = append(os.Environ(), "BULLPEN_URL="+sys.base, "BULLPEN_API_KEY="+sys.key)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	run := func(t *testing.T, program string, args ...string) {
		t.Helper()
		t.Log(summary(runIn(t, "typescript", program, args...)))
	}
	install := []string{"install", "--no-audit", "--no-fund", "--no-package-lock", "--silent"}
	run(t, "npm", install...)
	run(t, "npx", "tsc", "--project", "tests")
	for runtime, command := range map[string][]string{
		"node": {"node"}, "deno": {deno, "run", "--no-check", "--allow-all"}, "bun": {"node_modules/.bin/bun"},
	} {
		t.Run("scenario "+runtime, func(t *testing.T) {
			run(t, command[0], append(command[1:], "build/tests/scenario.js", "../scenario.json")...)
		})
	}
	t.Run("unit node", func(t *testing.T) { run(t, "node", "--test", "build/tests/client_test.js") })
	t.Run("unit bun", func(t *testing.T) { run(t, "node_modules/.bin/bun", "test", "./build/tests/client_test.js") })
	t.Run("ai sdk", func(t *testing.T) { run(t, "node", "--test", "build/tests/ai.js") })
	t.Run("guides", func(t *testing.T) {
		run(t, "npm", "pack", "--silent", "--pack-destination", root)
		if err := os.CopyFS(filepath.Join(root, "guide"), os.DirFS("testdata/typescript")); err != nil {
			t.Fatal(err)
		}
		runIn(t, "guide", "npm", install...)
		for _, page := range []string{"../sdk/typescript/README.md", "../docs/guides/clients.md"} {
			text, err := os.ReadFile(page)
			if err != nil {
				t.Fatal(err)
			}
			blocks := fence.FindAllStringSubmatch(string(text), -1)
			for _, b := range blocks {
				if b[1] == "ts" {
					if err := os.WriteFile(filepath.Join(root, "guide", b[2]), []byte(b[3]), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			runIn(t, "guide", "npx", "tsc")
			for i, b := range blocks {
				if b[1] != "ts" || blocks[i+1][1] != "output" {
					continue
				}
				printed := runIn(t, "guide", "node", strings.TrimSuffix(b[2], ".ts")+".js")
				if missing := missingLine(printed, blocks[i+1][3]); missing != "" {
					t.Errorf("%s printed\n%s\nand not the documented line\n%s", b[2], printed, missing)
				}
			}
		}
	})
	t.Run("scenario killed", func(t *testing.T) {
		testScenarioKilled(t, p, "node", filepath.Join(root, "typescript", "build", "tests", "scenario.js"),
			filepath.Join(root, "scenario.json"))
	})
	t.Run("killed", func(t *testing.T) {
		testSDKKilled(t, p, "node", filepath.Join(root, "typescript", "build", "tests", "kill.js"), sdkPrograms)
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
	code := `read -r name; name=${name//\"/}` + "\n" + effectCode("$name") + "sleep 0.3; echo done"
	running := with.startProcess(t, "client", nil, "env",
		append([]string{"CODE=" + code, "BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + key, client}, args...)...)
	kills := sys.killWhile(t, running, func() bool { return true })
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

// testScenarioKilled runs the scenario of a client, which prints its steps, and kills the gateway and scheduler after each.
// It stops before the first sandbox: what creates objects other than executions has an unknown outcome then.
func testScenarioKilled(t *testing.T, p *programs, client string, args ...string) {
	sys := newSystem(t, p, topology{separate: true}, manySlots)
	running := p.startProcess(t, "client", nil, "env",
		append([]string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + sys.key, client}, args...)...)
	kills := sys.killWhile(t, running, func() bool { return !strings.Contains(running.text(t), "(threads.delete)") })
	t.Logf("the gateway was killed %d times", kills)
}

// killWhile kills the gateway and scheduler whenever a client has printed another line, as long as more holds, and returns
// how often. The client must end with exit code 0.
func (sys *system) killWhile(t *testing.T, client *process, more func() bool) (kills int) {
	t.Helper()
	sys.args = append(sys.args, "--listen", strings.TrimPrefix(sys.base, "http://"))
	for seen := 0; !client.ended(); {
		eventually(t, "the client goes on", func() (bool, any) {
			n := strings.Count(client.text(t), "\n")
			progress := n > seen || client.ended()
			seen = n
			return progress, n
		})
		if !client.ended() && more() {
			sys.front.kill()
			sys.startFront(t)
			kills++
		}
	}
	if code := client.exitCode(t); code != 0 {
		t.Fatalf("the client ended with exit code %d after %d kills:\n%s", code, kills, client.tail())
	}
	if kills < sdkKills {
		t.Errorf("the gateway was killed %d times only", kills)
	}
	return kills
}
