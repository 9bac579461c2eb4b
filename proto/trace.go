package proto

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
)

// TraceID identifies an execution: "trc_" and 20 characters of base64url for 15 random bytes.
type TraceID string

const (
	tracePrefix  = "trc_"
	traceRandom  = 15
	traceEncoded = 20
	// otelPrefix is the fixed first byte of OpenTelemetry trace ids. It is not zero, so that the id
	// is always valid.
	otelPrefix = 0xb1
)

// ErrBadTraceID is returned for a string that is not a trace id.
var ErrBadTraceID = errors.New(`a trace id is "trc_" and 20 characters of A-Z a-z 0-9 _ -`)

// NewTraceID returns a random trace id.
func NewTraceID() TraceID {
	var b [traceRandom]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never returns an error since Go 1.24
	return TraceID(tracePrefix + base64.RawURLEncoding.EncodeToString(b[:]))
}

// DerivedTraceID returns the trace id that belongs to a name.
func DerivedTraceID(name string) TraceID {
	sum := sha256.Sum256([]byte(name))
	return TraceID(tracePrefix + base64.RawURLEncoding.EncodeToString(sum[:traceRandom]))
}

// ParseTraceID returns s as a trace id, or [ErrBadTraceID].
func ParseTraceID(s string) (TraceID, error) {
	if len(s) != len(tracePrefix)+traceEncoded || s[:len(tracePrefix)] != tracePrefix {
		return "", ErrBadTraceID
	}
	for _, c := range []byte(s[len(tracePrefix):]) { // the decoder would ignore line breaks
		if (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return "", ErrBadTraceID
		}
	}
	return TraceID(s), nil
}

// OTel returns the OpenTelemetry trace id of t: one fixed byte followed by the 15 random ones.
func (t TraceID) OTel() ([16]byte, error) {
	var id [16]byte
	if _, err := ParseTraceID(string(t)); err != nil {
		return id, fmt.Errorf("trace id %q: %w", string(t), err)
	}
	id[0] = otelPrefix
	_, err := base64.RawURLEncoding.Decode(id[1:], []byte(t[len(tracePrefix):]))
	return id, err
}

// TraceIDFromOTel is the inverse of [TraceID.OTel]; ok is false for an id that is not from bullpen.
func TraceIDFromOTel(id [16]byte) (t TraceID, ok bool) {
	if id[0] != otelPrefix {
		return "", false
	}
	return TraceID(tracePrefix + base64.RawURLEncoding.EncodeToString(id[1:])), true
}
