package process

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"
)

// logged returns the entries of a log to which write has written as process 7.
func logged(t *testing.T, limit int, write func(l *Lines)) (all []entry) {
	t.Helper()
	var out bytes.Buffer
	log := NewLog(&out, limit)
	l := &Lines{log: log, pid: 7, from: stdout}
	write(l)
	l.Flush()
	log.Close(time.Minute)
	for d := json.NewDecoder(&out); ; {
		var e entry
		if err := d.Decode(&e); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
}

// Entries have whole lines however those are written, and long ones are split between characters.
func TestLogLines(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxLogText-1) + "é" + strings.Repeat("é", maxLogText) + "\n"
	text := "one\ntwo {\"pid\": 8}\n\n" + long + "\xff\nlast"
	all := logged(t, 1<<20, func(l *Lines) {
		for i := range len(text) {
			l.Add([]byte{text[i]})
		}
	})
	joined := ""
	for _, e := range all {
		if e.PID != 7 || e.Type != "output" || e.Stream != "stdout" || len(e.Text) > maxLogText || e.Time.IsZero() {
			t.Errorf("%+v", e)
		}
		joined += e.Text
	}
	if want := strings.ToValidUTF8(text, "\uFFFD"); joined != want {
		t.Errorf("%q, want %q", joined, want)
	}
	if together := logged(t, 1<<20, func(l *Lines) { l.Add([]byte("1\n2\n3")) }); len(together) != 2 ||
		together[0].Text != "1\n2\n" || together[1].Text != "3" {
		t.Errorf("written at once: %+v", together)
	}
	if all[0].Text != "one\n" || all[1].Text != "two {\"pid\": 8}\n" || all[len(all)-1].Text != "last" {
		t.Errorf("%+v", all)
	}
}

// At its limit a log ends, and says so.
func TestLogLimit(t *testing.T) {
	t.Parallel()
	const limit = 10 << 10
	all := logged(t, limit, func(l *Lines) {
		for range 1000 {
			l.Add([]byte("a line\n"))
		}
	})
	n := len(all) - 1
	if all[n].Type != "truncated" || n < limit/200 || n > limit/len("a line\n") {
		t.Errorf("%d entries, the last is %+v", len(all), all[n])
	}
}

// A log whose writer is stuck holds nothing up, and later tells how much it has dropped.
func TestLogDrops(t *testing.T) {
	t.Parallel()
	read, write := io.Pipe()
	log := NewLog(write, 1<<30)
	l := &Lines{log: log, pid: 7, from: stderr}
	const n = 2 * maxLogQueue / len("a line\n")
	for range n {
		l.Add([]byte("a line\n"))
	}
	go func() { // once all of that is read, the next entry says what is missing
		for log.queued() > 0 {
			time.Sleep(time.Millisecond)
		}
		l.Add([]byte("after\n"))
		log.Close(time.Minute)
		_ = write.Close()
	}()
	kept, dropped, last := 0, 0, ""
	for d := json.NewDecoder(read); ; {
		var e entry
		if err := d.Decode(&e); err != nil {
			break
		}
		if e.Type == "output" {
			kept++
		}
		dropped += e.Count
		last = e.Text
	}
	if kept+dropped != n+1 || dropped == 0 || last != "after\n" {
		t.Errorf("%d kept and %d dropped of %d, the last is %q", kept, dropped, n+1, last)
	}
}

// queued returns the bytes that wait for the writer.
func (l *Log) queued() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)
}
