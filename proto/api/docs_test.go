package api

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/doctest"
)

func TestDocsAreCurrent(t *testing.T) {
	doctest.Compare(t, "../../docs/reference/api.md", "<!-- error codes: written by `make docs` -->\n",
		"<!-- end of error codes -->\n", codeTable())
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
