package nsjail

import (
	"os"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// TestAbsentNetLimit checks that a worker creates jails without a limit that their network
// namespaces do not have, and names the limit. Linux 6.1 has net.core.somaxconn in the namespaces
// that the worker creates, and not in those of jails.
func TestAbsentNetLimit(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	m.netLimits = append(m.netLimits, netLimit{"core/absent", "1"})
	for range 2 {
		runCode(t, m, "bash", "echo works").want(t, jail.Exited, "works")
	}
	if err := m.NetLimits(); err == nil || strings.Count(err.Error(), "core/absent") != 1 {
		t.Errorf("got %v, want one mention of the limit", err)
	}
}

// TestFragments checks that a worker limits fragments where its network namespace has the setting, and
// names the setting elsewhere.
func TestFragments(t *testing.T) {
	t.Parallel()
	if err := newMaker(t).Fragments(); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(fragments.path()); err != nil || string(b) != "1\n" {
		t.Errorf("got %q, %v", b, err)
	}
	m := &Maker{}
	if err := egress.InNamespace(nil, func() error {
		m.noFragments = limitFragments()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := m.Fragments(); err == nil ||
		!strings.Contains(err.Error(), "sysctl -w net.core.high_order_alloc_disable=1") {
		t.Errorf("got %v, want the setting", err)
	}
}
