package app

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/bullpen-run/bullpen/proto"
)

// Durations makes a parser of commands read durations with [proto.ParseDuration].
func Durations() kong.Option {
	return kong.TypeMapper(reflect.TypeFor[time.Duration](),
		kong.MapperFunc(func(ctx *kong.DecodeContext, target reflect.Value) error {
			var text string
			if err := ctx.Scan.PopValueInto("duration", &text); err != nil {
				return err
			}
			d, err := proto.ParseDuration(text)
			if err != nil {
				return err
			}
			target.SetInt(int64(d))
			return nil
		}))
}

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
		return fmt.Errorf("%q must have at least %d user ids, without root's id 0, and none above %d", text,
			UIDsPerSlot, maxUID)
	}
	*r = UIDRange{First: int(f), Count: int(n)}
	return nil
}

// ReservedSlots is how many slots some executions leave to others: a number, or a share of them.
type ReservedSlots struct {
	Slots   int
	Percent float64
}

// String returns a number of slots, or a percentage such as 12.5%.
func (r ReservedSlots) String() string {
	if r.Percent > 0 {
		return strconv.FormatFloat(r.Percent, 'f', -1, 64) + "%"
	}
	return strconv.Itoa(r.Slots)
}

// UnmarshalText parses what String returns.
func (r *ReservedSlots) UnmarshalText(text []byte) error {
	var v ReservedSlots
	var err error
	if percent, ok := strings.CutSuffix(string(text), "%"); ok {
		v.Percent, err = strconv.ParseFloat(percent, 64)
	} else {
		v.Slots, err = strconv.Atoi(string(text))
	}
	if err != nil || v.Slots < 0 || !(v.Percent >= 0 && v.Percent < 100) {
		return fmt.Errorf("%q must be a number of slots, or a percentage below 100%% such as 12.5%%", text)
	}
	*r = v
	return nil
}

// Of returns how many of n slots are reserved. A percentage reserves at least one. One slot is
// never reserved, and the last one is not.
func (r ReservedSlots) Of(n int) int {
	reserved := r.Slots
	if r.Percent > 0 {
		reserved = max(1, int(float64(n)*r.Percent/100))
	}
	return max(0, min(reserved, n-1))
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
