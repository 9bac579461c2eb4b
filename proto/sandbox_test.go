package proto

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOlderJobsAndRecordsAreRead(t *testing.T) {
	var job Job
	err := json.Unmarshal([]byte(
		`{"trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","org":"acme","key":"key_1","mode":"inline","language":"python","timeout":60,
		"max_attempts":1,"created_at":"2026-01-02T03:04:05Z","queue_deadline":"2026-01-02T03:04:08Z","concurrent":5,
		"max_queued":0,"code":"print(1)",
		"sandbox":{"cpu":1,"memory":1073741824,"pids":256,"home_bytes":536870912,"tmp_bytes":268435456,"inodes":65536,
		"output_bytes":16777216}}`), &job)
	want := DefaultSandbox()
	want.Network = Network{}
	if err != nil || job.Profile != "" {
		t.Errorf("%+v, %v", job, err)
	}
	if d := cmp.Diff(want, job.Sandbox); d != "" {
		t.Error(d)
	}
	rec, err := DecodeRecord("trc_AbCdEfGhIjKlMnOpQrSt",
		[]byte(`{"trace_id":"trc_AbCdEfGhIjKlMnOpQrSt","status":"failed","usage":{"cpu_ms":1,"memory_peak":2},`+
			`"result":{"success":false,"exit_code":3}}`))
	if err != nil || rec.Usage.Network != nil {
		t.Errorf("%+v, %v", rec, err)
	}
}

func TestBoundErrorNamesTheKeys(t *testing.T) {
	for want, keys := range map[string][]string{
		"bound to it: key_1; revoke":                        {"key_1"},
		"bound to it: key_1, key_2, key_3; revoke":          {"key_1", "key_2", "key_3"},
		"bound to it: key_1, key_2, key_3 and 2 more; revo": {"key_1", "key_2", "key_3", "key_4", "key_5"},
	} {
		if got := (&BoundError{"web", keys}).Error(); !strings.Contains(got, want) || !strings.Contains(got, "web") {
			t.Errorf("%q does not contain %q", got, want)
		}
	}
}
