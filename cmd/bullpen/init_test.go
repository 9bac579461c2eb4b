package main

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// On a terminal, bullpen init asks what is wanted, until the answer is yes or no.
func TestInitAsks(t *testing.T) {
	for _, c := range []struct {
		answers        []string
		code           int
		printed, shown string
	}{
		{[]string{"n", "maybe", "y", ""}, exitOK, "export E2B_API_KEY=", "Next, a first E2B sandbox"},
		{[]string{"", "no", "N"}, exitFailure, "", "nothing was chosen"},
	} {
		screen, out := openTerminal(t), new(bytes.Buffer)
		cmd := bullpen(t, nil, "init", "--image", "tiny")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = screen.File, out, screen.File
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for i, answer := range c.answers {
			screen.awaitCount(t, "[y/N] ", i+1)
			if _, err := fmt.Fprintln(screen.keyboard, answer); err != nil {
				t.Fatal(err)
			}
		}
		_ = cmd.Wait() // its exit code follows
		shown := screen.content(t)
		if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(out.String(), c.printed) ||
			!strings.Contains(shown, c.shown) {
			t.Errorf("%q: exit code %d, printed %q, shown %q", c.answers, code, out, shown)
		}
	}
}

// What a server answers is not evaluated by the shell that evaluates the output of bullpen init.
func TestShellWord(t *testing.T) {
	for _, text := range []string{
		"sk-local-abc_D", "https://[::1]:8443/?a=b", "$(echo x)", "`echo x`", "a;echo x", "it's", "a b", `\`, "",
	} {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", "export A="+shellWord(text)+`; printf %s "$A"`).Output()
		if err != nil || string(out) != text {
			t.Errorf("%q is %q, %v", text, out, err)
		}
	}
	if got := shellWord("https://bullpen.example.com"); got != "https://bullpen.example.com" {
		t.Error(got)
	}
}
