package gateway

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// changesStream is an open stream of changes.
type changesStream struct {
	t     *testing.T
	lines *bufio.Scanner
}

// changes opens a stream of changes, and reads its first event.
func (h *harness) changes(r *http.Request) *changesStream {
	h.t.Helper()
	resp, err := h.client.Do(r)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = resp.Body.Close() })
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != web.TypeSSE {
		h.t.Fatalf("answer is %d %v", resp.StatusCode, resp.Header)
	}
	s := &changesStream{h.t, bufio.NewScanner(resp.Body)}
	if e := s.next(); !reflect.DeepEqual(e, &api.ChangesEvent{Type: api.ChangesReady}) {
		h.t.Fatalf("the first event is %+v", e)
	}
	return s
}

// follow opens the stream of changes of the harness's key.
func (h *harness) follow(query string) *changesStream {
	h.t.Helper()
	return h.changes(h.request("GET", "/v1/changes"+query, ""))
}

// next returns the next event, nil at the end of the stream.
func (s *changesStream) next() *api.ChangesEvent {
	s.t.Helper()
	if !s.lines.Scan() {
		if err := s.lines.Err(); err != nil {
			s.t.Fatal(err)
		}
		return nil
	}
	data, ok := strings.CutPrefix(s.lines.Text(), "data: ")
	e := new(api.ChangesEvent)
	if err := json.Unmarshal([]byte(data), e); !ok || err != nil || !s.lines.Scan() || s.lines.Text() != "" {
		s.t.Fatalf("event %q: %v", data, err)
	}
	return e
}

// ends reads a stream to its end, and checks that only keepalives come before.
func (s *changesStream) ends() {
	s.t.Helper()
	for e := s.next(); e != nil; e = s.next() {
		if e.Type != api.ChangesKeepalive {
			s.t.Fatalf("event %+v", e)
		}
	}
}

func TestChanges(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		user := h.as(h.stub.addKey("team", "pro", asUser))
		own, all, other := user.follow(""), h.follow(""), h.follow("?org=acme")
		change := func(kind proto.ChangeKind, org, id string) {
			h.server.Changes.Changed(proto.Change{Kind: kind, Org: org, ID: id})
		}
		began := time.Now()
		change(proto.ChangedExecutions, "team", "a")
		change(proto.ChangedExecutions, "team", "a")
		change(proto.ChangedBatches, "team", "b")
		change(proto.ChangedKeys, "team", "k")
		change(proto.ChangedOrgs, "", "team")
		got, want := own.next(), &api.ChangesEvent{
			Type: api.ChangesChanges, Kinds: []proto.ChangeKind{proto.ChangedExecutions, proto.ChangedBatches},
			IDs: map[proto.ChangeKind][]string{proto.ChangedExecutions: {"a"}, proto.ChangedBatches: {"b"}},
		}
		if !reflect.DeepEqual(got, want) || time.Since(began) != 250*time.Millisecond {
			t.Errorf("after %s: %+v", time.Since(began), got)
		}
		if got := all.next(); !slices.Equal(got.Kinds, append(want.Kinds, proto.ChangedKeys, proto.ChangedOrgs)) {
			t.Errorf("a global administrator: %+v", got)
		}
		if got := other.next(); !slices.Equal(got.Kinds, []proto.ChangeKind{proto.ChangedOrgs}) {
			t.Errorf("a global administrator who follows another organisation: %+v", got)
		}
		// A client that does not read is told at most 50 ids.
		for i := range 51 {
			change(proto.ChangedExecutions, "team", fmt.Sprint(i))
		}
		if got := own.next(); len(got.IDs[proto.ChangedExecutions]) != 50 ||
			!slices.Equal(got.More, []proto.ChangeKind{proto.ChangedExecutions}) {
			t.Errorf("%+v", got)
		}
		change(proto.ChangedExecutions, "", "") // of unknown ones
		if got := own.next(); !reflect.DeepEqual(got.Kinds, got.More) || len(got.IDs) != 0 {
			t.Errorf("%+v", got)
		}
		if got := own.next(); got.Type != api.ChangesKeepalive {
			t.Errorf("%+v", got)
		}
		user.do("GET", "/v1/changes?org=acme", "").want(404, "not_found")
		user.do("HEAD", "/v1/changes", "").want(200, "")
	})
}

// A stream ends soon after its key or session may no longer read.
func TestChangesEnd(t *testing.T) {
	for name, end := range map[string]func(h *harness, id string){
		"revoked":   func(h *harness, id string) { h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, "") },
		"expired":   func(h *harness, id string) { h.stub.change(id, func(k *proto.Key) { k.ExpiresAt = new(time.Now()) }) },
		"no scope":  func(h *harness, id string) { h.stub.change(id, func(k *proto.Key) { k.Scopes = k.Scopes[:1] }) },
		"suspended": func(h *harness, _ string) { h.do("PUT", "/v1/admin/orgs/team", `{"suspended":true}`).want(200, "") },
		"drained":   func(h *harness, _ string) { h.server.Drain() },
		"signed out": func(h *harness, _ string) {
			for id := range h.server.Sessions.(sessionStore) {
				h.do("DELETE", "/v1/admin/sessions/"+id, "").want(204, "")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, withPlainURL)
				h.stub.addKey("team", "pro", asUser)
				made := h.do("POST", "/v1/admin/keys", `{"name":"n","org":"team","scopes":["execute","read"]}`).want(201, "").json()
				b := h.browser()
				b.signInWithKey(made["key"].(string)).want(201, "")
				r := h.request("GET", "/v1/changes", "", "Authorization", "")
				r.AddCookie(&http.Cookie{Name: "bullpen_session", Value: b.cookies["bullpen_session"]})
				streams := []*changesStream{h.changes(r)}
				if name != "signed out" {
					streams = append(streams, h.as(made["key"].(string)).follow(""))
				}
				began := time.Now()
				end(h, made["id"].(string))
				for _, s := range streams {
					s.ends()
				}
				if took := time.Since(began); took > 10*time.Second {
					t.Errorf("after %s", took)
				}
			})
		})
	}
}

// The following of a page does not keep its session.
func TestChangesDoNotUseTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, withPlainURL)
		b := h.browser()
		b.signInWithKey(h.key).want(201, "")
		r := h.request("GET", "/v1/changes", "", "Authorization", "")
		r.AddCookie(&http.Cookie{Name: "bullpen_session", Value: b.cookies["bullpen_session"]})
		began := time.Now()
		h.changes(r).ends()
		if took := time.Since(began); took < proto.SessionIdle || took > proto.SessionIdle+time.Minute {
			t.Errorf("the stream ended after %s", took)
		}
	})
}

func TestStreamsOfChangesAreLimited(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		for range 64 {
			h.follow("")
		}
		h.do("GET", "/v1/changes", "").want(429, "rate_limited", "64 streams")
		h.as(h.stub.addKey("team", "pro", asUser)).follow("")
	})
}

// The stream of an output ends, too.
func TestOutputEndsWithTheKey(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		running := proto.TraceID("")
		h.stub.onSubmit = func(job *proto.Job) { running = job.TraceID; h.stub.start(job.TraceID) }
		h.execute(`{"code":"1"}`, "Prefer", "respond-async").want(202, "")
		key := h.stub.addKey("acme", "pro", asUser)
		for _, path := range []string{"/v1/executions/" + string(running) + "/output", h.as(key).streamURLOf(running)} {
			resp, err := h.client.Do(h.as(key).request("GET", path, ""))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = resp.Body.Close() }()
			lines := bufio.NewScanner(resp.Body)
			if !lines.Scan() {
				t.Fatalf("%s: %v", path, lines.Err())
			}
			h.stub.change("key_2", func(k *proto.Key) { k.RevokedAt = new(time.Now()) })
			began := time.Now()
			for lines.Scan() {
				if strings.Contains(lines.Text(), `"result"`) {
					t.Errorf("%s: %s", path, lines.Text())
				}
			}
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("%s ended after %s", path, took)
			}
			h.stub.change("key_2", func(k *proto.Key) { k.RevokedAt = nil })
		}
		h.stub.finish(running, proto.Exited(0))
	})
}
