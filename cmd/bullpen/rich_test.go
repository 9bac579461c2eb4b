package main

import (
	"encoding/base64"
	"strings"
	"testing"
)

// Only terminals that are known to show pictures get any, in their protocol.
func TestGraphics(t *testing.T) {
	picture, err := base64.StdEncoding.DecodeString(stubPicture)
	if err != nil {
		t.Fatal(err)
	}
	for env, want := range map[string]string{
		"":                                      "",
		"TERM=xterm-256color":                   "",
		"TERM=xterm-kitty":                      "\x1b_G",
		"TERM=xterm-256color KITTY_WINDOW_ID=1": "\x1b_G",
		"TERM=tmux-256color KITTY_WINDOW_ID=1":  "",
		"TERM_PROGRAM=iTerm.app TMUX=x":         "",
		"TERM_PROGRAM=iTerm.app":                "\x1b]1337;File=",
		"LC_TERMINAL=iTerm2":                    "\x1b]1337;File=",
		"TERM=foot":                             "\x1bP0;1q",
	} {
		variables := map[string]string{}
		for field := range strings.FieldsSeq(env) {
			name, value, _ := strings.Cut(field, "=")
			variables[name] = value
		}
		g := graphicsOf(func(name string) string { return variables[name] })
		var shown strings.Builder
		if err := g.show(&shown, picture); err != nil {
			t.Errorf("%s: %v", env, err)
		}
		if !strings.HasPrefix(shown.String(), want) || (shown.Len() > 0) != (want != "") {
			t.Errorf("%s: %q", env, shown.String())
		}
		var nothing strings.Builder
		if err := g.show(&nothing, []byte("<svg/>")); err != nil || nothing.Len() > 0 {
			t.Errorf("%s: what is no picture: %v, %q", env, err, nothing.String())
		}
	}
}
