package proto

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of languages into docs/api.md")

func TestLanguageTable(t *testing.T) {
	const file, begin, end = "../docs/api.md", "<!-- languages: written by `make docs` -->\n", "<!-- end of languages -->\n"
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
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	_, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		t.Fatalf("%s has no place for the table of languages", file)
	}
	want := before + begin + table.String() + end + after
	if want == string(b) {
		return
	}
	if !*update {
		t.Fatalf("the table of languages in %s is out of date: run make docs", file)
	}
	if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Every row is complete. No file name, extension or name belongs to two languages.
func TestRuntimes(t *testing.T) {
	seen := map[string]Language{}
	for _, r := range Runtimes() {
		if got, ok := r.Language.Runtime(); !ok || got.Language != r.Language {
			t.Errorf("%s is not found by its name", r.Language)
		}
		if r.Title == "" || r.Version == "" || r.File == "" || r.Sample == "" || len(r.Interpreters) == 0 || len(r.Extensions) == 0 {
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
