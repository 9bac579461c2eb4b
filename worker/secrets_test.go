package worker

import (
	"bytes"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestMasks(t *testing.T) {
	job := &proto.Job{
		Env:     map[string]string{"A": "abab", "B": "ababab!", "C": "line one\nxy\n", "OTHER": "other"},
		Secrets: []string{"A", "B", "C", "MISSING"},
	}
	for text, want := range map[string]string{
		"x abab y":          "x *** y",
		"ababab!":           "***",
		"ababab":            "***ab",
		"xaba":              "xaba",
		"abaabab":           "aba***",
		"line one\nxy\n":    "***",
		"only line one\nxy": "only ***\nxy",
		"other":             "other",
	} {
		for size := 1; size <= len(text); size++ {
			var out bytes.Buffer
			m := newMasks(job)
			w := m.writer(&out)
			for rest := []byte(text); len(rest) > 0; {
				n := min(size, len(rest))
				_, _ = w.Write(rest[:n])
				rest = rest[n:]
			}
			m.flush()
			if out.String() != want {
				t.Errorf("%q in pieces of %d: %q, want %q", text, size, out.String(), want)
			}
			if bytes.Contains(out.Bytes(), []byte("abab")) {
				t.Errorf("%q in pieces of %d: %q", text, size, out.String())
			}
		}
	}
}
