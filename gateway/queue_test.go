package gateway

import (
	"context"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// queueStub is a queue that notes the last request.
type queueStub struct {
	view proto.QueueView
	last proto.QueueRequest
	orgs []proto.OrgQueue
}

func (s *queueStub) Orgs(context.Context) ([]proto.OrgQueue, error) { return s.orgs, nil }

func (s *queueStub) View(_ context.Context, req *proto.QueueRequest) (proto.QueueView, error) {
	s.last = *req
	return s.view, nil
}

func TestQueue(t *testing.T) {
	h := newHarness(t)
	id := proto.NewTraceID()
	place := proto.QueuePlace{
		TraceID: id, Class: proto.ClassBackground, CreatedAt: time.Unix(1e9, 0), Position: 12,
		Wait: new(3.2),
	}
	stub := &queueStub{view: proto.QueueView{
		Key: proto.QueueCounts{Queued: proto.ClassCounts{Background: 3}, Running: proto.ClassCounts{Interactive: 1}},
		Org: proto.QueueCounts{
			Queued: proto.ClassCounts{Background: 40}, Running: proto.ClassCounts{Interactive: 1, Background: 6},
		},
		Oldest: &place, Places: []proto.QueuePlace{
			{TraceID: id, Class: proto.ClassInteractive, CreatedAt: time.Unix(1e9, 0)},
		},
	}}
	h.server.Queue = stub
	h.remount()
	pro := h.stub.addKey("team", "pro", asUser)
	got := h.do("GET", "/v1/queue?trace_id="+string(id), "", "Authorization", "Bearer "+pro).want(200, "").json()
	counts := func(interactive, background float64) map[string]any {
		return map[string]any{"interactive": interactive, "background": background}
	}
	execution := func(class string, position float64, wait any) map[string]any {
		return map[string]any{
			"trace_id": string(id), "class": class, "created_at": "2001-09-09T01:46:40.000Z", "position": position,
			"estimated_wait": wait,
		}
	}
	want := map[string]any{
		"key": map[string]any{"queued": counts(0, 3), "running": counts(1, 0), "concurrent": nil},
		"organisation": map[string]any{
			"queued": counts(0, 40), "running": counts(1, 6), "concurrent": 100.0,
			"max_queued": 1000.0,
		},
		"oldest": execution("background", 12, 4.0), "executions": []any{execution("interactive", 0, nil)},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	if stub.last.Org != "team" || stub.last.Key == "" || !reflect.DeepEqual(stub.last.Traces, []proto.TraceID{id}) {
		t.Errorf("asked for %+v", stub.last)
	}
	h.do("GET", "/v1/queue?trace_id=trc_1", "", "Authorization", "Bearer "+pro).want(400, "validation_error")
	most := strings.Repeat(","+string(id), proto.MaxQueuePlaces)
	h.do("GET", "/v1/queue?trace_id="+most[1:], "", "Authorization", "Bearer "+pro).want(200, "")
	h.do("GET", "/v1/queue?trace_id="+string(id)+most, "", "Authorization", "Bearer "+pro).want(400, "validation_error")
}

func TestOrgQueues(t *testing.T) {
	h := newHarness(t)
	h.stub.addKey("team", "pro", asUser)
	running := proto.QueueCounts{Running: proto.ClassCounts{Interactive: 1, Background: 6}}
	h.server.Queue = &queueStub{orgs: []proto.OrgQueue{{Org: "gone", QueueCounts: running}, {Org: "team"}}}
	h.remount()
	counts := func(interactive, background float64) map[string]any {
		return map[string]any{"interactive": interactive, "background": background}
	}
	got := h.do("GET", "/v1/admin/queue", "").want(200, "").json()
	if want := map[string]any{"orgs": []any{
		map[string]any{
			"org": "gone", "queued": counts(0, 0), "running": counts(1, 6), "concurrent": nil, "max_queued": nil,
		},
		map[string]any{
			"org": "team", "queued": counts(0, 0), "running": counts(0, 0), "concurrent": 100.0, "max_queued": 1000.0,
		},
	}}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
}
