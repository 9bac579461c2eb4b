package scaler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pool(name string, workers int) proto.Pool {
	return proto.Pool{Name: name, Workers: 1, Desired: &proto.DesiredWorkers{
		Workers: workers, Slots: 4 * workers, Reason: "demand",
	}}
}

// fakeDriver takes time, and fails while fail is set.
type fakeDriver struct {
	takes time.Duration
	fail  bool
	calls []string
}

func (d *fakeDriver) Scale(ctx context.Context, p proto.Pool) error {
	d.calls = append(d.calls, fmt.Sprint(p.Name, " ", p.Desired.Workers))
	select {
	case <-ctx.Done():
	case <-time.After(d.takes):
	}
	if d.fail {
		return errors.New("no machine left")
	}
	return nil
}

func TestScaler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		d := &fakeDriver{takes: time.Second}
		failures := 0
		s := &Scaler{Driver: d, Failed: func(string) { failures++ }, Log: slog.New(slog.DiscardHandler)}
		done := make(chan error)
		go func() { done <- s.Run(ctx) }()
		// pass lets time pass while the dispatcher recommends n workers.
		pass := func(duration time.Duration, n int) {
			for range duration / (200 * time.Millisecond) {
				s.Set([]proto.Pool{pool("a", n), {Name: "new"}})
				time.Sleep(200 * time.Millisecond)
			}
			synctest.Wait()
		}
		check := func(want ...string) {
			t.Helper()
			if got := fmt.Sprint(d.calls); got != fmt.Sprint(want) {
				t.Errorf("got %v, want %v", got, want)
			}
			d.calls = nil
		}
		pass(10*time.Second, 3)
		check("a 3")
		pass(5*time.Second, 4) // at once
		check("a 4")
		pass(60*time.Second, 4) // and every minute
		check("a 4")
		d.takes = 8 * time.Second
		pass(4*time.Second, 5)
		pass(14*time.Second, 6) // one call at a time; the last number is not lost
		check("a 5", "a 6")
		d.takes, d.fail = 0, true
		pass(15*time.Second, 2)
		check("a 2", "a 2")
		if failures != 2 {
			t.Errorf("%d failures were counted", failures)
		}
		d.takes = time.Hour
		pass(20*time.Second, 1)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func script(t *testing.T, text string) *Exec {
	t.Helper()
	name := filepath.Join(t.TempDir(), "scale")
	if err := os.WriteFile(name, []byte("#!/bin/sh\n"+text), 0o700); err != nil {
		t.Fatal(err)
	}
	return &Exec{Command: name}
}

func TestExec(t *testing.T) {
	t.Setenv("BULLPEN_NATS_PASSWORD", "secret")
	out := filepath.Join(t.TempDir(), "out")
	t.Setenv("OUT", out)
	e := script(t, `echo "$1 $2 $# $BULLPEN_AUTOSCALE_POOL $BULLPEN_AUTOSCALE_WORKERS $BULLPEN_AUTOSCALE_SLOTS `+
		`$BULLPEN_AUTOSCALE_LIVE_WORKERS $BULLPEN_AUTOSCALE_REASON [$BULLPEN_NATS_PASSWORD]" > "$OUT"`)
	if err := e.Scale(t.Context(), pool("gpu", 3)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out)
	if err != nil || string(text) != "gpu 3 2 gpu 3 12 1 demand []\n" {
		t.Errorf("got %q, %v", text, err)
	}
	err = script(t, "seq 1 10000; echo the quota is used up >&2; exit 3").Scale(t.Context(), pool("gpu", 3))
	if err == nil || !strings.Contains(err.Error(), "exit status 3") ||
		!strings.HasSuffix(err.Error(), "\nthe quota is used up") || len(err.Error()) > maxCommandOutput+1000 {
		t.Errorf("got %v", err)
	}
	if err := (&Exec{Command: "/no/such/program"}).Scale(t.Context(), pool("gpu", 3)); err == nil {
		t.Error("a command that does not exist did not fail")
	}
	stopped, stop := context.WithCancelCause(t.Context())
	stop(errors.New("the server stops"))
	if err := script(t, "exec sleep 1000").Scale(stopped, pool("gpu", 3)); err == nil {
		t.Error("a stopped command did not fail")
	}
}

func TestParsePolicies(t *testing.T) {
	p, err := parsePolicies([]byte(`{"max_workers": 20, "pools": {"gpu": {"min_workers": 1, "max_workers": 2}}}`))
	if err != nil {
		t.Fatal(err)
	}
	for pool, want := range map[string][2]int{"default": {0, 20}, "gpu": {1, 2}} {
		if got := p.Of(pool); got.Min != want[0] || got.Max != want[1] || got.SlotsPerWorker < 1 {
			t.Errorf("%s: %+v", pool, got)
		}
	}
	for text, want := range map[string]string{
		`{"max_wrokers": 1}`:                        "max_wrokers",
		`{"pools": {"gpu": {"min_workers": 1000}}}`: "pool gpu",
		`{"pools": {"a b": {}}}`:                    `"a b"`,
		`{"pools": []}`:                             "object",
		`{"max_workers": 5`:                         "autoscaling policy",
		`null`:                                      "",
		``:                                          "autoscaling policy",
	} {
		if _, err := parsePolicies([]byte(text)); want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
	if _, err := ReadPolicies(filepath.Join(t.TempDir(), "missing")); err == nil {
		t.Error("a missing file is no error")
	}
}
