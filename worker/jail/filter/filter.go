// Package filter builds the system call filter that every program runs under: a list of allowed
// calls, with conditions on the arguments of some. A jail's init, and a zygote, run without it.
package filter

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// Offsets into the data that a filter sees (struct seccomp_data).
const (
	offsetNumber    = 0
	offsetArch      = 4
	offsetArguments = 16 // 8 bytes each, little-endian
)

// x32 is the bit that marks system calls of the x32 entry. They have the same architecture as
// 64-bit calls and their own numbers. On other machines no number is that high.
const x32 = 0x4000_0000

// noNumber is the number -1. The kernel knows no such call under any entry.
const noNumber = 0xffff_ffff

const (
	allow  = uint32(unix.SECCOMP_RET_ALLOW)
	notify = uint32(unix.SECCOMP_RET_USER_NOTIF) // the init answers, or ends the program
)

func fail(errno unix.Errno) uint32 { return uint32(unix.SECCOMP_RET_ERRNO) | uint32(errno) }

// block is the filter's action for the numbers from first on.
type block struct {
	first uint32
	code  []unix.SockFilter
}

// Bytes returns the filter in the memory layout that this machine's kernel expects. It also allows
// the added calls, and returns an error if a profile cannot add one of them.
func Bytes(added []string) ([]byte, error) {
	var arch uint32
	number := func(c call) int { return c.amd64 }
	switch runtime.GOARCH {
	case "amd64":
		arch = unix.AUDIT_ARCH_X86_64
	case "arm64":
		arch = unix.AUDIT_ARCH_AARCH64
		number = func(c call) int { return c.arm64 }
	default:
		return nil, errors.New("no filter of system calls for " + runtime.GOARCH)
	}
	also := make([]call, 0, len(added))
	for _, name := range added {
		i := slices.IndexFunc(addable, func(c call) bool { return c.name == name })
		if i < 0 {
			return nil, fmt.Errorf("the system call %s cannot be allowed by a profile: leave it out of system_calls", name)
		}
		also = append(also, addable[i])
	}
	var b []byte
	for _, i := range build(arch, number, also) {
		b = binary.NativeEndian.AppendUint16(b, i.Code)
		b = append(b, i.Jt, i.Jf)
		b = binary.NativeEndian.AppendUint32(b, i.K)
	}
	return b, nil
}

// build returns the filter, which also allows the calls of also. Calls through the 32-bit and the
// x32 entry are attacks, because they
// would bypass a list of 64-bit numbers.
func build(arch uint32, number func(call) int, also []call) []unix.SockFilter {
	known := []block{{x32, end(notify)}, {noNumber, end(fail(unix.ENOSYS))}}
	add := func(calls []call, code func(name string) []unix.SockFilter) {
		for _, c := range calls {
			if n := number(c); n != none {
				known = append(known, block{uint32(n), code(c.name)})
			}
		}
	}
	add(allowed, func(name string) []unix.SockFilter { return conditional(rules[name].clauses) })
	add(also, func(string) []unix.SockFilter { return end(allow) })
	add(denied, func(string) []unix.SockFilter { return end(fail(unix.EPERM)) })
	add(attacks, func(string) []unix.SockFilter { return end(notify) })
	slices.SortFunc(known, func(a, b block) int { return cmp.Compare(a.first, b.first) })
	var all []block // of all numbers; neighbours that do the same are joined
	next := uint32(0)
	join := func(b block) {
		if len(all) == 0 || !slices.Equal(all[len(all)-1].code, b.code) {
			all = append(all, b)
		}
	}
	for _, b := range known {
		if b.first != next {
			join(block{next, end(fail(unix.ENOSYS))})
		}
		join(b)
		if next = b.first + 1; b.first == x32 { // up to noNumber
			next = noNumber
		}
	}
	return slices.Concat([]unix.SockFilter{
		load(offsetArch), jump(unix.BPF_JEQ, arch, 1, 0), end(notify)[0], load(offsetNumber),
	}, search(all))
}

// search returns a binary search for the number that is loaded. Jumps on a condition reach 255
// instructions only.
func search(all []block) []unix.SockFilter {
	if len(all) == 1 {
		return all[0].code
	}
	half := len(all) / 2
	low := search(all[:half])
	return slices.Concat([]unix.SockFilter{
		jump(unix.BPF_JGE, all[half].first, 0, 1),
		{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(len(low))},
	}, low, search(all[half:]))
}

// conditional returns the code for an allowed call. The first clause whose tests all hold decides.
func conditional(clauses []clause) []unix.SockFilter {
	var code []unix.SockFilter
	for _, c := range clauses {
		code = append(code, c.code()...)
	}
	return append(code, end(allow)...)
}

func (c clause) code() []unix.SockFilter {
	size := 1 // its end
	for _, t := range c.tests {
		size += len(t.code(0))
	}
	var code []unix.SockFilter
	for _, t := range c.tests {
		code = append(code, t.code(size-len(code)-len(t.code(0)))...)
	}
	return append(code, end(c.action)...)
}

// code skips the given number of following instructions if the test fails.
func (t test) code(skip int) []unix.SockFilter {
	code := []unix.SockFilter{load(offsetArguments + 8*t.argument)}
	if len(t.values) == 0 {
		return append(code, jump(unix.BPF_JSET, t.mask, 0, uint8(skip)))
	}
	if t.mask != whole {
		code = append(code, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: t.mask})
	}
	for i, value := range t.values {
		left := uint8(len(t.values) - i - 1)
		otherwise := uint8(0)
		if left == 0 {
			otherwise = uint8(skip)
		}
		code = append(code, jump(unix.BPF_JEQ, value, left, otherwise))
	}
	return code
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

func jump(how uint16, k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | how | unix.BPF_K, K: k, Jt: yes, Jf: no}
}

func end(action uint32) []unix.SockFilter {
	return []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: action}}
}
