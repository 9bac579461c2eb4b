package api

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Whatever shows the output of an execution as text shows that it was not UTF-8.
func TestInvalidUTF8IsShown(t *testing.T) {
	r := proto.Exited(0)
	r.Stdout, r.Stderr, r.StdoutInvalidUTF8 = "a\xff", "e", true
	now := time.Now()
	record := &proto.Record{
		Meta: proto.Meta{TraceID: proto.NewTraceID()}, Status: proto.StatusSuccess, Result: &r,
		CompletedAt: &now,
	}
	hook, err := proto.WebhookBody(record, "", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	var line, execution, event bytes.Buffer
	for _, err := range []error{
		NewBatchResult(0, proto.ItemSucceeded, record).Write(&line), NewExecution(record, "", nil, now).Write(&execution),
		proto.WriteResultEvent(&event, record),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	tool, err := json.Marshal(NewToolResult(record.TraceID, &r))
	if err != nil {
		t.Fatal(err)
	}
	unsaved := r.Unsaved("it was not saved")
	var failed strings.Builder
	if err := proto.WriteResult(&failed, &unsaved); err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{
		"webhook": string(hook), "batch": line.String(), "execution": execution.String(), "event": event.String(),
		"tool": string(tool), "not saved": failed.String(),
	} {
		if !strings.Contains(body, `"stdout_invalid_utf8":true`) || strings.Contains(body, "stderr_invalid_utf8") {
			t.Errorf("%s: %s", name, body)
		}
	}
}
