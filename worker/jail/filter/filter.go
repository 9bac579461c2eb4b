// Package filter is the filter of system calls that is added to nsjail's: what the
// language of that cannot say, and what it cannot forbid since it is needed while
// a jail is made from within another. Every program is under both.
package filter

import (
	"encoding/binary"
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

// namespaces are the flags of clone(2) that make namespaces. Of unshare(2) there is
// one more, which means something else to clone.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

const (
	kill    = uint32(unix.SECCOMP_RET_KILL_PROCESS)
	allow   = uint32(unix.SECCOMP_RET_ALLOW)
	eperm   = uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EPERM)
	einval  = uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EINVAL)
	always  = uint32(0xffff_ffff) // as a mask of rule: whatever the argument
	reading = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
)

// rule refuses a system call by its first argument.
type rule struct {
	number uint32
	how    uint16 // BPF_JSET: any bit of value; BPF_JEQ: value
	value  uint32
	action uint32
}

// rules are what is refused. Filters of the program's own are refused (as by a kernel
// without them, EINVAL): what they compile to counts against a limit of the whole
// host (net.core.bpf_jit_limit), and a few programs could use it up, so that no jail
// starts.
var rules = []rule{ // read only
	{unix.SYS_MOUNT, unix.BPF_JSET, always, eperm},
	{unix.SYS_CLONE, unix.BPF_JSET, namespaces, eperm},
	{unix.SYS_UNSHARE, unix.BPF_JSET, namespaces | unix.CLONE_NEWTIME, eperm},
	{unix.SYS_SECCOMP, unix.BPF_JEQ, unix.SECCOMP_SET_MODE_FILTER, einval},
	{unix.SYS_PRCTL, unix.BPF_JEQ, unix.PR_SET_SECCOMP, einval},
}

// program is a filter that is being written. It has its room in itself: the init has
// nowhere to allocate.
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

// write makes p the filter, and is false where there is none for this machine. Calls
// through the 32-bit and the x32 entry kill: they would go round a list of 64-bit
// numbers. Number -1 is let through, as the kernel knows no such call under any entry.
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

// Bytes is the filter as it lies in memory for the kernel of this machine.
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

// Install puts this thread, and what it starts, under the filter. It does without the
// runtime, as all of the init does. The kernel needs CONFIG_SECCOMP_FILTER.
func Install() unix.Errno {
	var p program
	if !p.write() {
		return unix.ENOSYS
	}
	whole := unix.SockFprog{Len: uint16(p.n), Filter: &p.code[0]}
	_, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&whole)), 0, 0, 0) //nolint:gosec // the kernel reads a struct
	return errno
}
