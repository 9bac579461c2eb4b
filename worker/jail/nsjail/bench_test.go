package nsjail

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func BenchmarkJail(b *testing.B) {
	m := newMaker(b)
	for _, l := range []string{"true", "bash", "python", "node"} {
		b.Run(l, func(b *testing.B) {
			var ps, rs []time.Duration
			for b.Loop() {
				t0 := time.Now()
				j, err := m.Prepare(context.Background(), jail.Spec{CPU: 1, Memory: 1 << 30, Pids: 256, HomeBytes: 1 << 30, TmpBytes: 1 << 29, Inodes: 65536})
				if err != nil {
					b.Fatal(err)
				}
				t1 := time.Now()
				p, _ := jail.Source{Language: l, Code: "", TraceID: "trc_x", Home: "/home/baponi"}.Program()
				if l == "true" {
					p = jail.Program{Argv: []string{"true"}, Dir: "/"}
				}
				if o, err := j.Run(context.Background(), p); o.Kind != jail.Exited || err != nil {
					b.Fatal(o, err)
				}
				ps, rs = append(ps, t1.Sub(t0)), append(rs, time.Since(t1))
			}
			slices.Sort(ps)
			slices.Sort(rs)
			b.ReportMetric(float64(ps[len(ps)/2].Microseconds()), "prepare-p50-us")
			b.ReportMetric(float64(rs[len(rs)/2].Microseconds()), "run-p50-us")
		})
	}
}
