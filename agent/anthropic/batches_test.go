package anthropic_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// oneBatch is a store with one batch, whose items were all cancelled.
type oneBatch struct {
	agent.BatchStore
	batch proto.BatchAndState
}

func (s *oneBatch) BaseURL() (string, error) { return "http://here", nil }

func (s *oneBatch) Batch(context.Context, string) (*proto.BatchAndState, error) { return &s.batch, nil }

func (s *oneBatch) BatchItems(
	_ context.Context, _ *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error,
) error {
	return each([]byte(`{"custom_id":"a"}`), proto.ItemCancelled, "msg_1")
}

// deletedBatch is deleted while its results are read.
type deletedBatch struct {
	oneBatch
	deleted bool
}

func (s *deletedBatch) Batch(context.Context, string) (*proto.BatchAndState, error) {
	if s.deleted {
		return nil, api.Errorf(api.CodeNotFound, "there is no batch of that id")
	}
	return &s.batch, nil
}

func (s *deletedBatch) BatchItems(
	_ context.Context, _ *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error,
) error {
	s.deleted = true
	return each([]byte(`{"custom_id":"a"}`), proto.ItemSucceeded, "msg_1")
}

// A request that has succeeded is not said to have failed because the batch is deleted.
func TestBatchDeletedWhileItIsRead(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	w.routes.Runs = agenttest.NewStore()
	w.batches = &deletedBatch{oneBatch: oneBatch{batch: proto.BatchAndState{
		Batch: proto.Batch{ID: "bat_x", Total: 1},
		State: proto.BatchState{EndedAt: time.Now(), Counts: proto.BatchCounts{Total: 1, Succeeded: 1}},
	}}}
	if status, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x/results",
		""); status != http.StatusNotFound || strings.Contains(answer, "custom_id") {
		t.Errorf("%d %s", status, answer)
	}
}

// Requests that a batch's expiry has ended are not those that its user has cancelled.
func TestExpiredBatch(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for stop, c := range map[proto.BatchStop]struct{ counts, result string }{
		proto.StopExpired:   {`"canceled":0,"expired":3`, `{"type":"expired"}`},
		proto.StopCancelled: {`"canceled":3,"expired":0`, `{"type":"canceled"}`},
		proto.StopFailed:    {`"canceled":3,"expired":0`, `{"type":"canceled"}`},
	} {
		w := newWorld(t, `rules: [{text: ok}]`)
		w.batches = &oneBatch{batch: proto.BatchAndState{
			Batch: proto.Batch{ID: "bat_x", Total: 5, CreatedAt: created, ExpiresAt: created.Add(time.Hour)},
			State: proto.BatchState{
				Stopped: stop, EndedAt: created.Add(time.Hour),
				Counts: proto.BatchCounts{Total: 5, Succeeded: 2, Cancelled: 3},
			},
		}}
		_, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x", "")
		for _, want := range []string{
			`"processing_status":"ended"`, `"processing":0,"succeeded":2,"errored":0,` + c.counts,
			`"expires_at":"2026-01-02T04:04:05Z"`, `"cancel_initiated_at":null`,
		} {
			if !strings.Contains(answer, want) {
				t.Errorf("%s: %s, want %s", stop, answer, want)
			}
		}
		if _, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x/results",
			""); answer != `{"custom_id":"a","result":`+c.result+"}\n" {
			t.Errorf("%s: %s", stop, answer)
		}
	}
}

// A message of a batch has its container, which expires as that of another message does.
func TestBatchResultsHaveContainers(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ended := created.Add(time.Minute)
	for revision, expires := range map[string]string{first: "2026-01-02T04:04:05Z", second: "2026-02-01T03:05:05Z"} {
		w := newWorld(t, `rules: [{text: ok}]`)
		store := agenttest.NewStore()
		w.routes.Runs = store
		w.batches = &succeededBatch{}
		request := `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}],` +
			`"tools":[{"type":"code_execution_` + revision + `","name":"code_execution"}]}`
		at, err := store.Create(t.Context(),
			&proto.AgentRun{Org: "acme", ID: "msg_1", Key: "k", CreatedAt: created, Request: []byte(request)})
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range []agent.Entry{
			{At: created, Started: &agent.Start{Container: "container_x", Created: created}},
			{At: ended, Event: &agent.Event{
				Kind: agent.EventCall,
				Call: &agent.Call{ID: "srvtoolu_1", Name: "code_execution", Arguments: []byte(`{}`)}, Server: true,
			}},
			{At: ended, Event: &agent.Event{Kind: agent.EventResult, Item: 1, Call: &agent.Call{
				ID: "srvtoolu_1", Name: "code_execution",
			}, Outcome: &agent.Outcome{Text: "{}", Value: []byte(`{}`)}}},
			{At: ended, Event: &agent.Event{Kind: agent.EventEnd, Item: 2, End: &agent.End{Reason: agent.ReasonDone}}},
		} {
			message, err := json.Marshal(entry)
			if err == nil {
				at, err = store.Append(t.Context(), "acme", "msg_1", at, message)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		want := `"container":{"id":"container_x","expires_at":"` + expires + `"`
		if status, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x/results", ""); status != http.StatusOK ||
			!strings.Contains(answer, want) {
			t.Errorf("%s: %d %s, want %s", revision, status, answer, want)
		}
	}
}

// succeededBatch is a batch with one item, whose run is msg_1.
type succeededBatch struct{ oneBatch }

func (s *succeededBatch) Batch(context.Context, string) (*proto.BatchAndState, error) {
	return &proto.BatchAndState{
		Batch: proto.Batch{ID: "bat_x", Org: "acme", Total: 1},
		State: proto.BatchState{EndedAt: time.Now(), Counts: proto.BatchCounts{Total: 1, Succeeded: 1}},
	}, nil
}

func (s *succeededBatch) BatchItems(
	_ context.Context, _ *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error,
) error {
	return each([]byte(`{"custom_id":"a"}`), proto.ItemSucceeded, "msg_1")
}

// A result that cannot be read is an errored one, and does not end the download.
func TestUnreadableBatchResult(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	store := agenttest.NewStore()
	w.routes.Runs = store
	w.batches = &succeededBatch{}
	if _, err := store.Append(t.Context(), "acme", "msg_1", 0, []byte("malformed")); err != nil {
		t.Fatal(err)
	}
	status, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x/results", "")
	if status != http.StatusOK || !strings.Contains(answer, `"type":"errored"`) ||
		!strings.Contains(answer, "could not read the result") {
		t.Errorf("%d %s", status, answer)
	}
}
