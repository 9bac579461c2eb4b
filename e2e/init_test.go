package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// testInit creates what a kind of work needs, twice, and runs a program in it. It gives a tenant's key no image of
// its choice.
func testInit(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{}, 1)
	if out := sys.command(t, sys.key, "init"); !strings.Contains(out, "choose with --data, --e2b and --agents") {
		t.Errorf("without a terminal: %s", out)
	}
	if out := sys.command(t, sys.key, "init", "--data", "--e2b", "--image="); !strings.Contains(out, "exactly one of") {
		t.Errorf("two kinds and an image: %s", out)
	}
	first := sys.command(t, sys.key, "init", "--data", "--image=")
	_, rest, ok := strings.Cut(first, "export BULLPEN_API_KEY=")
	key, _, _ := strings.Cut(rest, "\n")
	if !ok || !strings.Contains(first, "run --profile data --rich -") {
		t.Fatalf("the first run printed %s", first)
	}
	again := sys.command(t, sys.key, "init", "--data", "--image=")
	for _, want := range []string{
		"profile data exists", "API key data (key_", "key rotate", "run --profile data --rich -",
	} {
		if !strings.Contains(again, want) {
			t.Errorf("the second run does not print %q: %s", want, again)
		}
	}
	if strings.Contains(again, "export ") {
		t.Errorf("the second run made a key: %s", again)
	}
	if out := sys.command(t, sys.key, "init", "--data", "--image=", "--json"); !strings.Contains(out, "{}\n") {
		t.Errorf("with --json: %s", out)
	}

	plot := filepath.Join(t.TempDir(), "plot.py")
	if err := os.WriteFile(plot, []byte("40 + 2"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{key, sys.key} { // the new key, and the administrator's
		if out := sys.command(t, key, "run", "-q", "--rich", "--profile", "data", plot); out != "42\n" {
			t.Errorf("got %q", out)
		}
	}

	sys.imageCommand(t, "import", "--json", "tiny", hostBash(t))
	look := filepath.Join(t.TempDir(), "look.sh")
	if err := os.WriteFile(look, []byte("test -e /usr/bin/python3 || echo in tiny"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := []string{"run", "-q", "--image", "tiny", look}
	if out := sys.command(t, sys.key, run...); out != "in tiny\n" {
		t.Errorf("the administrator's program in an image: %q", out)
	}
	const refused = "may not choose an image, only one of its profiles, data"
	if out := sys.command(t, key, run...); !strings.Contains(out, refused) {
		t.Errorf("a tenant's program in an image: %q", out)
	}
	if out := sys.command(t, key, "run", "-q", "--profile", "default", look); !strings.Contains(out, "not allowed") {
		t.Errorf("a tenant's program in another profile: %q", out)
	}
}
