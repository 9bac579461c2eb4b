package mask

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
)

func BenchmarkMasks(b *testing.B) {
	const size = 10 << 20
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("%c%cecret-%d", 'a'+i%26, 'a'+i%7, i*7919))
	}
	// The longest secret almost matches at each byte.
	near := []string{strings.Repeat("a", 4095) + "b", "aaab"}
	for name, x := range map[string]struct {
		secrets []string
		text    []byte
	}{
		"short lines": {many, bytes.Repeat([]byte("test_abc ... ok\n"), size/16)},
		"near misses": {near, bytes.Repeat([]byte("a"), size)},
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				w := New(x.secrets).Writer(io.Discard)
				for rest := x.text; len(rest) > 0; {
					n := min(32<<10, len(rest))
					_, _ = w.Write(rest[:n])
					rest = rest[n:]
				}
				w.Flush()
			}
		})
	}
}
