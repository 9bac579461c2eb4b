package sessions_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/mock"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// open returns another process that uses a server.
func open(t *testing.T, server *natsembed.Server, delay time.Duration) *sessionstest.World {
	t.Helper()
	return sessionstest.New(t, storetest.Open(t, server), &mock.Agent{Delay: delay})
}

// A turn whose runner has died ends with one error, and those after it are as if nothing had happened.
func TestTurnWhoseRunnerDied(t *testing.T) {
	server := storetest.Server(t)
	one, two := open(t, server, time.Hour), open(t, server, 0)
	stop := one.Lead()
	create(one, "s", "")
	send(one, "s", "one", "two")
	one.Until("s", 0, nth(1, sessions.ItemStarted))
	stop()
	two.Lead()
	two.Until("s", 0, nth(2, sessions.TurnEnded))
	send(two, "s", "three")
	events := two.Until("s", 0, nth(3, sessions.TurnEnded))
	turn := slices.Concat(turnStarts, userSays, agentSays, turnEnds)
	equal(t, "the session", events, slices.Concat(begins, turnStarts, userSays[:1], []string{"error: turn_interrupted"},
		turnEnds, turn, turn)...)
	turns(t, events)
}

// A turn that waits for an answer goes on with another runner, whenever the answer comes.
func TestWaitingTurnWhoseRunnerDied(t *testing.T) {
	accept := func(s *sessions.Service) error {
		return s.AnswerPermission(t.Context(), org, "s", "mock_1_permission", sessions.PermissionAccepted)
	}
	interrupt := func(s *sessions.Service) error { return s.Interrupt(t.Context(), org, "s") }
	terminate := func(s *sessions.Service) error { return s.Terminate(t.Context(), org, "s") }
	accepted := []string{"permission.resolved: command_execution accept"}
	for name, c := range map[string]struct {
		before, after func(*sessions.Service) error // the other runner begins
		want          []string
	}{
		"answered after":      {after: accept, want: slices.Concat(accepted, turnEnds)},
		"answered between":    {before: accept, want: slices.Concat(accepted, turnEnds)},
		"interrupted after":   {after: interrupt, want: slices.Concat(rejected, turnEnds)},
		"interrupted between": {before: interrupt, want: slices.Concat(rejected, turnEnds)},
		"terminated between":  {before: terminate, want: []string{"session.ended: terminated"}},
	} {
		t.Run(name, func(t *testing.T) {
			server := storetest.Server(t)
			one, two := open(t, server, 0), open(t, server, 0)
			stop := one.Lead()
			create(one, "s", "")
			send(one, "s", listFiles)
			waiting := one.Until("s", 0, nth(1, sessions.PermissionRequested))
			stop()
			if c.before != nil {
				if err := c.before(two.Service); err != nil {
					t.Fatal(err)
				}
			}
			two.Lead()
			if c.after != nil {
				if err := c.after(two.Service); err != nil {
					t.Fatal(err)
				}
			}
			ends := func(e *sessions.Event) bool { return e.Type == sessions.TurnEnded || e.Type == sessions.SessionEnded }
			equal(t, "the rest", two.Until("s", int64(len(waiting)), ends), c.want...)
		})
	}
}

// A message whose turn comes after it has expired ends with an error, and the session goes on.
func TestMessageThatExpired(t *testing.T) {
	ctx, server := t.Context(), storetest.Server(t)
	w := open(t, server, 0)
	stop := w.Lead()
	create(w, "s", "")
	send(w, "s", listFiles)
	waiting := w.Until("s", 0, nth(1, sessions.PermissionRequested))
	stop()
	send(w, "s", "late")
	err := w.AnswerPermission(ctx, org, "s", "mock_1_permission", sessions.PermissionAccepted)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := storetest.Open(t, server).JS.Stream(ctx, "BULLPEN_AGENT_LOGS")
	if err == nil {
		err = stream.Purge(ctx, jetstream.WithPurgeKeep(1))
	}
	if err != nil {
		t.Fatal(err)
	}
	w.Lead()
	accepted := []string{"permission.resolved: command_execution accept"}
	expired := w.Until("s", int64(len(waiting)), nth(1, sessions.ErrorEvent))
	equal(t, "the rest", expired, slices.Concat(accepted, turnEnds, []string{"error: message_expired"})...)
	send(w, "s", "hello")
	equal(t, "the next turn", w.Until("s", expired[len(expired)-1].Sequence, nth(1, sessions.TurnEnded)),
		slices.Concat(turnStarts, userSays, agentSays, turnEnds)...)
}

// However often runners die, and with two at once, each message has one turn, which ends once.
func TestRunnersThatDie(t *testing.T) {
	const rounds, perRound = 20, 3
	server := storetest.Server(t)
	client := open(t, server, 0)
	create(client, "s", "")
	var want []string
	stop := func() {}
	for i := range rounds {
		for k := range perRound {
			text := fmt.Sprintf("message %d of round %d", k, i)
			want = append(want, text)
			send(client, "s", text)
		}
		if i%4 == 0 { // otherwise two processes lead for a while
			stop()
		}
		next := open(t, server, time.Duration(i%3)*time.Millisecond).Lead()
		stop()
		stop = next
	}
	events := client.Until("s", 0, nth(len(want), sessions.TurnEnded))
	got, failed := turns(t, events), 0
	for i := range got {
		if got[i] == "" { // it was cut before the user's item
			got[i] = want[i]
		}
	}
	for _, e := range events {
		if e.Type == sessions.ErrorEvent {
			failed++
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("turns: %q", got)
	}
	t.Logf("%d of %d turns were cut", failed, len(want))
}
