package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/gateway/work"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// batchStub keeps batches and their items in memory.
type batchStub struct {
	mu        sync.Mutex
	stored    []proto.BatchAndState // the newest first
	uploads   []*uploadStub
	discarded int
	full      bool
	items     batchItems
}

type uploadStub struct {
	stub   *batchStub
	shared string
	notes  []string
	items  []string
}

func (u *uploadStub) Note(value []byte) { u.notes = append(u.notes, string(value)) }

func (u *uploadStub) Shared(_ context.Context, fields []byte) error {
	u.shared = string(fields)
	return nil
}

func (u *uploadStub) Add(_ context.Context, item []byte) error {
	u.items = append(u.items, string(item))
	return nil
}

func (u *uploadStub) Finish(context.Context) (proto.BatchContent, int, error) {
	return proto.BatchContent{
		Index: proto.Blob{Key: fmt.Sprint(len(u.stub.uploads))},
		Hash:  fmt.Sprint(u.notes, u.shared, u.items),
	}, len(u.items), nil
}

func (u *uploadStub) Discard(context.Context) { u.stub.discarded++ }

func (s *batchStub) Upload(string) (work.BatchUpload, error) {
	if s.full {
		return nil, &proto.QuotaError{What: "batches", Limit: proto.MaxBatches}
	}
	u := &uploadStub{stub: s}
	s.uploads = append(s.uploads, u)
	return u, nil
}

func (s *batchStub) Create(_ context.Context, b *proto.Batch) (*proto.Batch, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.stored {
		if s.stored[i].Batch.ID == b.ID {
			return &s.stored[i].Batch, false, nil
		}
	}
	s.stored = append([]proto.BatchAndState{{Batch: *b}}, s.stored...)
	return b, true, nil
}

func (s *batchStub) Page(
	org, after string, limit int, keep func(*proto.BatchAndState) bool,
) ([]proto.BatchAndState, string) {
	place := func(b *proto.BatchAndState) string { // the newest first
		return fmt.Sprintf("%03d",
			slices.IndexFunc(s.stored, func(x proto.BatchAndState) bool { return x.Batch.ID == b.Batch.ID }))
	}
	return pageOf(slices.Values(s.stored), func(b *proto.BatchAndState) string { return b.Batch.Org }, place, org, after,
		limit, keep)
}

func (s *batchStub) find(org, id string) *proto.BatchAndState {
	for i := range s.stored {
		if b := &s.stored[i]; b.Batch.Org == org && b.Batch.ID == id {
			return b
		}
	}
	return nil
}

func (s *batchStub) Get(_ context.Context, org, id string) (proto.BatchAndState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.find(org, id); b != nil {
		return *b, nil
	}
	return proto.BatchAndState{}, proto.ErrNotFound
}

func (s *batchStub) Change(
	_ context.Context, org, id string, change func(*proto.Batch, *proto.BatchState) error,
) (proto.BatchAndState, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.find(org, id)
	if b == nil {
		return proto.BatchAndState{}, proto.ErrNotFound
	}
	changed := *b
	if err := change(&changed.Batch, &changed.State); err != nil {
		return proto.BatchAndState{}, err
	}
	*b = changed
	return changed, nil
}

func (s *batchStub) Remove(_ context.Context, org, id string) error {
	b := s.find(org, id)
	switch {
	case b == nil:
		return proto.ErrNotFound
	case !b.Batch.Finished(&b.State):
		return proto.ErrConflict
	default:
		return nil
	}
}

func (s *batchStub) Items(context.Context, string, string) (work.BatchItems, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.items, nil
}

type batchItems []proto.ItemStatus

func (i batchItems) Len() int                       { return len(i) }
func (i batchItems) Status(at int) proto.ItemStatus { return i[at] }
func (i batchItems) Round(int) int                  { return 0 }

func newBatchHarness(t *testing.T) (*harness, *batchStub) {
	h, stub := newHarness(t), new(batchStub)
	h.server.Batches = stub
	h.remount()
	return h, stub
}

func (h *harness) batch(body string, headers ...string) *reply {
	h.t.Helper()
	return h.do(http.MethodPost, "/v1/batches", body, headers...)
}

// The forms of a body mean the same.
func TestBatchForms(t *testing.T) {
	h, stub := newBatchHarness(t)
	lines := `{"batch":{"request":{"code":"x","env_vars":{"A":"1"}},"max_parallel":2}}` + "\r\n" + `{"args":["1"]}` +
		"\n\n" + `{"args":["2"], "env_vars":{"B":"2"}}`
	a := h.batch(lines, "Content-Type", "application/jsonl; charset=utf-8").want(http.StatusCreated, "")
	h.batch(`{"max_parallel":2,"request":{"env_vars":{"A":"1"},"code":"x"},"items":[{"args":["1"]},`+"\n"+
		` {"args":["2"], "env_vars":{"B":"2"}}]}`, "Content-Type", "application/json").want(http.StatusCreated, "")
	first, second := stub.uploads[0], stub.uploads[1]
	if first.shared != second.shared || !cmp.Equal(first.notes, second.notes) || len(first.items) != 2 ||
		first.items[0] != second.items[0] {
		t.Errorf("the forms differ: %+v, %+v", first, second)
	}
	if got := a.json(); got["status"] != "queued" || got["max_parallel"] != 2.0 ||
		a.header.Get("Location") != "/v1/batches/"+got["id"].(string) {
		t.Errorf("answer %s", a.body)
	}

	submit, err := h.admission.OpenBatch(&stub.stored[0].Batch, []byte(first.shared))
	if err != nil {
		t.Fatal(err)
	}
	id := stub.stored[0].Batch.ItemTrace(1, 0)
	if refused, err := submit(t.Context(), []byte(first.items[1]), 1, id); err != nil || refused != "" {
		t.Fatal(refused, err)
	}
	job := h.stub.runs[id].job
	if job.Code != "x" || job.Args[0] != "2" || job.Env["A"] != "1" || job.Env["B"] != "2" ||
		job.Batch != stub.stored[0].Batch.ID || job.BatchIndex != 1 || job.Mode != proto.ModeAsync {
		t.Errorf("job %+v", job)
	}
	got := h.do(http.MethodGet, "/v1/executions/"+string(id), "").want(http.StatusOK, "").json()
	if !cmp.Equal(got["batch"], map[string]any{"id": stub.stored[0].Batch.ID, "index": 1.0}) {
		t.Errorf("batch of the execution: %v", got["batch"])
	}
}

func TestRejectedBatches(t *testing.T) {
	h, stub := newBatchHarness(t)
	const jsonl = "application/jsonl"
	for _, c := range []struct{ kind, body, code, message string }{
		{"", ``, "validation_error", "body must be valid JSON"},
		{"", `[]`, "validation_error", "body must be valid JSON"},
		{"", `{}`, "validation_error", "items must be given"},
		{"", `{"items":[]}`, "validation_error", "items must have at least one entry"},
		{"", `{"items":{}}`, "validation_error", "items must be valid JSON"},
		{
			"", `{"items":[{"code":"x"}],"priority":1}`, "validation_error",
			"items must be the last member of the object; priority follows",
		},
		{"", `{"items":[{"code":"x"}]} x`, "validation_error", "body must be valid JSON"},
		{"", `{"items":[{"code":"x"}`, "validation_error", "the body ends in it"},
		{"", `{"priority":10,"items":[{"code":"x"}]}`, "validation_error", "priority must be from 0 to 9"},
		{"", `{"priority":1,"priority":2,"items":[{"code":"x"}]}`, "validation_error", "priority must be given only once"},
		{"", `{"max_parallel":100001,"items":[{"code":"x"}]}`, "validation_error", "max_parallel must be from 1 to 100000"},
		{"", `{"max_parallel":"4","items":[{"code":"x"}]}`, "validation_error", "max_parallel must be a whole number"},
		{"", `{"max_parallel":1.5,"items":[{"code":"x"}]}`, "validation_error", "max_parallel must be a whole number"},
		{
			"", `{"stop_on_failure":"true","items":[{"code":"x"}]}`, "validation_error",
			"stop_on_failure must be true or false",
		},
		{"", `{"stop_on_failure":1,"items":[{"code":"x"}]}`, "validation_error", "stop_on_failure must be true or false"},
		{"", `{"item_webhooks":"yes","items":[{"code":"x"}]}`, "validation_error", "item_webhooks must be true or false"},
		{"", `{"item_webhooks":{},"items":[{"code":"x"}]}`, "validation_error", "item_webhooks must be true or false"},
		{"", `{"priority":"high","items":[{"code":"x"}]}`, "validation_error", "priority must be a whole number"},
		{"", `{"metadata":[],"items":[{"code":"x"}]}`, "validation_error", "metadata must be an object of strings"},
		{"", `{"request":[],"items":[{"code":"x"}]}`, "validation_error", "request must be an object"},
		{
			jsonl, `{"batch":{"stop_on_failure":0}}` + "\n" + `{"code":"x"}`, "validation_error",
			"line 1: stop_on_failure must be true or false",
		},
		{
			jsonl, `{"batch":{"item_webhooks":"no"}}` + "\n" + `{"code":"x"}`, "validation_error",
			"line 1: item_webhooks must be true or false",
		},
		{jsonl, `{"batch":7}` + "\n" + `{"code":"x"}`, "validation_error", "line 1: "},
		{"", `{"max_parallel":0,"items":[{"code":"x"}]}`, "validation_error", "max_parallel must be from 1 to 100000"},
		{"", `{"wat":1,"items":[{"code":"x"}]}`, "validation_error", "wat is not known here"},
		{"", `{"metadata":{"-":""},"items":[{"code":"x"}]}`, "validation_error", "metadata keys"},
		{"", `{"webhook_url":"ftp://x","items":[{"code":"x"}]}`, "validation_error", "webhook_url must be"},
		{"", `{"request":{"env_vars":{"a":"b"}},"items":[{"code":"x"}]}`, "validation_error", "request.env_vars"},
		{"", `{"items":[{"code":"x"},{"code":"x"},{"code":7}]}`, "validation_error", "items[2]: code must be a string"},
		{"", `{"items":[{"code":"x"},7]}`, "validation_error", "items[1]: body must be a JSON object"},
		{"", `{"items":[{"code":"x","timeout":100000}]}`, "rate_limited", "items[0]: timeout is above the maximum"},
		{
			"", `{"items":[{"code":"x","webhook_url":"https://example.com/"}]}`, "validation_error",
			"items[0]: webhook_url must not be given, unless the batch sets item_webhooks",
		},
		{
			"", `{"request":{"code":"x"},"items":[{"delay":1}]}`, "validation_error",
			"items[0]: delay must not be given in a batch",
		},
		{
			"", `{"request":{"run_at":"2026-01-01T00:00:00Z"},"items":[{"code":"x"}]}`, "validation_error",
			"items[0]: run_at must not be given in a batch",
		},
		{jsonl, "\n\n", "validation_error", "items must have at least one entry"},
		{
			jsonl, "\ufeff\ufeff" + `{"batch":{}}` + "\n", "validation_error",
			"line 1: body must be UTF-8, with a byte order mark at the beginning",
		},
		{jsonl, "\ufeff" + `{"batch":{}}` + "\n", "validation_error", "items must have at least one entry"},
		{"", "\ufeff" + `{"items":[]}`, "validation_error", "items must have at least one entry"},
		{"application/json", "\ufeff\ufeff" + `{"items":[]}`, "validation_error", "body must be valid JSON"},
		{
			"application/x-jsonlines", `{"code":"x"}`, "unsupported_media_type",
			"application/json for an object with items, or application/jsonl",
		},
		{"text/csv", "x", "unsupported_media_type", "application/jsonl"},
		{"application/", `{"items":[]}`, "unsupported_media_type", "application/jsonl"},
		{"application/x-www-form-urlencoded", `{"items":[]}`, "validation_error", "items must have at least one entry"},
		{jsonl, `{"batch":{"wat":1}}`, "validation_error", "line 1: wat is not known here"},
		{jsonl, `{"code":"x"}` + "\n" + `{"batch":{}}`, "validation_error", "line 2: batch is not known here"},
		{
			jsonl, "\n" + `{"code":"x"}` + "\n" + `{"code":"x"`, "validation_error",
			"line 3: body must be one JSON object: unexpected end",
		},
		{
			jsonl, `{"code":"x"}` + "\n" + `{"code":"\ud800"}`, "validation_error",
			"line 2: code must not contain a lone surrogate",
		},
		{jsonl, `{"code":"x"}` + "\n" + `{}`, "validation_error", "line 2: code must be between 1 byte and 1 MB"},
		{
			jsonl, `{"code":"` + strings.Repeat("x", web.DefaultMaxBody) + `"}`, "validation_error",
			"line 1: body must be at most 8388608 bytes",
		},
		{
			"", `{"items":[{"code":"` + strings.Repeat("x", web.DefaultMaxBody) + `"}]}`, "validation_error",
			"items[0]: body must be at most 8388608 bytes",
		},
		{
			jsonl, strings.Repeat(`{"code":"x"}`+"\n", proto.MaxBatchItems+1), "validation_error",
			"items must have at most 100000 entries",
		},
	} {
		a := h.batch(c.body, "Content-Type", c.kind)
		var envelope struct{ Error, Message string }
		_ = json.Unmarshal(a.body, &envelope)
		if envelope.Error != c.code || !strings.Contains(envelope.Message, c.message) {
			t.Errorf("%.100q: %d %s, want %s %q", c.body, a.status, a.body, c.code, c.message)
		}
	}
	if len(stub.stored) != 0 || stub.discarded != len(stub.uploads) {
		t.Errorf("%d batches are stored, and %d of %d uploads were removed", len(stub.stored), stub.discarded,
			len(stub.uploads))
	}
	big := h.request(http.MethodPost, "/v1/batches", "")
	big.ContentLength, big.Body = proto.MaxBatchBytes+1, http.NoBody
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.http.URL+"/v1/batches", &endless{})
	if err != nil {
		t.Fatal(err)
	}
	r.Header, r.ContentLength = big.Header, proto.MaxBatchBytes+1
	h.send(r).want(http.StatusRequestEntityTooLarge, "payload_too_large", "268435456")
	stub.full = true
	h.batch(`{"items":[{"code":"x"}]}`).want(http.StatusConflict, "conflict", "batches are limited to 1000")
	h.key = h.stub.addKey("free", "free", asUser)
	stub.full = false
	h.batch(`{"items":[{"code":"x"}]}`).want(http.StatusTooManyRequests, "rate_limited",
		"items[0]: Async execution requires")
}

// endless is a body without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
func (endless) Close() error               { return nil }

func TestBatchIdempotency(t *testing.T) {
	h, stub := newBatchHarness(t)
	const body = `{"items":[{"code":"x"}]}`
	first := h.batch(body, "Idempotency-Key", "k").want(http.StatusCreated, "").json()
	second := h.batch(body, "Idempotency-Key", "k").want(http.StatusCreated, "").json()
	if first["id"] != second["id"] || len(stub.stored) != 1 || stub.discarded != 1 {
		t.Errorf("got %v and %v", first["id"], second["id"])
	}
	h.batch(`{"items":[{"code":"y"}]}`, "Idempotency-Key", "k").want(http.StatusUnprocessableEntity,
		"idempotency_mismatch", "another batch")
	h.key = h.stub.addKey("acme", "enterprise", asUser)
	h.batch(body, "Idempotency-Key", "k").want(http.StatusCreated, "")
	if len(stub.stored) != 2 {
		t.Error("two API keys share an idempotency key")
	}
}

func TestBatchRoutes(t *testing.T) {
	h, stub := newBatchHarness(t)
	var ids []string
	for range 3 {
		ids = append(ids, h.batch(`{"items":[{"code":"x"}]}`).want(http.StatusCreated, "").json()["id"].(string))
	}
	page := h.do(http.MethodGet, "/v1/batches?limit=2", "").want(http.StatusOK, "").json()
	if list := page["batches"].([]any); len(list) != 2 || list[0].(map[string]any)["id"] != ids[2] ||
		page["next_cursor"] == nil {
		t.Errorf("first page: %v", page)
	}
	page = h.do(http.MethodGet, fmt.Sprint("/v1/batches?cursor=", page["next_cursor"]), "").want(http.StatusOK, "").json()
	if list := page["batches"].([]any); len(list) != 1 || list[0].(map[string]any)["id"] != ids[0] ||
		page["next_cursor"] != nil {
		t.Errorf("last page: %v", page)
	}
	h.do(http.MethodGet, "/v1/batches?cursor=x", "").want(http.StatusBadRequest, "validation_error", "cursor")

	path := "/v1/batches/" + ids[0]
	status := func(method, at, want string) {
		t.Helper()
		if got := h.do(method, path+at, "").want(http.StatusOK, "").json()["status"]; got != want {
			t.Errorf("%s: %s, want %s", at, got, want)
		}
	}
	status(http.MethodPost, "/pause", "paused")
	status(http.MethodPost, "/resume", "queued")
	h.do(http.MethodPost, path+"/retry", "").want(http.StatusConflict, "conflict", "has not ended")
	h.do(http.MethodDelete, path, "").want(http.StatusConflict, "conflict", "has not ended")
	status(http.MethodPost, "/cancel", "stopping")
	h.do(http.MethodPost, path+"/pause", "").want(http.StatusConflict, "conflict", "is being stopped")
	h.do(http.MethodPost, path+"/resume", "").want(http.StatusConflict, "conflict", "is being stopped")
	status(http.MethodPost, "/cancel", "stopping")
	b := stub.find("acme", ids[0])
	b.State = proto.BatchState{
		Stopped: proto.StopCancelled, Notified: true, EndedAt: b.Batch.CreatedAt,
		Counts: proto.BatchCounts{Total: 1, Cancelled: 1},
	}
	status(http.MethodGet, "", "cancelled")
	// The end is visible when its webhook is stored: from then on the batch can be retried and deleted.
	b.State.Notified = false
	if got := h.do(http.MethodGet, path, "").want(http.StatusOK, "").json(); got["status"] != "stopping" ||
		got["completed_at"] != nil {
		t.Errorf("before the webhook of the end is stored: %v", got)
	}
	b.State.Stopped, b.State.StartedAt = "", b.Batch.CreatedAt
	b.Batch.Cancelled = false
	status(http.MethodGet, "", "running")
	h.do(http.MethodPost, path+"/retry", "").want(http.StatusConflict, "conflict", "has not ended")
	h.do(http.MethodDelete, path, "").want(http.StatusConflict, "conflict", "has not ended")
	b.State.Stopped, b.State.Notified, b.Batch.Cancelled = proto.StopCancelled, true, true
	status(http.MethodGet, "", "cancelled")
	h.do(http.MethodPost, path+"/pause", "").want(http.StatusConflict, "conflict", "has ended")
	h.do(http.MethodPost, path+"/retry", "").want(http.StatusConflict, "conflict", "no item has failed")
	got := h.do(http.MethodPost, path+"/retry", `{"cancelled":true}`).want(http.StatusOK, "").json()
	if got["counts"].(map[string]any)["waiting"] != 1.0 || got["reason"] != nil {
		t.Errorf("after the retry: %v", got)
	}
	b.State.Retries = 1
	h.do(http.MethodDelete, path, "").want(http.StatusNoContent, "")

	h.key = h.stub.addKey("other", "enterprise", asAdmin)
	for _, at := range []string{
		"GET ", "DELETE ", "POST /pause", "POST /resume", "POST /cancel", "POST /retry",
		"GET /results",
	} {
		method, rest, _ := strings.Cut(at, " ")
		h.do(method, path+rest, "").want(http.StatusNotFound, "not_found", "there is no batch of that id")
		h.do(method, "/v1/batches/bat_x"+rest, "").want(http.StatusNotFound, "not_found", "there is no batch of that id")
	}
	if list := h.do(http.MethodGet, "/v1/batches", "").json()["batches"].([]any); len(list) != 0 {
		t.Errorf("another organisation's batches: %v", list)
	}
}

func TestBatchResults(t *testing.T) {
	h, stub := newBatchHarness(t)
	id := h.batch(`{"request":{"code":"x"},"items":[{},{},{},{}]}`).want(http.StatusCreated, "").json()["id"].(string)
	h.stub.finishAtOnce(proto.Exited(0), "out\n")
	submit, err := h.admission.OpenBatch(&stub.stored[0].Batch, []byte(stub.uploads[0].shared))
	for i := range 4 {
		_, errSubmit := submit(t.Context(), []byte("{}"), i, stub.stored[0].Batch.ItemTrace(i, 0))
		err = errors.Join(err, errSubmit)
	}
	if err != nil {
		t.Fatal(err)
	}
	delete(h.stub.runs, stub.stored[0].Batch.ItemTrace(1, 0)) // past its retention
	delete(h.stub.runs, stub.stored[0].Batch.ItemTrace(2, 0)) // never submitted
	stub.items = batchItems{proto.ItemSucceeded, proto.ItemFailed, proto.ItemCancelled, proto.ItemSubmitted}
	results := func(query string) (lines []api.BatchResult) {
		t.Helper()
		a := h.do(http.MethodGet, "/v1/batches/"+id+"/results"+query, "").want(http.StatusOK, "")
		for line := range bytes.Lines(a.body) {
			var r api.BatchResult
			if err := json.Unmarshal(line, &r); err != nil {
				t.Fatal(err)
			}
			lines = append(lines, r)
		}
		return lines
	}
	lines := results("")
	if len(lines) != 3 || *lines[0].Stdout != "out\n" || lines[0].Status != proto.StatusSuccess ||
		*lines[0].TraceID != stub.stored[0].Batch.ItemTrace(0, 0) ||
		lines[1].Status != proto.StatusFailed || !strings.Contains(*lines[1].ErrorMessage, "not kept") ||
		lines[2].Status != proto.StatusCancelled || lines[2].TraceID != nil {
		t.Errorf("lines %+v", lines)
	}
	if lines := results("?after=1"); len(lines) != 1 || lines[0].Index != 2 {
		t.Errorf("after 1: %+v", lines)
	}
	stub.items = batchItems{proto.ItemSucceeded, proto.ItemFailed, proto.ItemCancelled, proto.ItemSucceeded}
	if lines := results("?after=0&follow=true"); len(lines) != 3 || lines[2].Index != 3 {
		t.Errorf("to the end: %+v", lines)
	}
	// A record that cannot be read leaves the others readable.
	h.stub.update(stub.stored[0].Batch.ItemTrace(0, 0), func(x *run) { x.broken = errors.New("malformed") })
	lines = results("")
	if len(lines) != 4 || !lines[0].Unreadable || lines[0].Stdout != nil || lines[0].Status != proto.StatusSuccess ||
		*lines[0].TraceID != stub.stored[0].Batch.ItemTrace(0, 0) ||
		lines[3].Unreadable || lines[3].Stdout == nil {
		t.Errorf("with one that is unreadable: %+v", lines)
	}
	h.do(http.MethodGet, "/v1/batches/"+id+"/results?after=-1", "").want(http.StatusBadRequest, "validation_error",
		"after must be")
	h.do(http.MethodHead, "/v1/batches/"+id+"/results", "").want(http.StatusOK, "")
}

// An item of a key that was revoked, or of a sandbox that is gone, is refused with the reason. A
// full queue is no reason.
func TestRefusedItems(t *testing.T) {
	h, stub := newBatchHarness(t)
	h.batch(`{"items":[{"code":"x"}]}`).want(http.StatusCreated, "")
	b := &stub.stored[0].Batch
	submit, err := h.admission.OpenBatch(b, nil)
	if err != nil {
		t.Fatal(err)
	}
	h.stub.refuse = func(*proto.Job) error { return &proto.Rejection{Reason: proto.RejectedQueueFull} }
	if refused, err := submit(t.Context(), []byte(`{"code":"x"}`), 0, proto.NewTraceID()); refused != "" || err == nil {
		t.Errorf("with a full queue: %q, %v", refused, err)
	}
	b.Key = "key_unknown"
	if refused, err := submit(t.Context(), []byte(`{"code":"x"}`), 0, proto.NewTraceID()); !strings.Contains(
		refused, "is revoked") || err != nil {
		t.Errorf("with a revoked key: %q, %v", refused, err)
	}
	if c, q := h.admission.BatchLimits(t.Context(), "key_unknown"); c != 0 || q != 0 {
		t.Errorf("limits %d, %d", c, q)
	}
}
