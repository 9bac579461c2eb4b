package gateway

import (
	"fmt"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// read only
var noRuby = &proto.Missing{Capabilities: []string{"language:ruby"}, Message: "no worker offers the language ruby"}

// A refusal for want of a worker is final for clients: it names what is missing, and has no Retry-After.
func TestNoCapableWorker(t *testing.T) {
	h := newHarness(t)
	h.stub.refuse = func(*proto.Job) error {
		return &proto.Rejection{Reason: proto.RejectedNoWorker, Missing: noRuby}
	}
	for _, mode := range []string{"application/json", web.TypeNDJSON, web.TypeSSE} {
		a := h.execute(hello, "Accept", mode).want(503, "service_unavailable")
		if body := a.json(); body["reason"] != "no_capable_worker" || body["permanent"] != true ||
			body["message"] != noRuby.Message ||
			a.header.Get("Retry-After") != "" || a.header.Get("X-Should-Retry") != "false" {
			t.Errorf("%s: %v %s", mode, a.header, a.body)
		}
	}
}

// A queued execution shows what it waits for, and only while it is queued.
func TestWaitingFor(t *testing.T) {
	h := newHarness(t)
	h.stub.missing = func(m *proto.Meta) *proto.Missing {
		if m.Language == "ruby" {
			return noRuby
		}
		return nil
	}
	get := func(id proto.TraceID) string {
		return fmt.Sprint(h.do("GET", "/v1/executions/"+string(id), "").want(200, "").json()["waiting_for"])
	}
	id := h.execute(body("language", "ruby"), "Prefer", "respond-async").want(202, "").trace()
	if got := get(id); got != "map[expected:false message:no worker offers the language ruby missing:[language:ruby]]" {
		t.Errorf("queued: %s", got)
	}
	if got := get(h.execute(hello, "Prefer", "respond-async").want(202, "").trace()); got != "<nil>" {
		t.Errorf("another language: %s", got)
	}
	later := h.execute(`{"code":"1","language":"ruby","delay":3600}`, "Prefer", "respond-async").want(202, "").trace()
	if got := get(later); got != "<nil>" {
		t.Errorf("not queued yet: %s", got)
	}
	h.stub.start(id)
	if got := get(id); got != "<nil>" {
		t.Errorf("running: %s", got)
	}
	h.stub.finish(id, proto.Exited(0))
	if got := get(id); got != "<nil>" {
		t.Errorf("ended: %s", got)
	}
}
