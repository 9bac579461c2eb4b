// Package storetest starts real JetStream servers for the tests of the scheduler.
package storetest

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Server starts an embedded server for the test.
func Server(t testing.TB) *natsembed.Server {
	t.Helper()
	s, err := natsembed.Open(t.TempDir(), 1<<20, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// clusters is the number of clusters that this process has started.
var clusters atomic.Int32

// Replicas is the number of servers of a cluster, and of replicas of its streams.
const Replicas = 3

// Cluster starts a cluster for the test and connects to it.
func Cluster(t testing.TB) *store.Store {
	t.Helper()
	start := Servers(t)
	var urls []string
	for range Replicas {
		urls = append(urls, start())
	}
	st, err := store.Connect(Context(t), store.Access{URL: strings.Join(urls, ","), Name: t.Name()},
		store.Config{Replicas: Replicas, Retention: time.Hour}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return st
}

// Servers returns a function that starts the next server of a cluster and returns its URL. Tests
// with clusters are skipped in short mode, since elections take seconds.
func Servers(t testing.TB) (start func() string) {
	t.Helper()
	if testing.Short() {
		t.Skip("elections take seconds")
	}
	const port = 6222
	// Each cluster has addresses of its own: a free port may be taken before the server binds it.
	pid, first := os.Getpid(), Replicas*int(clusters.Add(1)-1)+1
	host := func(i int) string { return fmt.Sprintf("127.%d.%d.%d", 1+pid>>8&0x7f, pid&0xff, first+i) }
	var routes []*url.URL
	for i := range Replicas {
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("%s:%d", host(i), port)})
	}
	started := 0
	return func() string {
		t.Helper()
		i := started
		started++
		return Start(t, &server.Options{
			ServerName: fmt.Sprint("n", i), Host: host(i), JetStream: true, SyncAlways: true,
			Cluster: server.ClusterOpts{Name: "test", Host: host(i), Port: port}, Routes: routes,
		}).ClientURL()
	}
}

// Start starts a server that listens for the test: on a loopback address, a free port and a new
// directory, unless the options name others.
func Start(t testing.TB, opts *server.Options) *server.Server {
	t.Helper()
	opts.Host, opts.StoreDir = cmp.Or(opts.Host, "127.0.0.1"), cmp.Or(opts.StoreDir, t.TempDir())
	opts.Port, opts.NoSigs, opts.NoLog = cmp.Or(opts.Port, server.RANDOM_PORT), true, true
	s, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(time.Minute) {
		t.Fatal("the NATS server does not listen")
	}
	return s
}

// RestartableServer is a server that can be restarted while connections are open.
type RestartableServer struct {
	t       testing.TB
	dir     string
	current atomic.Pointer[natsembed.Server]
}

// NewRestartable starts a restartable server for the test.
func NewRestartable(t testing.TB) *RestartableServer {
	t.Helper()
	r := &RestartableServer{t: t, dir: t.TempDir()}
	r.start()
	t.Cleanup(func() { r.current.Load().Close() })
	return r
}

func (r *RestartableServer) start() {
	s, err := natsembed.Open(r.dir, 1<<20, Log(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	r.current.Store(s)
}

// InProcessConn opens a connection to the current server.
func (r *RestartableServer) InProcessConn() (net.Conn, error) {
	return r.current.Load().InProcessConn()
}

// Restart stops the server and starts it with its stored data.
func (r *RestartableServer) Restart() {
	r.t.Helper()
	r.current.Load().Close()
	r.start()
}

// Open connects to the server with a new connection, like another process.
func Open(t testing.TB, s nats.InProcessConnProvider) *store.Store {
	t.Helper()
	st, err := store.Connect(Context(t), store.Access{InProcess: s, Name: t.Name()},
		store.Config{Replicas: 1, Retention: time.Hour}, Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return st
}

// Context is done when the test ends, or after a minute.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Job returns a job whose queue time outlasts any test.
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

// PutJob stores a job as a dispatcher does.
func PutJob(ctx context.Context, st *store.Store, job *proto.Job) error {
	m, err := st.Jobs.Stage(ctx, job, nats.Header{})
	if err != nil {
		return err
	}
	_, err = st.Jobs.Put(ctx, m)
	return err
}

// Log writes to the log of the test.
func Log(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// Fill stores n entries in a bucket, in no particular order. entry returns the key and the value of one.
func Fill(t testing.TB, st *store.Store, bucket jetstream.KeyValue, n int, entry func(i int) (key string, value any)) {
	t.Helper()
	for i := range n {
		key, value := entry(i)
		body, err := json.Marshal(value)
		if err == nil {
			_, err = st.JS.PublishAsync("$KV."+bucket.Bucket()+"."+key, body, jetstream.WithStallWait(time.Minute))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	<-st.JS.PublishAsyncComplete()
}

// Race calls each function n times concurrently, with different numbers, and returns how many calls
// succeeded. The test fails on an error that refused does not match.
func Race(t testing.TB, n int, refused func(error) bool, create ...func(i int) error) int {
	t.Helper()
	var accepted atomic.Int32
	var racing sync.WaitGroup
	begin := make(chan struct{})
	for k, f := range create {
		for i := range n {
			racing.Go(func() {
				<-begin
				switch err := f(k*n + i); {
				case err == nil:
					accepted.Add(1)
				case !refused(err):
					t.Error(err)
				}
			})
		}
	}
	close(begin)
	racing.Wait()
	return int(accepted.Load())
}
