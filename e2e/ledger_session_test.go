package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// kindSession is a client that sends messages in an agent session.
const kindSession kind = "session"

// sessionLedgerSize is the number of sessions of a ledger.
const sessionLedgerSize = 200

// testSessionLedger runs 200 agent sessions while processes of a deployment fail: each message must be
// answered once, or ended by one error.
func testSessionLedger(t *testing.T, p *programs, in topology) {
	d := newDeployment(t, p, in, "--agent-mock-delay", "20ms")
	d.deploy()
	l := newLedger(t, d)
	l.kinds = slices.Repeat([]kind{kindSession}, sessionLedgerSize)
	// Workers and schedulers have no part in sessions of the mock agent.
	wrong := slices.DeleteFunc(l.singleDisruptions(), func(d disruption) bool {
		return strings.HasPrefix(d.name, "worker") || strings.HasPrefix(d.name, "scheduler")
	})
	l.report(l.run(wrong, ledgerCycles.n()))
}

const sandboxAgent = "/sandbox-agent/v1/sessions/"

// permissionPrompt makes the mock agent ask for one permission.
const permissionPrompt = "List files in the current directory using available tools."

// sessionClient sends messages in a session until over is done. It checks the session when all turns have
// ended.
func (l *ledger) sessionClient(over, hard context.Context, r *rand.Rand) {
	l.mu.Lock()
	l.sessions++
	name := fmt.Sprintf("s%d", l.sessions)
	l.mu.Unlock()
	if !l.sessionCall(hard, r, name, "", "", request{"agent": "mock"}, http.StatusOK, http.StatusConflict) {
		return
	}
	var messages []string
	for over.Err() == nil {
		text := fmt.Sprintf("echo %s message %d of this session", name, len(messages)+1)
		if r.IntN(5) == 0 {
			text = permissionPrompt
		}
		key := fmt.Sprintf("%s-%d", name, len(messages)+1)
		if !l.sessionCall(hard, r, name, "/messages", key, request{"message": text}, http.StatusNoContent) {
			return
		}
		messages = append(messages, text)
		if r.IntN(3) > 0 { // else the next one is queued
			l.endTurns(hard, r, name, len(messages))
		}
		l.progress()
		sleep(over, time.Duration(r.IntN(3000))*time.Millisecond)
	}
	l.endTurns(hard, r, name, len(messages))
	l.checkSession(hard, r, name, messages)
}

// sessionCall posts to a session until a response has one of the statuses. It reports whether one had.
func (l *ledger) sessionCall(
	ctx context.Context, r *rand.Rand, name, path, key string, body any, want ...int,
) bool {
	for ctx.Err() == nil {
		m := l.gateways(r)[0]
		bounded, cancel := context.WithTimeout(ctx, 2*requestTime)
		answer, err := l.clientOf(m).try(bounded, http.MethodPost, sandboxAgent+name+path, body,
			"Content-Type", "application/json", "Idempotency-Key", key)
		cancel()
		l.log.note(name, "POST %s %s by %s: %v %v", path, key, m.name, answer, err)
		switch {
		case err != nil || mayPass(answer):
		case slices.Contains(want, answer.status):
			return true
		default:
			l.violate(name, "POST %s %s: %s", path, key, answer)
			return false
		}
		sleep(ctx, 250*time.Millisecond)
	}
	return false
}

// mayPass reports whether a request may succeed later. While the store cannot be reached, those that wait for
// it use up what an organisation may read at a time.
func mayPass(r *reply) bool {
	return r.status >= http.StatusInternalServerError || r.status == http.StatusTooManyRequests
}

// sessionEvent is an event of a session.
type sessionEvent struct {
	Sequence int64
	Type     string
	Data     struct {
		Turn       string `json:"turn_id"`
		Permission string `json:"permission_id"`
		Message    string
		Item       struct {
			Kind, Role string
			Content    []struct{ Text string }
		}
	}
}

// sessionEvents returns the events of a session, nil without a response.
func (l *ledger) sessionEvents(ctx context.Context, r *rand.Rand, name string, after int64) []sessionEvent {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTime)
	defer cancel()
	m := l.gateways(r)[0]
	path := sandboxAgent + name + "/events?offset=" + strconv.FormatInt(after, 10)
	answer, err := l.clientOf(m).try(ctx, http.MethodGet, path, nil)
	if err != nil || mayPass(answer) {
		return nil
	}
	var list struct{ Events []sessionEvent }
	if answer.status != http.StatusOK || json.Unmarshal(answer.body, &list) != nil {
		l.violate(name, "events: %s", answer)
	}
	return list.Events
}

// endTurns waits until the turns of all messages have ended, and answers permissions meanwhile.
func (l *ledger) endTurns(ctx context.Context, r *rand.Rand, name string, messages int) {
	last, after := "turn_"+strconv.Itoa(messages), int64(0)
	for ctx.Err() == nil {
		for _, e := range l.sessionEvents(ctx, r, name, after) {
			after = e.Sequence
			switch {
			case e.Type == "permission.requested": // it may have been answered, or its turn have ended
				l.sessionCall(ctx, r, name, "/permissions/"+e.Data.Permission+"/reply", "", request{"reply": "once"},
					http.StatusNoContent, http.StatusBadRequest)
			case e.Type == "turn.ended" && e.Data.Turn == last:
				return
			}
		}
		sleep(ctx, 250*time.Millisecond)
	}
	l.violate(name, "turn %d does not end", messages)
}

// checkSession compares the events of a session with its messages.
func (l *ledger) checkSession(ctx context.Context, r *rand.Rand, name string, messages []string) {
	var events []sessionEvent
	for events == nil && ctx.Err() == nil {
		events = l.sessionEvents(ctx, r, name, 0)
	}
	turns := make([]struct{ started, ended, said, answered, errors int }, len(messages)+1)
	turn, last := 0, int64(0)
	for i := range events {
		e := &events[i]
		if e.Sequence <= last {
			l.violate(name, "event %d comes after event %d", e.Sequence, last)
		}
		last = e.Sequence
		if number, ok := strings.CutPrefix(e.Data.Turn, "turn_"); ok {
			n, err := strconv.Atoi(number)
			if err != nil || n < 1 || n > len(messages) {
				l.violate(name, "event %d is of the turn %q of %d", e.Sequence, number, len(messages))
				return
			}
			turn = n
		}
		x := &turns[turn]
		isMessage := e.Type == "item.completed" && e.Data.Item.Kind == "message"
		switch {
		case e.Type == "turn.started":
			x.started++
		case e.Type == "turn.ended":
			x.ended++
			turn = 0
		case e.Type == "error":
			x.errors++
			l.ends.add(e.Data.Message)
		case isMessage && e.Data.Item.Role == "user" && turn > 0 && e.Data.Item.Content[0].Text == messages[turn-1]:
			x.said++
		case isMessage && e.Data.Item.Role == "assistant" && turn > 0 &&
			e.Data.Item.Content[0].Text == strings.TrimPrefix(messages[turn-1], "echo "):
			x.answered++
		case e.Type == "permission.resolved" && turn > 0 && messages[turn-1] == permissionPrompt:
			x.answered++
		case isMessage:
			l.violate(name, "event %d of turn %d is %+v", e.Sequence, turn, e.Data)
		}
	}
	for n, x := range turns[1:] {
		if x.started != 1 || x.ended != 1 || x.said > 1 || x.answered > 1 || x.errors > 1 || x.answered+x.errors == 0 {
			l.violate(name, "turn %d, %q: %+v", n+1, messages[n], x)
		}
	}
	if x := turns[0]; x.started+x.ended+x.said+x.answered+x.errors > 0 {
		l.violate(name, "outside of turns: %+v", x)
	}
	for i := range events {
		if e := &events[i]; e.Type == "turn.ended" || e.Type == "permission.requested" {
			l.awaitHook(ctx, sessionHook{e.Type, name, e.Sequence})
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.messages += len(messages)
}

// awaitHook waits for the webhook of an event.
func (l *ledger) awaitHook(ctx context.Context, of sessionHook) {
	for ctx.Err() == nil {
		l.outside.mu.Lock()
		came := l.sessionHooks[of] != ""
		l.outside.mu.Unlock()
		if came {
			return
		}
		sleep(ctx, 250*time.Millisecond)
	}
	l.violate(of.session, "no webhook of %s %d", of.event, of.sequence)
}
