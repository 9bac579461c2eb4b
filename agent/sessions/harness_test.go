package sessions_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/mock"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

const org = sessionstest.Org

// start returns a world that runs sessions of the mock agent.
func start(t *testing.T) *sessionstest.World {
	t.Helper()
	w := sessionstest.New(t, storetest.Open(t, storetest.Server(t)), &mock.Agent{})
	w.Lead()
	return w
}

// create creates a session of the mock agent.
func create(w *sessionstest.World, id, permissionMode string) {
	w.T.Helper()
	w.MustCreate(id, "mock", func(x *proto.AgentSession) { x.PermissionMode = permissionMode })
}

// send sends messages.
func send(w *sessionstest.World, id string, texts ...string) {
	w.T.Helper()
	for _, text := range texts {
		w.MustSend(id, text)
	}
}

// all returns the events so far.
func all(w *sessionstest.World, id string) (events []sessions.Event) {
	w.T.Helper()
	r, err := w.Read(w.T.Context(), org, id, 0)
	if err != nil {
		w.T.Fatal(err)
	}
	defer r.Close()
	for {
		e, err := r.Next(w.T.Context(), false)
		if err != nil {
			w.T.Fatal(err)
		}
		if e == nil {
			return events
		}
		events = append(events, e.Events...)
	}
}

// nth returns a function that reports true for the nth event of a type.
func nth(n int, kind sessions.EventType) func(*sessions.Event) bool {
	return func(e *sessions.Event) bool {
		if e.Type == kind {
			n--
		}
		return n == 0
	}
}

// lines describes events.
func lines(events []sessions.Event) (list []string) {
	for i := range events {
		list = append(list, line(&events[i]))
	}
	return list
}

// line describes an event, an item without parts of reasoning and status.
func line(e *sessions.Event) string {
	var d struct {
		sessions.ItemData
		Action  string          `json:"action"`
		Options []string        `json:"options"`
		Status  string          `json:"status"`
		Reason  string          `json:"reason"`
		Code    string          `json:"code"`
		Answer  string          `json:"response"`
		More    json.RawMessage `json:"metadata"`
	}
	if err := json.Unmarshal(e.Data, &d); err != nil {
		return err.Error()
	}
	switch e.Type {
	case sessions.ItemStarted, sessions.ItemCompleted:
		return fmt.Sprintf("%s: %s %s %s %s", e.Type, *d.Item.Role, d.Item.Kind, d.Item.Status, contentTypes(&d.Item))
	case sessions.PermissionRequested, sessions.PermissionResolved:
		return fmt.Sprintf("%s: %s %s", e.Type, d.Action, d.Status)
	case sessions.QuestionRequested, sessions.QuestionResolved:
		return strings.TrimSpace(fmt.Sprintf("%s: %d options %s %s", e.Type, len(d.Options), d.Status, d.Answer))
	case sessions.SessionEnded:
		return fmt.Sprintf("%s: %s", e.Type, d.Reason)
	case sessions.ErrorEvent:
		return fmt.Sprintf("%s: %s", e.Type, d.Code)
	case sessions.SessionStarted:
		if len(d.More) > 0 {
			return fmt.Sprintf("%s: metadata", e.Type)
		}
	}
	return string(e.Type)
}

// contentTypes returns the types of an item's parts without those of reasoning and status.
func contentTypes(x *sessions.Item) string {
	var types []string
	for _, p := range x.Content {
		if p.Type != sessions.PartReasoning && p.Type != sessions.PartStatus {
			types = append(types, string(p.Type))
		}
	}
	isEmpty := len(types) == 0 && x.Kind == sessions.KindMessage && *x.Role == sessions.RoleAssistant
	if isEmpty && x.Status == sessions.InProgress {
		types = append(types, string(sessions.PartText))
	}
	return strings.Join(types, ",")
}

// equal compares the lines of events.
func equal(t *testing.T, what string, events []sessions.Event, want ...string) {
	t.Helper()
	if got := lines(events); !slices.Equal(got, want) {
		t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
