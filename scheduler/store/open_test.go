package store_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// logged is a writer of a log that reports the first line with a text.
type logged struct {
	text string
	seen chan struct{}
}

func (l *logged) Write(line []byte) (int, error) {
	if strings.Contains(string(line), l.text) {
		select {
		case l.seen <- struct{}{}:
		default:
		}
	}
	return len(line), nil
}

// connectWhen connects with the settings cfg while something is missing. It calls supply once the
// log names what the connection waits for.
func connectWhen(t *testing.T, url string, cfg store.Config, supply func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	log := &logged{"streams of bullpen", make(chan struct{}, 1)}
	connected := make(chan error, 1)
	go func() {
		st, err := store.Connect(ctx, store.Access{URL: url}, cfg, slog.New(slog.NewTextHandler(log, nil)))
		if err == nil {
			st.Close()
		}
		connected <- err
	}()
	select {
	case <-log.seen:
	case err := <-connected:
		t.Fatalf("it did not wait: %v", err)
	case <-ctx.Done():
		t.Fatal("the log does not name what is waited for")
	}
	supply()
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
}

func TestConnectWaitsForJetStream(t *testing.T) {
	s := storetest.Start(t, &server.Options{})
	connectWhen(t, s.ClientURL(), store.Config{Replicas: 1, Retention: time.Hour}, func() {
		if err := s.EnableJetStream(&server.JetStreamConfig{StoreDir: t.TempDir()}); err != nil {
			t.Fatal(err)
		}
	})
}

// The servers of a new cluster may take minutes until all are there.
func TestConnectWaitsForACluster(t *testing.T) {
	t.Parallel()
	start := storetest.Servers(t)
	urls := start() + "," + start()
	connectWhen(t, urls, store.Config{Replicas: storetest.Replicas, Retention: time.Hour}, func() { start() })
}

// A wait for permissions would never end.
func TestConnectReportsMissingPermissions(t *testing.T) {
	s := storetest.Start(t, &server.Options{JetStream: true, Users: []*server.User{{
		Username: "u", Password: "p", Permissions: &server.Permissions{
			Publish: &server.SubjectPermission{Deny: []string{"$JS.API.STREAM.CREATE.>"}},
		},
	}}})
	_, err := store.Connect(storetest.Context(t), store.Access{URL: s.ClientURL(), User: "u", Password: "p"},
		store.Config{Replicas: 1, Retention: time.Hour}, storetest.Log(t))
	if err == nil || !strings.Contains(strings.ToLower(err.Error()), "permissions violation") {
		t.Error(err)
	}
}
