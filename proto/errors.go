package proto

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// FieldError names the invalid field of a request and states what it must be.
type FieldError struct {
	Field   string // as the client wrote it; "body" for the request as a whole
	Message string // a sentence that starts with the field's name
}

func (e *FieldError) Error() string { return e.Message }

// FieldErrorf returns a [FieldError] whose message is the field's name and the formatted text.
func FieldErrorf(field, format string, args ...any) *FieldError {
	return &FieldError{Field: field, Message: field + " " + fmt.Sprintf(format, args...)}
}

// Shorten truncates a name chosen by a client so that it fits into a message.
func Shorten(name string) string {
	const most = 64
	if len(name) <= most {
		return name
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(name[cut]) {
		cut--
	}
	return name[:cut] + "…"
}

// ListSome formats the first few names for a message, with the number of the rest.
func ListSome(names []string) string {
	const most = 3
	list := strings.Join(names[:min(len(names), most)], ", ")
	if more := len(names) - most; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return list
}

// QuotaError is returned if an organisation has reached a quota.
type QuotaError struct {
	What  string // in the plural
	Limit int64
}

func (e *QuotaError) Error() string {
	return fmt.Sprintf("%s are limited to %d for each organisation; remove some that are not needed any more",
		e.What, e.Limit)
}

// Conflict marks the error's text as meant for the client.
func (*QuotaError) Conflict() {}

// PendingUploadsError is returned if an organisation has begun to upload too much in parts.
type PendingUploadsError struct {
	Uploads int   // how many an organisation may have
	Bytes   int64 // of all of them
}

func (e *PendingUploadsError) Error() string {
	return fmt.Sprintf("uploads in parts that are not complete are limited to %d with %d bytes together for each "+
		"organisation; complete or remove some, or wait a day until the oldest are gone", e.Uploads, e.Bytes)
}

// Conflict marks the error's text as meant for the client.
func (*PendingUploadsError) Conflict() {}

// ErrNotFound is returned if the name does not exist or its retention has expired.
var ErrNotFound = errors.New("not found")

// ErrConflict is returned if another process changed the object first.
var ErrConflict = errors.New("changed by somebody else")

// ErrCorrupt is returned if bytes do not match their digest or size, or fail to decrypt.
var ErrCorrupt = errors.New("corrupt")

// ErrExists is returned if something has that name already.
var ErrExists = errors.New("exists already")

// LastKeyError is returned if no API key of a global administrator would be left.
type LastKeyError struct{ Key string }

func (e *LastKeyError) Error() string {
	return fmt.Sprintf("API key %s is the last one of a global administrator; create another one first", e.Key)
}

// Conflict marks the error's text as meant for the client.
func (e *LastKeyError) Conflict() {}

// BoundError is returned if a sandbox profile cannot be removed because API keys are bound to it, or
// their requests may choose it.
type BoundError struct {
	Profile string
	Keys    []string // their ids
}

func (e *BoundError) Error() string {
	return fmt.Sprintf("profile %s has API keys bound to it: %s; revoke them first, or remove it from their profiles",
		e.Profile, ListSome(e.Keys))
}

// Conflict marks the error's text as meant for the client.
func (*BoundError) Conflict() {}

// ErrLost is the cause that cancels the context of a running execution after its lease was lost.
var ErrLost = errors.New("the lease was lost")
