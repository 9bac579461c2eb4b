package nsjail

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// parentOf makes a jail to fork from, until the test is over.
func parentOf(tb testing.TB, m *Maker, spec jail.Spec, modules ...string) jail.Parent {
	tb.Helper()
	p := newParent(tb, m, spec, modules...)
	tb.Cleanup(func() { closeParent(tb, p) })
	return p
}

func closeParent(tb testing.TB, p jail.Parent) {
	tb.Helper()
	if err := p.Close(); err != nil {
		tb.Error(err)
	}
}

// newParent makes a jail to fork from, for programs in jails of a spec.
func newParent(tb testing.TB, m *Maker, spec jail.Spec, modules ...string) jail.Parent {
	tb.Helper()
	p, err := jail.Source{Language: "python", Home: m.Home()}.Parent(modules)
	if err != nil {
		tb.Fatal(err)
	}
	spec.Ahead = &p
	parent, err := m.Parent(tb.Context(), spec)
	if err != nil {
		tb.Fatal(err)
	}
	return parent
}

// fork makes a jail in which python waits.
func fork(tb testing.TB, p jail.Parent, spec jail.Spec) jail.Jail {
	tb.Helper()
	spec.Ahead = ahead(tb, "python")
	j, err := p.Fork(tb.Context(), spec)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := j.Close(); err != nil {
			tb.Error(err)
		}
	})
	return j
}

func TestFork(t *testing.T) {
	m := newMaker(t)
	p := parentOf(t, m, testSpec())
	for range 3 {
		r := runIn(t, fork(t, p, testSpec()), program(t, "python", `
import os, sys
print(os.getpid(), os.getppid(), os.getuid(), os.getgid(), os.getgroups(), os.getcwd(), sys.argv, os.listdir("/tmp"), os.listdir("."))
print(open("/proc/self/status").read())
print(open("/proc/self/mountinfo").read())
print(open("/proc/self/cgroup").read())
print(os.listdir("/proc/self/fd"), os.listdir("/proc"))
print(sorted(sys.modules))
`))
		t.Log(r.stdout, r.stderr, r.Outcome)
		if r.Kind != jail.Exited || r.ExitCode != 0 || !strings.Contains(r.stdout, "main.py") {
			t.Errorf("%+v", r)
		}
	}
}
