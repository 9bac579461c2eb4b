package nsjail

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// mostLost is the memory that the host may lose during an attack from a jail of 64 MiB, in bytes.
const mostLost = 200 << 20

// watching is held while the host's memory is a witness: the watch of a worker, and the figures of the
// host, see the sum of what attacks take.
var watching sync.Mutex

// witnessed makes the host's memory the witness of a, which may end as it wants or be killed by the
// watch.
func witnessed(a attack) attack {
	a.run = func(t *testing.T, m *Maker) {
		watching.Lock()
		defer watching.Unlock()
		loss := watchHostMemory(t)
		r := a.attempt(t, m)
		lost := loss()
		if r.Uncharged == 0 { // else the watch found the program before its end
			a.check(t, r)
		}
		t.Logf("the host lost %d MiB", lost>>20)
		if lost >= mostLost {
			t.Errorf("the host lost %d MiB", lost>>20)
		}
	}
	return a
}

// hostMemory returns an attack that puts memory where no control group is charged for it. The
// function attack of the Python code ends as result says: done, or with the error of that name. The
// code may put what must not be freed into kept.
func hostMemory(name, result, code string) attack {
	return witnessed(attack{
		name: name, language: "python", limits: memory(64), stdout: result, code: errnos + `
kept = []
def attack():
` + strings.ReplaceAll(code, "\n", "\n    ") + `
print(no(attack))`,
	})
}

// watchHostMemory returns a function that ends the watch and returns how many bytes the host lost
// meanwhile at most, by both of its figures at the same time. Memory that no group is charged for
// changes both: it is available to nobody, and the kernel's. What other processes use for themselves
// changes the first alone, so that they are no part of the loss, however busy.
func watchHostMemory(t testing.TB) (loss func() int64) {
	t.Helper()
	best := readHostMemory(t)
	stop, lost := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		for tick := time.Tick(5 * time.Millisecond); ; {
			now := readHostMemory(t)
			best.available, best.kernel = max(best.available, now.available), min(best.kernel, now.kernel)
			most = max(most, min(best.available-now.available, now.kernel-best.kernel))
			select {
			case <-tick:
			case <-stop:
				lost <- most
				return
			}
		}
	}()
	return func() int64 {
		close(stop)
		return <-lost
	}
}

// hostMemoryFigures are figures of the host's memory, in bytes. Both change when a program makes
// the kernel allocate. Other programs of the host change the first alone.
type hostMemoryFigures struct {
	available int64 // MemAvailable
	kernel    int64 // in use by the kernel, without what it can reclaim: SUnreclaim, page tables, pages of packets
}

func readHostMemory(t testing.TB) hostMemoryFigures {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Error(err)
	}
	figures := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		if err != nil {
			t.Error(err)
		}
		figures[name] = kib << 10
	}
	used := figures["MemTotal"] - figures["MemFree"]
	for _, others := range []string{"Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable"} {
		used -= figures[others]
	}
	return hostMemoryFigures{available: figures["MemAvailable"], kernel: used}
}
