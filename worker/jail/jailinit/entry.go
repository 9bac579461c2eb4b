//go:build amd64 || arm64

//nolint:gosec // the kernel gives pointers
package main

import "unsafe"

// nobody is the goroutine that all of the init runs as, see entry_amd64.s: zero, but
// for a word at its end, which is for the entry alone. A real one is smaller.
var nobody [nobodySize]byte

const nobodySize = 1024

// entry is the first of the init.
func entry()

// start is called by entry with what the kernel has put on the stack: the number of arguments,
// and pointers to them.
func start(stack *uintptr) {
	kind := ""
	if *stack > 1 {
		arg := *(**byte)(unsafe.Add(unsafe.Pointer(stack), 2*unsafe.Sizeof(*stack)))
		n := 0
		for *(*byte)(unsafe.Add(unsafe.Pointer(arg), n)) != 0 {
			n++
		}
		kind = unsafe.String(arg, n)
	}
	run(kind)
}

// Nothing that is written in Go makes use of these.
var (
	_ = entry
	_ = start
	_ = &nobody
)
