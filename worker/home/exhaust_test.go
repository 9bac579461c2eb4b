package home_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/home"
)

// deep makes directories in each other with names as long as can be, and calls f
// in the last one, whose path has more than 100,000 bytes.
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

// asked counts how often a context is asked whether it has ended, which reading a
// home does for each name and each part of a file.
type asked struct {
	context.Context
	times atomic.Int64
}

func (a *asked) Err() error { a.times.Add(1); return a.Context.Err() }

// TestWorkIsBounded: what a program can do quickly is read in time that is in
// proportion to what there is.
func TestWorkIsBounded(t *testing.T) {
	for _, test := range []struct {
		name, before, change string
		names                int64 // that there are in all, and parts of files
	}{
		{
			"directories renamed out of each other", `p=.; for i in $(seq 100); do mkdir $p/d$i; p=$p/d$i; done; for i in $(seq 300); do : > $p/$i; done`,
			`for i in $(seq 100 -1 2); do p=.; for j in $(seq $i); do p=$p/d$j; done; mv $p .; done`, 400,
		},
		{"names of a file with many holes", `python3 -c "
import os
f = open('f', 'wb')
for i in range(300): f.seek(i * 8192); f.write(b'x' * 4096)
for i in range(300): os.link('f', str(i))"`, `rm [0-9]*`, 600},
	} {
		t.Run(test.name, func(t *testing.T) {
			th := newThread(t)
			th.run(test.before)
			o, mount := th.open()
			shell(t, mount, test.change)
			check(t, mount.Close())
			ctx := &asked{Context: t.Context()}
			must[home.Stats](t)(o.Diff(ctx, io.Discard, roomy, th.objects.store))
			if n := ctx.times.Load(); n > 8*test.names {
				t.Errorf("%d looks at %d names", n, test.names)
			}
		})
	}
}

// TestMemoryIsBounded: long paths are not kept for each of the many that have them.
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
					if _, err := o.Diff(t.Context(), io.Discard, roomy, th.objects.store); !errors.Is(err, home.ErrLimit) {
						t.Error(err)
					}
				})
				return
			}
			var b bytes.Buffer
			stats := must[home.Stats](t)(home.Full(t.Context(), th.lower, &b, roomy, th.objects.store))
			next := newDir(t)
			allocated(t, func() { check(t, apply(next, split(&b, stats), th.objects)) })
		})
	}
}

// allocated fails where f needs much memory.
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
