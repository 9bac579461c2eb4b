package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	stubBatchID     = "bat_abcdefghijklmnopqrstuvwxyz" // one of its items fails
	stubCancelledID = "bat_cccccccccccccccccccccccccc"
	stubGoodID      = "bat_gggggggggggggggggggggggggg" // all items succeed
	// stubItem is the id of an execution of stubBatchID.
	stubItem = proto.TraceID("trc_iiiiiiiiiiiiiiiiiiii")
)

func stubBatch(id, status, counts, rest string) string {
	return fmt.Sprintf(`{"id":%q,"status":%q,"reason":null,"counts":%s,"max_parallel":null,"stop_on_failure":false,`+
		`"priority":0,"metadata":{"a":"b"},`+
		`"key_id":"key_1","item_webhooks":false,"webhook_url":null,"webhook_delivery_status":null,"retries":0,`+
		`"created_at":"2026-01-02T03:04:05.678Z",`+
		`"started_at":"2026-01-02T03:04:05.700Z",%s}`, id, status, counts, rest)
}

func stubRunningBatch(id, status string) string {
	return stubBatch(id, status, `{"total":3,"waiting":0,"queued":1,"running":1,"succeeded":1,"failed":0,"cancelled":0}`,
		`"rate":1.5,"time_left":2,"completed_at":null`)
}

func stubEndedBatch(id string) string {
	status, counts := "completed", `"succeeded":2,"failed":1,"cancelled":0`
	switch id {
	case stubCancelledID:
		status, counts = "cancelled", `"succeeded":1,"failed":0,"cancelled":2`
	case stubGoodID:
		counts = `"succeeded":3,"failed":0,"cancelled":0`
	}
	return stubBatch(id, status, `{"total":3,"waiting":0,"queued":0,"running":0,`+counts+`}`,
		`"rate":0,"time_left":null,"completed_at":"2026-01-02T03:05:05.678Z"`)
}

func (s *stub) batchRoutes(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/batches", s.createBatch)
	mux.HandleFunc("GET /v1/batches", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"batches":[%s,%s],"next_cursor":null}`, stubRunningBatch(stubBatchID, "running"),
			stubEndedBatch(stubCancelledID))
	})
	mux.HandleFunc("GET /v1/batches/{id}", func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		if s.batchPolls.Add(1)%2 == 1 { // ends during the second request
			_, _ = io.WriteString(w, stubRunningBatch(id, "running"))
			return
		}
		_, _ = io.WriteString(w, stubEndedBatch(id))
	})
	mux.HandleFunc("POST /v1/batches/{id}/{verb}", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.record(r, body)
		status := map[string]string{
			"pause": "paused", "resume": "running", "cancel": "stopping",
			"retry": "running",
		}[r.PathValue("verb")]
		_, _ = io.WriteString(w, stubRunningBatch(r.PathValue("id"), status))
	})
	mux.HandleFunc("DELETE /v1/batches/{id}", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /v1/batches/{id}/results", s.batchResults)
}

func (s *stub) createBatch(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	for i, line := range strings.Split(string(body), "\n") {
		if strings.Contains(line, "bad") {
			refuse(w, http.StatusBadRequest, "validation_error", fmt.Sprintf("line %d: bad is not known here", i+1), "")
			return
		}
	}
	w.WriteHeader(http.StatusCreated)
	_, _ = io.WriteString(w, stubRunningBatch(stubBatchID, "queued"))
}

// batchResults breaks off after the first item.
func (s *stub) batchResults(w http.ResponseWriter, r *http.Request) {
	line := func(i int) {
		_, _ = fmt.Fprintf(w, `{"index":%d,"trace_id":%q,"status":"success"}`+"\n", i, stubItem)
	}
	s.record(r, nil)
	switch r.URL.Query().Get("after") {
	case "":
		w.Header().Set("Content-Length", "1000")
		line(0)
	case "0":
		line(1)
		_, _ = io.WriteString(w, "\n")
		line(2)
	case "1":
		line(2)
	}
}

// Results that the server could not read are counted, after all others were written.
func TestUnreadableResults(t *testing.T) {
	var out strings.Builder
	err := writeResults(&out, func(yield func(client.BatchLine, error) bool) {
		for i, line := range []string{`{"index":0}`, `{"index":1,"unreadable":true}`, `{"index":2}`} {
			if !yield(client.BatchLine{Index: i, Line: []byte(line + "\n")}, nil) {
				return
			}
		}
	})
	if err == nil || !strings.Contains(err.Error(), "1 results, the first of item 1") ||
		strings.Count(out.String(), "\n") != 3 {
		t.Errorf("%v after %q", err, out.String())
	}
}

// An incomplete line at the end of a file is not a result.
func TestLastLine(t *testing.T) {
	for text, want := range map[string]string{"": "", "a\nbc\n": "bc", "a\nbc": "a", "a\n\n": "a", "a": ""} {
		last, end, err := lastLine(strings.NewReader(text))
		if err != nil || string(last) != want || int(end) != strings.LastIndexByte(text, '\n')+1 {
			t.Errorf("%q: got %q to %d, %v", text, last, end, err)
		}
	}
}
