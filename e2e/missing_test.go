package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/proto"
)

var ruby = request{"language": "ruby", "code": "puts 6 * 7"} // read only

// withoutRuby returns programs that run on machines without Ruby.
func (p *programs) withoutRuby(t *testing.T) *programs {
	t.Helper()
	dir := passable(t)
	empty, wrapper := filepath.Join(dir, "empty"), filepath.Join(dir, "bullpen")
	for name, text := range map[string]string{
		empty: "",
		wrapper: fmt.Sprintf(`#!/bin/sh
exec unshare --mount sh -c 'for f in /usr/bin/ruby* /usr/local/bin/ruby*; do [ ! -e "$f" ] || mount --bind %s "$f"; done; exec %s "$@"' sh "$@"
`, empty, p.bullpen),
	} {
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	without := *p
	without.bullpen = wrapper
	return &without
}

// waitingFor is what an execution waits for, as the API returns it.
type waitingFor struct {
	Missing  []string
	Message  string
	Expected bool
}

// checkRefused checks that nobody waits for what no worker can run.
func (a *api) checkRefused(t *testing.T, body request, missing string) {
	t.Helper()
	for _, mode := range []string{"application/json", ndjson} {
		r := a.execute(body, "Accept", mode)
		var e struct {
			Reason    string
			Permanent bool
		}
		message := r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		r.into(t, &e)
		if e.Reason != "no_capable_worker" || !e.Permanent || r.header.Get("Retry-After") != "" ||
			r.header.Get("X-Should-Retry") != "false" ||
			!strings.Contains(message, missing) || !strings.Contains(message, "the operator of this server") {
			t.Errorf("%s: %v %s", mode, r.header, r)
		}
	}
}

// testMissingLanguage: what no worker can run is refused where somebody waits for it. Elsewhere it
// waits, says for what, and runs when a worker comes.
func testMissingLanguage(t *testing.T, p *programs) {
	sys := newSystem(t, p.withoutRuby(t), topology{}, 2)
	sys.checkRefused(t, ruby, "the language ruby")
	session, err := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1"}, nil).Connect(t.Context(),
		&mcp.StreamableClientTransport{
			Endpoint: sys.base + "/mcp", HTTPClient: &http.Client{Transport: keyed{sys.key, sys.http.Transport}},
		}, nil)
	if err != nil {
		t.Fatal(err)
	}
	result, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: "sandbox_execute", Arguments: ruby})
	if err != nil || !result.IsError || result.Meta["bullpen.run/reason"] != "no_capable_worker" ||
		!strings.Contains(fmt.Sprint(result.Content[0].(*mcp.TextContent).Text), "the language ruby") {
		t.Errorf("%+v, %v", result, err)
	}
	_ = session.Close()

	id := sys.submit(ruby)
	var batch, run, schedule struct{ ID string }
	sys.do(http.MethodPost, "/v1/batches", request{"items": []request{ruby}}).into(t, &batch)
	sys.do(http.MethodPost, "/v1/pipelines",
		request{"file": "steps:\n  - name: one\n    language: ruby\n    code: puts 6 * 7\n"}).into(t, &run)
	sys.do(http.MethodPost, "/v1/schedules", request{"name": "never", "cron": "0 0 1 1 *", "request": ruby}).into(
		t, &schedule)
	sys.do(http.MethodPost, "/v1/schedules/"+schedule.ID+"/run", nil)
	var one struct {
		Status     proto.Status
		WaitingFor *waitingFor `json:"waiting_for"`
	}
	var queue struct {
		Executions []struct {
			WaitingFor *waitingFor `json:"waiting_for"`
		}
	}
	var list struct {
		Executions []struct {
			WaitingFor *waitingFor `json:"waiting_for"`
		}
	}
	var pipeline struct {
		Cells []struct {
			WaitingFor *waitingFor `json:"waiting_for"`
		}
	}
	waits := func(path string, into any, of func() *waitingFor) {
		t.Helper()
		eventually(t, path+" says what is missing", func() (bool, any) {
			r := sys.get(path)
			r.into(t, into)
			got := of()
			return got != nil && fmt.Sprint(got.Missing) == "[language:ruby]" &&
				strings.Contains(got.Message, "the language ruby"), r
		})
	}
	whole := func() *waitingFor { return one.WaitingFor }
	waits("/v1/executions/"+id, &one, whole)
	waits("/v1/queue?trace_id="+id, &queue, func() *waitingFor {
		if len(queue.Executions) == 0 {
			return nil
		}
		return queue.Executions[0].WaitingFor
	})
	waits("/v1/executions?language=ruby&status=queued", &list, func() *waitingFor {
		if len(list.Executions) < 4 {
			return nil
		}
		return list.Executions[0].WaitingFor
	})
	waits("/v1/batches/"+batch.ID, &one, whole)
	waits("/v1/pipelines/"+run.ID, &pipeline, func() *waitingFor { return pipeline.Cells[0].WaitingFor })
	one.WaitingFor = nil
	waits("/v1/schedules/"+schedule.ID, &one, whole)
	for _, args := range [][]string{
		{"get", id},
		{"queue", id},
		{"ls", "--status", "queued"},
		{"batch", "status", batch.ID},
		{"ci", "show", run.ID},
		{"schedule", "show", schedule.ID},
	} {
		want := "no worker offers the language ruby"
		if args[0] == "ls" {
			want = "no worker with language:ruby"
		}
		eventually(t, fmt.Sprintf("bullpen %v prints %q", args, want), func() (bool, any) {
			printed := sys.command(t, sys.key, args...)
			return strings.Contains(printed, want), printed
		})
	}
	client := []string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + sys.key}
	attached := p.startProcess(t, "ci attach", client, p.bullpen, "ci", "attach", run.ID)
	eventually(t, "bullpen ci attach says what the step waits for", func() (bool, any) {
		return strings.Count(attached.text(t), "one waits: no worker offers the language ruby") == 1, attached.tail()
	})
	attached.kill()
	able := sys.submit(bash("echo hello"))
	sys.ended(able).succeeded(t, "hello\n")

	sys.front.signal(syscall.SIGTERM)
	if code := sys.front.exitCode(t); code != 0 {
		t.Errorf("exit code %d:\n%s", code, sys.front.tail())
	}
	sys.programs = p
	sys.startFront(t)
	sys.ready(t)
	sys.ended(id).succeeded(t, "42\n")
	one.WaitingFor = nil
	sys.get("/v1/executions/"+id).into(t, &one)
	if one.WaitingFor != nil {
		t.Errorf("it ran, and waits for %+v", one.WaitingFor)
	}
	eventually(t, "all others ran", func() (bool, any) {
		r := sys.get("/v1/executions?language=ruby&status=success")
		r.into(t, &list)
		return len(list.Executions) == 4, r
	})
	if r := sys.inline(ruby); r.Stdout != "42\n" {
		t.Errorf("%+v", r)
	}
}

// testMissingWorkers: with several workers of different offers, a job goes to the one that can run
// it, waits for a worker that was killed, and is refused a minute later.
func testMissingWorkers(t *testing.T, p *programs) {
	sys := newSystem(t, p.withoutRuby(t), topology{separate: true}, 1, "--queue-wait", "1m")
	able := *sys
	able.programs = p
	first, _ := able.startWorkerIn(t, filepath.Join(t.TempDir(), "ruby"))
	sys.ended(sys.submit(ruby)).succeeded(t, "42\n")
	eventually(t, "the dispatcher refuses what it has not seen for a minute", func() (bool, any) {
		r := sys.execute(request{"language": "deno", "code": "1"}, "Prefer", "wait=1")
		return r.status == http.StatusServiceUnavailable && r.header.Get("Retry-After") == "", r
	})
	first.kill()
	eventually(t, "the worker is lost", func() (bool, any) { names := sys.workers(t); return len(names) == 1, names })
	waiting := make(chan *reply, 1)
	go func() {
		r, err := sys.try(context.WithoutCancel(t.Context()), http.MethodPost, "/v1/sandbox/execute", ruby)
		if err != nil {
			t.Error(err)
		}
		waiting <- r
	}()
	eventually(t, "an inline execution waits", func() (bool, any) {
		var q struct {
			Key struct{ Queued struct{ Interactive int } }
		}
		r := sys.get("/v1/queue")
		r.into(t, &q)
		return q.Key.Queued.Interactive == 1, r
	})
	again, _ := able.startWorkerIn(t, filepath.Join(t.TempDir(), "ruby"))
	if r := <-waiting; r == nil || r.status != http.StatusOK || r.result(t).Stdout != "42\n" {
		t.Errorf("%v", r)
	}
	again.signal(syscall.SIGTERM)
	again.exitCode(t)
	eventually(t, "nobody waits for a worker that left a minute ago", func() (bool, any) {
		r := sys.execute(ruby, "Prefer", "wait=1")
		return r.status == http.StatusServiceUnavailable && r.header.Get("Retry-After") == "", r
	})
	sys.checkRefused(t, ruby, "the language ruby")
}
