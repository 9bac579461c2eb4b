package proto

import (
	"errors"
	"fmt"
	"strings"
)

// ErrNotFound says that nothing of that name is known, or that its retention is over.
var ErrNotFound = errors.New("not found")

// ErrConflict says that somebody else changed the same thing first.
var ErrConflict = errors.New("changed by somebody else")

// ErrCorrupt says that bytes are not those that a digest or size names, or not those that were encrypted.
var ErrCorrupt = errors.New("corrupt")

// ErrExists says that there is something of that name already.
var ErrExists = errors.New("exists already")

// BoundError says that a sandbox profile cannot be removed because API keys are bound to it.
type BoundError struct {
	Profile string
	Keys    []string // their ids
}

func (e *BoundError) Error() string {
	const most = 3
	list := strings.Join(e.Keys[:min(len(e.Keys), most)], ", ")
	if more := len(e.Keys) - most; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Sprintf("sandbox %s has API keys bound to it: %s; revoke them first", e.Profile, list)
}

// What ends the context of a running execution.
var (
	ErrCancelled = errors.New("the execution was cancelled")
	ErrLost      = errors.New("the lease was lost")
)
