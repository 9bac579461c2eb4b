package main

import (
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain makes this test binary the command bullpen of the scripts.
func TestMain(m *testing.M) { testscript.Main(m, map[string]func(){"bullpen": main}) }

// TestScripts runs the command line against a stub of the server, see stub_test.go.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "script"),
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(env *testscript.Env) error {
			server := httptest.NewServer(newStub(filepath.Join(env.WorkDir, "requests")))
			env.Defer(server.Close)
			env.Setenv("BULLPEN_URL", server.URL)
			env.Setenv("BULLPEN_API_KEY", stubKey)
			env.Setenv("TZ", "UTC")
			return nil
		},
	})
}
