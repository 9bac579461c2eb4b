package sessions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// puppet is an agent that does what a test says.
type puppet struct {
	info   sessions.Info
	starts chan *hand // receives each conversation
	resume bool       // the turn in progress can be continued
	broken error      // of each start
}

func newPuppet() *puppet {
	return &puppet{
		info: sessions.Info{
			ID: "puppet", Modes: []sessions.Mode{{ID: sessions.DefaultMode}},
			PermissionModes: []string{sessions.PermissionDefault, sessions.PermissionAcceptEdits},
		},
		starts: make(chan *hand, 100),
	}
}

// newPendingPuppet returns a puppet whose turns begin with an empty item.
func newPendingPuppet() *puppet {
	p := newPuppet()
	p.info.ID, p.info.PendingAssistant = "pending", true
	return p
}

func (p *puppet) Info() *sessions.Info { return &p.info }

func (p *puppet) Start(_ context.Context, s *sessions.Start) (sessions.Conversation, error) {
	h := &hand{
		Start: *s, resumed: p.resume && s.Running,
		sent: make(chan *sessions.Message, 100), answers: make(chan *sessions.Answer, 100),
	}
	p.starts <- h
	return h, p.broken
}

// hand is a conversation with a puppet.
type hand struct {
	sessions.Start
	resumed bool
	sent    chan *sessions.Message
	answers chan *sessions.Answer
}

func (h *hand) Resumed() bool { return h.resumed }

func (h *hand) Send(_ context.Context, m *sessions.Message) error { h.sent <- m; return nil }

func (h *hand) Answer(_ context.Context, a *sessions.Answer) error { h.answers <- a; return nil }

func (h *hand) Interrupt(context.Context) error { return nil }

func (h *hand) Close() {}

// report reports what the agent has done.
func (h *hand) report(t *testing.T, list ...sessions.Native) {
	t.Helper()
	for _, n := range list {
		if err := h.Report(n); err != nil {
			t.Fatal(err)
		}
	}
}

// worldOf returns a process with agents, which leads until stop is called.
func worldOf(
	t *testing.T, server *natsembed.Server, agents ...sessions.Agent,
) (w *sessionstest.World, stop func()) {
	t.Helper()
	w = sessionstest.New(t, storetest.Open(t, server), agents...)
	return w, w.Lead()
}

// Reports of an agent.
func started(id string, parts ...sessions.Part) sessions.Native {
	return reported(sessions.ItemStarted, sessions.Item{
		NativeID: &id, Kind: sessions.KindMessage, Role: new(sessions.RoleAssistant), Status: sessions.InProgress,
		Content: parts,
	})
}

func completed(id string, parts ...sessions.Part) sessions.Native {
	return reported(sessions.ItemCompleted, sessions.Item{
		NativeID: &id, Kind: sessions.KindMessage, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
		Content: parts,
	})
}

func result(id, parent string) sessions.Native {
	return reported(sessions.ItemCompleted, sessions.Item{
		NativeID: &id, ParentID: &parent, Kind: sessions.KindToolResult, Role: new(sessions.RoleTool),
		Status: sessions.Completed, Content: []sessions.Part{{Type: sessions.PartToolResult, CallID: "c"}},
	})
}

func reported(kind sessions.EventType, x sessions.Item) sessions.Native {
	return sessions.Native{Type: kind, Data: sessions.ItemData{Item: x}}
}

func delta(id, text string) sessions.Native {
	return sessions.Native{Type: sessions.ItemDelta, Data: sessions.Delta{NativeItemID: &id, Delta: text}}
}

func asks(id, action, metadata string) sessions.Native {
	return sessions.Native{Type: sessions.PermissionRequested, Data: sessions.Permission{
		ID: id, Action: action, Metadata: json.RawMessage(metadata),
	}}
}

func ends() sessions.Native { return sessions.Native{Type: sessions.TurnEnded} }

// shape describes an event with the ids of items.
func shape(e *sessions.Event) string {
	mark := ""
	if e.Synthetic {
		mark = "*"
	}
	id := func(s *string) string {
		if s == nil {
			return "-"
		}
		return *s
	}
	if item, err := sessions.DataOf[sessions.ItemData](e); err == nil && item.Item.ID != "" {
		x := item.Item
		return fmt.Sprintf("%s %s %s %s %q%s", e.Type, x.ID, id(x.NativeID), id(x.ParentID), sessions.TextOf(x.Content), mark)
	}
	if d, err := sessions.DataOf[sessions.Delta](e); err == nil && d.ItemID != "" {
		return fmt.Sprintf("%s %s %s %q%s", e.Type, d.ItemID, id(d.NativeItemID), d.Delta, mark)
	}
	return line(e) + mark
}

// shapes compares the events after the start of the first turn.
func shapes(t *testing.T, what string, events []sessions.Event, want ...string) {
	t.Helper()
	var got []string
	for i := range events {
		if k := events[i].Type; k != sessions.SessionStarted && k != sessions.TurnStarted {
			got = append(got, shape(&events[i]))
		}
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Events that an agent leaves out are added, and those that it repeats are dropped.
func TestNormaliser(t *testing.T) {
	w, _ := worldOf(t, storetest.Server(t), newPuppet(), newPendingPuppet())
	said := []string{`item.started itm_1 user_1 - "go"*`, `item.completed itm_1 user_1 - "go"*`}
	for _, c := range []struct {
		what    string
		pending bool // Info.PendingAssistant
		reports []sessions.Native
		want    []string
	}{
		{
			"no start and no delta", false,
			[]sessions.Native{completed("a", sessions.Text("hello"))},
			[]string{`item.started itm_2 a - "hello"*`, `item.delta itm_2 a "hello"*`, `item.completed itm_2 a - "hello"`},
		},
		{
			"all there", false,
			[]sessions.Native{started("a"), delta("a", "hello"), completed("a", sessions.Text("hello"))},
			[]string{`item.started itm_2 a - ""`, `item.delta itm_2 a "hello"`, `item.completed itm_2 a - "hello"`},
		},
		{
			"repeated", false,
			[]sessions.Native{started("a"), started("a"), completed("a"), completed("a"), started("a")},
			[]string{`item.started itm_2 a - ""`, `item.completed itm_2 a - ""`},
		},
		{
			"a delta of an unknown item", false,
			[]sessions.Native{delta("a", "he"), delta("a", "llo"), completed("a")},
			[]string{
				`item.started itm_2 a - ""*`, `item.delta itm_2 a "he"`, `item.delta itm_2 a "llo"`, `item.completed itm_2 a - ""`,
			},
		},
		{
			"parents", false,
			[]sessions.Native{completed("a"), result("b", "a"), result("c", "unknown")},
			[]string{
				`item.started itm_2 a - ""*`, `item.completed itm_2 a - ""`,
				`item.started itm_3 b itm_2 ""*`, `item.completed itm_3 b itm_2 ""`,
				`item.started itm_4 c - ""*`, `item.completed itm_4 c - ""`,
			},
		},
		{
			"the agent's own turn and session", false,
			[]sessions.Native{
				{Type: sessions.SessionStarted, Data: sessions.Started{}}, {Type: sessions.TurnStarted, Data: sessions.Turn{}},
			},
			nil,
		},
		{
			"empty", true,
			[]sessions.Native{delta("a", "hello"), completed("a", sessions.Text("hello")), completed("b", sessions.Text("bye"))},
			[]string{
				`item.started itm_2 empty_pending_assistant_1 - ""*`, `item.delta itm_2 a "hello"`,
				`item.completed itm_2 a - "hello"`,
				`item.started itm_3 b - "bye"*`, `item.delta itm_3 b "bye"*`, `item.completed itm_3 b - "bye"`,
			},
		},
		{
			"empty and started", true,
			[]sessions.Native{started("a"), delta("a", "hello"), completed("a", sessions.Text("hello"))},
			[]string{
				`item.started itm_2 empty and started_pending_assistant_1 - ""*`, `item.delta itm_2 a "hello"`,
				`item.completed itm_2 a - "hello"`,
			},
		},
	} {
		p := w.Agents[0].(*puppet)
		if c.pending {
			p = w.Agents[1].(*puppet)
		}
		w.MustCreate(c.what, p.info.ID)
		w.MustSend(c.what, "go")
		h := <-p.starts
		<-h.sent
		h.report(t, append(c.reports, ends())...)
		want := slices.Concat(said, c.want, []string{"turn.ended*"})
		shapes(t, c.what, w.Until(c.what, 0, sessionstest.Is(sessions.TurnEnded)), want...)
	}
}

// An agent that continues a turn with another runner finds its items as they were, and gets the answers again.
func TestResumedTurn(t *testing.T) {
	for _, p := range []*puppet{newPuppet(), newPendingPuppet()} {
		server, pending := storetest.Server(t), p.info.PendingAssistant
		p.info.OwnUserItems, p.resume = true, true
		one, stop := worldOf(t, server, p)
		one.MustCreate("s", p.info.ID)
		one.MustSend("s", "go")
		h := <-p.starts
		<-h.sent
		if !pending {
			h.report(t, started("a"), delta("a", "hel"))
		}
		const tool = `{"toolName":"Bash","input":{"command":"ls"}}`
		h.report(t, reported(sessions.ItemStarted, toolCall("call")), reported(sessions.ItemCompleted, toolCall("call")),
			asks("p1", "Bash", tool))
		one.Until("s", 0, nth(1, sessions.PermissionRequested))
		if err := one.AnswerPermission(t.Context(), org, "s", "p1", sessions.PermissionAlways); err != nil {
			t.Fatal(err)
		}
		last := asks("p2", "Bash", tool)
		last.Cursor, last.NativeSession = "12", "native"
		h.report(t, last)
		one.Until("s", 0, nth(2, sessions.PermissionResolved))
		stop()

		two, _ := worldOf(t, server, p)
		h = <-p.starts
		if !h.Running || h.Cursor != "12" || h.Native != "native" || len(h.Pending) != 0 || h.Turns != 1 {
			t.Errorf("resumed with %+v", h.Start)
		}
		for _, id := range []string{"p1", "p2"} {
			if a := <-h.answers; a.Permission.ID != id || a.Permission.Status != sessions.PermissionAlways {
				t.Errorf("answer: %+v", a.Permission)
			}
		}
		h.report(t, reported(sessions.ItemCompleted, toolCall("call")), result("r", "call"), delta("a", "lo"),
			completed("a", sessions.Text("hello")), ends())
		answers := []string{
			"permission.requested: Bash requested", "permission.resolved: Bash accept_for_session*",
			"permission.requested: Bash requested", "permission.resolved: Bash accept_for_session*",
		}
		var want []string
		if pending {
			want = append([]string{
				`item.started itm_1 s_pending_assistant_1 - ""*`, `item.started itm_2 call - ""`, `item.completed itm_2 call - ""`,
			}, answers...)
		} else {
			want = append([]string{
				`item.started itm_1 a - ""`, `item.delta itm_1 a "hel"`,
				`item.started itm_2 call - ""`, `item.completed itm_2 call - ""`,
			}, answers...)
		}
		want = append(want, `item.started itm_3 r itm_2 ""*`, `item.completed itm_3 r itm_2 ""`, `item.delta itm_1 a "lo"`,
			`item.completed itm_1 a - "hello"`, "turn.ended*")
		shapes(t, "the turn", two.Until("s", 0, nth(1, sessions.TurnEnded)), want...)
	}
}

func toolCall(id string) sessions.Item {
	return sessions.Item{
		NativeID: &id, Kind: sessions.KindToolCall, Role: new(sessions.RoleAssistant), Status: sessions.Completed,
		Content: []sessions.Part{{Type: sessions.PartToolCall, Name: "Bash", Arguments: "{}", CallID: id}},
	}
}

// A file change is allowed unseen if the user has accepted edits.
func TestAcceptEdits(t *testing.T) {
	p := newPuppet()
	p.info.OwnUserItems = true
	w, _ := worldOf(t, storetest.Server(t), p)
	w.MustCreate("s", "puppet", func(x *proto.AgentSession) { x.PermissionMode = sessions.PermissionAcceptEdits })
	w.MustSend("s", "go")
	h := <-p.starts
	<-h.sent
	h.report(t, asks("p1", "Edit", `{"toolName":"Edit"}`))
	if a := <-h.answers; a.Permission.ID != "p1" || a.Permission.Status != sessions.PermissionAccepted {
		t.Errorf("answer: %+v", a.Permission)
	}
	h.report(t, ends())
	shapes(t, "the turn", w.Until("s", 0, nth(1, sessions.TurnEnded)), "turn.ended*")
}

// The turn of an agent that does not start ends with an error, which does not tell why.
func TestAgentThatDoesNotStart(t *testing.T) {
	p := newPuppet()
	p.broken = errors.New("secret cause")
	w, _ := worldOf(t, storetest.Server(t), p)
	w.MustCreate("s", "puppet")
	w.MustSend("s", "go")
	events := w.Until("s", 0, nth(1, sessions.TurnEnded))
	shapes(t, "the turn", events, `item.started itm_1 user_1 - "go"*`, `item.completed itm_1 user_1 - "go"*`,
		"error: agent_unavailable*", "turn.ended*")
	for _, e := range events {
		if strings.Contains(string(e.Data), "secret") {
			t.Errorf("%s", e.Data)
		}
	}
	p.broken = &sessions.Error{Kind: sessions.AgentNotInstalled, Message: "public cause"}
	w.MustSend("s", "go")
	events = w.Until("s", int64(len(events)), nth(1, sessions.ErrorEvent))
	failure := sessionstest.Data[sessions.Failure](t, &events[len(events)-1])
	if failure.Message != "the agent could not be reached: public cause" {
		t.Errorf("the next turn: %s", failure.Message)
	}
}

// A session whose agent has died takes no messages, and says how it died. Those in the queue end with an error.
func TestAgentThatDies(t *testing.T) {
	p := newPuppet()
	w, _ := worldOf(t, storetest.Server(t), p)
	w.MustCreate("s", "puppet")
	w.MustSend("s", "go")
	h := <-p.starts
	<-h.sent
	w.MustSend("s", "next")
	h.report(t, asks("p1", "Bash", `{}`), sessions.Native{Type: sessions.SessionEnded, Data: sessions.Ended{
		Reason: sessions.EndError, TerminatedBy: sessions.FromAgent, ExitCode: new(3),
		Stderr: &sessions.Stderr{Head: "no memory"},
	}})
	shapes(t, "the session", w.Until("s", 0, nth(1, sessions.TurnEnded)), `item.started itm_1 user_1 - "go"*`,
		`item.completed itm_1 user_1 - "go"*`, "permission.requested: Bash requested", "permission.resolved: Bash reject*",
		"session.ended: error", `item.started itm_2 user_2 - "next"*`, `item.completed itm_2 user_2 - "next"*`,
		"error: agent_process_exited*", "turn.ended*")
	_, err := w.Send(t.Context(), org, "s", sessions.Message{Text: "again"}, "")
	e, ok := errors.AsType[*sessions.Error](err)
	if !ok || e.Kind != sessions.AgentExited || *e.Details["exitCode"].(*int) != 3 || e.Details["stderr"] != "no memory" {
		t.Errorf("a message after its end: %v", err)
	}
	if x, err := w.Get(t.Context(), org, "s"); err != nil || x.Ended != sessions.EndError || x.Queued() != 0 {
		t.Errorf("the session: %s, %d in the queue, %v", x.Ended, x.Queued(), err)
	}
}
