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
	numbers map[int]string // the last worker of each number
	failing bool           // processes end at once
}

func (m *machine) command(number int) (*exec.Cmd, string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if last, used := m.numbers[number]; used && !m.failing && !m.has(last, stopped) {
		m.t.Errorf("number %d is that of %s, which runs", number, last)
	}
	name := fmt.Sprint("w", len(m.workers))
	m.workers[name], m.numbers[number] = &proto.Worker{Name: name, Slots: 1}, name
	if m.failing {
		return exec.Command("false"), name, nil
	}
	script := `trap 'echo > "$0` + stopped + `"; exit 0' TERM; echo > "$0` + started + `"; while :; do sleep 0.05; done`
	return exec.Command("sh", "-c", script, filepath.Join(m.dir, name)), name, nil
}

// Suffixes of files that a worker writes: when SIGTERM will be noted, and when it was.
const started, stopped = ".started", ".stopped"

// has reports whether a worker has written a file.
func (m *machine) has(name, suffix string) bool {
	_, err := os.Stat(filepath.Join(m.dir, name+suffix))
	return err == nil
}

func (m *machine) Workers(context.Context) ([]proto.Worker, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []proto.Worker
	for name, w := range m.workers {
		if m.has(name, started) && !m.has(name, stopped) {
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
	m := &machine{t: t, dir: t.TempDir(), workers: map[string]*proto.Worker{}, numbers: map[int]string{}}
	failures := make(chan string, 100)
	p := &Process{
		Pool: "a", Most: 3, Command: m.command, Workers: m, Grace: time.Minute, Failed: func(pool string) {
			failures <- pool
		}, Log: slog.New(slog.DiscardHandler),
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
	scale(2, "[w0 w1]")
	m.set("w0", 1)
	scale(1, "[w0]")       // the idle one
	scale(0, "[(w0)]")     // a program runs
	scale(1, "[w0]")       // it takes jobs again
	scale(9, "[w0 w2 w3]") // no more than Most
	for _, name := range []string{"w2", "w3"} {
		m.set(name, 2)
	}
	scale(2, "[(w0) w2 w3]")
	m.set("w0", 0)
	scale(2, "[w2 w3]")
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
	for _, name := range []string{"w2", "w3"} {
		if !m.has(name, stopped) {
			t.Errorf("%s was not stopped", name)
		}
	}
}
