package gateway

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

func (a *reply) overloaded() {
	a.t.Helper()
	a.want(http.StatusServiceUnavailable, "service_unavailable", "too many requests")
	if a.header.Get("Retry-After") != "1" {
		a.t.Errorf("Retry-After is %q", a.header.Get("Retry-After"))
	}
}

// accepted retries until an async execution is accepted. The memory of an answered request is
// released just after its answer.
func (h *harness) accepted(body string) {
	h.t.Helper()
	for h.execute(body, "Prefer", web.PreferAsync).status != http.StatusAccepted {
		if h.t.Context().Err() != nil {
			h.t.Fatal("nothing is accepted any more")
		}
	}
}

func TestOpenRequestsAreLimited(t *testing.T) {
	h := newHarness(t)
	const most = 3
	h.server.Memory = web.OrgShare * most * web.RequestCost
	h.server.QueueWait = time.Minute
	h.remount()
	var answers []<-chan *reply
	var ids []proto.TraceID
	for range most {
		answers = append(answers, h.begin(h.executeRequest(`{"code":"1"}`)))
		ids = append(ids, <-h.stub.submitted)
	}
	h.execute(`{"code":"1"}`).overloaded()
	h.do(http.MethodGet, "/v1/executions/"+string(ids[0]), "").overloaded()
	if status := h.do(http.MethodGet, "/healthz", "").status; status != http.StatusOK {
		t.Errorf("/healthz: %d", status)
	}
	// One organisation does not exclude another.
	other := h.stub.addKey("other", "enterprise", asUser)
	h.do(http.MethodGet, "/v1/executions/"+string(ids[0]), "", "Authorization", "Bearer "+other).want(
		http.StatusNotFound, "not_found")
	for i, id := range ids {
		h.stub.start(id)
		h.stub.finish(id, proto.Exited(0))
		(<-answers[i]).want(http.StatusOK, "")
	}
	h.accepted(`{"code":"1"}`)
}

func TestBodiesOnTheirWayAreLimited(t *testing.T) {
	h := newHarness(t)
	large := `{"code":"` + strings.Repeat("#", proto.MaxCodeBytes) + `"}`
	h.server.QueueWait = time.Minute
	h.server.Memory = 20 << 20 // enough for one such body per organisation
	h.remount()
	arrived, store := make(chan struct{}), make(chan struct{})
	h.stub.refuse = func(*proto.Job) error {
		arrived <- struct{}{}
		<-store
		return nil
	}
	// An announced body that does not arrive reserves no memory.
	idle, err := h.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	h.write(idle, fmt.Sprintf("Content-Length: %d\r\n\r\n{", web.DefaultMaxBody))

	first := h.begin(h.executeRequest(large))
	<-arrived
	refused := h.execute(large)
	refused.overloaded()
	if !refused.closed {
		t.Error("the connection stays open with half a body on it")
	}
	small := h.begin(h.executeRequest(`{"code":"1"}`))
	<-arrived
	theirs := h.in(t)
	theirs.key = h.stub.addKey("other", "enterprise", asUser)
	other := theirs.begin(theirs.executeRequest(large))
	<-arrived
	close(store)
	for range 3 {
		id := <-h.stub.submitted
		h.stub.start(id)
		// The program is stored. Its body is not kept in memory while it runs.
		h.stub.finish(id, proto.Exited(0))
	}
	for _, answer := range []<-chan *reply{first, small, other} {
		(<-answer).want(http.StatusOK, "")
	}
	go func() { // later requests are not delayed
		for range arrived {
		}
	}()
	defer close(arrived)
	h.accepted(large)
}
