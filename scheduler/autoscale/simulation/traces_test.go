package simulation

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the traces")

// tracePath returns the path of a shipped trace.
func tracePath(name string) string {
	return filepath.Join("..", "..", "..", "deploy", "autoscale", name+".csv")
}

// TestTraces compares the shipped traces with their generators.
func TestTraces(t *testing.T) {
	for name, generate := range map[string]func(*traceWriter){"diurnal": diurnal, "burst": burst, "batch": batches} {
		t.Run(name, func(t *testing.T) {
			w := traceWriter{random: rand.New(rand.NewPCG(2, 2))}
			generate(&w)
			if *update {
				if err := os.WriteFile(tracePath(name), w.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := os.ReadFile(tracePath(name))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, w.Bytes()) {
				t.Errorf("deploy/autoscale/%s.csv differs from its generator: run this test with -update", name)
			}
		})
	}
}

type traceWriter struct {
	bytes.Buffer
	random *rand.Rand
}

func (w *traceWriter) head(text string) { _, _ = fmt.Fprintf(w, "# %s\nat,seconds,jobs,over\n", text) }

func (w *traceWriter) line(at time.Duration, seconds float64, jobs int, over time.Duration) {
	if jobs > 0 {
		_, _ = fmt.Fprintf(w, "%g,%g,%d,%g\n", at.Seconds(), seconds, jobs, over.Seconds())
	}
}

// around returns about n, with the deviation of a Poisson distribution.
func (w *traceWriter) around(n float64) int {
	return max(0, int(math.Round(n+math.Sqrt(n)*w.random.NormFloat64())))
}

// diurnal is a day of an office: nobody at night, most in the afternoon.
func diurnal(w *traceWriter) {
	w.head("A working day: nobody from 20:00 to 6:00, most at 13:00. Two thirds run 1 s, a quarter 8 s, the others 60 s.")
	const step = 5 * time.Minute
	for at := 6 * time.Hour; at < 20*time.Hour; at += step {
		load := math.Sin(math.Pi * float64(at-6*time.Hour) / float64(14*time.Hour))
		jobs := 1000 * load * load
		w.line(at, 1, w.around(jobs*8/12), step)
		w.line(at, 8, w.around(jobs*3/12), step)
		w.line(at, 60, w.around(jobs/12), step)
	}
}

// burst is a day of few jobs, with bursts at random times.
func burst(w *traceWriter) {
	w.head("A job of 2 s every 20 s in the mean, and twelve bursts of 300 to 1500 jobs of 5 s, each within a minute.")
	bursts := map[int]bool{}
	for len(bursts) < 12 {
		bursts[w.random.IntN(24*12)] = true
	}
	const step = 5 * time.Minute
	for i := range 24 * 12 {
		at := time.Duration(i) * step
		w.line(at, 2, w.around(step.Seconds()/20), step)
		if bursts[i] {
			w.line(at, 5, 300+w.random.IntN(1201), time.Minute)
		}
	}
}

// batches is a day of three batches.
func batches(w *traceWriter) {
	w.head("Three batches, each submitted at once: 4000 jobs of 60 s at 1:00, 1000 of 20 s at 12:30, 10000 of 1 s " +
		"at 18:00.")
	w.line(time.Hour, 60, 4000, 0)
	w.line(12*time.Hour+30*time.Minute, 20, 1000, 0)
	w.line(18*time.Hour, 1, 10_000, 0)
}

func TestReadTrace(t *testing.T) {
	const second = time.Second
	jobs, err := ReadTrace(strings.NewReader(
		"# a comment\n\nat,seconds,jobs,over\n3, 0.5, 1, 0\n1,2,2,0\r\n10,1,100,10\n"))
	if err != nil || len(jobs) != 103 || jobs[0] != (Job{second, 2 * second}) || jobs[2] != (Job{3 * second, second / 2}) {
		t.Fatalf("%d jobs, %v", len(jobs), err)
	}
	if jobs[3].At == jobs[102].At || jobs[3].At < 10*second || jobs[102].At >= 20*second {
		t.Errorf("jobs over 10 s arrive from %v to %v", jobs[3].At, jobs[102].At)
	}
	const names = "must name the columns: at,seconds or at,seconds,jobs or at,seconds,jobs,over"
	for trace, message := range map[string]string{
		"":                                      "there is no job",
		"at,seconds\n":                          "there is no job",
		"0,1\n":                                 "line 1 " + names,
		"at,seconds,over\n":                     "line 1 " + names,
		"\nat\n":                                "line 2 " + names,
		"at,seconds\n1,2,3\n":                   "line 2: there are 3 fields and not 2",
		"at,seconds\n1,2\n-1,2\n":               `line 3: at: "-1" is not a number of seconds between 0 and 2678400`,
		"at,seconds\nNaN,2\n":                   `line 2: at: "NaN" is not a number of seconds between 0 and 2678400`,
		"at,seconds\n0,1e9\n":                   `line 2: seconds: "1e9" is not a number of seconds between 0 and 86400`,
		"at,seconds,jobs\n0,1,1.5\n":            `line 2: jobs: "1.5" is not a number of jobs`,
		"at,seconds,jobs\n0,1,-1\n":             `line 2: jobs: "-1" is not a number of jobs`,
		"at,seconds,jobs\n0,1,2e6\n":            `line 2: jobs: "2e6" is not a number of jobs`,
		"at,seconds,jobs\n0,1,1\n0,1,2000000\n": "line 3: there are more than 2000000 jobs",
		"at,seconds\n" + strings.Repeat("1", 70_000): "line 2: bufio.Scanner: token too long",
	} {
		if _, err := ReadTrace(strings.NewReader(trace)); err == nil || err.Error() != "read trace: "+message {
			t.Errorf("%.40q: %v, want %s", trace, err, message)
		}
	}
}
