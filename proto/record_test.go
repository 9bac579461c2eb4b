package proto

import (
	"encoding/json"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRecordIsStoredAsItIs(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	for name, r := range map[string]Result{
		"success": {Success: true, Stdout: "a\u2028b<>&\x00\"", Stderr: "é", DurationMS: 5},
		"failure": Exited(3), "platform": TimedOut(9), "signal": Signaled(9),
	} {
		t.Run(name, func(t *testing.T) {
			rec := &Record{
				Meta: Meta{
					TraceID: NewTraceID(), Org: "o", Mode: ModeInline, Metadata: map[string]string{"k": "v"},
					CreatedAt: at,
				},
				Status: r.Status(), Attempt: 2, StartedAt: &at, CompletedAt: &at, Result: &r, ResultSeq: 7, Usage: &Usage{CPUMS: 1},
				Request: &Request{Code: "\x00\n\u2028<", Args: []string{""}, Requested: Requested{EnvNames: []string{"A"}}},
			}
			body, err := EncodeRecord(rec)
			if err != nil {
				t.Fatal(err)
			}
			back, err := DecodeRecord(rec.TraceID, body)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(rec, back); d != "" {
				t.Error(d)
			}
			var std Record
			if b, err := json.Marshal(rec); err != nil || json.Unmarshal(b, &std) != nil {
				t.Fatal(err)
			}
			std.Request = rec.Request // stored beside the record
			if d := cmp.Diff(&std, back); d != "" {
				t.Errorf("not what encoding/json stores: %s", d)
			}
		})
	}
	pending := Exited(3)
	pending.Stdout, pending.Stderr = "a\n\x00", "é"
	ended := &Record{
		Meta: Meta{TraceID: NewTraceID(), ThreadID: "t"}, Status: StatusRunning, Attempt: 1, Worker: "w", ResultSeq: 7,
		OutputTruncated: true,
		Usage:           &Usage{CPUMS: 1}, Pending: &pending,
		Commit: &Commit{Fence: 4, Version: Version{Number: 2, CreatedAt: at}, Staged: []string{"k"}},
	}
	stored, err := EncodeRecord(ended)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(stored), "}\na\n\x00é") || strings.Contains(string(stored), "u0000") {
		t.Errorf("a pending result is stored as %q", stored)
	}
	back, err := DecodeRecord(ended.TraceID, stored)
	if d := cmp.Diff(ended, back); d != "" || err != nil {
		t.Errorf("pending: %s, %v", d, err)
	}
	// The pending result is not public.
	running := &Record{Meta: ended.Meta, Status: StatusRunning, Attempt: 1, Worker: "w", ResultSeq: 7}
	if d := cmp.Diff(running, back.Public()); d != "" {
		t.Errorf("printed: %s", d)
	}
	if back.Pending == nil || running.Public() != running {
		t.Error("the record itself changed")
	}
	body, err := EncodeRecord(running)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := DecodeRecord(running.TraceID, body); err != nil || back.Result != nil || back.Status != StatusRunning {
		t.Errorf("%+v, %v", back, err)
	}
}

// Output that is six times as long in JSON must not need that space in the store, or in memory when
// it is written and read.
func TestWebhookBodyUsesItsLimit(t *testing.T) {
	const size = 4 << 20
	r := Exited(0)
	r.Stdout, r.Stderr = strings.Repeat("\x00", size), strings.Repeat("\n", size)
	rec := &Record{Meta: Meta{TraceID: NewTraceID()}, Status: StatusSuccess, Result: &r}
	var body []byte
	encoding := allocated(func() {
		var err error
		if body, err = EncodeRecord(rec); err != nil {
			t.Fatal(err)
		}
	})
	var back *Record
	decoding := allocated(func() {
		var err error
		if back, err = DecodeRecord(rec.TraceID, body); err != nil {
			t.Fatal(err)
		}
	})
	if back.Result.Stdout != r.Stdout || back.Result.Stderr != r.Stderr {
		t.Error("the output changed")
	}
	writing := allocated(func() {
		if err := WriteResultEvent(io.Discard, back); err != nil {
			t.Fatal(err)
		}
	})
	const most = 2*size + size/4
	if len(body) > most || encoding > most || decoding > most || writing > size/4 {
		t.Errorf("%d bytes of output: %d stored, %d allocated to encode, %d to decode, %d to answer", 2*size, len(body),
			encoding, decoding, writing)
	}
}

// allocated returns the number of bytes that f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestDecodeRecordRejectsMalformedRecords(t *testing.T) {
	id := NewTraceID()
	ended := func(more string) string {
		return `{"trace_id":"` + string(id) + `","status":"success","result":{}` + more + `}`
	}
	if r, err := DecodeRecord(id, []byte(ended(`,"stdout_bytes":1,"stderr_bytes":2`)+"\n\n\xffx")); err != nil ||
		r.Result.Stdout != "\n" || r.Result.Stderr != "\xffx" {
		t.Fatalf("%+v, %v", r, err)
	}
	for name, body := range map[string]string{
		"empty":                    `{}`,
		"no JSON":                  `{`,
		"another's":                `{"trace_id":"` + string(NewTraceID()) + `","status":"running"}`,
		"ended without a result":   `{"trace_id":"` + string(id) + `","status":"success"}`,
		"running with a result":    `{"trace_id":"` + string(id) + `","status":"running","result":{}}`,
		"without a status":         `{"trace_id":"` + string(id) + `","result":{}}`,
		"less output":              ended(`,"stdout_bytes":2`) + "\nx",
		"more output":              ended(`,"stdout_bytes":1,"stderr_bytes":1`) + "\nxyz",
		"output of its own":        ended("") + "\nx",
		"negative output":          ended(`,"stdout_bytes":2,"stderr_bytes":-1`) + "\nx",
		"more and less":            ended(`,"stdout_bytes":-1,"stderr_bytes":2`) + "\nx",
		"pending without a commit": `{"trace_id":"` + string(id) + `","status":"running","pending":{}}`,
		"commit without a result":  `{"trace_id":"` + string(id) + `","status":"running","commit":{}}`,
		"ended and pending":        ended(`,"pending":{},"commit":{}`),
		"queued and pending":       `{"trace_id":"` + string(id) + `","status":"queued","pending":{},"commit":{}}`,
		"more than what is pending": `{"trace_id":"` + string(id) +
			`","status":"running","pending":{},"commit":{},"stdout_bytes":1}` + "\nxy",
		"output while running": `{"trace_id":"` + string(id) + `","status":"running","stdout_bytes":1}` + "\nx",
	} {
		if r, err := DecodeRecord(id, []byte(body)); err == nil {
			t.Errorf("%s was taken for %+v", name, r)
		}
	}
}
