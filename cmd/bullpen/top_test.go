package main

import (
	"io"
	"strings"
	"testing"
)

// The screen has every section and what the server does not have, each section can fill it, and it
// leaves the terminal as it was.
func TestTop(t *testing.T) {
	screen := openTerminal(t)
	cmd := bullpen(t, nil, "top")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = screen.File, screen.File, screen.File
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"1 Pools, with the queues of all organisations", "2 Workers", "node-1", "3 Executions",
		"TRACE", "4 Webhooks",
	} {
		screen.await(t, text)
	}
	typed := func(keys string) {
		if _, err := io.WriteString(screen.keyboard, keys); err != nil {
			t.Fatal(err)
		}
	}
	typed(" ")
	screen.await(t, "paused")
	typed("2q")
	_ = cmd.Wait()
	shown := screen.content(t)
	if code := cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exited with %d: %q", code, shown)
	}
	if !strings.Contains(shown, "\x1b[?1049h") || !strings.Contains(shown, "\x1b[?1049l") {
		t.Errorf("not on a screen of its own: %q", shown)
	}
}

func TestTopNeedsATerminal(t *testing.T) {
	out, err := bullpen(t, nil, "top").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "top needs a terminal") {
		t.Errorf("%v: %s", err, out)
	}
}
