//go:build faults

package fault

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// TestMain turns this test binary into a program that passes a point three times and prints that.
func TestMain(m *testing.M) {
	if os.Getenv("FAULT_TEST_CHILD") == "" {
		os.Exit(m.Run())
	}
	for i := range 3 {
		Here(AfterAssign)
		fmt.Println("passed", i+1)
	}
}

func child(t *testing.T, env ...string) (stdout, stderr string, state *os.ProcessState) {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(env, "FAULT_TEST_CHILD=1"), &out, &errs
	if err := cmd.Run(); err != nil {
		if _, ended := errors.AsType[*exec.ExitError](err); !ended {
			t.Fatal(err)
		}
	}
	return out.String(), errs.String(), cmd.ProcessState
}

func TestCrash(t *testing.T) {
	for env, want := range map[string]string{
		"BULLPEN_CRASH_AT=after_assign":   "",
		"BULLPEN_CRASH_AT=after_assign:1": "",
		"BULLPEN_CRASH_AT=after_assign:3": "passed 1\npassed 2\n",
	} {
		stdout, _, state := child(t, env)
		status, ok := state.Sys().(syscall.WaitStatus)
		if !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL || stdout != want {
			t.Errorf("%s: %s, printed %q; want it killed and %q", env, state, stdout, want)
		}
	}
}

func TestNoCrash(t *testing.T) {
	const passed = "passed 1\npassed 2\npassed 3\n"
	for env, want := range map[string]string{
		"BULLPEN_CRASH_AT=":                           passed,
		"BULLPEN_CRASH_AT=after_assign:4":             passed,
		"BULLPEN_CRASH_AT=after_commit_before_result": passed,
	} {
		if stdout, stderr, state := child(t, env); stdout != want || stderr != "" || !state.Success() {
			t.Errorf("%s: %s, printed %q and %q; want %q", env, state, stdout, stderr, want)
		}
	}
}

func TestUnknown(t *testing.T) {
	for _, env := range []string{
		"BULLPEN_CRASH_AT=after_lunch", "BULLPEN_CRASH_AT=after_assign:0", "BULLPEN_CRASH_AT=after_assign:",
		"BULLPEN_CRASH_AT=:1",
	} {
		if stdout, stderr, state := child(t, env); stdout != "" || !strings.Contains(stderr, env+": ") ||
			state.ExitCode() != 2 {
			t.Errorf("%s: %s, printed %q and %q; want exit code 2 and a message", env, state, stdout, stderr)
		}
	}
}
