package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

var (
	floodSize    = repeatsFlag("flood", 2000, 6000, "submissions that a server is flooded with")
	floodBacklog = repeatsFlag("backlog", 2000, 10_000, "executions that are queued when the flooded server is killed")
)

// Memory limits of the flooded server: its own limit and that of its control group, which includes
// its programs. The kernel kills the server above the latter.
const (
	floodMemory = 256 * proto.MiB
	floodLimit  = 384 * proto.MiB
)

// inControlGroup returns programs that run bullpen and its jails in a control group with this
// memory limit.
func (p *programs) inControlGroup(t *testing.T, memory proto.Bytes) *programs {
	t.Helper()
	name := "bullpen-test-" + strings.ToLower(rand.Text())
	dir, limit := filepath.Join("/sys/fs/cgroup/memory", name), "memory.limit_in_bytes"
	if _, err := os.Stat("/sys/fs/cgroup/memory"); errors.Is(err, fs.ErrNotExist) {
		dir, limit = filepath.Join("/sys/fs/cgroup", name), "memory.max"
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatalf("make a control group: %v", err)
	}
	t.Cleanup(func() {
		var groups []string // includes the groups of jails, innermost last
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				groups = append(groups, path)
			}
			return err
		})
		for _, group := range slices.Backward(groups) {
			err = errors.Join(err, os.Remove(group))
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, limit), []byte(strconv.FormatInt(int64(memory), 10)), 0); err != nil {
		t.Fatal(err)
	}
	limited := *p
	limited.bullpen = filepath.Join(t.TempDir(), "bullpen")
	script := fmt.Sprintf("#!/bin/sh\necho $$ >%s/cgroup.procs && exec %s \"$@\"\n", dir, p.bullpen)
	if err := os.WriteFile(limited.bullpen, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return &limited
}

// status returns a size from /proc/PID/status, such as the peak of resident memory.
func (p *process) status(t testing.TB, name string) proto.Bytes {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n"+name+":")
	line, _, _ := strings.Cut(rest, "\n")
	kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(line, "kB")), 10, 64)
	if !found || err != nil {
		t.Fatalf("%s: %v in %s", name, err, text)
	}
	return proto.Bytes(kib) * proto.KiB
}

// flood is a burst of submissions by many clients, with their outcomes.
type flood struct {
	*system
	keys []string

	mu        sync.Mutex
	accepted  map[string]accepted
	withdrawn map[string]string // keys of inline and streaming requests that got no slot in time
	refused   map[int]int       // number of rejections by status
}

// accepted is an execution of the flood.
type accepted struct{ key, word string }

// submission returns the nth request of the flood. Most are small, and every kind occurs.
func (f *flood) submission(n int) (body []byte, word string, headers []string) {
	word = fmt.Sprintf("execution %d", n)
	program, padding, headers := bash("echo "+word), 0, []string{"Prefer", "respond-async"}
	switch {
	case n%50 == 0:
		headers = []string{accept, "application/json"}
	case n%50 == 1:
		headers = []string{accept, ndjson}
	case n%100 == 2: // the largest possible program
		program["code"] = program["code"].(string) + "\n#" +
			strings.Repeat("x", proto.MaxCodeBytes-len(program["code"].(string))-2)
	case n%500 == 3: // the largest possible body
		padding = 8<<20 - 1<<10
	}
	body, err := json.Marshal(program)
	if err != nil {
		f.t.Error(err)
	}
	return append(body, bytes.Repeat([]byte{' '}, padding)...), word + "\n", headers
}

// send submits the nth request and records the response.
func (f *flood) send(t testing.TB, n int) {
	body, word, headers := f.submission(n)
	key := f.keys[n%len(f.keys)]
	r, err := f.with(key).try(t.Context(), http.MethodPost, executePath, body, headers...)
	if err != nil {
		t.Errorf("submission %d: %v", n, err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch r.status {
	case http.StatusAccepted:
		f.accepted[r.trace(t)] = accepted{key, word}
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		r.retryAfter(t)
		f.refused[r.status]++
		if id := r.header.Get("X-Trace-Id"); id != "" {
			f.withdrawn[id] = key
		}
	default:
		t.Errorf("submission %d: %s", n, r)
	}
}

// callers calls do for 0 to n-1, with many calls at once.
func callers(n int, do func(i int)) {
	const many = 64
	var next atomic.Int64
	var group sync.WaitGroup
	for range many {
		group.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				do(int(i))
			}
		})
	}
	group.Wait()
}

// testOverload floods a server whose slots are all busy and kills it while its queue is long. Each
// accepted execution must end exactly once. The server must reject what does not fit and stay
// within its memory limit.
func testOverload(t *testing.T, p *programs) {
	const slots, run = 2, 100
	sys := newSystem(t, p.inControlGroup(t, floodLimit), topology{}, slots, "--memory", floodMemory.String(),
		"--queue-wait", "1s")
	h := newHold()
	held := bash(h.code())
	held["timeout"] = 3600 // longer than the flood lasts
	for range slots {
		sys.submit(held)
	}
	h.reached(t, slots)
	f := &flood{system: sys, accepted: map[string]accepted{}, withdrawn: map[string]string{}, refused: map[int]int{}}
	for _, plan := range []string{"enterprise", "enterprise", "enterprise", "enterprise", "pro"} {
		key, _ := sys.newKey(fmt.Sprintf("org%d", len(f.keys)), plan)
		f.keys = append(f.keys, key)
	}
	callers(floodSize.n(), func(i int) { f.send(t, i) })
	if f.refused[http.StatusServiceUnavailable] == 0 || len(f.accepted) == 0 || len(f.withdrawn) == 0 {
		t.Errorf("%d were accepted; refused, by status: %v", len(f.accepted), f.refused)
	}
	for n := 10 * floodSize.n(); len(f.accepted) < floodBacklog.n() && !t.Failed(); n += 10 * floodBacklog.n() {
		// Small requests of organisations that may queue many.
		callers(floodBacklog.n()-len(f.accepted), func(i int) { f.send(t, n+10*i+5+i%4) })
	}
	peak := sys.front.status(t, "VmHWM")
	t.Logf("%d submissions, %d accepted, refused by status %v, peak of memory %d MiB", floodSize.n(), len(f.accepted),
		f.refused, peak/proto.MiB)
	if sys.front.ended() || peak > floodLimit {
		t.Errorf("the server ended: %v; it took %s", sys.front.ended(), peak)
	}
	for id, key := range f.withdrawn {
		sys.with(key).record(id).failed(t, "failed", "expired_in_queue", "")
	}

	sys.front.kill()
	sys.startFront(t)
	sys.ready(t)
	for line := range strings.Lines(sys.front.text(t)) {
		if strings.Contains(line, `"dispatcher leads"`) {
			t.Logf("after the restart: %s", line)
		}
	}
	f.finish(t, run)
	if peak := sys.front.status(t, "VmHWM"); peak > floodLimit {
		t.Errorf("after the restart the server took %s", peak)
	}
}

// finish cancels most queued executions, lets the others run, and checks each of them.
func (f *flood) finish(t *testing.T, run int) {
	var ids []string
	for id := range f.accepted {
		ids = append(ids, id)
	}
	cancelled := len(ids) - run
	callers(cancelled, func(i int) {
		if r, err := f.with(f.accepted[ids[i]].key).try(t.Context(), http.MethodPost, execution(ids[i], "cancel"),
			nil); err != nil || r.status/100 != 2 {
			t.Errorf("cancel: %v, %v", r, err)
		}
	})
	var succeeded atomic.Int64
	callers(len(ids), func(i int) {
		rec := f.with(f.accepted[ids[i]].key).in(t).ended(ids[i])
		switch {
		case rec.Status == "success":
			rec.succeeded(t, f.accepted[ids[i]].word)
			succeeded.Add(1)
		case i >= cancelled || rec.Status != "cancelled" || rec.Attempt > 1:
			t.Errorf("got %s", rec)
		}
	})
	t.Logf("%d ran, %d were cancelled", succeeded.Load(), int64(len(ids))-succeeded.Load())
}
