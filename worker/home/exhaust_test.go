package home_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// deep creates nested directories with names of maximal length, and calls f in the innermost one,
// whose path has more than 100,000 bytes.
func deep(tb testing.TB, dir string, f func(fd int)) {
	tb.Helper()
	at := must[int](tb)(unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))
	for range 450 {
		name := strings.Repeat("d", 255)
		if err := unix.Mkdirat(at, name, 0o755); !errors.Is(err, unix.EEXIST) {
			check(tb, err)
		}
		next := must[int](tb)(unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))
		check(tb, unix.Close(at))
		at = next
	}
	f(at)
	check(tb, unix.Close(at))
}

// countingContext counts calls of Err. Reading a home calls it for each name and each extent.
type countingContext struct {
	context.Context
	times atomic.Int64
}

func (c *countingContext) Err() error { c.times.Add(1); return c.Context.Err() }

// TestWorkIsBounded makes changes that are cheap for a program, and expects reading them to take
// time proportional to the size of the home.
func TestWorkIsBounded(t *testing.T) {
	for _, test := range []struct {
		name, before, change string
		names                int64 // all names and extents
	}{
		{
			"directories renamed out of each other",
			`p=.; for i in $(seq 100); do mkdir $p/d$i; p=$p/d$i; done; for i in $(seq 300); do : > $p/$i; done`,
			`for i in $(seq 100 -1 2); do p=.; for j in $(seq $i); do p=$p/d$j; done; mv $p .; done`, 400,
		},
		{"names of a file with many holes", `python3 -c "
import os
f = open('f', 'wb')
for i in range(100): f.seek(i * 8192); f.write(b'x' * 4096)
for i in range(100): os.link('f', str(i))"`, `rm [0-9]*`, 200},
	} {
		t.Run(test.name, func(t *testing.T) {
			th := newThread(t)
			th.run(test.before)
			o, mount := th.open()
			shell(t, mount, test.change)
			check(t, mount.Close())
			ctx := &countingContext{Context: t.Context()}
			_, _, err := encodeDiff(ctx, o, unlimited, th.objects.store)
			check(t, err)
			if n := ctx.times.Load(); n > 8*test.names {
				t.Errorf("%d steps for %d names", n, test.names)
			}
		})
	}
}

// TestMemoryIsBounded has many files with very long paths, which must not all be held in memory.
func TestMemoryIsBounded(t *testing.T) {
	const files = 3000 // whose paths have more than 300 MB
	for name, dirs := range map[string]bool{"files with several names": false, "renamed directories": true} {
		t.Run(name, func(t *testing.T) {
			th := newThread(t)
			th.lower = newDir(t)
			deep(t, th.lower, func(fd int) {
				for i := range files {
					if name := fmt.Sprint("a", i); dirs {
						check(t, unix.Mkdirat(fd, name, 0o755))
					} else {
						f := must[int](t)(unix.Openat(fd, name, unix.O_CREAT|unix.O_WRONLY, 0o644))
						check(t, unix.Close(f), unix.Linkat(fd, name, fd, fmt.Sprint("b", i), 0))
					}
				}
			})
			if dirs {
				o, mount := th.open()
				deep(t, pathOf(mount), func(fd int) {
					for i := range files {
						check(t, unix.Renameat(fd, fmt.Sprint("a", i), fd, fmt.Sprint("c", i)))
					}
				})
				check(t, mount.Close())
				allocated(t, func() {
					if _, _, err := encodeDiff(t.Context(), o, unlimited, th.objects.store); !errors.Is(err, layer.ErrLimit) {
						t.Error(err)
					}
				})
				return
			}
			l, _ := full(t, th.lower, th.objects)
			next := newDir(t)
			allocated(t, func() { check(t, apply(next, l, th.objects)) })
		})
	}
}

// allocated fails the test if f allocates too much memory.
func allocated(tb testing.TB, f func()) {
	tb.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 200*mib {
		tb.Errorf("%d MiB", n/mib)
	}
}
