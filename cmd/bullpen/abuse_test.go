package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of attacks in docs/sandbox.md anew")

// controlAttack is an attack on the control plane, on a deployment of its own.
type controlAttack struct {
	name, told string
	test       func(*testing.T, *programs)
}

// controlAttacks is the part of the abuse list that does not come from inside of
// jails. The rest is in worker/jail/nsjail, under the same name.
func controlAttacks() []controlAttack {
	return []controlAttack{
		{"messages that are not ours on every subject", "set aside, or the job ends as `sandbox_start_error`; others go on", testMalformed},
		{"a worker killed while programs run", "`worker_lost`", testWorkerKilled},
		{"a gateway killed while clients wait", "executions go on", testFrontKilled},
		{"NATS killed", "503 until it is back; nothing that was accepted is lost", testBrokerKilled},
		{"everything killed at once", "queued jobs run, those that ran are `worker_lost`", testKillEverything},
		{"a full disk", "503 for new jobs; those that run end", testFullDisk},
		{"the trace id of another organisation", "404", func(t *testing.T, p *programs) {
			for _, in := range topologies() {
				testOrganisations(t, newWorld(t, p, in, manySlots).in(t))
			}
		}},
	}
}

// TestAbuse attacks whole deployments. Each test sees that the attack is contained,
// and that the next programs run.
func TestAbuse(t *testing.T) {
	p := buildPrograms(t)
	t.Run("control", func(t *testing.T) {
		for _, a := range controlAttacks() {
			t.Run(a.name, func(t *testing.T) {
				t.Parallel()
				a.test(t, p)
			})
		}
	})
}

// TestAbuseTable holds the table in docs/sandbox.md to the tests; `make docs`
// writes it anew.
func TestAbuseTable(t *testing.T) {
	const page, begin, end = "../../docs/sandbox.md", "<!-- abuse of the control plane: written by `make docs` -->\n", "<!-- end of abuse of the control plane -->\n"
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	found, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no lines %q and %q", page, begin, end)
	}
	var want strings.Builder
	want.WriteString("\n| attacks | what happens |\n|---|---|\n")
	for _, a := range controlAttacks() {
		_, _ = fmt.Fprintf(&want, "| %s | %s |\n", a.name, a.told)
	}
	want.WriteString("\n")
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if found != want.String() {
		t.Error("the table of attacks in docs/sandbox.md is not that of the tests: run `make docs`")
	}
}
