package nsjail

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// TestAbuseTable checks that the table in docs/sandbox.md matches the tests; `make docs` rewrites
// it.
func TestAbuseTable(t *testing.T) {
	const page, begin, end = "../../../docs/sandbox.md", "<!-- abuse: written by `make docs` -->\n", "<!-- end of abuse -->\n"
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	found, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no lines %q and %q", page, begin, end)
	}
	want := abuseTable()
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if found != want {
		t.Error("the table of attacks in docs/sandbox.md is not that of the tests: run `make docs`")
	}
}

// abuseTable returns the Markdown tables, with one row per reported status in each group.
func abuseTable() string {
	var b strings.Builder
	for _, g := range abuse() {
		_, _ = fmt.Fprintf(&b, "\n**%s.** %s.\n\n| attacks | told as |\n|---|---|\n", g.name, g.about)
		names := map[string][]string{}
		var order []string
		for _, a := range g.attacks {
			told := a.told()
			if names[told] == nil {
				order = append(order, told)
			}
			names[told] = append(names[told], strings.ReplaceAll(a.name, "|", "\\|"))
		}
		for _, told := range order {
			_, _ = fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(names[told], " · "), told)
		}
	}
	return b.String() + "\n"
}

// told returns the status that a client sees.
func (a *attack) told() string {
	switch o := a.want; o.Kind {
	case "", jail.Exited:
		if o.ExitCode == 0 {
			return "`success`: nothing happens"
		}
		return "`failed`, with its exit code"
	case jail.Signaled:
		return fmt.Sprintf("`failed`, exit code %d", 128+o.Signal)
	case jail.TimedOut:
		return "`timeout`"
	case jail.OutOfMemory:
		return "`oom`"
	case jail.Seccomp:
		return "`seccomp`"
	case jail.Killed:
		return "`cancelled`"
	default:
		return "`failed`, `sandbox_start_error`"
	}
}
