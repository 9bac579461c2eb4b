package nsjail

import (
	"math"
	"slices"
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
		witness(t, m, &a, func(r result) { a.check(t, r) })
	}
	return a
}

// witness makes the attack and checks what the host loses meanwhile. check is called with the
// result, unless the watch found the program before its end. What others of the host do meanwhile
// only adds to the loss, and a takes the same each time, since a count or a refusal bounds it. So the
// least loss of up to three attempts decides.
func witness(t *testing.T, m *Maker, a *attack, check func(result)) {
	t.Helper()
	watching.Lock()
	defer watching.Unlock()
	least := int64(math.MaxInt64)
	for attempt := 0; attempt < 3 && least >= mostLost; attempt++ {
		loss := watchHostMemory(t, m)
		r := a.attempt(t, m)
		lost := loss()
		if r.Uncharged == 0 {
			check(r)
		}
		t.Logf("the host lost %d MiB in %v", lost>>20, r.Duration)
		least = min(least, lost)
	}
	if least >= mostLost {
		t.Errorf("the host lost %d MiB", least>>20)
	}
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

// watchHostMemory returns a function that ends the watch. It returns by how many bytes the kernel's
// memory has grown meanwhile at most, with that of sockets, beyond what programs of any worker are
// charged for. Of 50 ms, the least reading counts.
func watchHostMemory(t testing.TB, m *Maker) (loss func() int64) {
	t.Helper()
	read := func() int64 {
		now, err := m.readHost()
		if err != nil {
			t.Error(err)
		}
		return now.uncharged() + now.Sockets
	}
	least := read()
	stop, lost := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		var recent [10]int64
		for tick := time.Tick(5 * time.Millisecond); ; {
			now := read()
			least = min(least, now)
			copy(recent[1:], recent[:])
			recent[0] = now - least
			most = max(most, slices.Min(recent[:]))
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
