package nsjail

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

var (
	chaos = flag.Int("chaos", 60, "attacks that TestChaos runs")
	seed  = flag.Uint64("seed", uint64(time.Now().UnixNano()), "of the order of TestChaos")
)

// atOnce is the number of attacks that TestChaos runs concurrently.
const atOnce = 4

// TestChaos runs attacks in random order, several at a time, in jails of one Maker. Each must end
// as it does alone, and none may leave anything behind.
func TestChaos(t *testing.T) {
	t.Logf("-seed %d", *seed)
	random := rand.New(rand.NewPCG(*seed, 0))
	var all []attack
	for _, g := range abuse() {
		for _, a := range g.attacks {
			if a.run == nil {
				all = append(all, a)
			}
		}
	}
	m, err := Open(Config{NsjailPath: nsjailPath(t), RunDir: runDir(t), Network: openNetwork(t), VolumeDir: diskDir(t)})
	if err != nil {
		t.Fatal(err)
	}
	m.canary(t, prepare(t, m, testSpec())) // creates what persists: locks on uids, the poller
	m.jails.Wait()
	before := footprint(t, m)
	next := make(chan attack)
	var wg sync.WaitGroup
	for range atOnce {
		wg.Go(func() {
			for a := range next {
				a.check(t, a.attempt(t, m))
			}
		})
	}
	for range *chaos {
		next <- all[random.IntN(len(all))]
	}
	close(next)
	wg.Wait()
	m.canary(t, prepare(t, m, testSpec()))
	m.nothingLeft(t)
	if err := m.closePool(); err != nil {
		t.Error(err)
	}
	after := footprint(t, m)
	after["descriptors"] -= len(m.uids.free) - 1 // the uid locks of jails that ran concurrently
	if fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("before %v, after %v", before, after)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(m.cfg.RunDir + "/workers/*"); len(left) != 0 {
		t.Errorf("left %q", left)
	}
}
