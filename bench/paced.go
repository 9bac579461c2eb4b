package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// pace is the pause after each run of either side. Without it, one caller would measure how
	// fast jails are made.
	pace         = 40 * time.Millisecond
	pacedPerRun  = 30 * time.Millisecond // time for one side of a cell per run
	rotatedKeys  = 100
	pacedFactor  = 7 // factor of the nonce; only a program that ran can have multiplied it
	largeOutput  = 1_000_000
	pacedThread  = "bench-paced"
	jailsMetric  = "bullpen_worker_jails_total"
	hostPIDSpace = "/proc/self/ns/pid"
)

// paced compares one caller who pauses between requests with the bare interpreter.
type paced struct {
	Case        string         `json:"case"`
	Language    proto.Language `json:"language"`
	Unavailable string         `json:"unavailable,omitempty"`
	Bare        *summary       `json:"bare,omitempty"`
	Bullpen     *summary       `json:"bullpen,omitempty"`
	P50Ratio    float64        `json:"p50_ratio"`
	Warm        float64        `json:"warm"` // share of requests that found a prewarmed jail
	// CPU time per run as cpuMillis counts it, including the jail that is made for the next run.
	CPU float64 `json:"cpu_ms"`
}

// task is a program that shows that each run is independent of earlier ones. It multiplies a nonce
// and checks for a mark file that it then leaves. It prints the product and, if the language can
// read it without help, its PID namespace.
type task struct {
	name     string
	language proto.Language
	code     string // %[1]d is the nonce, %[2]q the path of the mark
	large    bool   // it first prints a lot
	env      map[string]string
	thread   string
	callers  []*api // used in turn, each with its own key; empty for the server's own key
}

const (
	pacedPython = "import os\nif os.path.exists(%[2]q): raise SystemExit('not the first here')\nopen(%[2]q, 'w').close()\n"
	pacedEnd    = "print(%[1]d * 7, os.readlink('/proc/self/ns/pid'))"
	pacedNode   = "const fs = require('fs')\nif (fs.existsSync(%[2]q)) throw 'not the first " +
		"here'\nfs.writeFileSync(%[2]q, '')\n" +
		"console.log(%[1]d * 7, fs.readlinkSync('/proc/self/ns/pid'))"
	pacedBash = "[ -e %[2]q ] && exit 9\n: > %[2]q\necho $((%[1]d * 7))"
)

func pacedTasks(callers []*api) []task {
	python := func(name, more string) task {
		return task{name: name, language: proto.Python, code: pacedPython + more + pacedEnd}
	}
	withEnv, inThread, large, rotation := python("with env", "assert os.environ['FROM_THE_REQUEST'] == 'x'\n"),
		python("in a thread", ""),
		python("1 MB of output", fmt.Sprintf("print('x' * %d)\n", largeOutput-1)),
		python(fmt.Sprintf("%d keys in turn", rotatedKeys), "")
	withEnv.env, inThread.thread, large.large, rotation.callers = map[string]string{"FROM_THE_REQUEST": "x"}, pacedThread,
		true, callers
	return []task{
		printing(proto.Bash), printing(proto.Python), python("import json", "import json\n"),
		python("import numpy", "import numpy\n"), withEnv, inThread, large, rotation,
		printing(proto.Node),
	}
}

// printing returns the task of a language that does only what every task must do.
func printing(l proto.Language) task {
	code := map[proto.Language]string{proto.Bash: pacedBash, proto.Python: pacedPython + pacedEnd, proto.Node: pacedNode}
	return task{name: "print", language: l, code: code[l]}
}

// ownPIDSpace returns the PID namespace of this process. No jail may be in it.
func ownPIDSpace() (string, error) {
	host, err := os.Readlink(hostPIDSpace)
	if err != nil {
		return "", fmt.Errorf("tell the namespaces apart: %w", err)
	}
	return host, nil
}

// firstNonce returns the first nonce of requests. Each request adds 1.
func firstNonce() int64 { return time.Now().UnixNano() % 1_000_000_000 }

// measurePaced measures all tasks with this many runs each.
func measurePaced(ctx context.Context, t *target, dir string, runs int, progress io.Writer) ([]paced, error) {
	host, err := ownPIDSpace()
	if err != nil {
		return nil, err
	}
	var callers []*api
	for i := range rotatedKeys {
		a, err := t.newKey(ctx, fmt.Sprintf("paced-%d", i), fmt.Sprintf("org-%d", i))
		if err != nil {
			return nil, err
		}
		callers = append(callers, a)
	}
	var all []paced
	for _, task := range pacedTasks(callers) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		_, _ = fmt.Fprintf(progress, "%s, %s, now and then …\n", task.language, task.name)
		p, err := newProgram(filepath.Join(dir, "paced", string(task.language)), task.language, "")
		if err != nil {
			all = append(all, paced{Case: task.name, Language: task.language, Unavailable: err.Error()})
			continue
		}
		one, err := task.measure(ctx, t, p, host, runs)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

func (k task) measure(ctx context.Context, t *target, p program, host string, runs int) (paced, error) {
	result := paced{Case: k.name, Language: k.language}
	nonce := firstNonce()
	bare := func(ctx context.Context) (sample, error) {
		nonce++
		mark := filepath.Join(p.dir, fmt.Sprintf("mark-%d", nonce))
		p.code = fmt.Sprintf(k.code, nonce, mark)
		if err := os.WriteFile(p.file, []byte(p.code), 0o600); err != nil {
			return sample{}, fmt.Errorf("write a program: %w", err)
		}
		began := time.Now()
		out, err := p.outputOf(ctx, k.env)
		s := sample{took: time.Since(began)}
		return s, errors.Join(err, k.check(out, nonce, host, false))
	}
	jailed := func(ctx context.Context) (sample, error) {
		nonce++
		a := t.api
		if len(k.callers) > 0 {
			a = k.callers[int(nonce)%len(k.callers)]
		}
		return k.inJail(ctx, a, nonce, host)
	}
	if _, err := bare(ctx); err != nil && k.name == "import numpy" {
		result.Unavailable = "this machine's python3 has no numpy"
		return result, nil
	}
	var of, than series
	before := 0.0
	for i := range runs + 2 {
		if i == 2 { // the first runs made the pool prewarm jails
			of, than = series{}, series{}
		}
		for _, side := range []struct {
			s   *series
			run runner
		}{{&than, bare}, {&of, jailed}} {
			side.s.once(ctx, side.run)
			select {
			case <-ctx.Done():
				return result, ctx.Err()
			case <-time.After(pace):
			}
		}
		if i == 1 {
			result.Warm = -t.warmStarts(ctx)
			var err error
			if before, err = t.cpuMillis(); err != nil {
				return result, err
			}
		}
	}
	result.Warm += t.warmStarts(ctx)
	after, err := t.cpuMillis()
	if err != nil {
		return result, err
	}
	result.Warm /= float64(runs)
	result.CPU = (after - before) / float64(runs)
	result.Bare, result.Bullpen = than.summary(), of.summary()
	result.P50Ratio = ratio(result.Bullpen.P50, result.Bare.P50)
	return result, nil
}

// inJail runs a program in a jail and checks its output.
func (k task) inJail(ctx context.Context, a *api, nonce int64, host string) (sample, error) {
	began := time.Now()
	r, id, err := a.inline(ctx, k.request(nonce))
	s := sample{took: time.Since(began), id: id}
	if err == nil && !r.Success {
		err = fmt.Errorf("execution %s: exit code %d: %s", id, r.ExitCode, strings.TrimSpace(r.Stderr))
	}
	if err != nil {
		return s, err
	}
	return s, k.check(r.Stdout, nonce, host, true)
}

// request returns the body of a request for one run.
func (k task) request(nonce int64) asked {
	body := request(k.language, fmt.Sprintf(k.code, nonce, "/tmp/mark"), programTimeout)
	body.Env, body.ThreadID = k.env, k.thread
	return body
}

// check checks the output of a run.
func (k task) check(out string, nonce int64, host string, jailed bool) error {
	if k.large {
		var much string
		if much, out, _ = strings.Cut(out, "\n"); len(much) != largeOutput-1 {
			return fmt.Errorf("%d bytes of output and not %d", len(much), largeOutput-1)
		}
	}
	product, space, _ := strings.Cut(strings.TrimSpace(out), " ")
	if product != fmt.Sprint(nonce*pacedFactor) {
		return fmt.Errorf("it printed %.40q and not %d", out, nonce*pacedFactor)
	}
	if k.language != proto.Bash && (space == host) == jailed {
		return fmt.Errorf("it ran in process namespace %q, this is %q", space, host)
	}
	return nil
}

// warmStarts returns how many jails were ready so far, or 0 if the server does not report it.
func (t *target) warmStarts(ctx context.Context) (n float64) {
	text, err := t.get(ctx, "/metrics")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if v, err := strconv.ParseFloat(value, 64); err == nil && strings.HasPrefix(name, jailsMetric+"{") &&
			!strings.Contains(name, `start="cold"`) {
			n += v
		}
	}
	return n
}

// printPaced prints the results.
func printPaced(line func(string, ...any), all []paced) {
	if len(all) == 0 {
		return
	}
	line("")
	line("one caller, a run each %s\tbare p50\tp99\tbullpen p50\tp99\tof\tp50 ratio\tready jails\tprocessor time", 2*pace)
	for _, p := range all {
		if p.Unavailable != "" {
			line("%s, %s\tunavailable: %s", p.Language, p.Case, p.Unavailable)
			continue
		}
		line("%s, %s\t%.2f ms\t%.2f ms\t%.2f ms\t%.2f ms\t%d\t%.2f\t%.0f %%\t%.1f ms", p.Language, p.Case, p.Bare.P50,
			p.Bare.P99, p.Bullpen.P50, p.Bullpen.P99,
			p.Bullpen.Runs, p.P50Ratio, 100*p.Warm, p.CPU)
		for name, s := range map[string]*summary{"bare": p.Bare, "bullpen": p.Bullpen} {
			if s.Errors > 0 {
				line("%s, %s, %s: %d runs failed, the first: %s", p.Language, p.Case, name, s.Errors, s.FirstError)
			}
		}
	}
}
