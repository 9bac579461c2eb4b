package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// terminal is a pseudo-terminal of 80 columns.
type terminal struct {
	*os.File               // what a program has
	keyboard io.Writer     // what is typed
	shown    afterWrite    // what was shown so far
	change   chan struct{} // has an entry after a change
	closed   chan struct{} // closed when no program has the terminal any more
}

func openTerminal(t *testing.T) *terminal {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fd := int(screen.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &terminal{File: file, keyboard: screen, change: make(chan struct{}, 1), closed: make(chan struct{})}
	s.shown.f = func() {
		select {
		case s.change <- struct{}{}:
		default:
		}
	}
	go func() {
		defer close(s.closed)
		_, _ = io.Copy(&s.shown, screen) // ends with EIO
		_ = screen.Close()
	}()
	t.Cleanup(func() { _ = file.Close() })
	return s
}

// await waits until text was shown, a minute at most.
func (s *terminal) await(t *testing.T, text string) {
	t.Helper()
	s.awaitCount(t, text, 1)
}

// awaitCount waits until text was shown n times, a minute at most.
func (s *terminal) awaitCount(t *testing.T, text string, n int) {
	t.Helper()
	limit := time.After(time.Minute)
	for strings.Count(s.shown.String(), text) < n {
		select {
		case <-s.change:
		case <-limit:
			t.Errorf("%q was not shown: %q", text, s.shown.String())
			return
		}
	}
}

// content returns what was shown, when no program has the terminal any more.
func (s *terminal) content(t *testing.T) string {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	<-s.closed
	return s.shown.String()
}

// bullpen returns a command of bullpen with a server. visit, if not nil, is called before each
// answer.
func bullpen(t *testing.T, visit func(*http.Request), args ...string) *exec.Cmd {
	t.Helper()
	program, err := build()
	if err != nil {
		t.Fatal(err)
	}
	answer := newStub(filepath.Join(t.TempDir(), "requests"))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if visit != nil {
			visit(r)
		}
		answer.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append(os.Environ(), "BULLPEN_URL="+server.URL, "BULLPEN_API_KEY="+stubKey, "TZ=UTC")
	return cmd
}

// A watched list is printed again and again until the interruption. It replaces the last one on a
// terminal, and nowhere else.
func TestWatch(t *testing.T) {
	for _, name := range []string{"workers", "ls"} {
		for _, onTerminal := range []bool{true, false} {
			t.Run(name+", terminal "+strconv.FormatBool(onTerminal), func(t *testing.T) {
				t.Parallel()
				requests := make(chan struct{}, 100)
				cmd := bullpen(t, func(*http.Request) { requests <- struct{}{} }, name, "--watch")
				screen, out := openTerminal(t), new(bytes.Buffer)
				cmd.Stdout, cmd.Stderr = out, screen.File
				if onTerminal {
					cmd.Stdout = screen.File
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				for range 3 { // two lists are printed
					<-requests
				}
				if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
					t.Fatal(err)
				}
				_ = cmd.Wait()
				shown := screen.content(t)
				if code := cmd.ProcessState.ExitCode(); code != exitInterrupted {
					t.Errorf("exited with %d: %s", code, shown)
				}
				lists, cleared := out.String(), 0
				if onTerminal {
					lists, cleared = shown, 2
				}
				head := map[string]string{"workers": "NAME ", "ls": "TRACE "}[name]
				if strings.Count(lists, head) < 2 || strings.Count(lists, clearScreen) < cleared ||
					(!onTerminal && strings.Contains(lists+shown, "\x1b")) {
					t.Errorf("printed %q, and %q on standard error", lists, shown)
				}
			})
		}
	}
}

// The progress of a batch is a bar on a terminal, which the outcome replaces.
func TestProgressBar(t *testing.T) {
	screen, out := openTerminal(t), new(bytes.Buffer)
	polls := 0
	cmd := bullpen(t, func(*http.Request) {
		if polls++; polls == 2 { // the batch has ended in this answer
			screen.await(t, "1 of 3 done")
		}
	}, "wait", "--batch", stubBatchID)
	cmd.Stdout, cmd.Stderr = out, screen.File
	_ = cmd.Run()
	shown := screen.content(t)
	if code := cmd.ProcessState.ExitCode(); code != exitFailure || out.Len() > 0 {
		t.Errorf("exited with %d and %q", code, out)
	}
	if !regexp.MustCompile(`33 % \[=+>-+\] 1 of 3 done, 1\.5/s, 2s left`).MatchString(shown) {
		t.Errorf("shown %q", shown)
	}
	rest := shown[strings.LastIndex(shown, "\x1b[J")+len("\x1b[J"):]
	if want := "bullpen: batch " + stubBatchID + " completed: 2 of 3 succeeded, 1 failed; see bullpen batch results " +
		stubBatchID + "\r\n"; rest != want {
		t.Errorf("%q is left of %q", rest, shown)
	}
}
