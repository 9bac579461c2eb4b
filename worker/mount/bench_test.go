package mount_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

// BenchmarkUntouched is an execution in a prewarmed jail, without mounts and with some that the
// program does not use.
func BenchmarkUntouched(b *testing.B) {
	w := newWorld(b)
	dir, _ := w.directory("shared")
	cases := []struct {
		name   string
		mounts []proto.Mount
	}{{"none", nil}, {"s3", []proto.Mount{w.s3("f", "p")}}, {"directory", []proto.Mount{dir}}}
	all := map[string][]time.Duration{}
	for range b.N {
		for _, c := range cases { // in turn, since the load of the machine changes
			all[c.name] = append(all[c.name], w.timeUntouched(c.mounts))
		}
	}
	for name, took := range all {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, name+"-ms")
	}
}

func (w *world) timeUntouched(mounts []proto.Mount) time.Duration {
	j := w.prepare("prewarmed")
	time.Sleep(50 * time.Millisecond) // the machine becomes idle
	p, err := jail.Source{Language: "python", Code: "print(1)", TraceID: "trc_test", Home: nsjail.DefaultHome}.Program()
	must(w.t, err)
	var out bytes.Buffer
	p.Stdout, p.Timeout = &out, time.Minute
	began := time.Now()
	set, err := w.opener.Open(mounts)
	must(w.t, err)
	must(w.t, set.Use(w.secret))
	if mounts != nil {
		must(w.t, j.MountData(w.t.Context(), set))
	}
	must(w.t, j.Load(w.t.Context(), p))
	_, err = j.Run(w.t.Context(), p)
	must(w.t, err)
	must(w.t, set.Finish(w.t.Context()))
	took := time.Since(began)
	must(w.t, set.Close())
	must(w.t, j.Close())
	return took
}

// timed returns the figures that a program prints, name and seconds per line, in the order of lines.
func (w *world) timed(code string, mounts ...proto.Mount) map[string]float64 {
	w.t.Helper()
	memory := 0.0
	w.onLine = func(string) { memory = w.memoryOfServer() }
	r := w.run("prewarmed", "import time, os\nall = []\ndef timed(name, f):\n    t = time.perf_counter(); f(); "+
		"all.append(f'{name} {time.perf_counter() - t}')\n"+
		code+"print('\\n'.join(all), flush=True)\ntime.sleep(0.5)\n", mounts...)
	if r.Kind != jail.Exited || r.ExitCode != 0 || r.finish != nil {
		w.t.Fatalf("got %+v, %s, %v", r.Outcome, r.stderr, r.finish)
	}
	figures := map[string]float64{"memory": memory}
	for line := range strings.Lines(r.stdout) {
		f := strings.Fields(line)
		seconds, err := strconv.ParseFloat(f[1], 64)
		must(w.t, err)
		figures[f[0]] = seconds
	}
	return figures
}

// memoryOfServer returns the memory of the only serving process without its executable, in MiB.
func (w *world) memoryOfServer() float64 {
	total := 0.0
	for _, pid := range servingProcesses(w.t) {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			w.t.Error(err)
		}
		for line := range strings.Lines(string(status)) {
			f := strings.Fields(line)
			if f[0] == "RssAnon:" || f[0] == "VmPTE:" || f[0] == "RssShmem:" {
				kib, err := strconv.ParseFloat(f[1], 64)
				if err != nil {
					w.t.Error(err)
				}
				total += kib / 1024
			}
		}
	}
	return total
}

// BenchmarkTransfer is reading and writing of objects in a jail, and the same with the S3 client.
func BenchmarkTransfer(b *testing.B) {
	w := newWorld(b)
	const size = 48 << 20
	bucket := w.bucket("p")
	content := strings.NewReader(strings.Repeat("x", size))
	put := func() { _, err := bucket.Put(b.Context(), "large", size, content); must(b, err) }
	put()
	w.put(map[string]string{"p/small": strings.Repeat("y", 1<<20)})
	for range b.N {
		began := time.Now()
		put()
		write := time.Since(began).Seconds()
		o, err := bucket.Stat(b.Context(), "large")
		must(b, err)
		began = time.Now()
		r, err := bucket.Open(b.Context(), o, 0, size)
		must(b, err)
		_, err = io.Copy(io.Discard, r)
		must(b, err)
		must(b, r.Close())
		read := time.Since(began).Seconds()
		f := w.timed(fmt.Sprintf(`
def read(name, size):
    with open("/data/f/" + name, "rb", buffering=0) as f:
        b = bytearray(1 << 20); n = 0
        while k := f.readinto(b): n += k
        assert n == size
def write():
    with open("/data/f/written", "wb", buffering=0) as f:
        b = bytes(1 << 20)
        for i in range(%d): f.write(b)
timed("first", lambda: read("small", 1 << 20))
timed("read", lambda: read("large", %d))
timed("write", write)
`, size>>20, size), w.s3("f", "p"))
		b.ReportMetric(f["first"]*1000, "first-MiB-ms")
		b.ReportMetric(size/f["read"]/(1<<20), "read-MiB/s")
		b.ReportMetric(size/read/(1<<20), "client-read-MiB/s")
		b.ReportMetric(size/f["write"]/(1<<20), "write-MiB/s")
		b.ReportMetric(size/write/(1<<20), "client-write-MiB/s")
		b.ReportMetric(f["memory"], "memory-MiB")
	}
}

// BenchmarkList is listing of 10,000 objects.
func BenchmarkList(b *testing.B) {
	w := newWorld(b)
	w.putMany("p", 10_000)
	bucket := w.bucket("p")
	for range b.N {
		began := time.Now()
		next := ""
		for {
			var err error
			_, _, next, err = bucket.List(b.Context(), "", next, 1000)
			must(b, err)
			if next == "" {
				break
			}
		}
		client := time.Since(began)
		f := w.timed(`
def ls(): assert len(os.listdir("/data/f")) == 10000
def stat():
    with os.scandir("/data/f") as it: assert sum(e.stat().st_size for e in it) == 10000
timed("ls", ls)
timed("stat", stat)
`, w.s3("f", "p"))
		b.ReportMetric(f["ls"]*1000, "ls-ms")
		b.ReportMetric(f["stat"]*1000, "ls-l-ms")
		b.ReportMetric(float64(client.Milliseconds()), "client-ms")
		b.ReportMetric(f["memory"], "memory-MiB")
	}
}

// putMany stores objects of one byte.
func (w *world) putMany(prefix string, n int) {
	w.t.Helper()
	bucket := w.bucket(prefix)
	work := make(chan int)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for i := range work {
				if _, err := bucket.Put(w.t.Context(), fmt.Sprintf("object-%05d", i), 1, strings.NewReader("x")); err != nil {
					w.t.Error(err)
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	group.Wait()
}
