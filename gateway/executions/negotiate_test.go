package executions

import (
	"net/http"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestModeOf(t *testing.T) {
	for _, tt := range []struct {
		accept, prefer string
		want           proto.Mode
	}{
		{"", "", proto.ModeInline},
		{"*/*", "", proto.ModeInline},
		{"application/json", "", proto.ModeInline},
		{"application/x-ndjson", "", proto.ModeStreaming},
		{"Application/X-NDJSON; charset=utf-8", "", proto.ModeStreaming},
		{"application/x-ndjson, application/json", "", proto.ModeStreaming},
		{"application/json, application/x-ndjson", "", proto.ModeInline},
		{"application/json;q=0.5, application/x-ndjson;q=0.9", "", proto.ModeStreaming},
		{"application/json;q=0.9, application/x-ndjson;Q=0.5", "", proto.ModeInline},
		{"application/x-ndjson;q=0, */*;q=0.1", "", proto.ModeInline},
		{"application/x-ndjson;q=0", "", proto.ModeInline},
		{"application/x-ndjson;q=NaN", "", proto.ModeInline},
		{"application/x-ndjson;q=x", "", proto.ModeInline},
		{"application/*, application/x-ndjson;q=0.9", "", proto.ModeInline},
		{"text/html", "", proto.ModeInline},
		{"text/event-stream", "", proto.ModeStreaming},
		{"application/json, text/event-stream", "", proto.ModeInline},
		{"text/event-stream", "respond-async", proto.ModeAsync},
		{`text/html;x="a,application/x-ndjson"`, "", proto.ModeInline},
		{`text/html;x="\",", application/x-ndjson`, "", proto.ModeStreaming},
		{",, application/x-ndjson ,", "", proto.ModeStreaming},
		{"application/x-ndjson", "respond-async", proto.ModeAsync},
		{"", "RESPOND-ASYNC; x=1", proto.ModeAsync},
		{"", "wait=10, respond-async", proto.ModeAsync},
		{"", "respond-asynchronously", proto.ModeInline},
	} {
		h := http.Header{"Accept": {tt.accept}, "Prefer": {"handling=strict", tt.prefer}}
		if got := modeOf(h); got != tt.want {
			t.Errorf("Accept %q, Prefer %q: %s, want %s", tt.accept, tt.prefer, got, tt.want)
		}
	}
	if got := modeOf(nil); got != proto.ModeInline {
		t.Errorf("no headers: %s", got)
	}
}
