package proto

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/doctest"
)

func TestLanguageTable(t *testing.T) {
	var table strings.Builder
	table.WriteString("\n| `language` | | runs as | interpreters, best first | extensions |\n|---|---|---|---|---|\n")
	for _, r := range Runtimes() {
		path := "in the home"
		if r.OutsideHome {
			path = "outside the home"
		}
		command := strings.Join(append(append([]string{r.Interpreters[0]}, r.Args...), r.File), " ")
		_, _ = fmt.Fprintf(&table, "| `%s` | %s | `%s`, %s | `%s` | `%s` |\n", r.Language, r.Title, command, path,
			strings.Join(r.Interpreters, "`, `"), strings.Join(r.Extensions, "`, `"))
	}
	table.WriteString("\n")
	doctest.Compare(t, "../docs/reference/api.md", "<!-- languages: written by `make docs` -->\n",
		"<!-- end of languages -->\n", table.String())
}

// Every row is complete. No file name, extension or name belongs to two languages.
func TestRuntimes(t *testing.T) {
	seen := map[string]Language{}
	for _, r := range Runtimes() {
		if got, ok := r.Language.Runtime(); !ok || got.Language != r.Language {
			t.Errorf("%s is not found by its name", r.Language)
		}
		if r.Title == "" || r.Version == "" || r.File == "" || r.Sample == "" || len(r.Interpreters) == 0 ||
			len(r.Extensions) == 0 {
			t.Errorf("%+v is not complete", r)
		}
		for _, name := range append(append([]string{r.File}, r.Interpreters...), r.Extensions...) {
			if other, taken := seen[name]; taken {
				t.Errorf("%s belongs to %s and %s", name, other, r.Language)
			}
			seen[name] = r.Language
		}
	}
	if _, ok := Language("perl").Runtime(); ok {
		t.Error("perl has a row")
	}
}
