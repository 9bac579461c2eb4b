package e2e

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// eventLog records everything that happened while a ledger ran, in order. It is written to a file,
// which is kept if the test fails.
type eventLog struct {
	began time.Time
	file  *os.File

	mu      sync.Mutex
	entries []entry
}

// entry is one event. Its subject is the name of a submission or a thread, or troubleSubject.
type entry struct {
	at            time.Duration
	subject, text string
}

func (e entry) String() string {
	return fmt.Sprintf("%9.3fs %-10s %s", e.at.Seconds(), e.subject, e.text)
}

func newEventLog(t *testing.T) *eventLog {
	t.Helper()
	file, err := os.CreateTemp("", "ledger-*.log")
	if err != nil {
		t.Fatal(err)
	}
	l := &eventLog{began: time.Now(), file: file}
	t.Cleanup(func() {
		if err := file.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the whole event log is %s", file.Name())
			return
		}
		if err := os.Remove(file.Name()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// now returns the time since the log began.
func (l *eventLog) now() time.Duration { return time.Since(l.began) }

// note writes an event to the log before anybody relies on it.
func (l *eventLog) note(subject, format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := entry{l.now(), subject, strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", `\n`)}
	l.entries = append(l.entries, e)
	_, _ = fmt.Fprintln(l.file, e)
}

// of returns all entries of a subject and the deployment's faults in between.
func (l *eventLog) of(subject string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var first, last time.Duration
	for _, e := range l.entries {
		if e.subject == subject {
			if first == 0 {
				first = e.at
			}
			last = e.at
		}
	}
	var text strings.Builder
	for _, e := range l.entries {
		if e.subject == subject || e.subject == disruptionSubject && e.at >= first-30*time.Second && e.at <= last {
			_, _ = fmt.Fprintln(&text, e)
		}
	}
	return text.String()
}

// disruptionSubject is the subject of deployment faults.
const disruptionSubject = "TROUBLE"

// violation is a broken guarantee.
type violation struct {
	subject string // its subject in the event log
	text    string
}

func (v violation) String() string { return v.subject + ": " + v.text }
