package natsembed_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/scheduler/natsembed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDirectoryIsLocked(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s, err := natsembed.Open(dir, 1, log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := natsembed.Open(dir, 1, log); err == nil || !strings.Contains(err.Error(), "in use by another bullpen") {
		t.Fatalf("a second server: %v", err)
	}
	s.Close()
	s, err = natsembed.Open(dir, 1, log)
	if err != nil {
		t.Fatalf("after the first has gone: %v", err)
	}
	s.Close()
}

// A child process that a killed server was starting may hold its lock for a moment longer.
func TestOpenWaitsForAReleasedLock(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	ghost, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(ghost.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(200*time.Millisecond, func() { _ = ghost.Close() })
	s, err := natsembed.Open(dir, 1, log)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

// Each stored subject takes memory.
func TestSubjectsAreBounded(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := natsembed.Open(t.TempDir(), 1, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.MaxSubjects = 3
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = s.Run(ctx) })
	nc, err := nats.Connect("", nats.InProcessServer(s))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	st, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "records", Subjects: []string{"record.*"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		store, remove []string
		crowded       bool
	}{
		{store: []string{"a", "b", "c", "a"}}, {store: []string{"d"}, crowded: true}, {remove: []string{"b"}},
	} {
		for _, name := range step.store {
			if _, err := js.Publish(ctx, "record."+name, nil); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range step.remove {
			if err := st.Purge(ctx, jetstream.WithPurgeSubject("record."+name)); err != nil {
				t.Fatal(err)
			}
		}
		for s.Crowded() != step.crowded {
			select {
			case <-ctx.Done():
				t.Fatalf("%+v: crowded %t", step, s.Crowded())
			case <-time.After(time.Millisecond):
			}
		}
	}
}
