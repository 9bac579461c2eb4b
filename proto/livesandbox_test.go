package proto_test

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// TestNextStop describes what becomes of a sandbox whose execution has ended.
func TestNextStop(t *testing.T) {
	const kill, pause = proto.SandboxKill, proto.SandboxPause
	paused := &proto.SandboxStopped{Stop: pause, Reason: proto.SandboxPausedByUser}
	killed := &proto.SandboxStopped{Stop: kill, Reason: proto.SandboxKilled}
	failed := func(code proto.ErrorCode) proto.Result { return proto.Failure(code, "…") }
	for _, c := range []struct {
		name     string
		result   proto.Result
		unseen   bool // no worker started it
		resumed  bool
		stopping *proto.SandboxStopped
		reason   proto.SandboxReason
		kill     proto.SandboxStop // what a stop leaves with on_timeout kill
		pause    proto.SandboxStop // and with pause
	}{
		{name: "timeout", result: failed(proto.CodeSandboxExpired), reason: proto.SandboxExpired, kill: kill, pause: pause},
		{name: "idle", result: failed(proto.CodeSandboxIdle), reason: proto.SandboxIdle, kill: kill, pause: pause},
		{
			name: "drain", result: failed(proto.CodeSandboxDrained), reason: proto.SandboxWorkerDrained, kill: pause,
			pause: pause,
		},
		{name: "lost", result: failed(proto.CodeWorkerLost), reason: proto.SandboxWorkerLost, kill: kill, pause: pause},
		{name: "memory", result: failed(proto.CodeMemory), reason: proto.SandboxMemory, kill: kill, pause: pause},
		{name: "host memory", result: failed(proto.CodeHostMemory), reason: proto.SandboxMemory, kill: kill, pause: pause},
		{name: "not saved", result: failed(proto.CodeThreadSave), reason: proto.SandboxNotSaved, kill: kill, pause: pause},
		{
			name: "storage not saved", result: failed(proto.CodeSandboxExpired).Unwritten("…"),
			reason: proto.SandboxStorageNotSaved, kill: kill, pause: pause,
		},
		{name: "system call", result: failed(proto.CodeSeccomp), reason: proto.SandboxForbiddenCall, kill: kill, pause: kill},
		{name: "guest ended", result: proto.Exited(0), reason: proto.SandboxGuestEnded, kill: kill, pause: kill},
		{name: "guest killed", result: proto.Signaled(9), reason: proto.SandboxGuestEnded, kill: kill, pause: kill},
		{name: "cancelled", result: proto.Cancelled(), reason: proto.SandboxKilled, kill: kill, pause: kill},
		{
			name: "no worker", result: failed(proto.CodeExpiredInQueue), unseen: true, reason: proto.SandboxNotStarted,
			kill: kill, pause: kill,
		},
		{
			name: "no worker for a resume", result: failed(proto.CodeExpiredInQueue), unseen: true, resumed: true,
			reason: proto.SandboxNotStarted, kill: pause, pause: pause,
		},
		{
			name: "a resume that does not start", result: failed(proto.CodeSandboxStart), resumed: true,
			reason: proto.SandboxNotStarted, kill: pause, pause: pause,
		},
		{
			name: "paused", result: proto.Cancelled(), stopping: paused, reason: proto.SandboxPausedByUser, kill: pause,
			pause: pause,
		},
		{
			name: "paused on a worker that is lost", result: failed(proto.CodeWorkerLost), stopping: paused,
			reason: proto.SandboxWorkerLost, kill: pause, pause: pause,
		},
		{
			name: "paused and not saved", result: failed(proto.CodeThreadSave), stopping: paused,
			reason: proto.SandboxNotSaved, kill: pause, pause: pause,
		},
		{
			name: "paused and storage not saved", result: proto.Cancelled().Unwritten("…"), stopping: paused,
			reason: proto.SandboxStorageNotSaved, kill: pause, pause: pause,
		},
		{name: "killed", result: proto.Cancelled(), stopping: killed, reason: proto.SandboxKilled, kill: kill, pause: kill},
		{
			name: "killed at its timeout", result: failed(proto.CodeSandboxExpired), stopping: killed,
			reason: proto.SandboxKilled, kill: kill, pause: kill,
		},
		{
			name: "key revoked", result: proto.Cancelled(),
			stopping: &proto.SandboxStopped{Stop: kill, Reason: proto.SandboxKeyRevoked},
			reason:   proto.SandboxKeyRevoked, kill: kill, pause: kill,
		},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			rec := &proto.Record{Status: c.result.Status(), Attempt: 1, Result: &c.result}
			if c.unseen {
				rec.Attempt = 0
			}
			for onTimeout, want := range map[proto.SandboxStop]proto.SandboxStop{kill: c.kill, pause: c.pause} {
				x := &proto.LiveSandbox{OnTimeout: onTimeout, Starts: 1, Stopping: c.stopping}
				if c.resumed {
					x.Starts = 2
				}
				if got := x.NextStop(rec); got != (proto.SandboxStopped{Stop: want, Reason: c.reason}) {
					t.Errorf("on_timeout %s: %v", onTimeout, got)
				}
			}
		})
	}
}

// A sandbox keeps its first act and the last ones. Clients that keep it alive do not push others out.
func TestActsOfSandboxes(t *testing.T) {
	caller := func(key string) *proto.Caller { return &proto.Caller{Key: &proto.Key{ID: key}, RequestID: "r" + key} }
	var x proto.LiveSandbox
	x.AddAct(proto.SandboxCreateAct, caller("first"))
	for range 100 {
		x.AddAct(proto.SandboxExtendAct, caller("a"))
	}
	x.AddAct(proto.SandboxExtendAct, caller("b"))
	if len(x.Acts) != 3 || x.Acts[1].Key != "a" || x.Acts[2].Key != "b" || x.Acts[2].RequestID != "rb" {
		t.Errorf("%+v", x.Acts)
	}
	before := x
	for i := range proto.MaxSandboxActs {
		x.AddAct([]proto.SandboxActName{proto.SandboxPauseAct, proto.SandboxResumeAct}[i%2], caller("c"))
	}
	if len(x.Acts) != proto.MaxSandboxActs || x.Acts[0].Key != "first" || x.Acts[1].Key != "c" ||
		x.Acts[len(x.Acts)-1].Act != proto.SandboxResumeAct {
		t.Errorf("%+v", x.Acts)
	}
	if len(before.Acts) != 3 || before.Acts[1].Key != "a" {
		t.Errorf("a copy was changed: %+v", before.Acts)
	}
}
