package nsjail

import (
	"os"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/doctest"
	"github.com/bullpen-run/bullpen/worker/jail"
)

func TestConfigGolden(t *testing.T) {
	const golden = "testdata/nsjail.cfg"
	got := layout{
		skeleton: &skeleton{
			dir:   "/run/bullpen/workers/X/root",
			binds: []bind{{"/usr", "/usr"}, {"/var/lib/image/lib64", "/lib64"}},
		},
		home: "/home/baponi", uids: &uidSet{first: 1_900_000_000, size: 2}, files: 4096, share: share{8, 12_000, 102_400},
		proc: &proc{files: []string{"keys"}, dirs: []string{"fs"}, replaced: []string{"stat"}},
		spec: jail.Spec{
			CPU: 1.5, Memory: 1 << 30, Pids: 256, OpenFiles: 4096, HomeBytes: 512 << 20, TmpBytes: 256 << 20,
			Inodes: 65536,
		},
	}.config()
	if *doctest.Update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("nsjail's configuration has changed; if that is meant, run this test with -update\n%s", got)
	}
	if a := strings.Join(args(), " "); a != "nsjail --config /proc/self/fd/8 --rw" {
		t.Errorf("arguments %q", a)
	}
}

func TestVersion(t *testing.T) {
	for out, want := range map[string]string{
		"Python 3.11.2\n": "3.11.2",
		"v20.20.2\n":      "20.20.2",
		"GNU bash, version 5.2.15(1)-release (x86_64-pc-linux-gnu)\nCopyright 2022\n": "5.2.15",
		"not found\n": "",
		"":            "",
	} {
		if got := version(out); got != want {
			t.Errorf("version(%q) = %q, want %q", out, got, want)
		}
	}
}
