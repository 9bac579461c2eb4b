package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Of what is not ours this may be called: system calls as they are, and of the runtime
// what needs nothing of it.
var harmless = regexp.MustCompile(`^(?:` +
	`golang\.org/x/sys/unix\.RawSyscall6?|syscall\.RawSyscall6?|internal/runtime/syscall/linux\.Syscall6|` +
	`runtime\.(?:memmove|memclrNoHeapPointers|memequal|duff(?:copy|zero))|` +
	// Not called in fact: there is no collector that asks for it, and no end of the stack.
	`runtime\.(?:gcWriteBarrier[1-8]|wbMove|wbZero|morestack|morestack_noctxt)|` +
	// The end, as entry_amd64.s has it.
	`runtime\.panic\w*` +
	`)(?:\.abi0)?$`)

const ours = `github.com/bullpen-run/bullpen/`

// What is reached from the entry calls nothing that needs Go's runtime, or an
// initialised package.
func TestNothingNeedsTheRuntime(t *testing.T) {
	file := build(t, "-ldflags=-E main.entry")
	calls := callsIn(t, file)
	reached := []string{"main.entry.abi0"}
	for i := 0; i < len(reached); i++ {
		caller := reached[i]
		to, ok := calls[caller]
		if !ok {
			t.Errorf("%s is not in the program", caller)
		}
		for _, callee := range to {
			switch {
			case strings.HasPrefix(callee, "main.") || strings.HasPrefix(callee, ours):
				if !slices.Contains(reached, callee) {
					reached = append(reached, callee)
				}
			case !harmless.MatchString(callee):
				t.Errorf("%s calls %s", caller, callee)
			}
		}
	}
	for _, known := range []string{
		"main.confine", "main.spawn", "main.enter", "main.(*filter).install",
		ours + "worker/jail/wire.ParseOrder",
	} {
		if !slices.Contains(reached, known) {
			t.Errorf("%s is not reached: does this test read the program as it is?", known)
		}
	}
	// Packages are initialised by functions of these names, which only the runtime calls.
	initialises := regexp.MustCompile(`^(?:main|` + ours + `\S*)\.init(?:\.\d+)?$`)
	for name := range callsIn(t, build(t)) {
		if initialises.MatchString(name) {
			t.Errorf("%s would not be called", name)
		}
	}
}

// The test above finds what is wrong with the usual beginning of a program.
func TestCallsToTheRuntimeAreFound(t *testing.T) {
	for _, callee := range callsIn(t, build(t))["main.main"] {
		if !harmless.MatchString(callee) {
			return
		}
	}
	t.Error("a panic with a value needs nothing of the runtime")
}

func build(t *testing.T, flags ...string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "init")
	cmd := exec.CommandContext(t.Context(), "go", slices.Concat([]string{"build", "-o", file}, flags, []string{"."})...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return file
}

// callsIn returns what each function calls, or jumps to. Where that is not known before it
// runs it is "somewhere".
func callsIn(t *testing.T, file string) map[string][]string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "tool", "objdump", file).Output()
	if err != nil {
		t.Fatal(err)
	}
	call := regexp.MustCompile(`\s(CALL|JMP)\s(?:(\S+)\(SB\)|[^0]\S*|0x[0-9a-f]+\(\S*)\s*$`)
	calls := map[string][]string{}
	name := ""
	for line := range strings.Lines(string(out)) {
		if text, ok := strings.CutPrefix(line, "TEXT "); ok {
			name, _, _ = strings.Cut(text, "(SB)")
			calls[name] = nil
		} else if m := call.FindStringSubmatch(line); m != nil {
			switch {
			case m[2] != "" && m[2] != name:
				calls[name] = append(calls[name], m[2])
			case m[2] == "" && m[1] == "CALL": // a jump is that of a switch
				calls[name] = append(calls[name], "somewhere")
			}
		}
	}
	return calls
}
