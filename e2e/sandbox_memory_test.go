package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"path/filepath"
	"syscall"
	"testing"

	schema "github.com/bullpen-run/bullpen/proto/api"
)

// testSandboxMemory gives live sandboxes to two workers by the memory that they have for them: one with
// room for 1 GiB of limits, half of it by overcommit, and one with room for 3 GiB.
func testSandboxMemory(t *testing.T, p *programs) {
	args := append(p.newBucket(t).flags(), "--sandboxes", "8", "--sandbox-memory", "512MiB", "--sandbox-overcommit", "2")
	sys := newSystem(t, p, topology{separate: true}, 2, args...)
	sys.startWorkerIn(t, filepath.Join(t.TempDir(), "large"), "--sandbox-memory", "3GiB", "--sandbox-overcommit", "1")
	// free waits until the workers have so many MiB left, the larger worker first.
	free := func(want ...int64) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d MiB are free", want), func() (bool, any) {
			var list schema.Workers
			sys.get("/v1/admin/workers").into(t, &list)
			var all []int64
			for _, of := range []int64{3 << 30, 1 << 30} {
				for _, w := range list.Workers {
					if w.SandboxMemory == of {
						all = append(all, w.SandboxMemoryFree>>20)
					}
				}
			}
			return fmt.Sprint(all) == fmt.Sprint(want), list
		})
	}
	free(3072, 1024)
	sized := func(name, memory string) *api { return sys.sandboxed(name, request{"memory": memory}) }
	small, medium := sized("small", "512MiB"), sized("medium", "1GiB")
	large, larger := sized("large", "2GiB"), sized("larger", "4GiB")

	first := large.newSandbox(request{})
	free(1024, 1024)
	held := []*liveSandbox{medium.newSandbox(request{}), medium.newSandbox(request{})}
	free(0, 0)
	// The next leader counts what runs, and knows that no other workers connect.
	sys.front.signal(syscall.SIGTERM)
	sys.front.exitCode(t)
	sys.startFront(t)
	sys.ready(t)
	for _, s := range append(held, first) {
		s.base = sys.base
	}
	small.base, large.base, larger.base = sys.base, sys.base, sys.base
	free(0, 0)
	// The answers differ: one refusal may pass, and the other does not.
	waiting := small.begin(http.MethodPost, "/v1/sandboxes", request{})
	r := larger.do(http.MethodPost, "/v1/sandboxes", request{})
	r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
	if r.header.Get("X-Should-Retry") != "false" || r.header.Get("Retry-After") != "" ||
		!bytes.Contains(r.body, []byte("no worker offers live sandboxes with 4GiB of memory")) {
		t.Errorf("larger than every worker: %s, %v", r, r.header)
	}
	if r := larger.get("/v1/sandboxes"); bytes.Contains(r.body, []byte(`"id"`)) {
		t.Errorf("something remains of a refused sandbox: %s", r)
	}
	r = waiting.answer(t)
	r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
	if r.header.Get("X-Should-Retry") == "false" || r.header.Get("Retry-After") == "" {
		t.Errorf("while all memory is taken: %s, %v", r, r.header)
	}
	// What ends makes room for what waits.
	waiting = large.begin(http.MethodPost, "/v1/sandboxes", request{})
	eventually(t, "it waits", func() (bool, any) {
		r := large.get("/v1/sandboxes?state=starting")
		return bytes.Contains(r.body, []byte(`"starting"`)), r
	})
	first.change(http.MethodDelete, "")
	if r := waiting.answer(t); r.status != http.StatusCreated {
		t.Errorf("after the end of another one: %s", r)
	}
	free(0, 0)
	for _, s := range held {
		s.check("echo alive", "alive\n")
		s.change(http.MethodDelete, "")
	}
	free(1024, 1024)
}
