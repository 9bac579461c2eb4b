package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	wire "github.com/bullpen-run/bullpen/proto/api"
)

// Parameters for measuring live sandboxes. They use their own server, whose store is an S3 server on this
// machine.
const (
	sandboxRuns      = 100 // of each kind of call
	idleSandboxes    = 200
	quickIdle        = 20
	createsPerSecond = 20
	createsFor       = 10 * time.Second
	quickCreatesFor  = time.Second
	idleWatch        = 20 * time.Second
	quickIdleWatch   = 3 * time.Second
	settledFor       = 5 * time.Second // after many have been created
	sandboxHomeBytes = 100 << 20
	sandboxTimeout   = 3600 // seconds
	sandboxCapacity  = "BULLPEN_SANDBOXES=256"
	sandboxMemory    = "BULLPEN_SANDBOX_OVERCOMMIT=16" // idle ones use little of their limits
)

// sandboxes holds the figures of live sandboxes. All kinds of call are measured in turn.
type sandboxes struct {
	Bare    *summary `json:"bare_bash_ms"`
	Inline  *summary `json:"inline_execution_ms"`
	First   *summary `json:"create_to_first_output_ms"`
	Command *summary `json:"command_ms"`

	Idle       int      `json:"idle"`
	IdleMiB    float64  `json:"idle_mib_of_the_host_each"`
	IdleCPU    float64  `json:"idle_cpu_percent_of_a_core"` // more than the server without them
	IdleWrites float64  `json:"idle_writes_kb_per_second"`  // more than the server without them
	Creates    *summary `json:"creates_ms"`                 // at createsPerSecond, each deleted at once
	Refused    *summary `json:"refused_creates_ms"`         // beyond the plan's limit

	DownloadS float64 `json:"download_seconds"` // of the home by a gateway without it
	ResumeS   float64 `json:"resume_seconds"`   // on a worker without the home
}

// measureSandboxes measures live sandboxes. dir holds the data of the server and its store.
func measureSandboxes(ctx context.Context, program, dir string, quick bool) (_ *sandboxes, err error) {
	m := &sandboxes{Idle: idleSandboxes}
	runs, watch, rush := sandboxRuns, idleWatch, createsFor
	if quick {
		m.Idle, runs, watch, rush = quickIdle, quickRuns, quickIdleWatch, quickCreatesFor
	}
	store := threads{}
	dir = filepath.Join(dir, "sandboxes")
	s3, err := store.startStore(dir)
	if err != nil {
		return nil, fmt.Errorf("measure live sandboxes: %w", err)
	}
	defer func() { err = errors.Join(err, s3.Close()) }()
	t, err := store.server(ctx, program, dir, sandboxCapacity, sandboxMemory)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	for _, step := range []struct {
		name string
		do   func(c *client.Client) error
	}{
		{"calls", func(c *client.Client) error { return m.calls(ctx, c, runs) }},
		{"creates", func(c *client.Client) error { return m.creates(ctx, c, rush) }},
		{"idle sandboxes", func(c *client.Client) error { return m.idle(ctx, t, c, watch) }},
	} {
		if err := step.do(store.withThreads(t.api).client); err != nil {
			return nil, fmt.Errorf("measure %s of live sandboxes: %w", step.name, err)
		}
	}
	if t, err = m.resume(ctx, &store, t, program, dir); err != nil {
		return nil, fmt.Errorf("measure resuming a live sandbox: %w", err)
	}
	return m, nil
}

// echo runs a command in a live sandbox.
func echo(ctx context.Context, c *client.Client, id string) error {
	var out bytes.Buffer
	exit, err := c.Guest(id, "").Exec(ctx, &client.Command{Args: []string{"bash", "-c", "echo hello"}, Stdout: &out})
	if err == nil && (exit.Code != 0 || out.String() != "hello\n") {
		err = fmt.Errorf("a command printed %q with exit code %d", out.String(), exit.Code)
	}
	return err
}

// timed adds the milliseconds that f takes to a list.
func timed(list *[]float64, f func() error) error {
	began := time.Now()
	err := f()
	*list = append(*list, millis(time.Since(began)))
	return err
}

// calls measures Bash on the host, an inline execution, a create with its first command, and a command, in
// turn.
func (m *sandboxes) calls(ctx context.Context, c *client.Client, runs int) error {
	var bare, inline, first, command []float64
	request := &wire.SandboxRequest{Timeout: sandboxTimeout}
	for i := range runs + 1 {
		var id string
		err := errors.Join(
			timed(&bare, func() error { return exec.CommandContext(ctx, "bash", "-c", "echo hello").Run() }),
			timed(&inline, func() error {
				_, err := c.Execute(ctx, wire.ExecuteRequest{Language: proto.Bash, Code: "echo hello"})
				return err
			}),
			timed(&first, func() error {
				x, err := c.CreateSandbox(ctx, request)
				if err != nil {
					return err
				}
				id = x.ID
				return echo(ctx, c, id)
			}))
		if err == nil {
			err = timed(&command, func() error { return echo(ctx, c, id) })
		}
		if err == nil {
			_, err = c.DeleteSandbox(ctx, id)
		}
		if err != nil {
			return err
		}
		if i == 0 { // warm-up
			bare, inline, first, command = nil, nil, nil, nil
		}
	}
	m.Bare, m.Inline, m.First, m.Command = summarise(bare), summarise(inline), summarise(first), summarise(command)
	return nil
}

// creates creates sandboxes at a steady rate, and deletes each at once.
func (m *sandboxes) creates(ctx context.Context, c *client.Client, during time.Duration) error {
	var mu sync.Mutex
	var took []float64
	var failed error
	var running sync.WaitGroup
	tick := time.NewTicker(time.Second / createsPerSecond)
	defer tick.Stop()
	for range int(during.Seconds() * createsPerSecond) {
		<-tick.C
		running.Go(func() {
			began := time.Now()
			x, err := c.CreateSandbox(ctx, &wire.SandboxRequest{Timeout: sandboxTimeout})
			created := millis(time.Since(began))
			if err == nil {
				_, err = c.DeleteSandbox(ctx, x.ID)
			}
			mu.Lock()
			defer mu.Unlock()
			took, failed = append(took, created), errors.Join(failed, err)
		})
	}
	running.Wait()
	m.Creates = summarise(took)
	return failed
}

// usage is what the machine and the server have used.
type usage struct {
	cpu       float64 // milliseconds of the machine without the benchmark
	written   float64 // bytes by the server
	available float64 // memory of the machine, in MiB
}

func (t *target) usage() (u usage, err error) {
	if u.cpu, err = t.cpuMillis(); err != nil {
		return u, err
	}
	u.written, err = strconv.ParseFloat(field(text(procPath(t.pid, "io")), "write_bytes"), 64)
	if err != nil {
		return u, fmt.Errorf("read what the server has written: %w", err)
	}
	memory, err := strconv.ParseFloat(strings.TrimSuffix(field(text("/proc/meminfo"), "MemAvailable"), " kB"), 64)
	u.available = memory / kib
	return u, err
}

// watched returns the CPU time in percent of a core and the kB written per second during a time.
func (t *target) watched(ctx context.Context, during time.Duration) (cpu, writes float64, err error) {
	before, err := t.usage()
	if err != nil {
		return 0, 0, err
	}
	if err := wait(ctx, during); err != nil {
		return 0, 0, err
	}
	after, err := t.usage()
	return 100 * (after.cpu - before.cpu) / millis(during), (after.written - before.written) / 1000 / during.Seconds(), err
}

// idle measures what sandboxes cost that do nothing, and how the next one is refused.
func (m *sandboxes) idle(ctx context.Context, t *target, c *client.Client, watch time.Duration) error {
	if err := t.quiet(ctx); err != nil {
		return err
	}
	cpu, writes, err := t.watched(ctx, watch)
	if err != nil {
		return err
	}
	before, err := t.usage()
	if err != nil {
		return err
	}
	ids := make([]string, m.Idle)
	for i := range ids {
		x, err := c.CreateSandbox(ctx, &wire.SandboxRequest{Timeout: sandboxTimeout})
		if err != nil {
			return err
		}
		ids[i] = x.ID
	}
	if err := wait(ctx, settledFor); err != nil {
		return err
	}
	if m.Idle == idleSandboxes { // the plan's limit
		var refused []float64
		for range sandboxRuns {
			err := timed(&refused, func() error {
				_, err := c.CreateSandbox(ctx, &wire.SandboxRequest{})
				return err
			})
			if e, ok := errors.AsType[*client.Error](err); !ok || e.Status != http.StatusTooManyRequests {
				return fmt.Errorf("a sandbox beyond the plan's limit was not refused: %w", err)
			}
		}
		m.Refused = summarise(refused)
	}
	if err := t.quiet(ctx); err != nil {
		return err
	}
	after, err := t.usage()
	if err != nil {
		return err
	}
	m.IdleMiB = (before.available - after.available) / float64(m.Idle)
	idleCPU, idleWrites, err := t.watched(ctx, watch)
	if err != nil {
		return err
	}
	m.IdleCPU, m.IdleWrites = idleCPU-cpu, idleWrites-writes
	for _, id := range ids {
		if _, err := c.DeleteSandbox(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for a time.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// resume measures the download of a home, and a resume with it, both by processes that do not have it.
func (m *sandboxes) resume(ctx context.Context, store *threads, t *target, program, dir string) (*target, error) {
	c := store.withThreads(t.api).client
	x, err := c.CreateSandbox(ctx, &wire.SandboxRequest{
		Timeout: sandboxTimeout, ThreadID: benchThread, OnTimeout: proto.SandboxPause,
	})
	if err != nil {
		return t, err
	}
	code := fmt.Sprintf("for i in {1..100}; do head -c %d /dev/urandom >f$i; done", sandboxHomeBytes/100)
	if _, err := c.Guest(x.ID, "").Exec(ctx, &client.Command{Args: []string{"bash", "-c", code}}); err != nil {
		return t, err
	}
	if _, err := c.PauseSandbox(ctx, x.ID); err != nil {
		return t, err
	}
	for _, step := range []struct {
		took *float64
		do   func(c *client.Client) error
	}{
		{&m.DownloadS, func(c *client.Client) error { return download(ctx, store.withThreads(t.api)) }},
		{&m.ResumeS, func(c *client.Client) error {
			_, err := c.ResumeSandbox(ctx, x.ID, sandboxTimeout)
			return err
		}},
	} {
		if t, err = store.restart(ctx, t, program, dir, sandboxCapacity, sandboxMemory); err != nil {
			return t, err
		}
		c := store.withThreads(t.api).client
		if _, err := c.Execute(ctx, wire.ExecuteRequest{Language: proto.Bash, Code: ":"}); err != nil {
			return t, err
		}
		began := time.Now()
		if err := step.do(c); err != nil {
			return t, err
		}
		*step.took = time.Since(began).Seconds()
	}
	return t, nil
}

// download reads the home as an archive.
func download(ctx context.Context, a *api) error {
	resp, err := a.do(ctx, http.MethodGet, "/v1/threads/"+benchThread+"/archive", "application/x-tar", nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}

// figures returns the figures of live sandboxes. m is nil if they were not measured.
func (m *sandboxes) figures() []figure {
	first := atMost("live sandbox, create to the first command's output, p50", targetFirstOutput, "inline executions")
	command := atMost("command in a live sandbox, p50", targetCommand, "inline executions")
	memory := atMost("memory of the host for each idle live sandbox", targetSandboxMiB, "MiB")
	cpu := below("CPU of idle live sandboxes together", targetSandboxCPU, "% of a core")
	writes := atMost("durable writes of idle live sandboxes together", targetSandboxKB, "kB/s")
	creates := figure{
		Name:   fmt.Sprintf("live sandboxes created at %d/s, slowest", createsPerSecond),
		Target: fmt.Sprintf("all created, at most %g ms", float64(targetCreateMS)), Unit: "ms",
	}
	resume := atMost("resume with a home of 100 MB", targetResume, "downloads of it")
	if m == nil {
		const why = "needs a server that is started here"
		return []figure{
			first.unknown(why), command.unknown(why), memory.unknown(why), cpu.unknown(why), writes.unknown(why),
			creates.unknown(why), resume.unknown(why),
		}
	}
	note := fmt.Sprintf("%d samples in turn; inline %.1f ms, Bash on the host %.1f ms", m.Inline.Runs, m.Inline.P50,
		m.Bare.P50)
	refused := ""
	if m.Refused != nil {
		refused = fmt.Sprintf("; beyond the plan's limit refused in %.1f ms, p99", m.Refused.P99)
	}
	firstRatio, commandRatio := m.First.P50/m.Inline.P50, m.Command.P50/m.Inline.P50
	resumeRatio := ratio(m.ResumeS, m.DownloadS)
	return []figure{
		first.is(firstRatio, firstRatio <= targetFirstOutput, fmt.Sprintf("%.1f ms; %s", m.First.P50, note)),
		command.is(commandRatio, commandRatio <= targetCommand, fmt.Sprintf("%.1f ms; %s", m.Command.P50, note)),
		memory.is(m.IdleMiB, m.IdleMiB <= targetSandboxMiB,
			fmt.Sprintf("%d of them, by the host's available memory", m.Idle)),
		cpu.is(m.IdleCPU, m.IdleCPU < targetSandboxCPU, fmt.Sprintf("%d of them, more than the server without them", m.Idle)),
		writes.is(m.IdleWrites, m.IdleWrites <= targetSandboxKB, "more than the server without them, by the kernel's count"),
		creates.is(m.Creates.Max, m.Creates.Max <= targetCreateMS,
			fmt.Sprintf("%d, p50 %.0f ms%s", m.Creates.Runs, m.Creates.P50, refused)),
		resume.is(resumeRatio, resumeRatio <= targetResume,
			fmt.Sprintf("%.2f s; download as tar %.2f s; with nothing cached", m.ResumeS, m.DownloadS)),
	}
}
