package proto

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"unicode/utf8"
)

const testTrace = TraceID("trc_AbCdEfGhIjKlMnOpQrSt")

func TestEvents(t *testing.T) {
	if got, want := string(AppendStatusEvent(nil, testTrace)),
		`{"type":"status","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","status":"running","seq":1}`+"\n"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := string(AppendKeepaliveEvent([]byte("x"), 7)), `x{"type":"keepalive","seq":7}`+"\n"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for data, want := range map[string]string{
		"a\n":                       `a\n`,
		"\x00\x01\x1b\x7f\t\r\"\\/": `\u0000\u0001\u001b` + "\x7f" + `\t\r\"\\/`,
		"é😀":                        "é😀",
		"\u0085\u2028\u2029\u2027":  `\u0085\u2028\u2029` + "\u2027",
		"\xff\xfea\xe2\x80":         "\ufffd\ufffda\ufffd\ufffd" + `","base64":"//5h4oA=`,
		"\ufffd":                    "\ufffd",
		"<&>":                       "<&>",
		"\xed\xa0\x80":              "\ufffd\ufffd\ufffd" + `","base64":"7aCA`,
		"":                          "",
	} {
		got := string(AppendOutputEvent(nil, Stderr, []byte(data), 2))
		if want := `{"type":"output","stream":"stderr","data":"` + want + `","seq":2}` + "\n"; got != want {
			t.Errorf("%q: %s, want %s", data, got, want)
		}
	}
}

func TestResultEvent(t *testing.T) {
	oom := Failure(CodeMemory, "It used more than 1 GiB.")
	oom.Stdout = "a\u2028\xff"
	r := &Record{Meta: Meta{TraceID: testTrace}, Status: oom.Status(), Result: &oom, ResultSeq: 9, OutputTruncated: true}
	var got strings.Builder
	err := WriteResultEvent(&got, r)
	const want = `{"type":"result","trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","status":"failed","result":{"success":false,` +
		`"stdout":"a\u2028` + "\ufffd" +
		`","stderr":"","exit_code":-1,"error":"memory_limit_exceeded","error_code":"memory_limit_exceeded",` +
		`"error_message":"It used more than 1 GiB.",` +
		`"duration_ms":0,"stdout_truncated":false,"stderr_truncated":false},"output_truncated":true,"seq":9}` + "\n"
	if err != nil || got.String() != want {
		t.Errorf("%v\n%s, want\n%s", err, got.String(), want)
	}
	if err := WriteResultEvent(io.Discard, &Record{}); err == nil {
		t.Error("a result event of an execution that runs")
	}
}

// WriteResult must write the output of encoding/json for all fields.
func TestWriteResult(t *testing.T) {
	saved := Failure(CodeThreadSave, "m")
	saved.ProgramExitCode = new(3)
	full := Exited(0)
	full.Stdout, full.Stderr, full.DurationMS, full.StdoutTruncated, full.StderrTruncated = "o\n", "e\u2028",
		12, true, true
	for _, r := range []Result{Exited(0), Exited(1), Signaled(9), TimedOut(30), Cancelled(), saved, full} {
		var got strings.Builder
		if err := WriteResult(&got, &r); err != nil {
			t.Fatal(err)
		}
		want, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if got.String() != string(want) {
			t.Errorf("%s, want %s", got.String(), want)
		}
	}
}

// A string written in pieces must equal the string encoded at once, wherever the pieces end.
func TestWriteJSONStringInPieces(t *testing.T) {
	for _, unit := range []string{"a", "é", "€", "😀", "\xe2\x80", "\x00", "\x80\x80\x80\x80\x80", "\u2028"} {
		for shift := range 5 {
			s := strings.Repeat("x", shift) + strings.Repeat(unit, 100_000/len(unit))
			for _, s := range []string{s, s[:len(s)-1], s + "\xe2"} {
				var got strings.Builder
				if err := WriteJSONString(&got, s); err != nil || got.String() != string(AppendJSONString(nil, s)) {
					t.Errorf("%q, moved by %d: %v, or not the same in pieces", unit, shift, err)
				}
			}
		}
	}
}

// Long plain text is scanned several bytes at a time. A special character must be found at every
// position and beside every neighbour.
func TestJSONStringOfLongText(t *testing.T) {
	const lead, rest = 9, 24
	for b := range 256 {
		for _, fill := range []byte{' ', '!', '#', '[', ']', 0x7f} {
			for at := range rest {
				s := bytes.Repeat([]byte{fill}, lead+rest)
				s[lead+at] = byte(b)
				var back string
				if err := json.Unmarshal(AppendJSONString(nil, s), &back); err != nil ||
					back != strings.ToValidUTF8(string(s), "\ufffd") {
					t.Fatalf("%q: %q, %v", s, back, err)
				}
			}
		}
	}
}

func FuzzAppendJSONString(f *testing.F) {
	f.Add("a\x00\u0085\xff\u2028é\xed\xa0\x80")
	f.Fuzz(func(t *testing.T, s string) {
		got := AppendJSONString(nil, s)
		var back string
		if err := json.Unmarshal(got, &back); err != nil || back != string([]rune(s)) {
			t.Fatalf("%q: %s, %v", s, got, err)
		}
		if string(AppendJSONString(nil, []byte(s))) != string(got) || !utf8.Valid(got) ||
			strings.ContainsAny(string(got), "\n\r\u0085\u2028\u2029") {
			t.Fatalf("%q: %s", s, got)
		}
	})
}
