//go:build faults

package fault

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
)

// crashAt is the point at which the process dies, when it passes it for the crashCount-th time.
var crashAt, crashCount = parseSetting(os.Getenv("BULLPEN_CRASH_AT"))

// passed counts how often crashAt was passed.
var passed atomic.Int64

// Here kills the process if its environment asks for a crash at p. It does not return then.
func Here(p Point) {
	if p != crashAt || passed.Add(1) != crashCount {
		return
	}
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Kill()
	}
	if err != nil {
		panic(fmt.Sprintf("die at %s: %v", p, err))
	}
	select {}
}

func parseSetting(text string) (Point, int64) {
	if text == "" {
		return "", 0
	}
	name, number, counted := strings.Cut(text, ":")
	count := int64(1)
	var err error
	if counted {
		count, err = strconv.ParseInt(number, 10, 64)
	}
	if err != nil || count < 1 {
		fail("BULLPEN_CRASH_AT=%s: after the colon there must be a number from 1", text)
	}
	if all := slices.Concat(Points(), BatchPoints(), SchedulePoints(), PipelinePoints(), AuditPoints(),
		AgentPoints(), SandboxPoints()); !slices.Contains(all, Point(name)) {
		fail("BULLPEN_CRASH_AT=%s: there is no such point; there are %q", text, all)
	}
	return Point(name), count
}

// fail exits, since the process would not do what its test expects.
func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bullpen: "+format+"\n", args...)
	os.Exit(2)
}
