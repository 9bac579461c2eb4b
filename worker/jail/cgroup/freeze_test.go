package cgroup

import (
	"errors"
	"os"
	"testing"
)

// A worker that dies while a jail is frozen leaves processes that die all the same.
func TestSweepOfFrozen(t *testing.T) {
	dead := newTree(t, "test-frozen")
	g, err := dead.New("1", true)
	if err != nil {
		t.Fatal(err)
	}
	sleeper, err := g.StartProcess("/bin/sleep", []string{"sleep", "600"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	tree := newTree(t, "test-sweeper")
	if _, err := tree.Sweep(func(i string) bool { return i == "test-frozen" }); err != nil {
		t.Error(err)
	}
	if state, err := sleeper.Wait(); err != nil || state.String() != "signal: killed" {
		t.Errorf("what was left ended with %v, %v", state, err)
	}
	if err := g.Thaw(); err != nil {
		t.Errorf("thaw a group that is gone: %v", err)
	}
	other := newGroup(t, tree, "1")
	if err := other.Freeze(t.Context()); tree.version == 1 && !errors.Is(err, ErrNoFreezer) {
		t.Errorf("a group that is not freezable: %v", err)
	}
}
