package guard

import (
	"fmt"
	"strconv"
	"strings"
)

const maxPort = 65535

// PortRange is the ports from First to Last. Its text is 9000 or 9000-9099.
type PortRange struct{ First, Last int }

// String returns the text of the range.
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(r.First)
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// MarshalText implements [encoding.TextMarshaler].
func (r PortRange) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (r *PortRange) UnmarshalText(text []byte) error {
	first, last, isRange := strings.Cut(string(text), "-")
	if !isRange {
		last = first
	}
	from, err := strconv.ParseUint(first, 10, 16)
	to, err2 := strconv.ParseUint(last, 10, 16)
	if err != nil || err2 != nil || from == 0 || to < from {
		return fmt.Errorf("%q must be a port from 1 to %d, or a range of them such as 9000-9099", text, maxPort)
	}
	*r = PortRange{int(from), int(to)}
	return nil
}

func (r PortRange) contains(port int) bool { return r.First <= port && port <= r.Last }
