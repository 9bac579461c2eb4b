package cron

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// MaxLen bounds the length of an expression, in bytes.
const MaxLen = 1024

// aliases are expressions with a name.
var aliases = map[string]string{ // read only
	"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
	"@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}

// Parse parses an expression of 5 fields, or of 6 with the seconds first, or a name such as @daily.
// Its errors complete a sentence that begins with the name of a request's field.
func Parse(text string) (*Expression, error) {
	if len(text) > MaxLen {
		return nil, fmt.Errorf("must be at most %d bytes", MaxLen)
	}
	fields := strings.Fields(text)
	if len(fields) > 0 && strings.Contains(fields[0], "=") {
		return nil, errors.New("must not name a time zone; use time_zone")
	}
	if len(fields) > 0 && fields[0][0] == '@' {
		expression, ok := aliases[strings.ToLower(strings.Join(fields, " "))]
		switch {
		case !ok && strings.EqualFold(fields[0], "@every"):
			return nil, errors.New("must not be an interval; use every")
		case !ok:
			return nil, fmt.Errorf("must not be %q; the names are @hourly, @daily, @midnight, @weekly, @monthly, @yearly and "+
				"@annually", proto.Shorten(text))
		}
		fields = strings.Fields(expression)
	}
	if len(fields) == 5 {
		fields = append([]string{"0"}, fields...)
	}
	if len(fields) != 6 {
		return nil, fmt.Errorf("must have 5 fields (minute, hour, day of the month, month, day of the week), "+
			"or 6 with the second first; it has %d", len(fields))
	}
	e, err := parseFields(fields)
	if err != nil {
		return nil, err
	}
	if _, ok := e.nextWall(0); !ok { // the calendar repeats
		return nil, fmt.Errorf("must match a day that exists; no month %q has a day of the month %q",
			proto.Shorten(fields[4]), proto.Shorten(fields[3]))
	}
	return e, nil
}

// parseFields parses the six fields.
func parseFields(fields []string) (*Expression, error) {
	e := new(Expression)
	for i, f := range []struct {
		field
		set     *uint64
		any     *bool
		special func(element string) (ok bool, err error)
	}{
		{field: field{name: "second", max: 59}, set: &e.seconds},
		{field: field{name: "minute", max: 59}, set: &e.minutes},
		{field: field{name: "hour", max: 23}, set: &e.hours},
		{field: dayOfMonth, set: &e.days.days, any: &e.days.any, special: e.days.parse},
		{field: month, set: &e.months},
		{field: dayOfWeek, set: &e.weekdays.days, any: &e.weekdays.any, special: e.weekdays.parse},
	} {
		for element := range strings.SplitSeq(fields[i], ",") {
			if f.special != nil {
				if done, err := f.special(element); err != nil {
					return nil, err
				} else if done {
					continue
				}
			}
			set, all, err := f.parse(element)
			if err != nil {
				return nil, err
			}
			*f.set |= set
			if all && f.any != nil {
				*f.any = true
			}
		}
	}
	return e, nil
}

// field describes a field of an expression.
type field struct {
	name     string
	min, max int
	names    string // of its values, in order
}

var (
	dayOfMonth = field{name: "day of the month", min: 1, max: 31}
	month      = field{name: "month", min: 1, max: 12, names: "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"}
	dayOfWeek  = field{name: "day of the week", max: 6, names: "SUN MON TUE WED THU FRI SAT"}
)

// parse parses an element of a list. all reports whether it restricts nothing.
func (f *field) parse(element string) (set uint64, all bool, err error) {
	values, step, err := f.cutStep(element)
	if err != nil {
		return 0, false, err
	}
	first, last := f.min, f.max
	switch low, high, isRange := strings.Cut(values, "-"); {
	case values == "*", element == "?" && (*f == dayOfMonth || *f == dayOfWeek):
		all = step == 1
	case isRange:
		var okFirst, okLast bool
		first, okFirst = f.value(low)
		last, okLast = f.value(high)
		if !okFirst || !okLast {
			return 0, false, f.invalid(element)
		}
	default:
		var ok bool
		if first, ok = f.value(values); !ok {
			return 0, false, f.invalid(element)
		}
		if values == element { // without a step
			last = first
		}
	}
	size := f.max - f.min + 1
	if last < first { // beyond the largest value and on from the smallest
		last += size
	}
	for v := first; v <= last; v += step {
		set |= 1 << (f.min + (v-f.min)%size)
	}
	return set, all, nil
}

// cutStep splits an element into its values and its step, which is 1 if there is none.
func (f *field) cutStep(element string) (values string, step int, err error) {
	values, text, ok := strings.Cut(element, "/")
	if !ok {
		return element, 1, nil
	}
	if step, ok = number(text); !ok || step == 0 {
		return "", 0, f.errorf(element, "what follows / must be a whole number from 1 to 999999999")
	}
	return values, step, nil
}

// value parses a number or a name. Sunday is 0 or 7.
func (f *field) value(text string) (v int, ok bool) {
	if at := strings.Index(f.names, strings.ToUpper(text)); len(text) == 3 && at >= 0 && at%4 == 0 {
		return f.min + at/4, true
	}
	v, ok = number(text)
	return v, ok && v >= f.min && (v <= f.max || v == 7 && *f == dayOfWeek)
}

// number parses a number of at most nine digits.
func number(text string) (n int, ok bool) {
	if len(text) > 9 || strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.Atoi(text)
	return n, err == nil
}

// specialDay is an element with L or W: L, L-3, LW, L-3W or 15W.
var specialDay = regexp.MustCompile(`^(?:(L)(?:-([0-9]{1,2}))?|([0-9]{1,2}))(W)?$`)

// parse parses an element with L or W. done is false if it has neither.
func (d *monthDays) parse(element string) (done bool, err error) {
	upper := strings.ToUpper(element)
	if !strings.ContainsAny(upper, "LW#") {
		return false, nil
	}
	set, parts := &d.nearest, specialDay.FindStringSubmatch(upper)
	least, most := dayOfMonth.min, dayOfMonth.max
	if parts != nil && parts[1] != "" {
		least, most, set = 0, dayOfMonth.max-1, &d.last
		if parts[4] != "" {
			set = &d.lastNearest
		}
	}
	if parts != nil {
		if n, _ := strconv.Atoi(parts[2] + parts[3]); n >= least && n <= most {
			*set |= 1 << n
			return true, nil
		}
	}
	return false, dayOfMonth.errorf(element, "L is the last day of the month, L-3 three days before it, "+
		"15W the day from Monday to Friday nearest to the 15th, and LW the last day from Monday to Friday; # is for the "+
		"day of the week")
}

// parse parses an element with L or #. done is false if it has neither.
func (w *weekdays) parse(element string) (done bool, err error) {
	upper := strings.ToUpper(element)
	if day, nth, ok := strings.Cut(upper, "#"); ok {
		v, known := dayOfWeek.value(day)
		n, ok := number(nth)
		if !known || !ok || n < 1 || n > len(w.nth) {
			return false, dayOfWeek.errorf(element, "FRI#3 is the third Friday of the month; it has at most five")
		}
		w.nth[n-1] |= 1 << (v % 7)
		return true, nil
	}
	if day, ok := strings.CutSuffix(upper, "L"); ok {
		v, known := dayOfWeek.value(day)
		if !known {
			return false, dayOfWeek.errorf(element, "FRIL or 5L is the last Friday of the month; L needs a day before it")
		}
		w.last |= 1 << (v % 7)
		return true, nil
	}
	return false, nil
}

// invalid returns the error for an element that the field does not allow.
func (f *field) invalid(element string) error {
	upper := strings.ToUpper(element)
	switch rest := strings.Trim(upper, "0123456789-/"); {
	case rest == "H" || strings.HasPrefix(rest, "H("):
		return f.errorf(element, "H, a value chosen by a hash, is not supported; "+
			"name a value, and use jitter to spread ticks")
	case rest == "?":
		return f.errorf(element, "? is for the days, and has no step")
	case rest == "W" && *f == dayOfWeek:
		return f.errorf(element, "W is for the day of the month")
	case rest == "L" || rest == "W" || rest == "LW" || strings.Contains(rest, "#"):
		return f.errorf(element, "L, W and # are for the days, and have neither ranges nor steps")
	}
	values := fmt.Sprintf("%d to %d", f.min, f.max)
	if *f == dayOfWeek {
		values = "0 to 7"
	}
	if f.names != "" {
		values += " or " + f.names[:3] + " to " + f.names[len(f.names)-3:]
	}
	return f.errorf(element, "it must be *, a value from %s, a range a-b, or a list a,b; "+
		"/n after * or a range takes every nth value", values)
}

// errorf returns an error that names the field and the element.
func (f *field) errorf(element, format string, args ...any) error {
	return fmt.Errorf("has a wrong %s %q: %s", f.name, proto.Shorten(element), fmt.Sprintf(format, args...))
}
