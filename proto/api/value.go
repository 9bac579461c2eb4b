package api

import (
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Time is a point in time. Its JSON form is RFC 3339 in UTC with milliseconds.
type Time struct{ time.Time }

// MarshalJSON implements [json.Marshaler].
func (t Time) MarshalJSON() ([]byte, error) {
	return []byte(`"` + t.UTC().Format(proto.TimeLayout) + `"`), nil
}

// optional returns nil for a zero value.
func optional[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// optionalTime returns nil for the zero time.
func optionalTime(t time.Time) *Time {
	if t.IsZero() {
		return nil
	}
	return &Time{t}
}

// orEmpty returns m, or an empty map if it is nil.
func orEmpty[V any](m map[string]V) map[string]V {
	if m == nil {
		return map[string]V{}
	}
	return m
}
