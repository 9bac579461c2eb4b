package proto

import "errors"

// ErrNotFound says that nothing of that name is known, or that its retention is over.
var ErrNotFound = errors.New("not found")

// ErrConflict says that somebody else changed the same thing first.
var ErrConflict = errors.New("changed by somebody else")

// What ends the context of a running execution.
var (
	ErrCancelled = errors.New("the execution was cancelled")
	ErrLost      = errors.New("the lease was lost")
)
