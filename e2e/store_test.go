package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// testStore runs with an S3 server, also while that does not respond. Once a process has started,
// only threads need the store.
func testStore(t *testing.T, p *programs, in topology) {
	b := p.newBucket(t)
	sys := newSystem(t, p, in, 1, b.flags()...)
	b.Set(storagetest.Silent, -1, "", 0)
	before := len(b.Seen())
	if res := sys.inline(bash("echo served")); res.Stdout != "served\n" {
		t.Errorf("got %+v", res)
	}
	if seen := b.Seen()[before:]; len(seen) > 0 {
		t.Errorf("an execution without a thread sent a request to the store: %v", seen[0].URL)
	}
	b.Clear()
	if c := sys.storeCheck(t); !c.OK {
		t.Errorf("%+v", c)
	}
	if len(b.Seen()) == before {
		t.Error("doctor sent no request to the store")
	}
	if left, err := filepath.Glob(b.path("doctor/*")); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	b.Set(storagetest.Broken, -1, "", 0)
	if c := sys.storeCheck(t); c.OK || !strings.Contains(c.Found, "InternalError") || c.Remedy == "" {
		t.Errorf("%+v", c)
	}
}

// check is one line of `bullpen doctor --json`.
type check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Found  string `json:"found"`
	Remedy string `json:"remedy"`
}

// storeCheck returns the result of `bullpen doctor` for the blob store.
func (sys *system) storeCheck(t *testing.T) check {
	t.Helper()
	args := append([]string{
		"doctor", "--json", "--nsjail", sys.programs.nsjail, "--data",
		filepath.Join(t.TempDir(), "data"),
	}, sys.args...)
	if sys.separate {
		args = append(args, "--roles", "gateway")
	}
	cmd := exec.CommandContext(t.Context(), sys.programs.bullpen, args...)
	cmd.Env = append(os.Environ(), sys.env...)
	var log bytes.Buffer
	cmd.Stderr = &log
	out, _ := cmd.Output() // other checks may fail on this machine
	var checks []check
	if err := json.Unmarshal(out, &checks); err != nil {
		t.Fatalf("%v in %s\n%s", err, out, &log)
	}
	for _, c := range checks {
		if c.Name == "blob store" {
			return c
		}
	}
	t.Fatalf("the store is not among %+v", checks)
	return check{}
}
