package nsjail

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/doctest"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// TestAbuseTable checks that the table in docs/reference/attacks.md matches the tests; `make docs` rewrites
// it.
func TestAbuseTable(t *testing.T) {
	doctest.Compare(t, "../../../docs/reference/attacks.md", "<!-- abuse: written by `make docs` -->\n",
		"<!-- end of abuse -->\n", abuseTable())
}

// abuseTable returns the Markdown tables, with one row per reported status in each group.
func abuseTable() string {
	var b strings.Builder
	for _, g := range abuse() {
		_, _ = fmt.Fprintf(&b, "\n**%s.** %s.\n\n| attacks | reported as |\n|---|---|\n", g.name, g.about)
		names := map[string][]string{}
		var order []string
		for _, a := range g.attacks {
			status := a.status()
			if names[status] == nil {
				order = append(order, status)
			}
			names[status] = append(names[status], strings.ReplaceAll(a.name, "|", "\\|"))
		}
		for _, status := range order {
			_, _ = fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(names[status], " · "), status)
		}
	}
	return b.String() + "\n"
}

// status returns the status that a client sees.
func (a *attack) status() string {
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
	case jail.Cancelled, jail.Killed:
		return "`cancelled`"
	default:
		return "`failed`, `sandbox_start_error`"
	}
}
