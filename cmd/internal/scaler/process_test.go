package scaler

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// machine pretends that the processes of a driver are workers.
type machine struct {
	t       *testing.T
	dir     string
	mu      sync.Mutex
	workers map[string]*proto.Worker
	failing bool // processes end at once
}

func (m *machine) command(number int) (*exec.Cmd, string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := fmt.Sprint("w", number, "-", len(m.workers))
	m.workers[name] = &proto.Worker{Name: name, Slots: 1}
	if m.failing {
		return exec.Command("false"), name, nil
	}
	// It notes that it is stopped.
	return exec.Command("sh", "-c", `trap 'echo > "$0"; exit 0' TERM; while :; do sleep 0.05; done`, filepath.Join(m.dir, name)), name, nil
}

// stopped reports whether a worker was sent SIGTERM.
func (m *machine) stopped(name string) bool {
	_, err := os.Stat(filepath.Join(m.dir, name))
	return err == nil
}

func (m *machine) Workers(context.Context) ([]proto.Worker, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []proto.Worker
	for name, w := range m.workers {
		if !m.stopped(name) {
			list = append(list, *w)
		}
	}
	return list, nil
}

func (m *machine) Drain(_ context.Context, name string, drain bool) (proto.Worker, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.workers[name].Draining = drain
	return *m.workers[name], nil
}

func (m *machine) set(name string, running int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.workers[name].Running = running
}

// live returns the names of the workers that run, with those that drain in brackets.
func (m *machine) live() string {
	list, _ := m.Workers(context.Background())
	var names []string
	for _, w := range list {
		if w.Draining {
			w.Name = "(" + w.Name + ")"
		}
		names = append(names, w.Name)
	}
	slices.Sort(names)
	return fmt.Sprint(names)
}

func TestProcess(t *testing.T) {
	m := &machine{t: t, dir: t.TempDir(), workers: map[string]*proto.Worker{}}
	failures := make(chan string, 100)
	p := &Process{
		Pool: "a", Most: 3, Command: m.command, Workers: m, Grace: time.Minute, Failed: func(pool string) { failures <- pool }, Log: slog.New(slog.DiscardHandler),
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	scale := func(n int, want string) {
		t.Helper()
		if err := p.Scale(ctx, pool("a", n)); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); m.live() != want; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("got %s, want %s", m.live(), want)
			}
		}
	}
	if err := p.Scale(ctx, pool("other", 5)); err != nil {
		t.Fatal(err)
	}
	scale(2, "[w0-0 w1-1]")
	m.set("w0-0", 1)
	scale(1, "[w0-0]")           // the idle one
	scale(0, "[(w0-0)]")         // a program runs
	scale(1, "[w0-0]")           // it takes jobs again
	scale(9, "[w0-0 w1-2 w2-3]") // no more than Most
	for _, name := range []string{"w1-2", "w2-3"} {
		m.set(name, 2)
	}
	scale(2, "[(w0-0) w1-2 w2-3]")
	m.set("w0-0", 0)
	scale(2, "[w1-2 w2-3]")
	if len(failures) > 0 {
		t.Error("a failure was counted")
	}
	m.mu.Lock()
	m.failing = true
	m.mu.Unlock()
	if err := p.Scale(ctx, pool("a", 3)); err != nil {
		t.Fatal(err)
	}
	if got := <-failures; got != "a" {
		t.Errorf("pool %q", got)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, name := range []string{"w1-2", "w2-3"} {
		if !m.stopped(name) {
			t.Errorf("%s was not stopped", name)
		}
	}
}
