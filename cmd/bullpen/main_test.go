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

// build builds bullpen. The tests start it more than a hundred times, and a program with the race
// detector takes a second to start.
var build = sync.OnceValues(func() (program string, err error) {
	root := filepath.Join("..", "..")
	if out, err := exec.Command("make", "-s", "-C", root, "build").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build bullpen: %w: %s", err, out)
	}
	return filepath.Abs(filepath.Join(root, "bin", "bullpen"))
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
