package filter

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/doctest"
)

// filteredEnv makes the test program the child of TestCallsThatAreNotAllowed.
const filteredEnv = "BULLPEN_TEST_FILTERED"

func TestMain(m *testing.M) {
	if os.Getenv(filteredEnv) != "" {
		filtered()
		return
	}
	os.Exit(m.Run())
}

// TestNumbers checks the table against the kernel's numbers as golang.org/x/sys has them, and that a
// call is in one list only.
func TestNumbers(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	for arch, number := range map[string]func(call) int{
		"amd64": func(c call) int { return c.amd64 }, "arm64": func(c call) int { return c.arm64 },
	} {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix/zsysnum_linux_"+arch+".go"))
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]int{}
		for _, m := range regexp.MustCompile(`SYS_(\w+)\s*=\s*(\d+)`).FindAllStringSubmatch(string(text), -1) {
			want[strings.ToLower(m[1])], _ = strconv.Atoi(m[2])
		}
		seen := map[string]bool{}
		for _, c := range slices.Concat(allowed, addable, denied, attacks) {
			n, ok := want[c.name]
			if !ok {
				n = none
			}
			if number(c) != n {
				t.Errorf("%s: number %d of %s, want %d", arch, number(c), c.name, n)
			}
			if seen[c.name] {
				t.Errorf("%s is listed twice", c.name)
			}
			seen[c.name] = true
		}
	}
	for name := range rules {
		if !slices.ContainsFunc(allowed, func(c call) bool { return c.name == name }) {
			t.Errorf("a rule for %s, which is not allowed", name)
		}
	}
}

// TestCallsThatAreNotAllowed makes all calls that no program may make, listed and unlisted, under
// the filter, except those that end the program.
func TestCallsThatAreNotAllowed(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), filteredEnv+"=1")
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "done\n" {
		t.Errorf("%v: %s", err, out)
	}
}

// filtered prints calls that do not fail as they should.
func filtered() {
	runtime.LockOSThread()
	code, err := Bytes(nil)
	if err != nil {
		panic(err)
	}
	if err := syscall.Setuid(65534); err != nil { // harmless, should the filter let a call through
		panic(err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	program := unix.SockFprog{Len: uint16(len(code) / 8), Filter: (*unix.SockFilter)(unsafe.Pointer(&code[0]))}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0,
		0); err != nil {
		panic(err)
	}
	want := map[int]unix.Errno{-1: unix.ENOSYS}
	for n := range 1024 {
		want[n] = unix.ENOSYS
	}
	for _, c := range denied {
		want[numberHere(c)] = unix.EPERM
	}
	for _, c := range slices.Concat(allowed, attacks) {
		delete(want, numberHere(c))
	}
	want[-1] = unix.ENOSYS // of calls that this architecture lacks
	for _, n := range slices.Sorted(maps.Keys(want)) {
		if _, _, errno := unix.RawSyscall6(uintptr(n), 0, 0, 0, 0, 0, 0); errno != want[n] {
			fmt.Printf("call %d: %v, want %v\n", n, errno, want[n])
		}
	}
	fmt.Println("done")
}

func numberHere(c call) int {
	if runtime.GOARCH == "arm64" {
		return c.arm64
	}
	return c.amd64
}

// TestAddedCalls checks that a filter can add the calls that profiles can name, and no others.
func TestAddedCalls(t *testing.T) {
	if _, err := Bytes(proto.AddableSystemCalls()); err != nil {
		t.Error(err)
	}
	if len(addable) != len(proto.AddableSystemCalls()) {
		t.Errorf("%d calls can be added, and profiles can name %d", len(addable), len(proto.AddableSystemCalls()))
	}
	for _, c := range slices.Concat(allowed, denied, attacks) {
		if _, err := Bytes([]string{c.name}); err == nil {
			t.Errorf("%s can be added", c.name)
		}
	}
}

// TestSystemCallTable checks that the table in docs/reference/system-calls.md matches the lists; `make docs`
// rewrites it.
func TestSystemCallTable(t *testing.T) {
	var b strings.Builder
	b.WriteString("\n| calls | in a sandbox |\n|---|---|\n")
	row := func(does string, calls []call) {
		var names []string
		for _, c := range calls {
			names = append(names, "`"+c.name+"`")
		}
		_, _ = fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(names, " "), does)
	}
	row("allowed", slices.DeleteFunc(slices.Clone(allowed), func(c call) bool { return rules[c.name].about != "" }))
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		row("allowed; refused or changed: "+rules[name].about, []call{{name: name}})
	}
	row("`ENOSYS`, unless the profile's `system_calls` adds it", addable)
	row("`EPERM`", denied)
	row("ends the program: `seccomp`", attacks)
	b.WriteString("| all others, `clone3` and calls of later kernels among them | `ENOSYS`, as on a kernel without " +
		"them |\n\n")
	doctest.Compare(t, "../../../docs/reference/system-calls.md", "<!-- system calls: written by `make docs` -->\n",
		"<!-- end of system calls -->\n", b.String())
}
