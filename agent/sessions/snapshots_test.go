package sessions_test

import (
	"errors"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/mock"
	"github.com/bullpen-run/bullpen/proto"
)

// Messages that the tests of the original send.
const (
	sayOK     = "Reply with exactly the single word OK."
	sayFirst  = "Reply with exactly the word FIRST."
	saySecond = "Reply with exactly the word SECOND."
	listFiles = "List files in the current directory using available tools."
	askOne    = "Use the AskUserQuestion tool to ask exactly one yes/no question, then wait for a reply. " +
		"Do not answer yourself."
	askAnother = "Call the AskUserQuestion tool with exactly one yes/no question and wait for a reply. " +
		"Do not answer yourself."
)

// What the original's snapshots have of events, as its tests cut them: see scrub.
var (
	begins   = []string{"session.started: metadata"}
	userSays = []string{
		"item.started: user message in_progress text", "item.completed: user message completed text",
	}
	agentSays = []string{
		"item.started: assistant message in_progress text", "item.delta", "item.completed: assistant message completed text",
	}
	asksPermission = []string{"permission.requested: command_execution requested"}
	asksQuestion   = []string{"question.requested: 2 options requested"}
)

// scrub does to the events of a session what the tests of the original do. They drop items that are a status or
// reasoning alone, and cut after the first answer of the assistant, error, permission or question. Events of
// turns are newer than the snapshots.
func scrub(events []sessions.Event) (kept []sessions.Event) {
	dropped := map[string]bool{}
	for i := range events {
		e := &events[i]
		item, _ := sessions.DataOf[sessions.ItemData](e)
		delta, _ := sessions.DataOf[sessions.Delta](e)
		switch {
		case e.Type == sessions.TurnStarted || e.Type == sessions.TurnEnded:
			continue
		case e.Type == sessions.ItemDelta && dropped[delta.ItemID]:
			continue
		case isItem(e) && isHidden(&item.Item):
			dropped[item.Item.ID] = true
			continue
		}
		if kept = append(kept, *e); stops(e) {
			return kept
		}
	}
	return kept
}

func isItem(e *sessions.Event) bool {
	return e.Type == sessions.ItemStarted || e.Type == sessions.ItemCompleted
}

func isHidden(x *sessions.Item) bool {
	isReasoning := func(p sessions.Part) bool { return p.Type == sessions.PartReasoning }
	isShown := func(p sessions.Part) bool { return !isReasoning(p) && p.Type != sessions.PartStatus }
	return x.Kind == sessions.KindStatus ||
		slices.ContainsFunc(x.Content, isReasoning) && !slices.ContainsFunc(x.Content, isShown)
}

func stops(e *sessions.Event) bool {
	switch e.Type {
	case sessions.ErrorEvent, sessions.Unparsed, sessions.PermissionRequested, sessions.QuestionRequested:
		return true
	case sessions.ItemCompleted:
		item, err := sessions.DataOf[sessions.ItemData](e)
		return err == nil && item.Item.Role != nil && *item.Item.Role == sessions.RoleAssistant
	default:
		return false
	}
}

// The sessions of the original's snapshots have the same events. Each message is sent when the one before it
// has been answered.
func TestSnapshotsOfEvents(t *testing.T) {
	w := start(t)
	for _, c := range []struct {
		snapshots, mode string
		messages        []string
		want            [][]string // of each message
	}{
		{
			"http_events, sse_events", sessions.PermissionBypass,
			[]string{sayOK},
			[][]string{slices.Concat(begins, userSays, agentSays)},
		},
		{
			"multi_turn", sessions.PermissionBypass,
			[]string{sayFirst, saySecond},
			[][]string{slices.Concat(begins, userSays, agentSays), slices.Concat(userSays, agentSays)},
		},
		{
			"permission_events", sessions.PermissionPlan,
			[]string{listFiles},
			[][]string{slices.Concat(begins, userSays, asksPermission)},
		},
		{
			"question_reply_events, question_reject_events", sessions.PermissionPlan,
			[]string{askOne},
			[][]string{slices.Concat(begins, userSays, asksQuestion)},
		},
		{
			"the question in other words", sessions.PermissionPlan,
			[]string{askAnother},
			[][]string{slices.Concat(begins, userSays, asksQuestion)},
		},
	} {
		create(w, c.snapshots, c.mode)
		var offset int64
		for i, message := range c.messages {
			send(w, c.snapshots, message)
			events := w.Until(c.snapshots, offset, (*sessions.Event).EndsTurn)
			equal(t, c.snapshots, scrub(events), c.want[i]...)
			offset = events[len(events)-1].Sequence
		}
	}
}

// concurrency_events: two sessions at once do not mix.
func TestSnapshotOfConcurrentSessions(t *testing.T) {
	w := start(t)
	ids := []string{"session_a", "session_b"}
	var work sync.WaitGroup
	for _, id := range ids {
		create(w, id, sessions.PermissionBypass)
		work.Go(func() {
			if _, err := w.Send(t.Context(), org, id, sessions.Message{Text: sayOK}, ""); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	for _, id := range ids {
		events := w.Until(id, 0, (*sessions.Event).EndsTurn)
		equal(t, id, scrub(events), slices.Concat(begins, userSays, agentSays)...)
		for _, e := range events {
			if e.Session != id || e.NativeSession == nil || *e.NativeSession != "mock-"+id {
				t.Errorf("%s has event %d of session %s", id, e.Sequence, e.Session)
			}
		}
	}
}

// The snapshots without events: what requests answer. Package rest has them in the form of HTTP.
func TestSnapshotsOfRequests(t *testing.T) {
	w := start(t)
	ctx := t.Context()
	unknown := func(snapshot string, err error, message string) {
		t.Helper()
		e, ok := errors.AsType[*sessions.Error](err)
		if !ok || e.Kind != sessions.InvalidRequest || e.Message != message || e.Agent+e.Session != "" || e.Details != nil {
			t.Errorf("%s: %v", snapshot, err)
		}
	}
	ok := func(snapshot string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", snapshot, err)
		}
	}

	create(w, "s", sessions.PermissionPlan)
	x, err := w.Get(ctx, org, "s")
	if ok("create_session", err); x.Native != "mock-s" {
		t.Errorf("create_session: the agent's own id is %q", x.Native)
	}
	list, err := w.List(ctx, org)
	if ok("sessions_list", err); len(list) != 1 || list[0].ID != "s" || list[0].Agent != "mock" ||
		list[0].AgentMode != "build" || list[0].PermissionMode != "plan" || list[0].Ended != "" {
		t.Errorf("sessions_list: %v", list)
	}
	send(w, "s", listFiles, askOne, askOne)
	ok("send_message", err)

	unknown("permission_reply_missing",
		w.AnswerPermission(ctx, org, "s", "missing-permission", sessions.PermissionAccepted),
		"invalid request: unknown permission id: missing-permission")
	for snapshot, answers := range map[string][][]string{"question_reply_missing": {}, "question_reject_missing": nil} {
		unknown(snapshot, w.AnswerQuestion(ctx, org, "s", "missing-question", answers),
			"invalid request: unknown question id: missing-question")
	}

	w.Until("s", 0, nth(1, sessions.PermissionRequested))
	ok("permission_reply", w.AnswerPermission(ctx, org, "s", "mock_1_permission", sessions.PermissionAccepted))
	w.Until("s", 0, nth(1, sessions.QuestionRequested))
	ok("question_reply", w.AnswerQuestion(ctx, org, "s", "mock_2_question", [][]string{{"Yes"}}))
	w.Until("s", 0, nth(2, sessions.QuestionRequested))
	ok("question_reject", w.AnswerQuestion(ctx, org, "s", "mock_3_question", nil))
	w.Until("s", 0, nth(3, sessions.TurnEnded))
}

// The snapshots of the mock's description.
func TestSnapshotsOfMock(t *testing.T) {
	info := (&mock.Agent{}).Info()
	for i, want := range []struct{ id, name string }{{"build", "Build"}, {"plan", "Plan"}} {
		if got := info.Modes[i]; got.ID != want.id || got.Name != want.name || got.Description == "" {
			t.Errorf("agent_modes: %v", got)
		}
	}
	if len(info.Modes) != 2 || len(info.Models) != 1 || info.Models[0].ID != "mock" ||
		info.Models[0].Variants != nil || info.DefaultModel != "mock" {
		t.Errorf("agent_modes, agent_models: %v", info)
	}
}

// accept_edits_noop_for_non_claude, and what other modes are refused.
func TestModes(t *testing.T) {
	w := start(t)
	create(w, "s", sessions.PermissionAcceptEdits)
	if x, err := w.Get(t.Context(), org, "s"); err != nil || x.PermissionMode != sessions.PermissionDefault {
		t.Errorf("acceptEdits: %v", err)
	}
	for _, c := range []struct {
		session proto.AgentSession
		want    sessions.Error
	}{
		{
			proto.AgentSession{ID: "a", Agent: "mock", PermissionMode: "sometimes"},
			sessions.Error{Kind: sessions.InvalidRequest, Message: "invalid request: invalid permission mode: sometimes"},
		},
		{
			proto.AgentSession{ID: "a", Agent: "mock", AgentMode: "custom"},
			sessions.Error{
				Kind: sessions.ModeNotSupported, Message: "mode not supported: mock custom", Agent: "mock",
				Details: map[string]any{"mode": "custom"},
			},
		},
		{
			proto.AgentSession{ID: "a", Agent: "robot"},
			sessions.Error{Kind: sessions.UnsupportedAgent, Message: "unsupported agent: robot", Agent: "robot"},
		},
		{
			proto.AgentSession{ID: "s", Agent: "mock"},
			sessions.Error{Kind: sessions.SessionExists, Message: "session already exists: s", Session: "s"},
		},
	} {
		c.session.Org, c.session.Key = org, "k"
		err := w.Create(t.Context(), &c.session)
		if e, ok := errors.AsType[*sessions.Error](err); !ok || !reflect.DeepEqual(*e, c.want) {
			t.Errorf("%v: %v", c.session, err)
		}
	}
}
