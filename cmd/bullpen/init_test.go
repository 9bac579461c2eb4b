package main

import (
	"os/exec"
	"testing"
)

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
