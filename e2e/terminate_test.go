package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// printed waits until an execution has printed something.
func (a *api) printed(id, text string) {
	a.t.Helper()
	eventually(a.t, fmt.Sprintf("%s prints %q", id, text), func() (bool, any) {
		r := a.get(execution(id, "output") + "?follow=false")
		return bytes.Contains(r.body, []byte(text)), r
	})
}

// cancelled cancels an execution that has printed up, twice, and returns its record. The execution may
// have ended by the time of the second cancel.
func (a *api) cancelled(id string) record {
	a.t.Helper()
	a.printed(id, "up")
	if r := a.do(http.MethodPost, execution(id, "cancel"), nil); r.status != http.StatusAccepted {
		a.t.Errorf("cancel: %s", r)
	}
	if r := a.do(http.MethodPost, execution(id, "cancel"), nil); r.status != http.StatusAccepted &&
		r.status != http.StatusOK {
		a.t.Errorf("second cancel: %s", r)
	}
	return a.ended(id)
}

// testTerminate ends programs by a cancel and by their timeout. What they do after SIGTERM counts, and
// nothing of them is left afterwards.
func testTerminate(t *testing.T, a *api) {
	const loop = "\necho up; while :; do sleep .1; done"
	for name, tt := range map[string]struct {
		handler string
		grace   any
		exit    *int // by itself
		least   int64
	}{
		"goes on": {handler: "echo saved > ~/state", least: 2000},
		"ends":    {handler: "echo saved > ~/state; exit 3", grace: 30, exit: new(3)},
	} {
		t.Run("cancel/"+name, func(t *testing.T) {
			t.Parallel()
			a := a.in(t)
			thread := "terminate-" + string(proto.NewTraceID())
			r := a.cancelled(a.submit(bash("trap '"+tt.handler+"' TERM"+loop).and("thread_id", thread, "kill_grace", tt.grace)))
			r.failed(t, "cancelled", "cancelled", "")
			if *r.Stdout != "up\n" || *r.DurationMS < tt.least || display(r.ProgramExitCode) != display(tt.exit) {
				t.Errorf("after %d ms, %s, %s", *r.DurationMS, display(r.ProgramExitCode), r)
			}
			if r := a.inline(bash("cat state").and("thread_id", thread)); r.Stdout != "saved\n" {
				t.Errorf("the home has %+v", r)
			}
		})
		t.Run("timeout/"+name, func(t *testing.T) {
			t.Parallel()
			a := a.in(t)
			thread := "terminate-" + string(proto.NewTraceID())
			r := a.inline(bash("trap '"+tt.handler+"' TERM"+loop).and("thread_id", thread, "timeout", 3, "kill_grace", 3))
			if r.Status() != proto.StatusTimeout || r.Stdout != "up\n" || display(r.ProgramExitCode) != display(tt.exit) {
				t.Errorf("%+v, %s", r, display(r.ProgramExitCode))
			}
			if least := int64(3000); r.DurationMS < least || tt.exit == nil && r.DurationMS < 2*least {
				t.Errorf("ended after %d ms", r.DurationMS)
			}
			if r := a.inline(bash("cat state").and("thread_id", thread)); r.Stdout != "saved\n" {
				t.Errorf("the home has %+v", r)
			}
		})
	}
	for name, code := range map[string]string{
		"ignores": "trap '' TERM; setsid sleep %[1]s & echo up; sleep %[1]s",
		"forks":   "trap 'while :; do setsid sleep %[1]s & done' TERM; echo up; while :; do sleep .1; done",
		"leaves":  "trap 'for i in {1..50}; do setsid sleep %[1]s & done; exit 0' TERM; echo up; while :; do sleep .1; done",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, h := a.in(t), newHold()
			body := bash(fmt.Sprintf(code, h.seconds))
			a.cancelled(a.submit(body)).failed(t, "cancelled", "cancelled", "")
			if left := h.pids(t); len(left) != 0 {
				t.Errorf("after the cancel, %d processes are left", len(left))
			}
			if r := a.inline(body.and("timeout", 3, "kill_grace", 1.5)); r.Status() != proto.StatusTimeout ||
				r.Stdout != "up\n" {
				t.Errorf("%+v", r)
			}
			if left := h.pids(t); len(left) != 0 {
				t.Errorf("after the timeout, %d processes are left", len(left))
			}
		})
	}
	// Whatever kills at once sends no SIGTERM before.
	for status, code := range map[proto.Status]string{
		proto.StatusOOM: "trap 'echo asked' TERM; echo up; x=$(yes | tr -d '\\n')",
		proto.StatusSeccomp: "trap 'echo asked' TERM; echo up; python3 -c 'import ctypes; " +
			"ctypes.CDLL(None).syscall(169)'; sleep 60",
		proto.StatusTimeout: "trap 'echo asked' TERM; echo up; while :; do sleep .1; done", // without kill_grace
	} {
		t.Run("at once/"+string(status), func(t *testing.T) {
			t.Parallel()
			body := bash(code).and("kill_grace", 30)
			if status == proto.StatusTimeout {
				body = bash(code).and("timeout", 3)
			}
			if r := a.in(t).ended(a.in(t).submit(body)); r.Status != string(status) || *r.Stdout != "up\n" {
				t.Errorf("%s", r)
			}
		})
	}
	for _, mode := range [][]string{nil, {accept, ndjson}} {
		a.execute(bash("true").and("kill_grace", 3.001), mode...).rejection(t, http.StatusBadRequest, "validation_error")
	}
	for _, grace := range []any{-1, 30.001, "2"} {
		a.execute(bash("true").and("kill_grace", grace), "Prefer", "respond-async").rejection(t, http.StatusBadRequest,
			"validation_error")
	}
}
