package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/doctest"
)

// testE2BClients runs programs and E2B's own tests, as tables of cases, with E2B's clients, unmodified,
// against a server that has only what `bullpen init --e2b` creates, but the image. The clients come from
// PyPI and npm: the newest ones, and the newest one for Python with the routes of the first generation,
// which accepts keys of one form only.
func testE2BClients(t *testing.T, p *programs) {
	sys := newSystem(t, p, topologies()[0], manySlots, "--sandbox-domain", "sandboxes.example.com")
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "e2b"))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), clientsTime)
	defer cancel()
	env := append(os.Environ(), "BULLPEN_URL="+sys.base, "BULLPEN_API_KEY="+sys.key)
	run := func(t *testing.T, program string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir, cmd.Env = dir, env
		var failed strings.Builder
		cmd.Stderr = &failed
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s%s", program, strings.Join(args, " "), err, out, failed.String())
		}
		return string(out)
	}
	for line := range strings.Lines(run(t, p.bullpen, "init", "--e2b", "--image=")) {
		env = append(env, strings.TrimPrefix(strings.TrimSpace(line), "export "))
	}
	for i, version := range []string{"2.63.0", "2.45.1"} {
		t.Run("python "+version, func(t *testing.T) {
			venv := filepath.Join(dir, version)
			run(t, "python3", "-m", "venv", venv)
			run(t, filepath.Join(venv, "bin", "pip"), "install", "--quiet", "e2b=="+version)
			python := filepath.Join(venv, "bin", "python")
			run(t, "env", "RUN="+version, python, "client.py")
			t.Log(summary(run(t, python, "suite.py")))
			if i == 0 {
				doctest.Compare(t, "../docs/guides/e2b.md",
					"<!-- E2B's tests: written by `TestE2E/e2b-clients` with -update -->\n", "<!-- end of E2B's tests -->\n",
					run(t, python, "suite.py", "--table"))
			}
		})
	}
	t.Run("python code interpreter", func(t *testing.T) {
		venv := filepath.Join(dir, "interpreter")
		run(t, "python3", "-m", "venv", venv)
		run(t, filepath.Join(venv, "bin", "pip"), "install", "--quiet", "e2b==2.63.0", "e2b-code-interpreter==2.11.5")
		python := filepath.Join(venv, "bin", "python")
		for _, client := range []string{"sync", "async"} {
			t.Log(summary(run(t, "env", "CLIENT="+client, python, "interpreter.py")))
		}
		doctest.Compare(t, "../docs/guides/e2b.md",
			"<!-- the interpreter's tests: written by `TestE2E/e2b-clients` with -update -->\n",
			"<!-- end of the interpreter's tests -->\n", run(t, python, "interpreter.py", "--table"))
	})
	t.Run("typescript", func(t *testing.T) {
		run(t, "npm", "install", "--no-audit", "--no-fund", "--silent")
		run(t, "node", "client.mjs")
		t.Log(summary(run(t, "node", "suite.mjs")))
		t.Log(summary(run(t, "node", "interpreter.mjs")))
	})
}

// summary returns the last line of what a suite has printed.
func summary(out string) string {
	out = strings.TrimSpace(out)
	return out[strings.LastIndexByte(out, '\n')+1:]
}
