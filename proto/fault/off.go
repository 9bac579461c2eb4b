//go:build !faults

package fault

// Here is where the process dies if it was told to at this point.
func Here(Point) {}

// Planted reports whether the process is to have this bug.
func Planted(Bug) bool { return false }
