//go:build amd64 || arm64

//nolint:gosec // the kernel gives pointers
package main

import (
	"unsafe"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// nobody is the goroutine that the whole init runs as, see entry_amd64.s. It is zero except for a
// word at its end, which only the entry uses. A real goroutine's descriptor is smaller.
var nobody [nobodySize]byte

const nobodySize = 1024

// entry is the first function of the init.
func entry()

// start is called by entry with the kernel's initial stack: the number of arguments and pointers to
// them.
func start(stack *uintptr) {
	var arguments [6][]byte
	argument := func(i int) **byte {
		return (**byte)(unsafe.Add(unsafe.Pointer(stack), uintptr(1+i)*unsafe.Sizeof(*stack)))
	}
	for i := range min(len(arguments), int(*stack)) {
		arg := *argument(i)
		n := 0
		for *(*byte)(unsafe.Add(unsafe.Pointer(arg), n)) != 0 {
			n++
		}
		arguments[i] = unsafe.Slice(arg, n)
	}
	kind := unsafe.String(unsafe.SliceData(arguments[1]), len(arguments[1]))
	if kind == wire.Limit && arguments[5] != nil {
		limit(arguments[2], arguments[3], arguments[4], &arguments[5][0], (*uintptr)(unsafe.Pointer(argument(6))))
	}
	if kind == wire.Nsjail && arguments[2] != nil {
		logError("execute nsjail", executeNsjail(&arguments[2][0], (*uintptr)(unsafe.Pointer(argument(3)))))
		exit(exitConfine)
	}
	if arguments[3] != nil {
		prepare(kind != wire.Zygote, arguments[2], arguments[3])
	}
	run(kind)
}

// No Go code uses these.
var (
	_ = entry
	_ = start
	_ = &nobody
)
