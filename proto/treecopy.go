package proto

import "fmt"

// TreeCopy copies parts of homes into the home of an unlocked thread. Files keep their modes,
// times, attributes and holes; links and empty directories are copied as they are.
type TreeCopy struct {
	Parts []TreePart
	New   bool  // the thread must not exist; it is created if there is anything to copy
	Most  Space // limit of the copied parts together
	Home  Space // limit of the home after the copy
}

// TreePart is the part of a thread's current home that patterns select.
type TreePart struct {
	Thread string
	Paths  []string // patterns, see [CheckPathPattern]
	Dir    string   // the directory to copy to; empty for the home
}

// CopyError refuses a copy that is too large.
type CopyError struct{ Size, Most Space }

func (e *CopyError) Error() string {
	return fmt.Sprintf("%d files and directories with %d bytes are more than the %d with %s that can be copied; "+
		"keep fewer",
		e.Size.Files, e.Size.Bytes, e.Most.Files, Bytes(e.Most.Bytes))
}

// Conflict marks the error's text as meant for the client.
func (*CopyError) Conflict() {}
