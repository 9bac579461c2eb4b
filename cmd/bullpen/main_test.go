package main

import (
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// buildDir is the directory of the program that build builds.
var buildDir string

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = os.MkdirTemp("", "bullpen-test"); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := os.RemoveAll(buildDir); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// build builds bullpen as `make build` does. The tests start it more than a hundred times, and a
// program with the race detector takes a second to start.
var build = sync.OnceValues(func() (program string, err error) {
	program = filepath.Join(buildDir, "bullpen")
	cmd := exec.Command("go", "build", "-trimpath", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build bullpen: %w: %s", err, out)
	}
	return program, nil
})

// TestScripts runs the command line against a stub of the server, see stub_test.go.
func TestScripts(t *testing.T) {
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "script"),
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			server := httptest.NewServer(newStub(filepath.Join(env.WorkDir, "requests")))
			env.Defer(server.Close)
			env.Setenv("PATH", filepath.Dir(program)+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("BULLPEN_URL", server.URL)
			env.Setenv("BULLPEN_API_KEY", stubKey)
			env.Setenv("TZ", "UTC")
			schema, err := filepath.Abs(filepath.Join("..", "..", "scheduler", "pipelines", "spec", "schema.json"))
			env.Setenv("SCHEMA", schema)
			if err != nil {
				return fmt.Errorf("find the schema: %w", err)
			}
			return nil
		},
	})
}
