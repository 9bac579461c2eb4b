package sessions_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// Lines of events that end a turn that waits for a permission.
var (
	turnStarts = []string{"turn.started"}
	turnEnds   = []string{"turn.ended"}
	rejected   = []string{"permission.resolved: command_execution reject"}
)

// turns checks that each message has one turn, one after another, and returns what the user said in each.
func turns(t *testing.T, events []sessions.Event) (texts []string) {
	t.Helper()
	started, running := 0, false
	for i := range events {
		e := &events[i]
		if e.Sequence != int64(i+1) || e.ID != fmt.Sprintf("evt_%d", i+1) {
			t.Fatalf("event %d is number %d, %s", i+1, e.Sequence, e.ID)
		}
		switch e.Type {
		case sessions.TurnStarted, sessions.TurnEnded:
			turn, starts := sessionstest.Data[sessions.Turn](t, e), e.Type == sessions.TurnStarted
			if starts == running {
				t.Fatalf("event %d: %s out of order", i+1, e.Type)
			}
			if running = starts; starts {
				started++
				texts = append(texts, "")
			}
			phase := map[bool]string{true: "started", false: "ended"}[starts]
			if turn.Phase != phase || turn.ID != fmt.Sprintf("turn_%d", started) || e.Source != sessions.FromDaemon {
				t.Errorf("event %d: %s %s of %s", i+1, turn.Phase, turn.ID, e.Source)
			}
		case sessions.SessionStarted:
		case sessions.SessionEnded:
			running = false
		default:
			if !running {
				t.Fatalf("event %d: %s outside of turns", i+1, e.Type)
			}
		}
		if item, err := sessions.DataOf[sessions.ItemData](e); err == nil && e.Type == sessions.ItemCompleted &&
			*item.Item.Role == sessions.RoleUser {
			texts[started-1] = sessions.TextOf(item.Item.Content)
		}
	}
	if running {
		t.Fatal("the last turn has not ended")
	}
	return texts
}

// Messages that come during a turn wait, and each has a turn of its own.
func TestMessagesWaitForTheirTurns(t *testing.T) {
	w := start(t)
	create(w, "s", "")
	send(w, "s", listFiles)
	w.Until("s", 0, nth(1, sessions.PermissionRequested))
	send(w, "s", "one", "two", " ", "three")
	if x, err := w.Get(t.Context(), org, "s"); err != nil || x.Queued() != 4 || !x.Running {
		t.Errorf("during the first turn: %d in the queue, %v", x.Queued(), err)
	}
	if err := w.AnswerPermission(t.Context(), org, "s", "mock_1_permission", sessions.PermissionAccepted); err != nil {
		t.Fatal(err)
	}
	events := w.Until("s", 0, nth(5, sessions.TurnEnded))
	if got := turns(t, events); !slices.Equal(got, []string{listFiles, "one", "two", "", "three"}) {
		t.Errorf("turns: %q", got)
	}
	turn := slices.Concat(turnStarts, userSays, agentSays, turnEnds)
	equal(t, "the session", events, slices.Concat(begins, turnStarts, userSays, asksPermission,
		[]string{"permission.resolved: command_execution accept"}, turnEnds, turn, turn, turnStarts, turnEnds, turn)...)
}

// The model of a message is that of later messages, even if another process drives the session.
func TestModelOfMessages(t *testing.T) {
	server := storetest.Server(t)
	p := newPuppet()
	w, stop := worldOf(t, server, p)
	w.MustCreate("s", "puppet")
	for i, m := range []struct{ sent, want sessions.Message }{
		{sessions.Message{Text: "one"}, sessions.Message{}},
		{sessions.Message{Model: "m", Variant: "high"}, sessions.Message{Model: "m", Variant: "high"}},
		{sessions.Message{Variant: "low"}, sessions.Message{Model: "m", Variant: "low"}},
		{sessions.Message{}, sessions.Message{Model: "m", Variant: "low"}},
	} {
		if _, err := w.Send(t.Context(), org, "s", m.sent, ""); err != nil {
			t.Fatal(err)
		}
		h := <-p.starts
		if got := <-h.sent; got.Model != m.want.Model || got.Variant != m.want.Variant {
			t.Errorf("message %d has the model %q, variant %q", i+1, got.Model, got.Variant)
		}
		h.report(t, ends())
		w.Until("s", 0, nth(i+1, sessions.TurnEnded))
		stop()
		w, stop = worldOf(t, server, p)
	}
}

// A permission for the session answers later requests for the same thing, and no others.
func TestAlways(t *testing.T) {
	w := start(t)
	create(w, "s", sessions.PermissionPlan)
	send(w, "s", listFiles)
	w.Until("s", 0, nth(1, sessions.PermissionRequested))
	if err := w.AnswerPermission(t.Context(), org, "s", "mock_1_permission", sessions.PermissionAlways); err != nil {
		t.Fatal(err)
	}
	first := w.Until("s", 0, nth(1, sessions.TurnEnded))
	send(w, "s", listFiles)
	second := w.Until("s", int64(len(first)), nth(1, sessions.TurnEnded))
	equal(t, "the same again", second, slices.Concat(turnStarts, userSays, asksPermission,
		[]string{"permission.resolved: command_execution accept_for_session"}, turnEnds)...)
	for _, e := range second {
		if e.Type != sessions.PermissionResolved {
			continue
		}
		if resolved := sessionstest.Data[sessions.Permission](t, &e); !e.Synthetic || resolved.ID != "mock_2_permission" {
			t.Errorf("resolved: %s", e.Data)
		}
	}
	send(w, "s", "permission") // for another command, and a change of a file
	w.Until("s", 0, nth(4, sessions.PermissionRequested))
	if x, err := w.Get(t.Context(), org, "s"); err != nil || len(x.Pending) != 2 {
		t.Errorf("of others are pending: %v, %v", x.Pending, err)
	}
}

// Questions are answered with the first option that was chosen, or rejected. Other answers come too late.
func TestQuestions(t *testing.T) {
	w := start(t)
	create(w, "s", "")
	send(w, "s", "question")
	w.Until("s", 0, nth(2, sessions.QuestionRequested))
	answer := func(id string, answers [][]string) error {
		return w.AnswerQuestion(t.Context(), org, "s", id, answers)
	}
	if err := answer("mock_1_question", [][]string{{"Blue"}}); err != nil {
		t.Fatal(err)
	}
	if err := answer("mock_1_question", [][]string{{"Red"}}); err == nil {
		t.Error("a second answer was accepted")
	}
	if err := answer("mock_1_question_reject", nil); err != nil {
		t.Fatal(err)
	}
	events := w.Until("s", 0, nth(1, sessions.TurnEnded))
	equal(t, "the session", events, slices.Concat(begins, turnStarts, userSays, asksQuestion, asksQuestion,
		[]string{"question.resolved: 2 options answered Blue", "question.resolved: 2 options rejected"}, turnEnds)...)
	if err := answer("mock_1_question_reject", nil); err == nil {
		t.Error("an answer after the turn was accepted")
	}
}

// A turn can be interrupted. What it waited for is rejected, and the next one is not interrupted.
func TestInterrupt(t *testing.T) {
	w := start(t)
	create(w, "s", "")
	if err := w.Interrupt(t.Context(), org, "s"); err != nil { // nothing is in progress
		t.Fatal(err)
	}
	send(w, "s", listFiles, "hello")
	w.Until("s", 0, nth(1, sessions.PermissionRequested))
	if err := w.Interrupt(t.Context(), org, "s"); err != nil {
		t.Fatal(err)
	}
	events := w.Until("s", 0, nth(2, sessions.TurnEnded))
	equal(t, "the session", events, slices.Concat(begins, turnStarts, userSays, asksPermission, rejected, turnEnds,
		turnStarts, userSays, agentSays, turnEnds)...)
	var ends []string
	for i := range events {
		if events[i].Type == sessions.TurnEnded {
			ends = append(ends, string(sessionstest.Data[sessions.Turn](t, &events[i]).Metadata))
		}
	}
	if !slices.Equal(ends, []string{`{"interrupted":true}`, ""}) {
		t.Errorf("turns ended with %q", ends)
	}
}

// A session that the agent has ended goes on with the next message.
func TestSessionGoesOnAfterItsEnd(t *testing.T) {
	w := start(t)
	create(w, "s", "")
	send(w, "s", "end")
	events := w.Until("s", 0, nth(1, sessions.SessionEnded))
	if x, err := w.Get(t.Context(), org, "s"); err != nil || x.Ended != sessions.EndCompleted || x.Running {
		t.Errorf("ended: %s, %v", x.Ended, err)
	}
	send(w, "s", "hello")
	equal(t, "after the end", w.Until("s", int64(len(events)), nth(1, sessions.TurnEnded)),
		slices.Concat(turnStarts, userSays, agentSays, turnEnds)...)
	send(w, "s", "end", "end", "hello")
	turns(t, w.Until("s", 0, nth(2, sessions.TurnEnded)))
}

// A session that was terminated takes no messages. One that was removed is unknown, also to its readers.
func TestTerminateAndRemove(t *testing.T) {
	w := start(t)
	ctx := t.Context()
	create(w, "s", "")
	send(w, "s", listFiles, "hello")
	w.Until("s", 0, nth(1, sessions.PermissionRequested))
	for range 2 {
		if err := w.Terminate(ctx, org, "s"); err != nil {
			t.Fatal(err)
		}
	}
	equal(t, "the session", all(w, "s"),
		slices.Concat(begins, turnStarts, userSays, asksPermission, []string{"session.ended: terminated"})...)
	_, err := w.Send(ctx, org, "s", sessions.Message{Text: "hello"}, "")
	if err == nil || err.Error() != "invalid request: session terminated" {
		t.Errorf("a message after the end: %v", err)
	}
	if err := w.AnswerPermission(ctx, org, "s", "mock_1_permission", sessions.PermissionAccepted); err == nil {
		t.Error("an answer after the end was accepted")
	}
	r, err := w.Read(ctx, org, "s", 100)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := w.Remove(ctx, org, "s"); err != nil {
		t.Fatal(err)
	}
	const gone = "session not found: s"
	if _, err := r.Next(ctx, true); err == nil || err.Error() != gone {
		t.Errorf("a reader: %v", err)
	}
	if err := w.Remove(ctx, org, "s"); err == nil || err.Error() != gone {
		t.Errorf("removed again: %v", err)
	}
	create(w, "s", "")
	send(w, "s", "hello")
	equal(t, "another one with its id", w.Until("s", 0, nth(1, sessions.TurnEnded)),
		slices.Concat(begins, turnStarts, userSays, agentSays, turnEnds)...)
}

// A message with the key of an earlier one is that message.
func TestIdempotencyKeys(t *testing.T) {
	w := start(t)
	ctx := t.Context()
	create(w, "s", "")
	send := func(text, key string) (int64, error) {
		sent, err := w.Send(ctx, org, "s", sessions.Message{Text: text}, key)
		if err != nil {
			return 0, err
		}
		return sent.Number, nil
	}
	numbers := make([]int64, 8)
	if n := storetest.Race(t, len(numbers), func(error) bool { return false }, func(i int) (err error) {
		numbers[i], err = send("one", "key")
		return err
	}); n != len(numbers) || slices.Max(numbers) != 1 {
		t.Errorf("sent with one key: messages %v", numbers)
	}
	if number, err := send("two", "other key"); err != nil || number != 2 {
		t.Errorf("with another key: %d, %v", number, err)
	}
	if number, err := send("one", "key"); err != nil || number != 1 {
		t.Errorf("the first again: %d, %v", number, err)
	}
	if _, err := send("three", "key"); !isConflict(err) {
		t.Errorf("another message with the key: %v", err)
	}
	if got := turns(t, w.Until("s", 0, nth(2, sessions.TurnEnded))); !slices.Equal(got, []string{"one", "two"}) {
		t.Errorf("turns: %q", got)
	}
}

func isConflict(err error) bool {
	e, ok := errors.AsType[*api.Error](err)
	return ok && e.Code == api.CodeConflict
}

// A reader begins at any event.
func TestReadFromOffset(t *testing.T) {
	w := start(t)
	create(w, "s", "")
	send(w, "s", "markdown", "hello", "hello")
	events := w.Until("s", 0, nth(3, sessions.TurnEnded))
	for i := range events {
		after := w.Until("s", int64(i), nth(1, sessions.TurnEnded))
		if after[0].Sequence != int64(i+1) {
			t.Fatalf("after %d: event %d", i, after[0].Sequence)
		}
	}
}

// Each end of a turn and each request has its webhook, once.
func TestNotices(t *testing.T) {
	w := start(t)
	create(w, "s", "")
	send(w, "s", listFiles, "hello", "end", "hello")
	w.Until("s", 0, nth(1, sessions.PermissionRequested))
	if err := w.AnswerPermission(t.Context(), org, "s", "mock_1_permission", sessions.PermissionRejected); err != nil {
		t.Fatal(err)
	}
	w.Until("s", 0, nth(3, sessions.TurnEnded))
	send(w, "s", "last") // its turn starts once the webhooks of those before it were created
	events := w.Until("s", 0, nth(5, sessions.TurnStarted))
	var want []sessions.Notice
	for _, e := range events {
		switch e.Type {
		case sessions.TurnEnded, sessions.PermissionRequested, sessions.SessionEnded:
			want = append(want, sessions.Notice{Sequence: e.Sequence, Type: e.Type})
		}
	}
	if got := w.Notices()[:len(want)]; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// Of several requests to create a session one succeeds, and the session is as it asked for.
func TestCreateAtTheSameTime(t *testing.T) {
	server := storetest.Server(t)
	worlds := []*sessionstest.World{open(t, server, 0), open(t, server, 0)}
	modes := []string{sessions.PermissionDefault, sessions.PermissionPlan, sessions.PermissionBypass}
	for round := range 20 {
		id := fmt.Sprint("session ", round)
		accepted := make(chan string, 100)
		if n := storetest.Race(t, 3*len(modes), isExisting, func(i int) error {
			mode := modes[i%len(modes)]
			x := &proto.AgentSession{Org: org, Key: "k", ID: id, Agent: "mock", PermissionMode: mode}
			err := worlds[i%len(worlds)].Create(t.Context(), x)
			if err == nil {
				accepted <- mode
			}
			return err
		}); n != 1 {
			t.Fatalf("%d requests succeeded", n)
		}
		mode := <-accepted
		x, err := worlds[0].Get(t.Context(), org, id)
		if err != nil {
			t.Fatal(err)
		}
		started := worlds[0].Until(id, 0, nth(1, sessions.SessionStarted))
		log := sessionstest.Data[sessions.Started](t, &started[0]).Metadata.PermissionMode
		if log != mode || x.PermissionMode != mode {
			t.Fatalf("mode %s was accepted; the record has %s, and the log %s", mode, x.PermissionMode, log)
		}
	}
}

func isExisting(err error) bool {
	e, ok := errors.AsType[*sessions.Error](err)
	return ok && e.Kind == sessions.SessionExists
}

// appendHook is called before an entry is appended.
type appendHook struct {
	sessions.Logs
	before func()
}

func (l appendHook) Append(ctx context.Context, org, id string, after uint64, message []byte) (uint64, error) {
	l.before()
	return l.Logs.Append(ctx, org, id, after, message)
}

func (l appendHook) AppendTurn(
	ctx context.Context, org, id string, after uint64, message []byte, key string,
) (uint64, error) {
	l.before()
	return l.Logs.AppendTurn(ctx, org, id, after, message, key)
}

// A request that meets the removal of its session is told that there is none.
func TestRequestDuringRemoval(t *testing.T) {
	w := start(t)
	ctx := t.Context()
	for name, request := range map[string]func(*sessions.Service) error{
		"send": func(s *sessions.Service) error {
			_, err := s.Send(ctx, org, "s", sessions.Message{Text: "hello"}, "")
			return err
		},
		"answer": func(s *sessions.Service) error {
			return s.AnswerPermission(ctx, org, "s", "mock_1_permission", sessions.PermissionAccepted)
		},
		"interrupt": func(s *sessions.Service) error { return s.Interrupt(ctx, org, "s") },
		"terminate": func(s *sessions.Service) error { return s.Terminate(ctx, org, "s") },
		"remove":    func(s *sessions.Service) error { return s.Remove(ctx, org, "s") },
	} {
		create(w, "s", "")
		send(w, "s", listFiles)
		w.Until("s", 0, nth(1, sessions.PermissionRequested))
		late := *w.Service
		late.Logs = appendHook{w.Logs, sync.OnceFunc(func() {
			if err := w.Remove(ctx, org, "s"); err != nil {
				t.Error(err)
			}
		})}
		err := request(&late)
		if e, ok := errors.AsType[*sessions.Error](err); !ok || e.Kind != sessions.SessionNotFound {
			t.Errorf("%s: %v", name, err)
		}
	}
}
