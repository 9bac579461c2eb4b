package image_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/storage/image"
)

var benchTar = flag.String("tar", "", "root file system for BenchmarkUnpack, an uncompressed tar")

// BenchmarkUnpack unpacks an image as a worker does on its first use, without the store.
func BenchmarkUnpack(b *testing.B) {
	if *benchTar == "" {
		b.Skip("give a root file system with -tar")
	}
	stored := packFile(b, *benchTar)
	var unpacked int64
	var cpu time.Duration
	dir := b.TempDir()
	for b.Loop() {
		began := cpuTime(b)
		to := filepath.Join(dir, "root")
		if err := os.Mkdir(to, 0o700); err != nil {
			b.Fatal(err)
		}
		img, _, err := image.Unpack(bytes.NewReader(stored), to, image.DefaultLimits())
		if err != nil {
			b.Fatal(err)
		}
		unpacked = img.UnpackedSize
		cpu += cpuTime(b) - began
		b.StopTimer()
		if err := os.RemoveAll(to); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.SetBytes(unpacked)
	b.ReportMetric(float64(len(stored))/(1<<20), "stored-MiB")
	b.ReportMetric(cpu.Seconds()/float64(b.N), "cpu-s/op")
}

// cpuTime returns the processor time that this process has used, the kernel's work included.
func cpuTime(t testing.TB) time.Duration {
	t.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// packFile packs an uncompressed tar.
func packFile(t testing.TB, file string) []byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	tree := newTree(t, image.DefaultLimits())
	if err := tree.AddTar(f); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if _, err := tree.Pack(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
