package proto_test

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// The names of files come from clients, and become names in homes.
func TestNamesOfAgentFiles(t *testing.T) {
	for name, want := range map[string]string{
		"data.csv": "data.csv text/csv", "dir/../data.csv": "data.csv text/csv", `C:\x\chart.png`: "chart.png image/png",
		"":   "unnamed application/octet-stream",
		"..": "unnamed application/octet-stream", ".": "unnamed application/octet-stream",
		"a/": "unnamed application/octet-stream", "x\x00y": "unnamed application/octet-stream",
		".pdf": "unnamed.pdf application/pdf", "\xff": "unnamed application/octet-stream",
		strings.Repeat("x", 256) + ".png": "unnamed.png image/png",
		"a." + strings.Repeat("x", 300):   "unnamed application/octet-stream", "notes": "notes application/octet-stream",
	} {
		f := proto.NewAgentFile(name, 1)
		if got := f.Name + " " + f.MIMEType; got != want || !proto.ValidAgentFileID(f.ID) ||
			proto.CheckThreadID("id", f.ID) != nil {
			t.Errorf("%q: %s, want %s (%s)", name, got, want, f.ID)
		}
		if clean, err := proto.CleanFileName("/home/x", f.Name); err != nil || clean != f.Name {
			t.Errorf("%q: %q, %v", name, clean, err)
		}
	}
}
