package gateway

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// letters keeps dead letters in memory.
type letters struct {
	mu     sync.Mutex
	stored map[string]*letter
}

type letter struct {
	proto.DeadLetter
	content proto.DeadContent
}

func (s *letters) List(
	_ context.Context, after *proto.DeadLetter, limit int, wrong func(error),
) (list []proto.DeadLetter, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wrong(errors.New("one that cannot be read"))
	order := func(a, b proto.DeadLetter) int { return cmp.Or(b.At.Compare(a.At), strings.Compare(a.ID, b.ID)) }
	for _, l := range s.stored {
		if after == nil || order(l.DeadLetter, *after) > 0 {
			list = append(list, l.DeadLetter)
		}
	}
	slices.SortFunc(list, order)
	return list[:min(len(list), limit)], nil
}

func (s *letters) Get(_ context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.stored[id]
	if l == nil {
		return nil, nil, fmt.Errorf("dead letter: %w", proto.ErrNotFound)
	}
	return new(l.DeadLetter), new(l.content), nil
}

func (s *letters) Mark(_ context.Context, wanted *proto.DeadLetter) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.stored[wanted.ID]
	if l == nil || l.Revision != wanted.Revision {
		return fmt.Errorf("dead letter: %w", proto.ErrConflict)
	}
	wanted.Revision++
	l.DeadLetter = *wanted
	return nil
}

func (s *letters) Remove(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stored[id] == nil {
		return fmt.Errorf("dead letter: %w", proto.ErrNotFound)
	}
	delete(s.stored, id)
	return nil
}

// add stores a dead letter for job.
func (s *letters) add(job proto.Job) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if job.TraceID == "" {
		job.TraceID = proto.NewTraceID()
	}
	id := string(job.TraceID)
	s.stored[id] = &letter{proto.DeadLetter{
		ID: id, Reason: proto.DeadWorkersLost, Message: "3 workers were lost with this job.", At: time.Now(),
		Meta: &job.Meta, Attempt: 1,
		Workers: []string{"a", "b", "c"},
	}, proto.DeadContent{Job: &job}}
	return id
}

func (s *letters) addMalformed() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	const id = "dead_7"
	s.stored[id] = &letter{proto.DeadLetter{
		ID: id, Reason: proto.DeadMalformed, Message: "This message is no job: x.",
		At: time.Now(),
	}, proto.DeadContent{
		Message: &proto.DeadMessage{Subject: "bullpen.job.x", Data: []byte("\xff" + strings.Repeat("y", 5000))},
	}}
	return id
}

// change changes a dead letter as another gateway does.
func (s *letters) change(id string, f func(*proto.DeadLetter)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.stored[id].DeadLetter)
	s.stored[id].Revision++
}

// lostJob returns a job of a key. Its client no longer waits for it.
func lostJob(org, key string) proto.Job {
	long := time.Now().Add(-time.Hour)
	return proto.Job{
		Meta: proto.Meta{
			Org: org, Key: key, Mode: proto.ModeInline, Language: proto.Python, Timeout: 7, MaxAttempts: 3,
			Metadata:   map[string]string{"a": "b"},
			WebhookURL: "https://example.com/hook", RequestID: "r-old", Prefer: "w", Profile: "default", CreatedAt: long,
			QueueDeadline: long, Concurrent: 1,
		},
		Code: "print(1)", Env: map[string]string{"SECRET": "s3cret"}, Sandbox: proto.DefaultSandbox(),
	}
}

const deadLetters = "/v1/admin/dead-letters"

func TestDeadLettersAreShown(t *testing.T) {
	h := newHarness(t)
	if a := h.do("GET", deadLetters, "").want(200, "").json(); len(a["dead_letters"].([]any)) != 0 ||
		a["next_cursor"] != nil {
		t.Errorf("%v", a)
	}
	want := []string{h.letters.addMalformed()}
	for range 4 { // also of other organisations: these routes serve the whole server
		want = append([]string{h.letters.add(lostJob("other", "key_9"))}, want...)
	}
	var got []string
	for cursor := ""; ; {
		a := h.do("GET", deadLetters+"?limit=2&cursor="+cursor, "").want(200, "").json()
		for _, l := range a["dead_letters"].([]any) {
			got = append(got, l.(map[string]any)["id"].(string))
		}
		if a["next_cursor"] == nil {
			break
		}
		cursor = a["next_cursor"].(string)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if !strings.Contains(h.log.String(), "dead letter unreadable") {
		t.Error("what cannot be read is passed over without a word")
	}
	h.do("GET", deadLetters+"?limit=101", "").want(400, "validation_error", "limit")
	h.do("GET", deadLetters+"?limit=0", "").want(400, "validation_error", "limit")
	for _, cursor := range []string{"x", "1", "1.x", "x.dead_1"} {
		h.do("GET", deadLetters+"?cursor="+cursor, "").want(400, "validation_error", "next_cursor")
	}

	a := h.do("GET", deadLetters+"/"+want[0], "").want(200, "")
	if l := a.json(); l["org"] != "other" || l["key_id"] != "key_9" || l["malformed"] != nil || l["requeued_as"] != nil ||
		l["execution"].(map[string]any)["code_bytes"] != 8.0 {
		t.Errorf("%s", a.body)
	}
	for _, secret := range []string{"s3cret", "print(1)"} {
		if strings.Contains(string(a.body), secret) {
			t.Errorf("what is the tenant's own is shown: %s", a.body)
		}
	}
	a = h.do("GET", deadLetters+"/dead_7", "").want(200, "")
	if l := a.json(); l["org"] != nil || l["execution"] != nil || l["malformed"].(map[string]any)["bytes"] != 5001.0 ||
		!strings.HasPrefix(l["malformed"].(map[string]any)["data"].(string), "\uFFFDyyy") || len(a.body) > 4096+1000 {
		t.Errorf("%s", a.body)
	}
	for _, method := range []string{"GET", "DELETE"} {
		for _, id := range []string{"dead_8", "x", string(proto.NewTraceID())} {
			h.do(method, deadLetters+"/"+id, "").want(404, "not_found", "dead letter")
		}
		h.do(method, deadLetters+"/dead_7%2e*", "").want(404, "not_found") // nothing can have this id
	}
	h.do("DELETE", deadLetters+"/dead_7", "").want(204, "")
	h.do("GET", deadLetters+"/dead_7", "").want(404, "not_found")
}

func TestDeadLettersAreForAdministrators(t *testing.T) {
	h := newHarness(t)
	id := h.letters.add(lostJob("acme", "key_1"))
	plain := h.stub.addKey("acme", "enterprise", asUser)
	for _, r := range []struct{ method, path string }{
		{"GET", deadLetters},
		{"GET", deadLetters + "/" + id},
		{"DELETE", deadLetters + "/" + id},
		{"POST", deadLetters + "/" + id + "/requeue"},
	} {
		h.do(r.method, r.path, "", "Authorization", "Bearer "+plain).want(403, "forbidden")
		h.do(r.method, r.path, "", "Authorization", "").want(401, "unauthorized")
	}
	h.do("GET", deadLetters+"/"+id, "").want(200, "")
	if len(h.stub.submitted) > 0 {
		t.Error("it was submitted")
	}
}

func TestRequeueMakesANewExecution(t *testing.T) {
	h := newHarness(t)
	h.stub.addKey("other", "pro", asUser)
	h.stub.keys[1].Concurrent = 3
	old := lostJob("other", "key_2")
	old.ThreadID = "notebook"
	id := h.letters.add(old)
	var answers []*reply
	for range 2 {
		answers = append(answers, h.do("POST", deadLetters+"/"+id+"/requeue", "", "X-Request-Id", "r-new").want(202, ""))
	}
	made := answers[0].trace()
	for _, a := range answers {
		if l := a.json(); l["requeued_as"] != string(made) || l["requeued_at"] == nil || l["id"] != id ||
			string(made) == id || a.trace() != made ||
			a.header.Get("Location") != "/v1/executions/"+string(made) {
			t.Errorf("%s", a.body)
		}
	}
	if len(h.stub.submitted) != 1 {
		t.Fatalf("%d executions", len(h.stub.submitted))
	}
	job := h.stub.runs[made].job
	if wait := job.QueueDeadline.Sub(job.CreatedAt); wait != 24*time.Hour || time.Since(job.CreatedAt) > time.Minute {
		t.Errorf("made %s, waits %s", job.CreatedAt, wait)
	}
	want := old
	want.TraceID, want.RequestID, want.CreatedAt, want.QueueDeadline = made, "r-new", job.CreatedAt, job.QueueDeadline
	// from the plan of its key
	want.Prefer, want.Concurrent, want.MaxQueued, want.Weight, want.KeyConcurrent = job.Prefer, 100, 1000, 4, 3
	gotText, _ := json.Marshal(job)
	wantText, _ := json.Marshal(want)
	if string(gotText) != string(wantText) {
		t.Errorf("got\n%s\nwant\n%s", gotText, wantText)
	}
	if head := h.threads.heads[key("other", "notebook")]; head == nil || head.Holder != made {
		t.Errorf("its thread: %+v", head)
	}
}

func TestRequeueIsAdmittedAsAnyOther(t *testing.T) {
	h := newHarness(t)
	h.stub.addKey("other", "free", asUser)
	requeue := func(change func(*proto.Job)) (*reply, string) {
		job := lostJob("other", "key_2")
		change(&job)
		id := h.letters.add(job)
		return h.do("POST", deadLetters+"/"+id+"/requeue", ""), id
	}
	again := func(id string) {
		t.Helper()
		if l := h.do("GET", deadLetters+"/"+id, "").want(200, "").json(); l["requeued_as"] != nil || l["requeued_at"] != nil {
			t.Errorf("what was refused is marked: %v", l)
		}
	}
	a, id := requeue(func(j *proto.Job) { j.Mode = proto.ModeAsync })
	a.want(429, "rate_limited", "Async execution requires")
	again(id)
	a, id = requeue(func(j *proto.Job) { j.Timeout = 61 })
	a.want(429, "rate_limited", "60 seconds of the Free plan")
	again(id)
	h.stub.refuse = func(*proto.Job) error {
		return &proto.Rejection{Reason: proto.RejectedConcurrency, Limit: 5, Used: 5}
	}
	a, id = requeue(func(*proto.Job) {})
	a.want(429, "rate_limited", "(5/5)", "Upgrade to Pro")
	again(id)
	h.stub.refuse = nil
	h.do("POST", deadLetters+"/"+id+"/requeue", "").want(202, "")
	<-h.stub.submitted

	holder := h.execute(`{"code":"x","thread_id":"busy"}`, "Prefer", "respond-async").want(202, "").trace()
	<-h.stub.submitted
	a, id = requeue(func(j *proto.Job) { j.Org, j.Key, j.ThreadID = "acme", "key_1", "busy" })
	a.want(409, "conflict", "busy", string(holder))
	again(id)
	h.stub.start(holder)
	h.stub.finish(holder, proto.Exited(0))
	h.do("POST", deadLetters+"/"+id+"/requeue", "").want(202, "")
	<-h.stub.submitted

	h.do("POST", deadLetters+"/"+h.letters.addMalformed()+"/requeue", "").want(409, "conflict", "no job")
	h.do("POST", deadLetters+"/dead_8/requeue", "").want(404, "not_found", "dead letter")
	a, _ = requeue(func(j *proto.Job) { j.Key = "key_unknown" })
	a.want(409, "conflict", "revoked")
	h.do("DELETE", "/v1/admin/keys/key_2", "").want(200, "")
	a, _ = requeue(func(*proto.Job) {})
	a.want(409, "conflict", "revoked")
	if len(h.stub.submitted) > 0 {
		t.Error("something was submitted")
	}
}

// If two administrators requeue a letter, only one execution is created. This also holds if a
// gateway died between marking and submitting.
func TestRequeueByTwoAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		id := h.letters.add(lostJob("acme", "key_1"))
		const many = 8
		traces := make(chan proto.TraceID, many)
		for range many {
			go func() { traces <- h.in(t).do("POST", deadLetters+"/"+id+"/requeue", "").want(202, "").trace() }()
		}
		first := <-traces
		for range many - 1 {
			if other := <-traces; other != first {
				t.Errorf("%s and %s", first, other)
			}
		}
		if len(h.stub.submitted) != 1 {
			t.Fatalf("%d executions", len(h.stub.submitted))
		}

		now, never := time.Now(), proto.NewTraceID()
		h.letters.change(id, func(l *proto.DeadLetter) { l.Requeued, l.RequeuedAt = never, &now })
		if got := h.do("POST", deadLetters+"/"+id+"/requeue", "").want(202, "").trace(); got == never || got == first {
			t.Errorf("it names %s", got)
		} else if waited := time.Since(now); waited < claimGrace || waited > claimGrace+2*time.Second {
			t.Errorf("taken over after %s", waited)
		} else {
			h.stub.finish(got, proto.Failure(proto.CodeExpiredInQueue, "withdrawn")) // it will never run
			if next := h.do("POST", deadLetters+"/"+id+"/requeue", "").want(202, "").trace(); next == got {
				t.Error("what never ran stands for it")
			}
		}
		h.client.CloseIdleConnections()
		h.http.Close()
	})
}
