// Package filter is the system call filter that is added to nsjail's. It forbids what nsjail's
// policy language cannot express. It also forbids what nsjail's filter must allow, because a jail
// in which others are created needs it. Every program runs under both filters.
package filter

import (
	"encoding/binary"
	"errors"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets into the data that a filter sees (struct seccomp_data).
const (
	offsetNumber   = 0
	offsetArch     = 4
	offsetArgument = 16 // low half of the first argument
)

// x32 is the bit that marks system calls of the x32 entry. They have the same architecture as
// 64-bit calls and their own numbers. On other machines no number is that high.
const x32 = 0x4000_0000

// namespaces are the flags of clone(2) that create namespaces. unshare(2) has one more, which means
// something else to clone.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

const (
	kill    = uint32(unix.SECCOMP_RET_KILL_PROCESS)
	allow   = uint32(unix.SECCOMP_RET_ALLOW)
	eperm   = uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EPERM)
	einval  = uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EINVAL)
	always  = uint32(0xffff_ffff) // mask of a rule that ignores the argument
	reading = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
)

// rule rejects a system call depending on its first argument.
type rule struct {
	number uint32
	how    uint16 // BPF_JSET: any bit of value; BPF_JEQ: value
	value  uint32
	action uint32
}

// rules are the rejected calls. Installing another filter fails with EINVAL, as on a kernel without
// filters. Compiled filters count against a limit of the whole host (net.core.bpf_jit_limit). A few
// programs could exhaust it, and no jail could start.
var rules = []rule{ // read only
	{unix.SYS_MOUNT, unix.BPF_JSET, always, eperm},
	{unix.SYS_CLONE, unix.BPF_JSET, namespaces, eperm},
	{unix.SYS_UNSHARE, unix.BPF_JSET, namespaces | unix.CLONE_NEWTIME, eperm},
	{unix.SYS_SECCOMP, unix.BPF_JEQ, unix.SECCOMP_SET_MODE_FILTER, einval},
	{unix.SYS_PRCTL, unix.BPF_JEQ, unix.PR_SET_SECCOMP, einval},
}

// program is a filter under construction. It has a fixed size because the init cannot allocate.
type program struct {
	code [64]unix.SockFilter
	n    int
}

func (p *program) add(code uint16, k uint32, yes, no uint8) {
	p.code[p.n] = unix.SockFilter{Code: code, Jt: yes, Jf: no, K: k}
	p.n++
}

func (p *program) load(offset uint32) { p.add(reading, offset, 0, 0) }

func (p *program) jump(how uint16, k uint32, yes, no uint8) {
	p.add(unix.BPF_JMP|how|unix.BPF_K, k, yes, no)
}

func (p *program) end(action uint32) { p.add(unix.BPF_RET|unix.BPF_K, action, 0, 0) }

// write builds the filter in p. It returns false if there is no filter for this machine. Calls
// through the 32-bit and the x32 entry kill the process, because they would bypass a list of 64-bit
// numbers. Number -1 is allowed: the kernel knows no such call under any entry.
func (p *program) write() bool {
	var arch uint32
	switch runtime.GOARCH {
	case "amd64":
		arch = unix.AUDIT_ARCH_X86_64
	case "arm64":
		arch = unix.AUDIT_ARCH_AARCH64
	default:
		return false
	}
	p.load(offsetArch)
	p.jump(unix.BPF_JEQ, arch, 1, 0)
	p.end(kill)
	p.load(offsetNumber)
	p.jump(unix.BPF_JEQ, 0xffff_ffff, 0, 1)
	p.end(allow)
	p.jump(unix.BPF_JGE, x32, 0, 1)
	p.end(kill)
	for _, r := range rules {
		if r.value == always {
			p.jump(unix.BPF_JEQ, r.number, 0, 1)
			p.end(r.action)
			continue
		}
		p.jump(unix.BPF_JEQ, r.number, 0, 4)
		p.load(offsetArgument)
		p.jump(r.how, r.value, 0, 1)
		p.end(r.action)
		p.load(offsetNumber)
	}
	p.end(allow)
	return true
}

// Bytes returns the filter in the memory layout that this machine's kernel expects.
func Bytes() ([]byte, error) {
	var p program
	if !p.write() {
		return nil, errors.New("no filter of system calls for " + runtime.GOARCH)
	}
	b := make([]byte, 0, 8*p.n)
	for _, i := range p.code[:p.n] {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b, nil
}

// Install puts this thread, and every process it starts, under the filter. Like the whole init, it
// does not use the Go runtime. The kernel needs CONFIG_SECCOMP_FILTER.
func Install() unix.Errno {
	var p program
	if !p.write() {
		return unix.ENOSYS
	}
	whole := unix.SockFprog{Len: uint16(p.n), Filter: &p.code[0]}
	_, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&whole)), 0, 0, 0) //nolint:gosec // the kernel reads a struct
	return errno
}
