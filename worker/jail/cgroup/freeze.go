package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNoFreezer is returned if the members of a group cannot be frozen.
var ErrNoFreezer = errors.New("the host has no freezer for control groups: use version 2, or mount the controller " +
	"freezer of version 1, writable for the worker")

const (
	// freezePoll is the time between two looks at whether all members are frozen.
	freezePoll = time.Millisecond
	// refreeze is how many looks it takes until a group is frozen anew on version 1: the kernel may
	// never report a group as frozen in which processes have appeared meanwhile, although they are.
	refreeze = 20
)

// Freeze stops all members of a group that was created freezable, and returns when none runs any more. A
// member that waits in the kernel without being interruptible delays it. The group must be thawed after
// an error too, except for [ErrNoFreezer].
//
// On version 1, a frozen process does not die by SIGKILL before it is thawed.
func (g *Group) Freeze(ctx context.Context) error {
	dir, file, value := g.freezer()
	if dir == "" {
		return ErrNoFreezer
	}
	tick := time.NewTicker(freezePoll)
	defer tick.Stop()
	for looks := 0; ; looks++ {
		if looks == 0 || g.version == 1 && looks%refreeze == 0 {
			if err := errors.Join(g.Thaw(), write(dir, file, value)); err != nil {
				return err
			}
		}
		if frozen, err := g.frozen(dir); frozen || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cgroup: freeze a group: %w", context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// freezer returns the directory and the file in which value freezes the group. The directory is empty if
// the group cannot be frozen.
func (g *Group) freezer() (dir, file, value string) {
	switch {
	case g.version == 2:
		return g.dirs[0], "cgroup.freeze", "1"
	case g.ctl.freezer < 0 || g.ctl.freezer >= len(g.dirs):
		return "", "", ""
	default:
		return g.dirs[g.ctl.freezer], freezerState, "FROZEN"
	}
}

// freezerState is the state of a group on version 1.
const freezerState = "freezer.state"

// frozen reports whether all members are frozen.
func (g *Group) frozen(dir string) (bool, error) {
	if g.version == 2 {
		n, err := readKey(dir, "cgroup.events", "frozen")
		return n == 1, err
	}
	state, err := read(dir, freezerState)
	return string(bytes.TrimSpace(state)) == "FROZEN", err
}

// Thaw lets the members of a frozen group run on. It does nothing if the group has been removed.
func (g *Group) Thaw() error {
	dir, file, _ := g.freezer()
	if dir == "" {
		return nil
	}
	value := "THAWED"
	if g.version == 2 {
		value = "0"
	}
	err := write(dir, file, value)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// thawInstance thaws the groups of an instance on version 1, whose frozen members would not die.
func (t *Tree) thawInstance(instance string) {
	if t.ctl.freezer < 0 || t.version == 2 {
		return
	}
	states, _ := filepath.Glob(filepath.Join(t.dirs[t.ctl.freezer], parentName, instance, "*", freezerState))
	for _, state := range states {
		_ = os.WriteFile(state, []byte("THAWED"), 0) // a group that is being removed has no members
	}
}
