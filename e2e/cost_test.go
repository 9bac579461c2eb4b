package e2e

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// What an inline execution may cost: counts and ratios, which a busy machine hardly changes, and no times. What is held against them is the
// least of some batches, because whatever else goes on, such as renewals of leases, can only add. Whoever makes executions cheaper lowers them.
const (
	costBatches = 5
	costRuns    = 10 // of each batch
	largeRuns   = 1  // of those whose output is large
	costly      = "print(1)"

	// Of a server that is one process, NATS inside, for a jail that is made for the program.
	mostObjects = 3000 // allocated; 1,600 to 2,100 when this was written
	mostKiB     = 340  // allocated; 205 to 255 when this was written
	// Processor time, of the jail too, to that of the interpreter alone; 2.6 when this was written, and up to 3.5 before with a load of 18.
	mostCPU = 5
	// Of the processes apart, which are those that handle an output of 16 MiB: allocated bytes for each byte of it. One more copy is too much.
	mostOfGateway = 3.6 // 3.0 when this was written
	mostOfWorker  = 4.8 // 4.2 when this was written

	durableWrites = 3 // the job, the claim, the result
	mostOutputs   = 2 // messages of output, which are not synced: that the program runs, and its line
)

// patientQueue has executions wait for a slot on a machine that is busy with something else.
var patientQueue = []string{"--queue-wait", "1m"} // read only

// batches runs several batches, and returns by how much each figure grew per run in each batch.
func batches(runs int, run func(), figures ...func() float64) (all [][]float64) {
	for range costBatches {
		grown := make([]float64, len(figures))
		for i, f := range figures {
			grown[i] = -f()
		}
		for range runs {
			run()
		}
		for i, f := range figures {
			grown[i] = (grown[i] + f()) / float64(runs)
		}
		all = append(all, grown)
	}
	return all
}

// least returns the smallest value of all batches.
func least(all [][]float64, says func(grown []float64) float64) float64 {
	v := math.Inf(1)
	for _, grown := range all {
		v = min(v, says(grown))
	}
	return v
}

func first(grown []float64) float64  { return grown[0] }
func second(grown []float64) float64 { return grown[1] }

// runs returns a function that runs a program and checks its output.
func (a *api) runs(r request, stdout string) func() {
	return func() {
		a.t.Helper()
		if got := a.inline(r); !got.Success || got.Stdout != stdout {
			a.t.Fatalf("exit code %d, stdout %s, stderr %s", got.ExitCode, short(got.Stdout), got.Stderr)
		}
	}
}

// metric returns a function that reads a metric of the process at base.
func (a *api) metric(base, name string) func() float64 {
	at := api{a.t, base, "", a.http}
	return func() (v float64) {
		a.t.Helper()
		for line := range strings.Lines(string(at.get("/metrics").body)) {
			if _, err := fmt.Sscanf(line, name+" %g", &v); err == nil {
				return v
			}
		}
		a.t.Fatalf("%s does not tell %s", base, name)
		return 0
	}
}

// cpu is the processor time of a process so far, and of those below it that it has waited for, in seconds.
func (p *process) cpu(t testing.TB) (sum float64) {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	// The name may hold anything; 11 fields after it are the four times, in hundredths of a second for every program.
	for _, f := range strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))[11:15] {
		ticks, err := strconv.ParseFloat(f, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += ticks / 100
	}
	return sum
}

// The names of what a process has allocated so far.
const (
	objectsAllocated = "go_memstats_mallocs_total"
	bytesAllocated   = "go_memstats_alloc_bytes_total"
)

// holdCost holds what an execution takes against what it may.
func holdCost(t *testing.T, what string, got, most float64) {
	t.Helper()
	t.Logf("an execution takes %.2f %s; %.2f at most", got, what, most)
	if got > most {
		t.Errorf("an execution takes %.2f %s, want %.2f at most; docs/performance.md says how to see where", got, what, most)
	}
}

// testCosts holds what small executions take of a server against what they may.
func testCosts(t *testing.T, p *programs) {
	w := newWorld(t, p, topologies()[0], 2, patientQueue...)
	small := w.runs(python(costly), "1\n")
	small()
	bare := 0.0 // seconds that the interpreter alone takes, which runs in turn
	all := batches(costRuns, func() {
		small()
		alone := exec.CommandContext(t.Context(), "/usr/bin/python3", "-c", costly)
		if err := alone.Run(); err != nil {
			t.Fatal(err)
		}
		bare += (alone.ProcessState.UserTime() + alone.ProcessState.SystemTime()).Seconds()
	}, w.metric(w.base, objectsAllocated), w.metric(w.base, bytesAllocated), func() float64 { return w.front.cpu(t) }, func() float64 { return bare })
	holdCost(t, "allocated objects", least(all, first), mostObjects)
	holdCost(t, "allocated KiB", least(all, second)/1024, mostKiB)
	holdCost(t, "times the processor time of the interpreter alone", least(all, func(grown []float64) float64 { return grown[2] / grown[3] }), mostCPU)
}

// testCopies counts how often a large output is copied on its way.
func testCopies(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{apart: true}, 2, patientQueue...)
	const size = 16 << 20
	large := w.runs(bash("head -c "+strconv.Itoa(size)+` /dev/zero | tr '\0' x`), strings.Repeat("x", size))
	large()
	all := batches(largeRuns, large, w.metric(w.base, bytesAllocated), w.metric(w.health, bytesAllocated))
	holdCost(t, "bytes of the gateway for each byte of output", least(all, first)/size, mostOfGateway)
	holdCost(t, "bytes of the worker for each byte of output", least(all, second)/size, mostOfWorker)
}

// testDurableWrites counts what an execution writes in JetStream.
func testDurableWrites(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{apart: true}, 2, patientQueue...)
	js, err := jetstream.New(connect(t, p, w.broker))
	if err != nil {
		t.Fatal(err)
	}
	// stored counts the messages that streams have taken in.
	stored := func(counts func(name string) bool) func() float64 {
		return func() (n float64) {
			list := js.ListStreams(t.Context())
			for s := range list.Info() {
				if counts(s.Config.Name) {
					n += float64(s.State.LastSeq)
				}
			}
			if err := list.Err(); err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	const output, seats = "BULLPEN_OUT", "KV_bullpen_control" // leaders renew their seats whether anything runs or not
	run := w.runs(python(costly), "1\n")
	run()
	all := batches(costRuns, run,
		stored(func(name string) bool { return name != output && name != seats }), stored(func(name string) bool { return name == output }))
	if n := least(all, first); n != durableWrites {
		t.Errorf("an execution takes %.1f durable writes, want %d: the job, the claim, the result", n, durableWrites)
	}
	if n := least(all, second); n <= 0 || n > mostOutputs {
		t.Errorf("an execution that prints a line takes %.1f messages of output, want %d at most", n, mostOutputs)
	}
}
