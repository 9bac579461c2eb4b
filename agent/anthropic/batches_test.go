package anthropic_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// oneBatch is a store with one batch, whose items were all cancelled.
type oneBatch struct {
	anthropic.BatchStore
	batch proto.BatchAndState
}

func (s *oneBatch) BaseURL() (string, error) { return "http://here", nil }

func (s *oneBatch) Batch(context.Context, string) (*proto.BatchAndState, error) { return &s.batch, nil }

func (s *oneBatch) BatchItems(_ context.Context, _ *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error) error {
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

func (s *deletedBatch) BatchItems(_ context.Context, _ *proto.Batch, each func(item []byte, status proto.ItemStatus, run string) error) error {
	s.deleted = true
	return each([]byte(`{"custom_id":"a"}`), proto.ItemSucceeded, "msg_1")
}

// A request that has succeeded is not said to have failed because the batch is deleted.
func TestBatchDeletedWhileItIsRead(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	w.routes.Runs = agenttest.NewStore()
	w.batches = &deletedBatch{oneBatch: oneBatch{batch: proto.BatchAndState{
		Batch: proto.Batch{ID: "bat_x", Total: 1}, State: proto.BatchState{EndedAt: time.Now(), Counts: proto.BatchCounts{Total: 1, Succeeded: 1}},
	}}}
	if status, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x/results", ""); status != http.StatusNotFound || strings.Contains(answer, "custom_id") {
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
			State: proto.BatchState{Stopped: stop, EndedAt: created.Add(time.Hour), Counts: proto.BatchCounts{Total: 5, Succeeded: 2, Cancelled: 3}},
		}}
		_, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x", "")
		for _, want := range []string{`"processing_status":"ended"`, `"processing":0,"succeeded":2,"errored":0,` + c.counts, `"expires_at":"2026-01-02T04:04:05Z"`, `"cancel_initiated_at":null`} {
			if !strings.Contains(answer, want) {
				t.Errorf("%s: %s, want %s", stop, answer, want)
			}
		}
		if _, answer := w.do(http.MethodGet, "/v1/messages/batches/msgbatch_x/results", ""); answer != `{"custom_id":"a","result":`+c.result+"}\n" {
			t.Errorf("%s: %s", stop, answer)
		}
	}
}
