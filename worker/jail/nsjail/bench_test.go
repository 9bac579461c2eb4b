package nsjail

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// pause is the time between two executions in BenchmarkJail/spaced. It is long enough for the
// kernel's grace periods to end, so that waiting for one is measured. In a tight loop, the cost of
// one wait hides behind the previous wait.
const pause = 30 * time.Millisecond

// BenchmarkJail measures Prepare and Run, spaced out and back to back.
func BenchmarkJail(b *testing.B) {
	m := newMaker(b)
	for name, wait := range map[string]time.Duration{"spaced": pause, "tight": 0} {
		for _, l := range []string{"true", "bash", "python", "node"} {
			b.Run(name+"/"+l, func(b *testing.B) { benchmark(b, m, benchSpec(), l, wait) })
		}
		for _, l := range []string{"bash", "python", "node"} {
			spec := benchSpec()
			spec.Prewarm = prewarmed(b, l)
			b.Run(name+"/prewarmed/"+l, func(b *testing.B) { benchmark(b, m, spec, l, wait) })
		}
		for _, l := range []string{"bash", "python", "node"} {
			b.Run(name+"/forked/"+l, func(b *testing.B) {
				spec := benchSpec()
				parent := zygoteOf(b, m, spec)
				spec.Prewarm = prewarmed(b, l)
				p, _ := jail.Source{Language: l, TraceID: "trc_x", Home: DefaultHome}.Program()
				measure(b, parent.Fork, spec, p, wait, func() {})
			})
		}
	}
}

// benchSpec returns the spec of the default profile.
func benchSpec() jail.Spec {
	return jail.Spec{
		CPU: 1, Memory: 1 << 30, Pids: 256, OpenFiles: 1024, HomeBytes: 512 << 20, TmpBytes: 256 << 20,
		Inodes: 65536,
	}
}

// BenchmarkHome measures jails with a home in memory, on disk, and from a thread.
func BenchmarkHome(b *testing.B) {
	m := openMaker(b, Config{VolumeDir: diskDir(b)})
	th := newThread(b, map[string]string{"d/f": "x"})
	onDisk, thread := benchSpec(), benchSpec()
	onDisk.HomeBytes = onDisk.Memory
	thread.Home = th
	for name, wait := range map[string]time.Duration{"spaced": pause, "tight": 0} {
		for home, spec := range map[string]jail.Spec{"memory": benchSpec(), "disk": onDisk, "thread": thread} {
			b.Run(name+"/"+home, func(b *testing.B) {
				measure(b, m.Prepare, spec, jail.Program{Argv: []string{"true"}, Dir: DefaultHome}, wait, th.close)
			})
		}
	}
}

func benchmark(b *testing.B, m *Maker, spec jail.Spec, language string, wait time.Duration) {
	p, _ := jail.Source{Language: language, TraceID: "trc_x", Home: DefaultHome}.Program()
	if language == "true" {
		p = jail.Program{Argv: []string{"true"}, Dir: "/"}
	}
	measure(b, m.Prepare, spec, p, wait, func() {})
}

func measure(
	b *testing.B, prepare func(context.Context, jail.Spec) (jail.Jail, error), spec jail.Spec, p jail.Program,
	wait time.Duration, after func(),
) {
	var prepares, runs []time.Duration
	for b.Loop() {
		time.Sleep(wait)
		t0 := time.Now()
		j, err := prepare(context.Background(), spec)
		if err != nil {
			b.Fatal(err)
		}
		t1 := time.Now()
		if o, err := j.Run(context.Background(), p); o.Kind != jail.Exited || err != nil {
			b.Fatal(o, err)
		}
		prepares, runs = append(prepares, t1.Sub(t0)), append(runs, time.Since(t1))
		after()
	}
	for name, d := range map[string][]time.Duration{"prepare": prepares, "run": runs} {
		slices.Sort(d)
		for percent, unit := range map[int]string{50: "-p50-us", 99: "-p99-us"} {
			b.ReportMetric(float64(d[len(d)*percent/100].Microseconds()), name+unit)
		}
	}
}
