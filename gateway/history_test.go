package gateway

import (
	"context"
	"errors"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// historyStub has one page, and keeps the last filter.
type historyStub struct {
	page proto.HistoryPage
	err  error
	got  proto.HistoryFilter
}

func (s *historyStub) List(_ context.Context, f *proto.HistoryFilter) (proto.HistoryPage, error) {
	s.got = *f
	return s.page, s.err
}

func TestListExecutions(t *testing.T) {
	h, s := newHarness(t), &historyStub{}
	h.server.History = s
	h.remount()
	result := proto.Failure(proto.CodeTimeout, "too long")
	done := time.Now()
	s.page = proto.HistoryPage{Next: 1 << 60, Complete: true, Records: []*proto.Record{
		{
			Meta: proto.Meta{
				TraceID: proto.NewTraceID(), Org: "acme", Key: "key_1", Mode: proto.ModeAsync, Language: proto.Bash, Timeout: 3,
				CreatedAt:  time.Now(),
				WebhookURL: "https://example.com/", RequestID: "r", Metadata: map[string]string{"a": "b"},
			},
			Status: proto.StatusTimeout, Result: &result, CompletedAt: &done,
		},
		{Meta: proto.Meta{
			TraceID: proto.NewTraceID(), Org: "acme", Key: "key_1", Mode: proto.ModeInline,
			Language: proto.Python, Timeout: 3, CreatedAt: time.Now(),
		}, Status: proto.StatusQueued},
	}}
	s.page.Records[1].Batch, s.page.Records[1].BatchIndex, s.page.Records[1].PipelineID,
		s.page.Records[1].Step = "bat_abcdefghijklmnopqrstuvwxyz", 7, "run_1", "test (3.14)"
	query := url.Values{
		"status": {"timeout"}, "language": {"bash"}, "delivery_mode": {"webhook"}, "thread_id": {"t"}, "request_id": {"r"},
		"key": {"key_1"}, "schedule": {"sch_1"}, "pipeline": {"run_1"},
		"created_after": {"2026-11-01T00:00:00Z"}, "created_before": {"2026-12-01T00:00:00.5+01:00"}, "metadata.a": {"b"},
		"metadata.c.d": {""}, "limit": {"2"},
	}
	answer := h.do("GET", "/v1/executions?"+query.Encode(), "").want(200, "").json()
	list := answer["executions"].([]any)
	if e := list[0].(map[string]any); len(list) != 2 || e["error_code"] != "timeout" ||
		e["webhook_delivery_status"] != "pending" || e["key_id"] != "key_1" || e["stdout"] != nil {
		t.Errorf("%v", answer)
	}
	if e := list[1].(map[string]any); !reflect.DeepEqual(e["batch"], map[string]any{
		"id": "bat_abcdefghijklmnopqrstuvwxyz", "index": 7.0,
	}) || e["pipeline_id"] != "run_1" || e["step"] != "test (3.14)" {
		t.Errorf("%v", e)
	}
	f := s.got
	if f.Org != "acme" || f.Limit != 2 || f.Before != 0 || f.Status != proto.StatusTimeout || f.Language != proto.Bash ||
		f.Mode != proto.ModeAsync || f.ThreadID != "t" ||
		f.RequestID != "r" || f.Key != "key_1" || f.Schedule != "sch_1" || f.Pipeline != "run_1" || f.Metadata["a"] != "b" ||
		len(f.Metadata) != 2 || f.From.Day() != 1 || f.Until.UTC().Day() != 30 {
		t.Errorf("%+v", f)
	}

	cursor := answer["next_cursor"].(string)
	query.Set("cursor", cursor)
	s.page = proto.HistoryPage{Behind: 7}
	answer = h.do("GET", "/v1/executions?"+query.Encode(), "").want(200, "").json()
	if s.got.Before != 1<<60 || answer["next_cursor"] != nil || answer["complete"] != false || answer["behind"] != 7.0 {
		t.Errorf("%+v, %v", s.got, answer)
	}
	query.Set("limit", "50") // another size of the pages
	h.do("GET", "/v1/executions?"+query.Encode(), "").want(200, "")
	query.Set("status", "failed") // another list
	h.do("GET", "/v1/executions?"+query.Encode(), "").want(400, "validation_error", "cursor")
	h.key = h.stub.addKey("other", "enterprise", asUser)
	query.Set("status", "timeout")
	h.do("GET", "/v1/executions?"+query.Encode(), "").want(400, "validation_error", "cursor")

	s.err = &proto.HistoryError{Reason: "its disk is full", Err: errors.New("secret path")}
	reply := h.do("GET", "/v1/executions", "").want(503, "service_unavailable", "its disk is full", "by its trace id")
	if strings.Contains(string(reply.body), "secret") || reply.header.Get("Retry-After") == "" {
		t.Errorf("%s", reply.body)
	}
}

func TestListExecutionsRefusesBadParameters(t *testing.T) {
	h := newHarness(t)
	h.server.History = &historyStub{}
	h.remount()
	for query, word := range map[string]string{
		"status=done": "status", "status=": "status", "language=cobol": "language", "delivery_mode=async": "delivery_mode",
		"thread_id=-": "thread_id", "request_id=": "request_id",
		"key=%ff": "key", "key=" + strings.Repeat("k", 2000): "key", "created_after=yesterday": "created_after",
		"created_before=2026-11-01": "created_before",
		"metadata.=x":               "metadata.", "metadata.a=%ff": "metadata.a",
		"metadata.a=" + strings.Repeat("x", 257): "metadata.a",
		"metadata.%20=x":                         "metadata. ", "metadata=x": "metadata",
		"limit=0": "limit", "limit=101": "limit", "limit=x": "limit", "cursor=x": "cursor",
		"cursor=" + strings.Repeat("A", 48): "cursor", "org=other": "org", "Status=failed": "Status",
		"status=failed&status=success": "status", "%zz": "query", "metadata.a=1&metadata.a=2": "metadata.a",
		"schedule_id=1": "schedule_id",
		"metadata.a=&metadata.b=&metadata.c=&metadata.d=&metadata.e=&metadata.f=" +
			"&metadata.g=&metadata.h=&metadata.i=&metadata.j=&metadata.k=": "metadata",
	} {
		h.in(t).do("GET", "/v1/executions?"+query, "").want(400, "validation_error", word)
	}
}
