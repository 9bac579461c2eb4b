// Package doctest compares the generated parts of documents with what the tests generate.
package doctest

import (
	"flag"
	"os"
	"strings"
	"testing"
)

// Update is set by the flag -update: tests write generated files instead of comparing them.
var Update = flag.Bool("update", false, "write the generated files instead of comparing them")

// Compare compares what stands between the lines begin and end of a document with want. If Update
// is set, it writes want there.
func Compare(t testing.TB, page, begin, end, want string) {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), begin)
	got, after, ends := strings.Cut(rest, end)
	switch {
	case !begins || !ends:
		t.Fatalf("%s has no lines %q and %q", page, begin, end)
	case got == want:
	case !*Update:
		t.Errorf("%s is not current: run `make docs`", page)
	default:
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), //nolint:gosec // the path is a constant of a test
			0o600); err != nil {
			t.Fatal(err)
		}
	}
}
