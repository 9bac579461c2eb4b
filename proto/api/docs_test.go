package api

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated part of docs/api.md")

func TestDocsAreCurrent(t *testing.T) {
	const file, begin, end = "../../docs/api.md", "<!-- error codes: written by `make docs` -->\n", "<!-- end of error codes -->\n"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s does not have the markers of the table of error codes", file)
	}
	want := before + begin + codeTable() + end + after
	switch {
	case want == string(text):
	case !*update:
		t.Errorf("%s is not current: run `make docs`", file)
	default:
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// codeTable returns the table of error codes in Markdown.
func codeTable() string {
	var b strings.Builder
	b.WriteString("\n| status | code | when |\n|---|---|---|\n")
	for _, c := range Codes() {
		fmt.Fprintf(&b, "| %d | `%s` | %s |\n", c.Status, c.Code, c.Doc)
	}
	return b.String() + "\n"
}
