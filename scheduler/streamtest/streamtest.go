// Package streamtest gives the scheduler's tests a real JetStream of their own.
package streamtest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

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

// Cluster starts three servers that keep streams together, and gives a connection to them. They stop when the test is over.
func Cluster(t testing.TB) *stream.Set {
	t.Helper()
	const size = 3
	var routes []string
	for range size { // a port that is free now is so a moment later, too, as good as always
		l, err := new(net.ListenConfig).Listen(Context(t), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		routes = append(routes, "nats://"+l.Addr().String())
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var urls []string
	for i, route := range routes {
		u, err := url.Parse(route)
		if err != nil {
			t.Fatal(err)
		}
		port, err := strconv.Atoi(u.Port())
		if err != nil {
			t.Fatal(err)
		}
		s, err := server.NewServer(&server.Options{
			ServerName: fmt.Sprint("n", i), Host: u.Hostname(), Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
			Cluster: server.ClusterOpts{Name: "test", Host: u.Hostname(), Port: port}, Routes: server.RoutesFromStr(strings.Join(routes, ",")),
		})
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
		if !s.ReadyForConnections(time.Minute) {
			t.Fatal("the server does not listen")
		}
		urls = append(urls, s.ClientURL())
	}
	set, err := stream.Connect(Context(t), stream.Access{URL: strings.Join(urls, ","), Name: t.Name()},
		stream.Config{Replicas: size, Retention: time.Hour}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(set.Close)
	return set
}

// Restarted is a server that can be started again with connections open.
type Restarted struct {
	t       testing.TB
	dir     string
	current atomic.Pointer[natsembed.Server]
}

// Restartable starts such a server, and stops it when the test is over.
func Restartable(t testing.TB) *Restarted {
	t.Helper()
	r := &Restarted{t: t, dir: t.TempDir()}
	r.start()
	t.Cleanup(func() { r.current.Load().Close() })
	return r
}

func (r *Restarted) start() {
	s, err := natsembed.Open(r.dir, 1<<20, Log(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	r.current.Store(s)
}

// InProcessConn opens a connection to the server as it is now.
func (r *Restarted) InProcessConn() (net.Conn, error) { return r.current.Load().InProcessConn() }

// Restart stops the server and starts it with what it has stored.
func (r *Restarted) Restart() {
	r.t.Helper()
	r.current.Load().Close()
	r.start()
}

// Set connects to the server with a connection of its own, as another process would.
func Set(t testing.TB, s nats.InProcessConnProvider) *stream.Set {
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

// Store stores a job as a dispatcher does.
func Store(ctx context.Context, set *stream.Set, job *proto.Job) error {
	m, err := set.StageJob(ctx, job, nats.Header{})
	if err != nil {
		return err
	}
	_, err = set.WriteJob(ctx, m)
	return err
}

// Log writes to the test's log.
func Log(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}
