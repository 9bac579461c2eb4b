package e2e

import (
	"bytes"
	"context"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// testThreadsFrozen suspends a worker in the middle of a run and of a save, until another worker
// has taken the next execution of each thread. When it resumes, it must change nothing, and its
// cached homes must not be used as current.
func testThreadsFrozen(t *testing.T, p *programs) {
	b := p.newBucket(t)
	sys := newSystem(t, p, topology{separate: true}, noSlots, append(b.flags(), "--slots", "4")...)
	way := b.server.Proxy(&storagetest.Injector{})
	t.Cleanup(way.Close)
	frozen, _ := sys.startWorkerIn(t, filepath.Join(t.TempDir(), "frozen"), "--store", way.StoreURL(b.prefix))
	t.Cleanup(func() { frozen.signal(syscall.SIGCONT) }) // so that it can exit
	sys.ready(t)
	same := func() *api { return sys.api }
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	next := func(d *threadJournal) {
		t.Helper()
		if res, err := d.write(ctx, same); err != nil || !res.Success {
			t.Errorf("%+v, %v", res, err)
		}
	}
	running, saving, h := &threadJournal{id: "running"}, &threadJournal{id: "saving"}, newHold()
	diaries := []*threadJournal{running, saving}
	for _, d := range diaries {
		next(d)
		d.next++ // for the lost execution
	}

	lost := []*pending{sys.start(bash(running.code(running.next)+h.code()).and("thread_id", running.id, "timeout", 60))}
	h.reached(t, 1)
	stopped := make(chan struct{})
	freeze := sync.OnceFunc(func() {
		frozen.signal(syscall.SIGSTOP)
		close(stopped)
	})
	way.Watch(func(r *http.Request, answered bool) {
		if !answered && storagetest.Operation(r) == "put" && strings.Contains(r.URL.Path, "/layers/") {
			freeze()
		}
	})
	lost = append(lost, sys.start(bash(saving.code(saving.next)).and("thread_id", saving.id, "timeout", 60)))
	select {
	case <-stopped:
		way.Watch(nil)
	case <-time.After(patience):
		t.Fatal("no layer was put")
	}
	h.release(t) // its program ends unnoticed for now
	other, _ := sys.startWorkerIn(t, filepath.Join(t.TempDir(), "other"))
	var ids []string
	for _, l := range lost {
		r := l.answer(t)
		if res := r.result(t); deref(res.ErrorCode) != "worker_lost" {
			t.Errorf("%s", r)
		}
		ids = append(ids, r.trace(t))
	}
	for _, d := range diaries {
		next(d)
	}
	look := func() []byte {
		t.Helper()
		var all [][]byte
		for i, d := range diaries {
			all = append(all, sys.get("/v1/threads/"+d.id).body, sys.get(execution(ids[i])).body)
		}
		return bytes.Join(all, []byte("\n"))
	}
	before := look()

	frozen.signal(syscall.SIGCONT)
	eventually(t, "the woken worker gives up what it had", func() (bool, any) {
		n := strings.Count(frozen.text(t), `"msg":"execution abandoned"`)
		return n == len(lost), n
	})
	if after := look(); !bytes.Equal(before, after) {
		t.Errorf("the woken worker changed\n%s\ninto\n%s", before, after)
	}
	other.signal(syscall.SIGTERM)
	if code := other.exitCode(t); code != 0 {
		t.Errorf("the other worker ended with %d", code)
	}
	for range 2 { // first from its cached older versions, then from the result
		for _, d := range diaries {
			next(d)
			if err := d.checkFiles(ctx, same); err != nil {
				t.Error(err)
			}
		}
	}
}
