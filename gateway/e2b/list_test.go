package e2b

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// listedID returns the id of a sandbox of the test.
func listedID(n int) string { return fmt.Sprintf("i%026s", strings.Repeat(string(rune('a'+n)), 26)) }

// ids returns the numbers of the sandboxes in a list.
func ids(t *testing.T, a answer) string {
	t.Helper()
	var list []listed
	if err := json.Unmarshal([]byte(a.body), &list); err != nil {
		t.Fatalf("%d %s", a.status, a.body)
	}
	text := ""
	for _, x := range list {
		text += x.SandboxID[1:2]
	}
	return text
}

func TestLists(t *testing.T) {
	h := newHarness(t)
	h.profiles["small"] = proto.DefaultProfile()
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for n, change := range []func(*proto.LiveSandbox){
		func(x *proto.LiveSandbox) { x.Metadata = map[string]string{"a b": "c&d", "k": "v"} },
		func(x *proto.LiveSandbox) { x.State, x.Metadata = proto.SandboxPaused, map[string]string{"k": "v"} },
		func(x *proto.LiveSandbox) { x.Profile = "small" },
		func(x *proto.LiveSandbox) { x.State = proto.SandboxEnded },
		func(x *proto.LiveSandbox) { x.Org = "other" },
		func(x *proto.LiveSandbox) {
			x.State, x.Stopping = proto.SandboxStopping, &proto.SandboxStopped{Stop: proto.SandboxKill}
		},
		func(x *proto.LiveSandbox) {
			x.State, x.Stopping = proto.SandboxStopping, &proto.SandboxStopped{Stop: proto.SandboxPause}
		},
		func(x *proto.LiveSandbox) { x.State = proto.SandboxStarting },
	} {
		x := h.add(listedID(n), change)
		x.StartedAt = begin.Add(time.Duration(n) * time.Hour)
	}
	for query, want := range map[string]string{
		"":                                  "hgcba",
		"order=asc":                         "abcgh",
		"state=running":                     "hgca",
		"state=paused":                      "b",
		"state=running,paused":              "hgcba",
		"state=running&state=paused":        "hgcba",
		"metadata=k%3Dv":                    "ba",
		"metadata=a%252520b%3Dc%252526d":    "a",
		"metadata=k%3Dw":                    "",
		"metadata=k%3Dv%26none%3Dx":         "",
		"template=small":                    "c",
		"template=base":                     "hgba",
		"template=nope":                     "",
		"startedAfter=2026-01-02T06:04:05Z": "hg",
	} {
		a := h.call(http.MethodGet, "/v2/sandboxes?"+query, "")
		if got := ids(t, a); got != want {
			t.Errorf("%s: %s, want %s", query, got, want)
		}
		if query == "state=paused" && a.header.Get(headerActive) != "4" {
			t.Errorf("%v", a.header)
		}
	}
	for _, order := range []string{"asc", "desc"} {
		all, token := "", ""
		for range 3 {
			a := h.call(http.MethodGet, "/v2/sandboxes?limit=2&order="+order+"&nextToken="+token, "")
			all += ids(t, a)
			token = a.header.Get(headerNext)
		}
		if want := map[string]string{"asc": "abcgh", "desc": "hgcba"}[order]; all != want || token != "" {
			t.Errorf("%s: %s, then %q", order, all, token)
		}
	}
	next := h.call(http.MethodGet, "/v2/sandboxes?limit=1", "").header.Get(headerNext)
	for _, bad := range []string{
		"state=dead", "limit=0", "limit=101", "limit=x", "order=up", "nextToken=x", "order=asc&nextToken=" + next,
		"startedAfter=yesterday", "metadata=%2525zz",
	} {
		if a := h.call(http.MethodGet, "/v2/sandboxes?"+bad, ""); a.status != http.StatusBadRequest {
			t.Errorf("%s: %d %s", bad, a.status, a.body)
		}
	}
	a := h.do(http.MethodGet, "/v2/sandboxes?nextToken="+next, "", KeyHeader, foreignKey)
	if a.status != http.StatusBadRequest {
		t.Errorf("another organisation's token: %d %s", a.status, a.body)
	}
	if got := ids(t, h.call(http.MethodGet, "/sandboxes?metadata=k%3Dv", "")); got != "a" {
		t.Errorf("v1: %s", got)
	}
	a = h.call(http.MethodGet, "/v2/sandboxes?state=paused", "")
	if !strings.Contains(a.body, `"startedAt":"2026-01-02T04:04:05.000Z"`) ||
		!strings.Contains(a.body, `"cpuCount":1,"memoryMB":1024,"diskSizeMB":512,"state":"paused","envdVersion":"`+
			guestVersion+`","metadata":{"k":"v"}`) {
		t.Errorf("%s", a.body)
	}
}
