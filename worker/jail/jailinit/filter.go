package main

import (
	"errors"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets in what a filter sees (struct seccomp_data).
const (
	offsetNumber   = 0
	offsetArch     = 4
	offsetArgument = 16 // low half of the first
)

// x32 is the bit that marks system calls of the x32 entry, which have the same
// architecture as 64-bit ones and numbers of their own. On other machines no
// number is that high.
const x32 = 0x4000_0000

// installFilter adds to nsjail's filter what its language cannot say, for this
// thread and the program. Calls through the 32-bit and the x32 entry kill: they
// would go round a list of 64-bit numbers. Number -1 is let through, as the kernel
// knows no such call under any entry. Filters of the program's own are refused (as
// by a kernel without them, EINVAL): what they compile to counts against a limit of
// the whole host (net.core.bpf_jit_limit), and a few programs could use it up, so
// that no jail starts.
func installFilter() error {
	arch, ok := map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[runtime.GOARCH]
	if !ok {
		return errors.New("no filter of system calls for " + runtime.GOARCH)
	}
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	jump := func(how uint16, k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | how | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	end := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	filter := [...]unix.SockFilter{
		load(offsetArch),
		jump(unix.BPF_JEQ, arch, 0, 10), // else kill
		load(offsetNumber),
		jump(unix.BPF_JEQ, 0xffff_ffff, 7, 0), // allow
		jump(unix.BPF_JGE, x32, 7, 0),         // kill
		jump(unix.BPF_JEQ, unix.SYS_SECCOMP, 3, 0),
		jump(unix.BPF_JEQ, unix.SYS_PRCTL, 0, 4), // else allow
		load(offsetArgument),
		jump(unix.BPF_JEQ, unix.PR_SET_SECCOMP, 4, 2), // refuse, else allow
		load(offsetArgument),
		jump(unix.BPF_JEQ, unix.SECCOMP_SET_MODE_FILTER, 2, 0), // refuse, else allow
		end(unix.SECCOMP_RET_ALLOW),
		end(unix.SECCOMP_RET_KILL_PROCESS),
		end(unix.SECCOMP_RET_ERRNO | uint32(unix.EINVAL)),
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0) //nolint:gosec // the kernel reads a struct
	if err != nil {
		return errors.New("filter system calls (the kernel needs CONFIG_SECCOMP_FILTER): " + err.Error())
	}
	return nil
}
