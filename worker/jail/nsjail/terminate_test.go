package nsjail

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// firstLine is a writer that closes a channel when it has got a line.
type firstLine struct {
	once sync.Once
	up   chan struct{}
	at   time.Time // when up was closed
}

func (f *firstLine) Write(p []byte) (int, error) {
	if strings.Contains(string(p), "\n") {
		f.once.Do(func() {
			f.at = time.Now()
			close(f.up)
		})
	}
	return len(p), nil
}

// cancelledAtFirstLine returns p, which is cancelled when it has printed a line.
func cancelledAtFirstLine(p jail.Program) jail.Program {
	f := &firstLine{up: make(chan struct{})}
	p.Stdout, p.Cancel = f, f.up
	return p
}

// A program that gets SIGTERM behaves as it does anywhere else, in each language and start mode.
func TestTerminate(t *testing.T) {
	t.Parallel()
	killed, signaled := jail.Outcome{}, jail.Outcome{Graceful: true, Signal: 15}
	exits := func(code int) jail.Outcome { return jail.Outcome{Graceful: true, ExitCode: code} }
	python := "import os, signal, subprocess, sys, time\n"
	for _, mode := range modes {
		m := newMaker(t)
		setStartMode(t, m, mode)
		for _, tt := range []struct {
			name, language, code string
			grace                time.Duration
			want                 jail.Outcome
			stdout               string
		}{
			{"by default", "python", "import time; print('up'); time.sleep(600)", patience, signaled, "up"},
			{"by default", "node", "console.log('up'); setInterval(() => {}, 1000)", patience, signaled, "up"},
			{"by default", "bash", "echo up; sleep 600", patience, signaled, "up"},
			{"handler", "python", python + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); print('up')\nwhile True: " +
				"time.sleep(.01)", patience, exits(3), "up"},
			{"handler", "node", "process.on('SIGTERM', () => { console.log('saved'); process.exit(3) }); console.log('up'); " +
				"setInterval(() => {}, 1000)", patience, exits(3), "up\nsaved"},
			{
				"handler", "bash", "trap 'echo saved; exit 3' TERM; echo up; while :; do sleep .1; done", patience, exits(3),
				"up\nsaved",
			},
			{
				"handler that goes on", "bash", "trap 'echo saved' TERM; echo up; while :; do sleep .1; done", 3 * time.Second,
				killed, "up\nsaved",
			},
			{
				"end as usual", "python",
				python + "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); print('up')\n" +
					"signal.sigwait({signal.SIGTERM}); print('end')", patience, exits(0), "up\nend",
			},
			{
				"process group", "bash",
				"trap 'wait; echo parent; exit 0' TERM; bash -c \"trap 'echo child; exit' TERM; echo up; while :; do sleep .1; " +
					"done\" & wait", patience, exits(0), "up\nchild\nparent",
			},
			{"stopped", "bash", "trap 'echo saved; exit 3' TERM; (while [ \"$(cut -d' ' -f3 /proc/$$/stat)\" != T ]; do :; " +
				"done; echo up) & kill -STOP $$; wait", patience, exits(3), "up\nsaved"},
			{"no grace", "bash", "trap 'echo saved' TERM; echo up; while :; do sleep .1; done", 0, killed, "up"},
		} {
			t.Run(mode+"/"+tt.language+"/"+tt.name, func(t *testing.T) {
				p := cancelledAtFirstLine(program(t, tt.language, tt.code))
				p.CancelGrace = tt.grace
				r := runProgram(t, m, testSpec(), p)
				r.want(t, jail.Cancelled, tt.stdout)
				if r.Graceful != tt.want.Graceful || r.ExitCode != tt.want.ExitCode || r.Signal != tt.want.Signal ||
					tt.language != "bash" && r.stderr != "" {
					t.Errorf("got %+v, want %+v\nstderr %s", r.Outcome, tt.want, r.stderr)
				}
				if lasted := time.Since(p.Stdout.(*firstLine).at); !r.Graceful && lasted < tt.grace {
					t.Errorf("killed after %v, with a grace of %v", lasted, tt.grace)
				}
			})
		}
	}
}

// The grace after a timeout begins when the timeout has passed, and is part of the duration.
func TestTerminateAtTimeout(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := program(t, "bash", "trap 'echo saved; exit 3' TERM; while :; do sleep .1; done")
	p.Timeout, p.TimeoutGrace = 2*time.Second, patience
	r := runProgram(t, m, testSpec(), p)
	r.want(t, jail.TimedOut, "saved")
	if !r.Graceful || r.ExitCode != 3 || r.Duration < p.Timeout {
		t.Errorf("got %+v", r.Outcome)
	}
	p = program(t, "bash", "trap 'echo saved' TERM; while :; do sleep .1; done")
	p.Timeout, p.TimeoutGrace = 2*time.Second, 2*time.Second
	r = runProgram(t, m, testSpec(), p)
	r.want(t, jail.TimedOut, "saved")
	if r.Graceful || r.Duration < p.Timeout+p.TimeoutGrace {
		t.Errorf("got %+v", r.Outcome)
	}
}

// What must kill at once kills during a grace too, whatever began the grace.
func TestKillDuringGrace(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for name, tt := range map[string]struct {
		end  func(p *jail.Program)
		want jail.Kind
	}{
		"timeout": {func(p *jail.Program) { p.Timeout, p.TimeoutGrace = time.Second, patience }, jail.TimedOut},
		"cancel":  {func(p *jail.Program) { *p, p.CancelGrace = cancelledAtFirstLine(*p), patience }, jail.Cancelled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, lose := context.WithCancelCause(t.Context())
			defer lose(nil)
			p := program(t, "bash", "trap 'echo asked >&2' TERM; echo up; while :; do sleep .1; done")
			tt.end(&p)
			asked := newLines()
			p.Stderr = asked
			go func() {
				<-asked.c
				lose(errors.New("the lease is lost"))
			}()
			o, err := prepare(t, m, testSpec()).Run(ctx, p)
			if err != nil || o.Kind != tt.want || o.Graceful || o.Duration >= patience {
				t.Errorf("got %+v, %v", o, err)
			}
		})
	}
}

// A cancel that precedes the start is not lost.
func TestCancelledBeforeStart(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	cancelled := make(chan struct{})
	close(cancelled)
	p := program(t, "bash", "trap '' TERM; sleep 600")
	p.Cancel, p.CancelGrace = cancelled, 10*time.Millisecond
	if o, err := prepare(t, m, testSpec()).Run(t.Context(), p); err != nil || o.Kind != jail.Cancelled {
		t.Errorf("got %+v, %v", o, err)
	}
}
