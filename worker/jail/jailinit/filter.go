package main

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// filter is a system call filter. It has a fixed size because the init cannot allocate.
type filter struct {
	code [1024]unix.SockFilter
	size int // bytes
}

// programFilter is the filter of programs.
var programFilter filter

// load reads the filter from wire.FilterFD and closes that. In a fork of the init, which has the
// filter already, it does nothing.
func (f *filter) load() unix.Errno {
	if f.size != 0 {
		return 0
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(&f.code)), unsafe.Sizeof(f.code)) //nolint:gosec // the kernel writes structs
	n, errno := readAt(wire.FilterFD, b, 0)
	if errno != 0 {
		return errno
	}
	f.size = n
	closeFD(wire.FilterFD)
	return 0
}

// tryFilters checks that the kernel supports filters, before there is a program to confine.
func tryFilters() unix.Errno {
	action := uint32(unix.SECCOMP_RET_ERRNO)
	return call(unix.SYS_SECCOMP, unix.SECCOMP_GET_ACTION_AVAIL, 0,
		uintptr(unsafe.Pointer(&action))) //nolint:gosec // the kernel reads a number
}

// install puts this thread, and every process it starts, under the filter. It returns a descriptor
// on which calls are passed on to a supervisor, or -1 if another
// filter of this process has such a descriptor, because only one can: then these calls fail with
// ENOSYS. The kernel refuses a filter that is empty or cut off.
func (f *filter) install() (listener int, errno unix.Errno) {
	whole := unix.SockFprog{Len: uint16(f.size / int(unsafe.Sizeof(f.code[0]))), Filter: &f.code[0]}
	for _, flags := range [...]uintptr{unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, 0} {
		var fd uintptr
		fd, _, errno = unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags,
			uintptr(unsafe.Pointer(&whole))) //nolint:gosec // the kernel reads a struct
		if errno == 0 && flags != 0 {
			return int(fd), 0
		}
		if errno != unix.EBUSY {
			break
		}
	}
	return -1, errno
}
