package image_test

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

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
	n := 0
	dir := b.TempDir()
	for b.Loop() {
		n++
		to := filepath.Join(dir, "root")
		if err := os.Mkdir(to, 0o700); err != nil {
			b.Fatal(err)
		}
		img, _, err := image.Unpack(bytes.NewReader(stored), to, image.DefaultLimits())
		if err != nil {
			b.Fatal(err)
		}
		unpacked = img.UnpackedSize
		b.StopTimer()
		if err := os.RemoveAll(to); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.SetBytes(unpacked)
	b.ReportMetric(float64(len(stored))/(1<<20), "stored-MiB")
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
	if _, err := tree.Pack(io.Writer(&out)); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
