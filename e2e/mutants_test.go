package e2e

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// mutant is a bug that breaks a guarantee of bullpen, as a patch, with the ledger that finds it.
type mutant struct {
	separate    bool
	kinds       []kind // kinds of its clients
	disruptions func(l *ledger) []disruption
	cycles      int
	// violation is part of the text of at least one violation.
	violation string
}

// mutants returns the mutant of each patch in the directory mutants.
func mutants() map[string]mutant {
	kills := func(l *ledger) []disruption { return []disruption{killed(l.members[0], atOnce)} }
	killsWithRetries := func(l *ledger) []disruption {
		kill := kills(l)[0]
		return []disruption{{
			kill.name + " while webhooks wait for a retry",
			func(l *ledger, r *rand.Rand) (func(), time.Duration) {
				refused, usual := l.rejectAll()
				defer usual()
				select {
				case <-refused:
				case <-time.After(patience):
					l.violate(disruptionSubject, "no webhook comes")
				}
				return kill.inject(l, r)
			},
		}}
	}
	// One worker is cut off but keeps running its program, and the other one is frozen. Each counts
	// as lost and then comes back. This happens twice, since a worker may have run nothing the
	// first time.
	ghosts := func(l *ledger) []disruption {
		long := func(*rand.Rand) time.Duration { return 16 * time.Second }
		return []disruption{
			cutOff(l.member("worker-1"), "cut off", long, true, false, false),
			frozen(l.member("worker-2"), long),
		}
	}
	return map[string]mutant{
		"ack-before-result":     {false, slices.Repeat([]kind{kindPolling}, 8), kills, 1, "has not ended"},
		"claim-after-start":     {false, slices.Repeat([]kind{kindPolling}, 8), kills, 1, "it ran more often"},
		"lease-without-fencing": {true, slices.Repeat([]kind{kindPolling, kindThread}, 4), ghosts, 4, ""},
		"result-without-cas":    {true, slices.Repeat([]kind{kindPolling}, 8), ghosts, 4, "reports"},
		"retry-in-memory": {
			false, slices.Repeat([]kind{kindWebhook}, 8), killsWithRetries, 1,
			"its webhook was not delivered",
		},
	}
}

// TestMutants checks that the ledger finds each bug, and that each patch applies. With -short it
// only checks the latter.
func TestMutants(t *testing.T) {
	patches, err := filepath.Glob("mutants/*.patch")
	if err != nil {
		t.Fatal(err)
	}
	if len(patches) != len(mutants()) {
		t.Errorf("there are %d patches and %d mutants", len(patches), len(mutants()))
	}
	overlays := map[string]string{}
	for name := range mutants() {
		overlays[name] = patchOverlay(t, filepath.Join("mutants", name+".patch"))
	}
	if testing.Short() {
		return
	}
	p := buildPrograms(t)
	for name, m := range mutants() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mutated := *p
			mutated.bullpen = filepath.Join(t.TempDir(), "bullpen")
			if err := p.build(mutated.bullpen, "-overlay", overlays[name], "./cmd/bullpen"); err != nil {
				t.Fatal(err)
			}
			m.find(t, &mutated)
		})
	}
}

// find fails the test unless a ledger finds the bug.
func (m *mutant) find(t *testing.T, p *programs) {
	t.Helper()
	d := newDeployment(t, p, topology{separate: m.separate})
	d.deploy()
	l := newLedger(t, d)
	l.kinds, l.longest = m.kinds, 20*time.Second // losses are noticed within 15 s
	violations := l.run(m.disruptions(l), m.cycles)
	for _, v := range violations {
		t.Logf("found %s", v)
	}
	if !slices.ContainsFunc(violations, func(v violation) bool { return strings.Contains(v.text, m.violation) }) {
		t.Errorf("no violation with %q was found; run it again with -ledger-seed %d", m.violation, l.seed)
	}
}

// patchOverlay applies a patch to copies of the files that it changes. It returns the path of an
// overlay for go build that replaces the files with the copies.
func patchOverlay(t *testing.T, patch string) string {
	t.Helper()
	patch, err := filepath.Abs(patch)
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	git := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"apply"}, args...)...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s does not apply; make it anew: %v\n%s", filepath.Base(patch), err, out)
		}
		return string(out)
	}
	replace := map[string]string{}
	for line := range strings.Lines(git("--numstat", patch)) {
		var added, deleted int
		var name string
		if _, err := fmt.Sscan(line, &added, &deleted, &name); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		content, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		changed := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(changed), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(changed, content, fs.FileMode(0o644)); err != nil {
			t.Fatal(err)
		}
		replace[filepath.Join(root, name)] = changed
	}
	git(patch)
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}
