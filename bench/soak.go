package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// Run before the first look, so that one-time allocations have happened.
	warmRuns     = 200
	warmCallers  = 16 // more than there are slots, so that all are used
	settleWithin = 60 * time.Second
	settlePoll   = time.Second
	progressAt   = 10 // number of progress reports
	shown        = 10 // names of each kind
)

// errLeak means that executions left something behind.
var errLeak = errors.New("executions left something behind: see above")

// soakPrograms are run in turn. The last one leaves a process behind that must not outlive it.
var soakPrograms = []struct {
	language proto.Language
	code     string
}{
	{proto.Bash, "echo 1"},
	{proto.Bash, "echo 1"},
	{proto.Python, "print(1)"},
	{proto.Bash, "echo 1"},
	{proto.Node, "console.log(1)"},
	{proto.Bash, "setsid sleep 1000 > /dev/null 2>&1 & echo 1"},
}

// look is a snapshot of what the server holds: names by kind. Only the counts are compared.
type look struct {
	kinds      map[string][]string
	goroutines int
	residentMB float64
}

const (
	kindProcess = "processes"
	kindMount   = "mounts"
	kindCgroup  = "cgroups"
	kindFile    = "open descriptors"
)

// soak runs n executions and compares the snapshots before and after.
func soak(ctx context.Context, t *target, n int, out, progress io.Writer) error {
	_, _ = fmt.Fprintf(progress, "warming up with %d executions …\n", warmRuns)
	var warm series
	runners := soakRunners(t.api)
	for i := range warmRuns / warmCallers {
		warm.block(ctx, time.Millisecond, warmCallers, runners[i%len(runners)]) // one run each
	}
	before, err := settle(ctx, t, nil)
	if err != nil {
		return err
	}
	var s series
	began := time.Now()
	for i := range n {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted after %d executions", i)
		}
		s.once(ctx, runners[i%len(runners)])
		if step := max(n/progressAt, 1); (i+1)%step == 0 {
			_, _ = fmt.Fprintf(progress, "%d executions, %d failed, %s\n", i+1, s.errors, time.Since(began).Round(time.Second))
		}
	}
	after, err := settle(ctx, t, before)
	if err != nil {
		return err
	}
	sum := s.summary()
	_, err = fmt.Fprintf(out,
		"%d executions in %s, %d failed; p50 %.1f ms, p99 %.1f ms; the server's memory %.0f -> %.0f MB\n",
		n, time.Since(began).Round(time.Second), s.errors, sum.P50, sum.P99, before.residentMB, after.residentMB)
	if s.firstErr != nil {
		_, _ = fmt.Fprintf(out, "the first that failed: %v\n", s.firstErr)
	}
	if err != nil {
		return err
	}
	leaks := before.leaks(after)
	for _, kind := range slices.Sorted(maps.Keys(before.counts())) {
		verdict := "ok"
		if leaks[kind] {
			verdict = "LEAK"
		}
		_, _ = fmt.Fprintf(out, "%-18s %6d -> %6d  %s\n", kind, before.counts()[kind], after.counts()[kind], verdict)
		if leaks[kind] {
			before.printGrown(out, after, kind)
		}
	}
	if len(leaks) > 0 {
		return errLeak
	}
	return nil
}

// soakRunners returns the soak programs whose interpreters this machine has.
func soakRunners(a *api) []runner {
	var runners []runner
	for _, p := range soakPrograms {
		for _, l := range languages {
			if _, err := lookPath(l.interpreter); err == nil && l.name == p.language {
				one := program{language: p.language, code: p.code, output: leastOutput}
				runners = append(runners, one.inline(a))
			}
		}
	}
	return runners
}

// settle takes snapshots until there is no more than before, for a limited time. If before is nil,
// it waits until two snapshots in a row are equal. The last executions take a moment to end, and
// the store closes unused files with a delay.
func settle(ctx context.Context, t *target, before *look) (*look, error) {
	deadline := time.Now().Add(settleWithin)
	var last *look
	for {
		now, err := lookAt(ctx, t)
		if err != nil {
			return nil, err
		}
		done := before == nil && last != nil && maps.Equal(now.counts(), last.counts()) ||
			before != nil && len(before.leaks(now)) == 0
		if done || time.Now().After(deadline) {
			return now, nil
		}
		last = now
		select {
		case <-ctx.Done():
			return nil, errors.New("interrupted")
		case <-time.After(settlePoll):
		}
	}
}

func lookAt(ctx context.Context, t *target) (*look, error) {
	t.http.CloseIdleConnections() // each costs the server a descriptor and goroutines
	figures, err := t.metrics(ctx)
	if err != nil {
		return nil, err
	}
	t.http.CloseIdleConnections()
	l := &look{kinds: map[string][]string{}, goroutines: int(figures["go_goroutines"])}
	if l.residentMB, err = residentMB(t.pid); err != nil {
		return nil, err
	}
	all, err := processes()
	if err != nil {
		return nil, err
	}
	for _, p := range descendants(all, t.pid) {
		l.kinds[kindProcess] = append(l.kinds[kindProcess], p.String())
	}
	mounts := text(procPath(t.pid, "mountinfo"))
	for line := range strings.Lines(mounts) {
		_, rest, _ := strings.Cut(line, " ")
		l.kinds[kindMount] = append(l.kinds[kindMount], strings.TrimSpace(rest))
	}
	if err := l.descriptors(t); err != nil {
		return nil, err
	}
	if t.noWorker {
		return l, nil
	}
	return l, l.cgroups(t.pid)
}

// descriptors records the server's open files by kind, without what distinguishes files of one
// kind.
func (l *look) descriptors(t *target) error {
	dir := procPath(t.pid, "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list the server's descriptors: %w", err)
	}
	for _, e := range entries {
		name, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		if kind, _, ok := strings.Cut(name, ":["); ok && !strings.HasPrefix(name, "/") {
			name = kind
		}
		if rel, ok := strings.CutPrefix(name, t.data); ok {
			name = "data" + rel
		}
		l.kinds[kindFile] = append(l.kinds[kindFile], name)
	}
	return nil
}

// cgroups records the groups of the server's jails. They are below bullpen/<instance>. The instance
// is found through the directory of workers whose lock the server holds.
func (l *look) cgroups(pid int) error {
	instance := ""
	for _, name := range l.kinds[kindFile] {
		if dir, base := filepath.Split(name); base == "lock" &&
			filepath.Base(filepath.Dir(filepath.Clean(dir))) == "workers" {
			instance = filepath.Base(dir)
		}
	}
	if instance == "" {
		return fmt.Errorf("process %d holds no lock of a worker, so that its control groups cannot be distinguished "+
			"from others'", pid)
	}
	for _, root := range cgroupRoots("") {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil //nolint:nilerr // a group that has gone meanwhile
			}
			if strings.Contains(path, "/"+instance+"/") {
				l.kinds[kindCgroup] = append(l.kinds[kindCgroup], path)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("list control groups: %w", err)
		}
	}
	return nil
}

// counts returns the number of names of each kind.
func (l *look) counts() map[string]int {
	counts := map[string]int{"goroutines": l.goroutines}
	for _, kind := range []string{kindProcess, kindMount, kindCgroup, kindFile} {
		counts[kind] = len(l.kinds[kind])
	}
	return counts
}

// leaks returns the kinds with more entries in after.
func (l *look) leaks(after *look) map[string]bool {
	more := map[string]bool{}
	before := l.counts()
	for kind, n := range after.counts() {
		if n > before[kind] {
			more[kind] = true
		}
	}
	return more
}

// printGrown prints the names of a kind that has grown.
func (l *look) printGrown(out io.Writer, after *look, kind string) {
	more := map[string]int{}
	for _, name := range after.kinds[kind] {
		more[name]++
	}
	for _, name := range l.kinds[kind] {
		more[name]--
	}
	printed := 0
	for _, name := range slices.Sorted(maps.Keys(more)) {
		if more[name] <= 0 {
			continue
		}
		if printed++; printed > shown {
			_, _ = fmt.Fprintln(out, "  and others")
			return
		}
		_, _ = fmt.Fprintf(out, "  %+d %s\n", more[name], name)
	}
}
