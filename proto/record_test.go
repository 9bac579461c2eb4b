package proto

import (
	"encoding/json"
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
				Meta:   Meta{TraceID: NewTraceID(), Org: "o", Mode: ModeInline, Metadata: map[string]string{"k": "v"}, CreatedAt: at},
				Status: r.Status(), Attempt: 2, StartedAt: &at, CompletedAt: &at, Result: &r, ResultSeq: 7, Usage: &Usage{CPUMS: 1},
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
			if d := cmp.Diff(&std, back); d != "" {
				t.Errorf("not what encoding/json stores: %s", d)
			}
		})
	}
	running := &Record{Meta: Meta{TraceID: NewTraceID()}, Status: StatusRunning}
	body, err := EncodeRecord(running)
	if err != nil {
		t.Fatal(err)
	}
	if back, err := DecodeRecord(running.TraceID, body); err != nil || back.Result != nil || back.Status != StatusRunning {
		t.Errorf("%+v, %v", back, err)
	}
}

func TestWhatIsNoRecordIsRefused(t *testing.T) {
	id := NewTraceID()
	for name, body := range map[string]string{
		"empty":                  `{}`,
		"no JSON":                `{`,
		"another's":              `{"trace_id":"` + string(NewTraceID()) + `","status":"running"}`,
		"ended without a result": `{"trace_id":"` + string(id) + `","status":"success"}`,
		"running with a result":  `{"trace_id":"` + string(id) + `","status":"running","result":{}}`,
		"without a status":       `{"trace_id":"` + string(id) + `","result":{}}`,
	} {
		if r, err := DecodeRecord(id, []byte(body)); err == nil {
			t.Errorf("%s was taken for %+v", name, r)
		}
	}
}
