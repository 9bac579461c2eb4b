package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
)

// markerName is the environment variable by which processes are found that have left the session of
// their leader and outlived their parent.
const markerName = "BULLPEN_PROCESS"

// maxEnviron limits how much of an environment is searched for a marker.
const maxEnviron = 4 << 20

// procEntry is a process as /proc shows it.
type procEntry struct {
	pid, parent, session int
	started              uint64 // in ticks since the boot: with the pid, it identifies a process
	dead, kernel         bool   // kernel: a thread of the kernel
	marker               string // value of the environment variable
	hidden               bool   // it has no environment, or none that can be read, as during execve
}

// view is what is needed to see all processes.
type view struct {
	users *account.Users
	lane  *account.Lane
}

// group is what leaders started and what descends from it.
type group struct {
	leaders []int  // without those whose pid may belong to another process by now
	since   uint64 // when the first of its processes was started
	marker  string // ends with a separator; a prefix selects several groups
}

// members returns the processes of a group that are alive, and reports whether there are others that may
// belong to it.
func (g group) members(all []procEntry) (alive []procEntry, unsure bool) {
	in := map[int]bool{}
	for _, p := range all {
		led := slices.Contains(g.leaders, p.pid) || slices.Contains(g.leaders, p.session)
		if led || strings.HasPrefix(p.marker, g.marker) {
			in[p.pid] = true
		}
	}
	for grown := true; grown; {
		grown = false
		for _, p := range all {
			if !in[p.pid] && in[p.parent] {
				in[p.pid], grown = true, true
			}
		}
	}
	for _, p := range all {
		switch {
		case p.dead || p.pid == 1 || p.pid == os.Getpid():
		case in[p.pid]:
			alive = append(alive, p)
		case p.hidden && p.started >= g.since:
			unsure = true
		}
	}
	return alive, unsure
}

// How often a group of which no process was found is looked for again: if there are processes that may belong
// to it, and if some have vanished while they were looked at, and may have left a child.
const (
	maxUnsure   = 8
	maxVanished = 10
)

// retries counts how often a group is looked for again.
type retries struct {
	unsure, vanished int
	pause            pauses
}

// needed reports whether a group must be looked for again, and waits if there is a reason to.
func (r *retries) needed(ctx context.Context, unsure, vanished bool) bool {
	switch {
	case vanished && r.vanished < maxVanished:
		r.vanished++
		return ctx.Err() == nil
	case unsure && r.unsure < maxUnsure:
		r.unsure++
		return r.pause.wait(ctx)
	}
	return false
}

// pauses are the times between two looks at all processes.
type pauses struct{ next time.Duration }

// wait waits, longer each time. It returns false if ctx is done first.
func (p *pauses) wait(ctx context.Context) bool {
	p.next = min(max(2*p.next, time.Millisecond), 50*time.Millisecond)
	timer := time.NewTimer(p.next)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// terminate sends SIGTERM to each process of a group once. It reports whether there was any.
func (g group) terminate(ctx context.Context, v view) (bool, error) {
	sent := map[procEntry]bool{}
	var again retries
	for {
		all, vanished, err := v.scan(g.since, nil)
		if err != nil {
			return false, err
		}
		members, unsure := g.members(all)
		fresh := unsignalled(members, sent)
		for _, p := range fresh {
			p.signal(unix.SIGTERM)
		}
		if len(fresh) > 0 && ctx.Err() == nil {
			continue
		}
		if !again.needed(ctx, unsure, vanished) {
			return len(sent) > 0, nil
		}
	}
}

// kill sends SIGKILL to the processes of a group until none is left. It reports whether there was any.
//
// Processes that fork faster than they are found are stopped first: with a signal pending, a process cannot
// fork, and stopped ones count against the limit of processes.
func (g group) kill(ctx context.Context, v view) (bool, error) {
	signalled := map[procEntry]bool{}
	var again retries
	var pause pauses
	for first := true; ; first = false {
		var fresh []procEntry
		// A process that moves on by forking is there only for a moment.
		stopAtSight := func(p procEntry) {
			if !first && strings.HasPrefix(p.marker, g.marker) {
				for _, p := range unsignalled([]procEntry{p}, signalled) {
					p.signal(unix.SIGSTOP)
					fresh = append(fresh, p)
				}
			}
		}
		all, vanished, err := v.scan(g.since, stopAtSight)
		if err != nil {
			return len(signalled) > 0, err
		}
		members, unsure := g.members(all)
		if len(members) == 0 && !again.needed(ctx, unsure, vanished) {
			return len(signalled) > 0, nil
		}
		rest := unsignalled(members, signalled)
		if len(rest)+len(fresh) > 0 {
			again = retries{}
		}
		if !first && len(rest)+len(fresh) > 0 && ctx.Err() == nil {
			for _, p := range rest {
				p.signal(unix.SIGSTOP)
			}
			continue
		}
		for _, p := range members {
			p.signal(unix.SIGKILL)
		}
		if len(members) > 0 && !pause.wait(ctx) {
			return true, fmt.Errorf("%d processes are still alive: %w", len(members), ctx.Err())
		}
	}
}

// unsignalled returns the processes that are not in a set, and adds them to it.
func unsignalled(processes []procEntry, signalled map[procEntry]bool) []procEntry {
	var fresh []procEntry
	for _, p := range processes {
		key := procEntry{pid: p.pid, started: p.started}
		if !signalled[key] {
			signalled[key] = true
			fresh = append(fresh, p)
		}
	}
	return fresh
}

// alive reports whether any process of a group is.
func (g group) alive(v view) bool {
	all, _, err := v.scan(g.since, nil)
	members, _ := g.members(all)
	return err == nil && len(members) > 0
}

// signal sends a signal, unless the pid belongs to another process by now.
func (p procEntry) signal(s unix.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return
	}
	defer func() { _ = unix.Close(fd) }()
	if now, err := readStat(p.pid); err == nil && now.started == p.started {
		_ = unix.PidfdSendSignal(fd, s, nil, 0)
	}
}

// scan returns all processes, and reports whether some have vanished meanwhile that were started since a time
// or whose start is not known. It calls seen, if that is not nil, with each process that has a marker at once.
// Environments are readable only with the rights of a process's user.
func (v view) scan(since uint64, seen func(procEntry)) (all []procEntry, vanished bool, err error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, false, fmt.Errorf("list processes: %w", err)
	}
	names, err := dir.Readdirnames(-1)
	_ = dir.Close()
	if err != nil {
		return nil, false, fmt.Errorf("list processes: %w", err)
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		p, err := readStat(pid)
		if err != nil {
			vanished = true
			continue
		}
		all = append(all, p)
	}
	unread := make([]int, len(all)) // indices
	for i := range unread {
		unread[i] = i
	}
	for _, user := range v.users.List {
		// An error means that nothing of this user can run.
		_ = v.lane.Do(user, func() error {
			var rest []int
			for _, i := range unread {
				marker, empty, err := readMarker(all[i].pid)
				if errors.Is(err, os.ErrPermission) {
					rest = append(rest, i)
					continue
				}
				vanished = vanished || err != nil && all[i].started >= since
				all[i].marker, all[i].hidden = marker, empty && !all[i].kernel
				if marker != "" && seen != nil {
					seen(all[i])
				}
			}
			unread = rest
			return nil
		})
	}
	for _, i := range unread {
		all[i].hidden = !all[i].kernel
	}
	return all, vanished, nil
}

// readStat reads what /proc/PID/stat says.
func readStat(pid int) (procEntry, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procEntry{}, err
	}
	// The name, in parentheses, may contain anything.
	end := bytes.LastIndexByte(b, ')')
	fields := strings.Fields(string(b[end+1:]))
	const state, parent, session, started, size = 0, 1, 3, 19, 20
	if end < 0 || len(fields) <= size {
		return procEntry{}, fmt.Errorf("stat of process %d is malformed", pid)
	}
	p := procEntry{pid: pid, dead: fields[state] == "Z" || fields[state] == "X", kernel: fields[size] == "0"}
	p.parent, _ = strconv.Atoi(fields[parent])
	p.session, _ = strconv.Atoi(fields[session])
	p.started, _ = strconv.ParseUint(fields[started], 10, 64)
	return p, nil
}

// readMarker returns the marker in a process's environment, or nothing, and reports whether there is no
// environment.
func readMarker(pid int) (marker string, empty bool, err error) {
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return "", false, err
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxEnviron))
	if err != nil {
		return "", false, err
	}
	for entry := range bytes.SplitSeq(b, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(markerName+"=")); ok {
			return string(value), false, nil
		}
	}
	return "", len(b) == 0, nil
}
