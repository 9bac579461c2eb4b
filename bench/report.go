package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"
)

const (
	idleFor     = 3 * time.Second
	syncs       = 200
	quickSyncs  = 20
	bulkRuns    = 5
	timeoutRuns = 20
	// quickTimeoutRuns is also about the number of seconds that they take.
	quickTimeoutRuns = 3
	webhookSides     = 3 // multiple of the time for one side of a cell, per webhook latency
	latestResult     = "bench/results/latest.json"
	tablePad         = 2
	reportForm       = 1 // incremented when a field changes its meaning
	remoteName       = "a server that was running"
	startedName      = "started for this"
)

// report is everything that was measured.
type report struct {
	Form            int            `json:"form"`
	StartedAt       time.Time      `json:"started_at"`
	Seconds         float64        `json:"seconds"`
	Commit          string         `json:"commit"` // dev if there is none, or if files were changed since
	Server          string         `json:"server"`
	Quick           bool           `json:"quick"`
	CellSeconds     float64        `json:"seconds_per_side_of_a_cell"`
	Machine         machine        `json:"machine"`
	Cells           []cell         `json:"cells"`
	Paced           []paced        `json:"paced"`
	Overhead        []overhead     `json:"overhead"`
	OverheadUnknown string         `json:"overhead_unknown,omitempty"`
	FirstLine       *firstLine     `json:"first_line"`
	Throughput      []throughput   `json:"throughput"`
	Timeouts        *summary       `json:"timeouts_late"` // how long after the timeout programs had ended, milliseconds
	Webhooks        *webhooks      `json:"webhooks"`
	Threads         *threads       `json:"threads"`
	Pressure        *pressure      `json:"pressure"`
	Fairness        *fairness      `json:"fairness"`
	Batches         *batches       `json:"batches"`
	Schedules       *schedules     `json:"schedules"`
	Sandboxes       *sandboxes     `json:"sandboxes"`
	Contexts        *contexts      `json:"contexts"`
	AgentSessions   *agentSessions `json:"agent_sessions"`
	Memory          *memory        `json:"memory"`
	Half            []halfLoad     `json:"half_load"`
	Bursts          *summary       `json:"bursts_last_answer"` // of each burst
	Figures         []figure       `json:"figures"`
	Targets         []figure       `json:"targets"`
}

// memory is the resident memory of the server and of the jails that it keeps.
type memory struct {
	IdleMB       float64      `json:"idle_mb"`            // before the first execution
	AfterMB      float64      `json:"idle_after_load_mb"` // after the last execution
	Jails        []jailMemory `json:"jails_made_ahead"`   // before the first execution
	JailsUnknown string       `json:"jails_made_ahead_unknown,omitempty"`
}

// benchmark measures everything, prints the report and saves it.
func benchmark(ctx context.Context, t *target, o options, dir string, out, progress io.Writer) error {
	r, err := measure(ctx, t, o, dir, progress)
	if err != nil {
		return err
	}
	if err := r.print(out); err != nil {
		return fmt.Errorf("print the figures: %w", err)
	}
	if o.svg != "" {
		if err := replace(o.svg, r.plot()); err != nil {
			return fmt.Errorf("draw the comparison: %w", err)
		}
	}
	return r.save(o.json, out)
}

func measure(ctx context.Context, t *target, o options, dir string, progress io.Writer) (*report, error) {
	programs, missing, err := leastPrograms(dir)
	if err != nil {
		return nil, err
	}
	r := &report{
		Form: reportForm, StartedAt: time.Now().UTC(), Commit: commit(ctx), Quick: o.quick, Server: startedName,
		CellSeconds: o.duration.Seconds(), Machine: describe(ctx, programs),
	}
	if t.pid == 0 {
		r.Server = remoteName
	} else if version, err := exec.CommandContext(ctx, o.server, "version").Output(); err == nil {
		r.Server += ": " + strings.TrimSpace(string(version))
	}
	if err := r.idle(ctx, t, o, progress); err != nil {
		return nil, err
	}
	r.Cells = compare(ctx, t.api, programs, missing, o.duration, progress)
	if t.pid != 0 { // it creates keys
		if r.Paced, err = measurePaced(ctx, t, dir, int(o.duration/pacedPerRun), progress); err != nil {
			return nil, err
		}
	}
	if r.Half, err = measureHalf(ctx, t.api, r.Cells, halfSides*o.duration, progress); err != nil {
		return nil, err
	}
	if t.pid != 0 {
		times := bursts
		if o.quick {
			times = quickBursts
		}
		if r.Bursts, err = measureBursts(ctx, t, times, progress); err != nil {
			return nil, err
		}
	}
	_, _ = fmt.Fprintln(progress, "where the time goes …")
	if r.Overhead, err = overheads(ctx, t, r.Cells); err != nil {
		r.OverheadUnknown = err.Error()
	}
	_, _ = fmt.Fprintln(progress, "streams …")
	runs, timeouts := bulkRuns, timeoutRuns
	if o.quick {
		runs, timeouts = 1, quickTimeoutRuns
	}
	for _, p := range programs {
		if p.output == leastOutput && p.code == "print(1)" {
			r.FirstLine = measureFirstLine(ctx, t.api, p, 2*o.duration)
		}
	}
	if r.Throughput, err = measureThroughput(ctx, t, dir, runs); err != nil {
		return nil, err
	}
	_, _ = fmt.Fprintln(progress, "timeouts …")
	r.Timeouts = measureTimeouts(ctx, t.api, timeouts)
	if r.Memory != nil {
		if r.Memory.AfterMB, err = idleMemory(ctx, t); err != nil {
			return nil, err
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "webhooks …")
		if r.Webhooks, err = measureWebhooks(ctx, o.server, dir, o.quick, webhookSides*o.duration); err != nil {
			return nil, err
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "fairness …")
		if r.Fairness, err = measureFairness(ctx, o.server, dir, o.quick, fairSides*o.duration); err != nil {
			return nil, fmt.Errorf("measure fairness: %w", err)
		}
		_, _ = fmt.Fprintln(progress, "batches …")
		if r.Batches, err = measureBatches(ctx, o.server, dir, o.quick, batchSides*o.duration); err != nil {
			return nil, fmt.Errorf("measure batches: %w", err)
		}
		_, _ = fmt.Fprintln(progress, "schedules …")
		if r.Schedules, err = measureSchedules(ctx, o.server, dir, o.quick); err != nil {
			return nil, fmt.Errorf("measure schedules: %w", err)
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "threads …")
		if r.Threads, err = measureThreads(ctx, o.server, dir, o.quick); err != nil {
			return nil, err
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "live sandboxes …")
		if r.Sandboxes, err = measureSandboxes(ctx, o.server, dir, o.quick); err != nil {
			return nil, err
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "contexts …")
		if r.Contexts, err = measureContexts(ctx, o.server, dir, o.quick); err != nil {
			return nil, err
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "agent sessions …")
		if r.AgentSessions, err = measureAgentSessions(ctx, o.server, dir, o.quick); err != nil {
			return nil, err
		}
	}
	if t.pid != 0 {
		_, _ = fmt.Fprintln(progress, "submissions and idle streams …")
		if r.Pressure, err = measurePressure(ctx, o.server, dir, o.quick, submitSides*o.duration); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, errors.New("interrupted: nothing was written")
	}
	r.Figures, r.Targets, r.Seconds = r.figures(), r.targets(), time.Since(r.StartedAt).Seconds()
	return r, nil
}

// idle measures what must be measured while the server is idle.
func (r *report) idle(ctx context.Context, t *target, o options, progress io.Writer) (err error) {
	if t.pid == 0 {
		return nil
	}
	_, _ = fmt.Fprintln(progress, "the idle server and the disk …")
	r.Memory = new(memory)
	if r.Memory.IdleMB, err = idleMemory(ctx, t); err != nil {
		return err
	}
	if err := t.quiet(ctx); err != nil {
		return err
	}
	if r.Memory.Jails, err = prewarmedJails(t.pid); err != nil {
		r.Memory.JailsUnknown = err.Error()
	}
	times := syncs
	if o.quick {
		times = quickSyncs
	}
	r.Machine.DataFS = fileSystem(t.data)
	r.Machine.Sync, err = measureSync(t.data, times)
	return err
}

func idleMemory(ctx context.Context, t *target) (float64, error) {
	select {
	case <-ctx.Done():
	case <-time.After(idleFor):
	}
	return residentMB(t.pid)
}

// save writes the figures to path. If path is empty, the figures of a full run go to the directory
// of results and of a quick run are not saved.
func (r *report) save(path string, out io.Writer) error {
	if path == "" && r.Quick {
		return nil
	}
	body, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the figures: %w", err)
	}
	if path == "" {
		path = latestResult
		if _, err := os.Stat(filepath.Dir(path)); err != nil {
			return fmt.Errorf("find the directory of results: %w: run it in the root of the repository, or name a file "+
				"with --json", err)
		}
	}
	if err := replace(path, append(body, '\n')); err != nil {
		return fmt.Errorf("write the figures: %w", err)
	}
	_, err = fmt.Fprintf(out, "\nAll figures are in %s\n", path)
	return err
}

// replace writes a file atomically.
func replace(path string, body []byte) error {
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, body, 0o644); err != nil { //nolint:gosec // results are for everybody
		return err
	}
	return os.Rename(tmp, path)
}

func (r *report) print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, tablePad, ' ', 0)
	line := func(format string, args ...any) { _, _ = fmt.Fprintf(t, format+"\n", args...) }
	m := r.Machine
	line("%s, %d cores, %d MB, Linux %s, cgroup v%d, %s, load %s", m.CPU, m.Cores, m.MemoryMB, m.Kernel, m.Cgroup,
		m.Go, m.Load)
	for _, l := range languages {
		if v, ok := m.Interpreters[l.name]; ok {
			line("%s: %s", l.name, v)
		}
	}
	if m.Sync != nil {
		line("disk: %s, a durable write takes %.2f ms (p50), %.2f ms (p99) of %d", m.DataFS, m.Sync.P50, m.Sync.P99,
			m.Sync.Runs)
	}
	line("commit %s, server %s; %.1f s for each side, in turn", r.Commit, r.Server, r.CellSeconds)
	if m.busy() {
		line("CAUTION: others were using the machine (load above); figures are worse than on a quiet one")
	}
	r.printCells(line)
	printPaced(line, r.Paced)
	printHalf(line, r.Half)
	r.printBursts(line)
	r.printOverhead(line)
	r.printJails(line)
	printFigures(line, "figure", r.Figures)
	printFigures(line, "target", r.Targets)
	return t.Flush()
}

func printFigures(line func(string, ...any), kind string, all []figure) {
	line("")
	line("%s\tasked\tgot\t\t", kind)
	for _, f := range all {
		line("%s\t%s\t%s\t%s\t%s", f.Name, f.Target, f.value(), f.verdict(), f.Note)
	}
}

func (r *report) printBursts(line func(string, ...any)) {
	if b := r.Bursts; b != nil {
		line("")
		if b.Runs > 0 {
			line("bursts of %d python calls, last answer: p50 %.0f ms, worst %.0f ms of %d bursts", burstCalls, b.P50,
				b.Max, b.Runs)
		}
		if b.Errors > 0 {
			line("%d bursts failed, the first: %s", b.Errors, b.FirstError)
		}
	}
}

func (r *report) printJails(line func(string, ...any)) {
	if r.Memory == nil {
		return
	}
	line("")
	if len(r.Memory.Jails) == 0 {
		line("memory of prewarmed jails: not measured: %s", r.Memory.JailsUnknown)
		return
	}
	line("prewarmed jail\tresident\tnot shared")
	for _, j := range r.Memory.Jails {
		line("%s\t%.1f MB\t%.1f MB", j.Language, j.ResidentMB, j.UnsharedMB)
	}
}

func (r *report) printCells(line func(string, ...any)) {
	line("")
	line("\tcallers\tbare p50\tp99\truns/s\tof\tbullpen p50\tp99\truns/s\tof\tp50 ratio\truns/s ratio")
	var remarks []string
	for _, c := range r.Cells {
		if c.Unavailable != "" {
			line("%s\tunavailable: %s", c.Language, c.Unavailable)
			continue
		}
		a, b := c.Bare, c.Bullpen
		line("%s\t%d\t%.2f ms\t%.2f ms\t%.0f\t%d\t%.2f ms\t%.2f ms\t%.0f\t%d\t%.2f\t%.2f", c.Language, c.Callers,
			a.P50, a.P99, a.PerSecond, a.Runs, b.P50, b.P99, b.PerSecond, b.Runs, c.Ratio.P50, c.Ratio.PerSecond)
		for name, s := range map[string]*summary{"bare": a, "bullpen": b} {
			if s.Errors > 0 {
				remarks = append(remarks, fmt.Sprintf("%s, %d callers, %s: %d runs failed, the first: %s", c.Language, c.Callers,
					name, s.Errors, s.FirstError))
			}
		}
	}
	for _, n := range remarks {
		line("%s", n)
	}
}

func (r *report) printOverhead(line func(string, ...any)) {
	line("")
	if len(r.Overhead) == 0 {
		line("where the time of one caller goes: not measured: %s", r.OverheadUnknown)
		return
	}
	line("one caller, p50\tjail made\tprogram run\tadded\tof it inside the server\toutside\tadded p99\tof")
	for _, o := range r.Overhead {
		line("%s\t%.2f ms\t%.2f ms\t%.2f ms\t%.2f ms\t%.2f ms\t%.2f ms\t%d", o.Language, o.Prepare.P50, o.Run.P50,
			o.Added.P50, o.Server.P50, o.Client.P50, o.Added.P99, o.Added.Runs)
		if o.Unknown > 0 {
			line("%s: %d runs are not in the server's log", o.Language, o.Unknown)
		}
	}
}
