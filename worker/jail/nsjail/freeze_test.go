package nsjail

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// counting is a program of several processes that count in files, beside one that is stopped and some that
// start others all the time.
const counting = `
for i in 1 2 3; do
	(while :; do /bin/true & /bin/true; done) &
done
for i in 1 2 3; do
	(n=0; while :; do n=$((n + 1)); echo $n >$i; done) &
done
sleep 1000 &
kill -STOP $!
wait`

// counters are the files of the program counting.
type counters struct{ dir string }

// startCounting starts the program in the group of a jail for a guest.
func startCounting(t *testing.T, m *Maker) (*sandbox, *counters) {
	t.Helper()
	spec := testSpec()
	spec.Guest = true
	s := prepare(t, m, spec).(*sandbox)
	c := &counters{t.TempDir()}
	p, err := s.group.StartProcess("/bin/bash", []string{"bash", "-c", counting}, &os.ProcAttr{Dir: c.dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Kill() // it has ended with its group
		if _, err := p.Wait(); err != nil {
			t.Error(err)
		}
	})
	c.advance(t)
	return s, c
}

// read returns the counters.
func (c *counters) read(t *testing.T) (all [3]string) {
	t.Helper()
	for i, name := range []string{"1", "2", "3"} {
		b, err := os.ReadFile(filepath.Join(c.dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		all[i] = string(b)
	}
	return all
}

// advance waits until all processes have counted.
func (c *counters) advance(t *testing.T) {
	t.Helper()
	before, deadline := c.read(t), time.Now().Add(patience)
	for after := before; after[0] == before[0] || after[1] == before[1] || after[2] == before[2]; after = c.read(t) {
		if time.Now().After(deadline) {
			t.Fatal("the processes do not run")
		}
	}
}

func TestWhileFrozen(t *testing.T) {
	m := newMaker(t)
	s, c := startCounting(t, m)
	for range repeats(100) {
		err := s.WhileFrozen(t.Context(), patience, func(ctx context.Context) error {
			before := c.read(t)
			for range 100 {
				if after := c.read(t); after != before {
					t.Errorf("a process ran: %q after %q", after, before)
				}
			}
			return ctx.Err()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	c.advance(t)
	failed := errors.New("failed")
	err := s.WhileFrozen(t.Context(), patience, func(context.Context) error { return failed })
	if !errors.Is(err, failed) || errors.Is(err, jail.ErrNotFrozen) {
		t.Errorf("a function that fails: %v", err)
	}
	c.advance(t)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	never := func(context.Context) error { t.Error("called"); return nil }
	if err := s.WhileFrozen(t.Context(), patience, never); !errors.Is(err, jail.ErrNotFrozen) {
		t.Errorf("of a dead jail: %v", err)
	}
}

// The processes run on when they may not be frozen any longer, whatever the function does.
func TestThaw(t *testing.T) {
	m := newMaker(t)
	s, c := startCounting(t, m)
	stuck := func(ctx context.Context) error {
		<-ctx.Done()
		c.advance(t)
		return nil
	}
	if err := s.WhileFrozen(t.Context(), time.Second, stuck); !errors.Is(err, jail.ErrNotFrozen) {
		t.Errorf("at the limit: %v", err)
	}
	if err := s.WhileFrozen(t.Context(), 0, stuck); !errors.Is(err, jail.ErrNotFrozen) {
		t.Errorf("without time: %v", err)
	}
	c.advance(t)
	ctx, cancel := context.WithCancel(t.Context())
	err := s.WhileFrozen(ctx, patience, func(ctx context.Context) error {
		cancel()
		return stuck(ctx)
	})
	if !errors.Is(err, jail.ErrNotFrozen) || errors.Is(err, jail.ErrFrozenTooLong) {
		t.Errorf("with a context that is done: %v", err)
	}
	if err := s.WhileFrozen(ctx, patience, stuck); !errors.Is(err, jail.ErrNotFrozen) {
		t.Errorf("with a context that was done before: %v", err)
	}
	c.advance(t)
	err = s.WhileFrozen(t.Context(), patience, func(ctx context.Context) error {
		if err := s.Close(); err != nil { // it waits until all processes are dead
			t.Error(err)
		}
		<-ctx.Done()
		return nil
	})
	if !errors.Is(err, jail.ErrNotFrozen) {
		t.Errorf("of a jail that was killed: %v", err)
	}
}

// Only the jails of guests can be frozen.
func TestNoFreezer(t *testing.T) {
	m := newMaker(t)
	s := prepare(t, m, testSpec())
	err := s.WhileFrozen(t.Context(), patience, func(context.Context) error { return nil })
	if m.CgroupVersion() == 1 && !errors.Is(err, jail.ErrNotFrozen) {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
