package worker

import (
	"bytes"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// maskedIn returns a text as it is written in pieces through the masks of a job.
func maskedIn(job *proto.Job, text []byte, size int) string {
	var out bytes.Buffer
	m := newMasks(job, nil)
	w := m.writer(&out)
	for rest := text; len(rest) > 0; {
		n := min(size, len(rest))
		_, _ = w.Write(rest[:n])
		rest = rest[n:]
	}
	m.flush()
	return out.String()
}

func TestMasks(t *testing.T) {
	job := &proto.Job{
		Env:     map[string]string{"A": "abab", "B": "ababab!", "C": "line one\nxy\n", "OTHER": "other"},
		Secrets: []string{"A", "B", "C", "MISSING"},
	}
	for text, want := range map[string]string{
		"x abab y":          "x *** y",
		"ababab!":           "***",
		"ababab":            "***",
		"abababx":           "***x",
		"xaba":              "xaba",
		"abaabab":           "aba***",
		"ababcabab":         "***c***",
		"line one\nxy\n":    "***",
		"line one\nxz":      "***\nxz",
		"only line one\nxy": "only ***\nxy",
		"other":             "other",
	} {
		for size := 1; size <= len(text); size++ {
			if got := maskedIn(job, []byte(text), size); got != want {
				t.Errorf("%q in pieces of %d: %q, want %q", text, size, got, want)
			}
		}
	}
}

// FuzzMasks compares with a search for each secret at each byte.
func FuzzMasks(f *testing.F) {
	f.Add("abab", "babb", "xababbabx", 2)
	f.Add("aaaa", "aaab", "aaaaaaaabaaa", 3)
	f.Add("abcd", "bc", "abcabcdbcbcd", 1)
	f.Add("abcde", "cd", "abcdxabcdecd", 4)
	f.Add("ba", "aaa", "ccbaaabbb", 1)
	f.Fuzz(func(t *testing.T, a, b, text string, size int) {
		if strings.ContainsAny(a+b, "\r\n") || size < 1 {
			return
		}
		var want strings.Builder
		to := 0 // the end of the last secrets that overlap
		for i := 0; i <= len(text); i++ {
			for _, secret := range []string{a, b} {
				if secret == "" || !strings.HasPrefix(text[i:], secret) {
					continue
				}
				if i >= to {
					want.WriteString(text[to:i] + masked)
				}
				to = max(to, i+len(secret))
			}
		}
		want.WriteString(text[to:])
		job := &proto.Job{Env: map[string]string{"A": a, "B": b}, Secrets: []string{"A", "B"}}
		if got := maskedIn(job, []byte(text), size); got != want.String() {
			t.Errorf("%q without %q and %q: %q, want %q", text, a, b, got, want.String())
		}
	})
}
