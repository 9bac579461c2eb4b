package mask

import (
	"bytes"
	"strings"
	"testing"
)

// maskedIn returns a text as it is written in pieces through masks of secrets.
func maskedIn(secrets []string, text []byte, size int, keepLength bool) string {
	var out bytes.Buffer
	w := New(secrets).Writer(&out)
	w.KeepLength = keepLength
	for rest := text; len(rest) > 0; {
		n := min(size, len(rest))
		_, _ = w.Write(rest[:n])
		rest = rest[n:]
	}
	w.Flush()
	return out.String()
}

func TestMasks(t *testing.T) {
	secrets := []string{"abab", "ababab!", "line one\nxy\n", ""}
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
			if got := maskedIn(secrets, []byte(text), size, false); got != want {
				t.Errorf("%q in pieces of %d: %q, want %q", text, size, got, want)
			}
			if got := maskedIn(secrets, []byte(text), size, true); len(got) != len(text) || unmasked(got) != unmasked(want) {
				t.Errorf("%q in pieces of %d, as long: %q", text, size, got)
			}
		}
	}
}

func unmasked(text string) string { return strings.ReplaceAll(text, "*", "") }

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
					want.WriteString(text[to:i] + Text)
				}
				to = max(to, i+len(secret))
			}
		}
		want.WriteString(text[to:])
		if got := maskedIn([]string{a, b}, []byte(text), size, false); got != want.String() {
			t.Errorf("%q without %q and %q: %q, want %q", text, a, b, got, want.String())
		}
	})
}

// Secrets are found in the strings and numbers of a JSON text as programs print them, and it stays valid.
func TestJSON(t *testing.T) {
	m := New([]string{"12345", `a"b` + "\u00e9", "true"})
	for text, want := range map[string]string{
		`{"x":12345,"y":[1,-2.5e3,null]}`:       `{"x":"***","y":[1,-2.5e3,null]}`,
		`123450e7`:                              `"***0e7"`,
		`{"12345":"say a\"b\u00e9, a\u0022bé"}`: `{"***":"say ***, ***"}`,
		`[true,"true","\\"]`:                    `[true,"***","\\"]`,
		`"\u2028<12"`:                           `"\u2028<12"`,
	} {
		if got := string(m.JSON([]byte(text))); got != want {
			t.Errorf("%s becomes %s instead of %s", text, got, want)
		}
	}
	if got := string(New(nil).JSON([]byte(`"12345"`))); got != `"12345"` {
		t.Errorf("without secrets: %s", got)
	}
}
