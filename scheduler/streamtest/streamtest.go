// Package streamtest gives the scheduler's tests a real JetStream of their own.
package streamtest

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/stream"
)

// Server starts an embedded server in a directory of the test's, and stops it when the test is over.
func Server(t testing.TB) *natsembed.Server {
	t.Helper()
	s, err := natsembed.Open(t.TempDir(), 1<<20, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// Set connects to the server with a connection of its own, as another process would.
func Set(t testing.TB, s *natsembed.Server) *stream.Set {
	t.Helper()
	set, err := stream.Connect(Context(t), stream.Access{InProcess: s, Name: t.Name()},
		stream.Config{Replicas: 1, Retention: time.Hour}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(set.Close)
	return set
}

// Context ends with the test, or when it takes so long that something hangs.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Job makes a job that waits long enough for any test.
func Job(org, key string, mode proto.Mode) *proto.Job {
	now := time.Now().UTC()
	return &proto.Job{
		Meta: proto.Meta{
			TraceID: proto.NewTraceID(), Org: org, Key: key, Mode: mode, Language: proto.Python, Timeout: 60, MaxAttempts: 1,
			CreatedAt: now, QueueDeadline: now.Add(time.Minute), Concurrent: 100, MaxQueued: 1000,
		},
		Code: "print(1)", Sandbox: proto.DefaultSandbox(),
	}
}

// Log writes to the test's log.
func Log(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}
