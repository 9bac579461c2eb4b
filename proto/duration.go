package proto

import (
	"errors"
	"regexp"
	"strconv"
	"time"
)

const day = 24 * time.Hour

var daysAndWeeks = regexp.MustCompile(`([0-9]+\.?[0-9]*|\.[0-9]+)([dw])`)

// ParseDuration accepts the syntax of [time.ParseDuration] plus the units d (24 hours) and w (7
// days).
func ParseDuration(text string) (time.Duration, error) {
	hours := daysAndWeeks.ReplaceAllStringFunc(text, func(part string) string {
		n, err := strconv.ParseFloat(part[:len(part)-1], 64)
		if err != nil { // too large
			return part
		}
		n *= day.Hours()
		if part[len(part)-1] == 'w' {
			n *= 7
		}
		return strconv.FormatFloat(n, 'f', -1, 64) + "h"
	})
	d, err := time.ParseDuration(hours)
	if err != nil { // its own text may name hours that the user did not write
		return 0, errors.New(strconv.Quote(text) +
			" is not a time: write a number with a unit such as 500ms, 30s, 10m, 24h, 7d or 2w")
	}
	return d, nil
}
