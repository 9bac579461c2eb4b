package nsjail

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
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
