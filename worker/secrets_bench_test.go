package worker

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func BenchmarkMasks(b *testing.B) {
	const size = 10 << 20
	many := &proto.Job{Env: map[string]string{}}
	for i := range 100 {
		name := fmt.Sprint("S", i)
		many.Secrets, many.Env[name] = append(many.Secrets, name), fmt.Sprintf("%c%cecret-%d", 'a'+i%26, 'a'+i%7, i*7919)
	}
	// The longest secret almost matches at each byte.
	near := &proto.Job{Env: map[string]string{"A": strings.Repeat("a", 4095) + "b", "B": "aaab"}, Secrets: []string{"A", "B"}}
	for name, x := range map[string]struct {
		job  *proto.Job
		text []byte
	}{
		"short lines": {many, bytes.Repeat([]byte("test_abc ... ok\n"), size/16)},
		"near misses": {near, bytes.Repeat([]byte("a"), size)},
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				m := newMasks(x.job, nil)
				w := m.writer(io.Discard)
				for rest := x.text; len(rest) > 0; {
					n := min(32<<10, len(rest))
					_, _ = w.Write(rest[:n])
					rest = rest[n:]
				}
				m.flush()
			}
		})
	}
}
