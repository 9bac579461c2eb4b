package web

import (
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// QueryInt parses a whole number from least to most in the query. It returns fallback if the query
// does not have it.
func QueryInt(r *Request, name string, least, most, fallback int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return fallback, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || int64(n) < least || int64(n) > most {
		return 0, proto.FieldErrorf(name, "must be a whole number from %d to %d", least, most)
	}
	return int64(n), nil
}

const (
	defaultPage = 20
	maxPage     = 100
)

// PageSize returns the requested number of entries of a list.
func PageSize(r *Request) (int, error) {
	limit, err := QueryInt(r, "limit", 1, maxPage, defaultPage)
	return int(limit), err
}

// QueryBool parses true or false in the query. It returns fallback if the query does not have it.
func QueryBool(r *Request, name string, fallback bool) (bool, error) {
	switch r.URL.Query().Get(name) {
	case "":
		return fallback, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	default:
		return false, proto.FieldErrorf(name, "must be true or false")
	}
}

// ParseOneOf parses a value of a list in the query.
func ParseOneOf[T ~string](to *T, name, value string, list []T) error {
	*to = T(value)
	if !slices.Contains(list, *to) {
		return proto.FieldErrorf(name, "must be one of %v", list)
	}
	return nil
}

// maxFilter limits the values of filters, in bytes.
const maxFilter = 1024

// ParseText parses a text that a filter asks for.
func ParseText(to *string, name, value string) error {
	*to = value
	if value == "" || len(value) > maxFilter || !utf8.ValidString(value) {
		return proto.FieldErrorf(name, "must be 1 to %d bytes of UTF-8", maxFilter)
	}
	return nil
}

// ParseTime parses a time in the query.
func ParseTime(to *time.Time, name, value string) (err error) {
	if *to, err = time.Parse(time.RFC3339Nano, value); err != nil || to.IsZero() {
		return proto.FieldErrorf(name, "must be a time as in RFC 3339, such as 2026-11-23T20:00:00Z")
	}
	return nil
}

// BadCursor returns the error for a cursor that does not belong to the list.
func BadCursor() error {
	return proto.FieldErrorf("cursor", "must be what next_cursor had in the answer before")
}
