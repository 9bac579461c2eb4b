package nsjail

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail/hostmemory"
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
		loss := watchHostMemory(t, kernel)
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
// meanwhile at most, by two figures at the same time: what is available, and a part of what the
// kernel holds. Memory that no group is charged for changes both. What other processes use for
// themselves changes the first alone, so that it is no part of the loss, however busy they are.
func watchHostMemory(t testing.TB, part func(hostmemory.Host) int64) (loss func() int64) {
	t.Helper()
	read := func() (available, held int64) {
		h, err := hostmemory.Read()
		if err != nil {
			t.Error(err)
		}
		return h.Available, part(h)
	}
	available, held := read()
	stop, lost := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		for tick := time.Tick(5 * time.Millisecond); ; {
			a, h := read()
			available, held = max(available, a), min(held, h)
			most = max(most, min(available-a, h-held))
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

// kernel and objects are the parts of the host's memory that can be a witness. Objects lacks
// packets, and others of the host change it less.
func kernel(h hostmemory.Host) int64  { return h.Kernel }
func objects(h hostmemory.Host) int64 { return h.Objects }
