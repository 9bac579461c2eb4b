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

// Settings of the process.
var (
	crashAt, crashTime = crashSetting(os.Getenv("BULLPEN_CRASH_AT"))
	planted            = bugSetting(os.Getenv("BULLPEN_PLANTED_BUG"))
)

// passed counts how often crashAt was passed.
var passed atomic.Int64

// Here is where the process dies if it was told to at this point. It does not return then.
func Here(p Point) {
	if p != crashAt || passed.Add(1) != crashTime {
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

// Planted reports whether the process is to have this bug.
func Planted(b Bug) bool { return b == planted }

func crashSetting(text string) (Point, int64) {
	if text == "" {
		return "", 0
	}
	name, number, counted := strings.Cut(text, ":")
	time := int64(1)
	var err error
	if counted {
		time, err = strconv.ParseInt(number, 10, 64)
	}
	if err != nil || time < 1 {
		refuse("BULLPEN_CRASH_AT=%s: after the colon there must be a number from 1", text)
	}
	if !slices.Contains(Points(), Point(name)) {
		refuse("BULLPEN_CRASH_AT=%s: there is no such point; there are %q", text, Points())
	}
	return Point(name), time
}

func bugSetting(text string) Bug {
	if text != "" && !slices.Contains(Bugs(), Bug(text)) {
		refuse("BULLPEN_PLANTED_BUG=%s: there is no such bug; there are %q", text, Bugs())
	}
	return Bug(text)
}

// refuse ends a process that would not do what its test believes.
func refuse(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bullpen: "+format+"\n", args...)
	os.Exit(2)
}
