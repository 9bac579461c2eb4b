package app

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// UIDRange is a range of user ids.
type UIDRange struct {
	First, Count int
}

// maxUID is the largest user id that fits a signed 32-bit integer, without the value that programs
// use for errors.
const maxUID = math.MaxInt32 - 1

// String returns FIRST:COUNT.
func (r UIDRange) String() string { return fmt.Sprintf("%d:%d", r.First, r.Count) }

// UnmarshalText parses FIRST:COUNT.
func (r *UIDRange) UnmarshalText(text []byte) error {
	first, count, ok := strings.Cut(string(text), ":")
	f, errFirst := strconv.ParseUint(first, 10, 31)
	n, errCount := strconv.ParseUint(count, 10, 31)
	if !ok || errFirst != nil || errCount != nil {
		return fmt.Errorf("%q must be FIRST:COUNT, such as 1900000000:8192", text)
	}
	if f == 0 || n < UIDsPerSlot || f+n-1 > maxUID {
		return fmt.Errorf("%q must have at least %d user ids, not that of root, and none above %d", text, UIDsPerSlot, maxUID)
	}
	*r = UIDRange{First: int(f), Count: int(n)}
	return nil
}

// LogFormat is a format of log messages.
type LogFormat string

// The log formats.
const (
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

// UnmarshalText parses a log format.
func (f *LogFormat) UnmarshalText(text []byte) error {
	switch g := LogFormat(text); g {
	case LogText, LogJSON:
		*f = g
		return nil
	default:
		return errors.New("must be text or json")
	}
}
