package home_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/bullpen-run/bullpen/worker/home"
)

// large creates a home of 500 MB in 20,000 files.
func large(tb testing.TB) string {
	tb.Helper()
	dir := newDir(tb)
	content := make([]byte, 25_000)
	random := rand.NewChaCha8([32]byte{})
	for i := range 20_000 {
		sub := filepath.Join(dir, fmt.Sprint(i%200))
		// Half of it is compressible.
		_, err := random.Read(content[:len(content)/2])
		check(tb, err, os.MkdirAll(sub, 0o755), os.WriteFile(filepath.Join(sub, fmt.Sprint(i)), content, 0o644))
	}
	return dir
}

func BenchmarkDiff(b *testing.B) {
	th := newThread(b)
	th.lower = large(b)
	for name, script := range map[string]string{"unchanged": ":", "1KB": "head -c 1024 /dev/urandom > 7/7"} {
		o, mount := th.open()
		shell(b, mount, script)
		b.Run(name, func(b *testing.B) {
			var l parts
			for b.Loop() {
				l, _ = diff(b, o, th.objects)
			}
			b.ReportMetric(float64(len(l.pack)+len(l.index)), "bytes")
		})
	}
	b.Run("mount", func(b *testing.B) {
		for b.Loop() {
			f, volume := tmpfs(b)
			m := must[*os.File](b)((&home.Overlay{Lower: th.lower, Volume: volume, Owner: th.owner}).Mount())
			check(b, m.Close(), f.Close())
		}
	})
}

func BenchmarkLarge(b *testing.B) {
	dir := large(b)
	var l parts
	b.Run("full", func(b *testing.B) {
		b.SetBytes(500_000_000)
		for b.Loop() {
			l, _ = full(b, dir, objects{})
		}
	})
	b.Run("apply", func(b *testing.B) {
		b.SetBytes(500_000_000)
		for b.Loop() {
			b.StopTimer()
			next := newDir(b)
			b.StartTimer()
			check(b, apply(next, l, objects{}))
			b.StopTimer()
			check(b, os.RemoveAll(next))
			b.StartTimer()
		}
	})
}
