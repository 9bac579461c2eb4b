package cache_test

import (
	"crypto/rand"
	"fmt"
	"os"
	"testing"
)

// BenchmarkRestore makes a home of 900 files of 25 KB from the store.
func BenchmarkRestore(b *testing.B) {
	w := newWorld(b)
	homes := w.worker("one", 1<<40)
	const files, size = 900, 25_000
	content := make([]byte, size)
	w.run(homes, "a", func(dir string) {
		for i := range files {
			_, _ = rand.Read(content)
			if i%100 == 0 {
				if err := os.Mkdir(fmt.Sprintf("%s/d%d", dir, i/100), 0o755); err != nil {
					b.Fatal(err)
				}
			}
			if err := os.WriteFile(fmt.Sprintf("%s/d%d/f%d", dir, i/100, i), content, 0o644); err != nil {
				b.Fatal(err)
			}
		}
	})
	w.close(homes)
	b.SetBytes(files * size)
	for i := 0; b.Loop(); i++ {
		cold := w.worker(fmt.Sprint("cold", i), 1<<40)
		h, err := cold.CheckOut(b.Context(), w.job("a"))
		if err != nil {
			b.Fatal(err)
		}
		if err := h.Close(false); err != nil {
			b.Error(err)
		}
		w.close(cold)
	}
}
