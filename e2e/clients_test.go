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

// clientsTime is how long one of the public clients may take, its installation included.
const clientsTime = 10 * time.Minute

// testClients runs public programs against a server: the TypeScript client of the Model Context
// Protocol, the public Python client, and schemathesis, which derives requests from the OpenAPI
// document and checks the answers against it. They come from npm and PyPI.
func testClients(t *testing.T, p *programs) {
	sys := newSystem(t, p, topologies()[0], manySlots)
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "clients"))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), clientsTime)
	defer cancel()
	run := func(t *testing.T, program string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "BULLPEN_URL="+sys.base, "BULLPEN_API_KEY="+sys.key, "BULLPEN="+p.bullpen,
			"PYTHONWARNINGS=ignore")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	t.Run("typescript", func(t *testing.T) {
		run(t, "npm", "install", "--no-audit", "--no-fund", "--silent")
		run(t, "node", "mcp.mjs")
	})
	venv := filepath.Join(dir, "venv")
	run(t, "python3", "-m", "venv", venv)
	run(t, filepath.Join(venv, "bin", "pip"), "install", "--quiet", "--requirement", "requirements.txt")
	t.Run("python", func(t *testing.T) { run(t, filepath.Join(venv, "bin", "python"), "baponi_client.py") })
	t.Run("schemathesis", func(t *testing.T) {
		// It cannot make an image, must not revoke its own key, and waits for the end of the stream of changes.
		run(t, filepath.Join(venv, "bin", "schemathesis"), "--config-file", "schemathesis.toml", "run",
			sys.base+"/openapi.json",
			"--header", "Authorization: Bearer "+sys.key, "--no-color", "--continue-on-failure", "--phases",
			"examples,coverage,fuzzing", "--max-examples", "20",
			"--request-timeout", "70", "--exclude-operation-id", "revokeKey", "--exclude-operation-id", "putImage",
			"--exclude-operation-id", "getChanges", "--checks",
			"not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"+
				"response_schema_conformance,unsupported_method,ignored_auth")
	})
}
