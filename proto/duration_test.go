package proto

import (
	"strings"
	"testing"
	"time"
)

func TestParseDuration(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"0": 0, "0s": 0, "1h30m": 90 * time.Minute, "168h0m0s": 168 * time.Hour, "500ms": 500 * time.Millisecond,
		"7d": 168 * time.Hour, "2w": 336 * time.Hour, "1w2d3h": (7*24 + 2*24 + 3) * time.Hour, "1.5d": 36 * time.Hour,
		".5d": 12 * time.Hour, "1.d": 24 * time.Hour, "-1d": -24 * time.Hour, "0.1d": 144 * time.Minute,
		"10000d": 240000 * time.Hour,
	} {
		if got, err := ParseDuration(text); err != nil || got != want {
			t.Errorf("%q: %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "7", "d", "7 d", "7D", "7days", "1.2.3d", "1e3d", "99999999w",
		strings.Repeat("9", 400) + "d", "7d\n",
	} {
		if got, err := ParseDuration(text); err == nil {
			t.Errorf("%q: %s, want an error", text, got)
		}
	}
}
