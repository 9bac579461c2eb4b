package main

import (
	"bufio"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// terminalInput reads lines from a terminal, one at a time and only when told to. What is typed meanwhile
// waits in the terminal.
type terminalInput struct {
	fd     int
	lines  chan inputLine
	wanted chan struct{}
}

// inputLine is a line that the user has typed.
type inputLine struct {
	text string
	at   time.Time // when it was read
	more bool      // whether further lines have arrived with it, as when text is pasted
	err  error
}

// pasteTime is how long further lines of a pasted text may take to arrive.
const pasteTime = 30 * time.Millisecond

func openTerminalInput(file *os.File) *terminalInput {
	in := &terminalInput{fd: int(file.Fd()), lines: make(chan inputLine), wanted: make(chan struct{}, 1)}
	go func() {
		r := bufio.NewReader(file)
		for range in.wanted {
			text, err := r.ReadString('\n')
			at := time.Now()
			more := err == nil && (r.Buffered() > 0 || in.ready(pasteTime))
			in.lines <- inputLine{strings.ToValidUTF8(strings.TrimSuffix(text, "\n"), "\ufffd"), at, more, err}
		}
	}()
	return in
}

// read makes the next line arrive in lines. It must not be called again before that.
func (in *terminalInput) read() { in.wanted <- struct{}{} }

// ready reports whether a line can be read within a time.
func (in *terminalInput) ready(within time.Duration) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(in.fd), Events: unix.POLLIN}}, int(within.Milliseconds()))
	return err == nil && n > 0
}

// discard discards what has been typed and not read.
func (in *terminalInput) discard() {
	_ = unix.IoctlSetInt(in.fd, unix.TCFLSH, unix.TCIFLUSH) // the terminal may be gone
}
