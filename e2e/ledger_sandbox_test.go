package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	schema "github.com/bullpen-run/bullpen/proto/api"
)

// kindSandbox is a client that creates live sandboxes, uses, pauses, resumes and deletes them.
const kindSandbox kind = "sandbox"

// ledgerSandboxes is how many sandboxes the clients of a ledger have at a time.
const ledgerSandboxes = 3

// ledgerSandbox is a client's request for a sandbox, and what it knows of it. One goroutine uses it at a
// time.
type ledgerSandbox struct {
	name    string
	id      string // empty before a response
	created bool   // a response confirmed it
	trace   map[proto.TraceID]bool
	// log has the lines that commands have appended to a file of the home, saved those that the last save
	// has. A line of a command without a response may be missing.
	log, saved []homeLine
	ended      bool
}

type homeLine struct {
	text    string
	certain bool
}

// matchesLog reports whether a file has the certain lines, perhaps others, and each once, in order.
func matchesLog(lines []homeLine, file string) bool {
	got := strings.Fields(file)
	for _, line := range lines {
		switch {
		case len(got) > 0 && got[0] == line.text:
			got = got[1:]
		case line.certain:
			return false
		}
	}
	return len(got) == 0
}

// sandboxClient uses one sandbox after another until over is done. It ends each one, unless hard is
// done first.
func (l *ledger) sandboxClient(over, hard context.Context, r *rand.Rand) {
	for over.Err() == nil {
		l.mu.Lock()
		x := &ledgerSandbox{name: fmt.Sprintf("b%d", len(l.sandboxes)+1), trace: map[proto.TraceID]bool{}}
		l.sandboxes = append(l.sandboxes, x)
		l.mu.Unlock()
		l.useSandbox(over, hard, r, x)
		l.progress()
	}
}

// useSandbox creates a sandbox, uses it and deletes it.
func (l *ledger) useSandbox(over, hard context.Context, r *rand.Rand, x *ledgerSandbox) {
	if !l.createSandbox(hard, r, x) {
		sleep(over, 500*time.Millisecond)
		return
	}
	for range 2 + r.IntN(4) {
		s := l.settledSandbox(hard, r, x)
		switch {
		case s == nil || s.State == proto.SandboxEnded || over.Err() != nil:
		case s.State == proto.SandboxPaused:
			l.resumeSandbox(hard, r, x)
			continue
		case r.IntN(3) == 0:
			l.pauseSandbox(hard, r, x)
			continue
		default:
			l.commandInSandbox(hard, r, x)
			continue
		}
		break
	}
	l.deleteSandbox(hard, r, x)
}

// sandboxRequest sends a request about sandboxes to any gateway. The response is nil without one, or with an
// error of the server.
func (l *ledger) sandboxRequest(
	ctx context.Context, r *rand.Rand, x *ledgerSandbox, method, path string, body any,
) *reply {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTime)
	defer cancel()
	m := l.gateways(r)[0]
	answer, err := l.clientOf(m).try(ctx, method, path, body)
	l.log.note(x.name, "%s %s by %s: %v %v", method, path, m.name, answer, err)
	if err != nil || answer.status >= http.StatusInternalServerError {
		return nil
	}
	return answer
}

// createSandbox reports whether there is a sandbox. Without a response it is found by its name.
func (l *ledger) createSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) bool {
	body := request{"name": x.name, "on_timeout": "pause", "timeout": 600}
	answer := l.sandboxRequest(ctx, r, x, http.MethodPost, "/v1/sandboxes", body)
	if answer != nil && answer.status == http.StatusCreated {
		var s schema.LiveSandbox
		if err := json.Unmarshal(answer.body, &s); err != nil || s.ID == "" {
			l.violate(x.name, "created as %s", answer)
			return false
		}
		x.id, x.created = s.ID, true
		return true
	}
	if answer != nil && answer.status != http.StatusTooManyRequests {
		l.violate(x.name, "answered with %s", answer)
	}
	for ctx.Err() == nil {
		if found, ok := l.findSandbox(ctx, r, x); ok {
			return found
		}
		sleep(ctx, 250*time.Millisecond)
	}
	return false
}

// findSandbox looks for a sandbox by its name. ok is false without a response.
func (l *ledger) findSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) (found, ok bool) {
	answer := l.sandboxRequest(ctx, r, x, http.MethodGet, "/v1/sandboxes?name="+x.name, nil)
	var list schema.LiveSandboxes
	if answer == nil || answer.status != http.StatusOK || json.Unmarshal(answer.body, &list) != nil {
		return false, false
	}
	if len(list.Sandboxes) > 1 {
		l.violate(x.name, "there are several: %s", answer)
	}
	if len(list.Sandboxes) == 0 {
		return false, true
	}
	x.id = list.Sandboxes[0].ID
	return true, true
}

// settledSandbox returns a sandbox once it neither starts nor stops, nil if it is gone. It learns from the
// reason of the last stop what has been saved.
func (l *ledger) settledSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) *schema.LiveSandbox {
	var s schema.LiveSandbox
	for ctx.Err() == nil {
		answer := l.sandboxRequest(ctx, r, x, http.MethodGet, "/v1/sandboxes/"+x.id, nil)
		switch {
		case answer == nil:
		case answer.status == http.StatusNotFound:
			if x.created {
				l.violate(x.name, "it is gone")
			}
			return nil
		case json.Unmarshal(answer.body, &s) != nil:
			l.violate(x.name, "it is %s", answer)
			return nil
		case s.State == proto.SandboxRunning:
			x.trace[s.TraceID] = true
			return &s
		case s.State == proto.SandboxPaused, s.State == proto.SandboxEnded:
			x.trace[s.TraceID] = true
			l.stopped(x, &s)
			return &s
		}
		sleep(ctx, 250*time.Millisecond)
	}
	l.violate(x.name, "it is %s for ever", s.State)
	return nil
}

// stopped notes what a stop has saved.
func (l *ledger) stopped(x *ledgerSandbox, s *schema.LiveSandbox) {
	l.stops.add(string(*s.Reason))
	switch reason := *s.Reason; reason {
	case proto.SandboxPausedByUser, proto.SandboxWorkerDrained:
		x.saved = x.log
	case proto.SandboxWorkerLost, proto.SandboxNotSaved, proto.SandboxNotStarted:
		x.log = x.saved
	case proto.SandboxKilled:
	default:
		l.violate(x.name, "it stopped as %s: %+v", reason, *s)
	}
}

func (l *ledger) pauseSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) {
	answer := l.sandboxRequest(ctx, r, x, http.MethodPost, "/v1/sandboxes/"+x.id+"/pause", nil)
	if answer != nil && answer.status != http.StatusOK && answer.status != http.StatusConflict {
		l.violate(x.name, "pause: %s", answer)
	}
}

func (l *ledger) resumeSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) {
	answer := l.sandboxRequest(ctx, r, x, http.MethodPost, "/v1/sandboxes/"+x.id+"/resume", nil)
	switch {
	case answer == nil || answer.status == http.StatusConflict || answer.status == http.StatusTooManyRequests:
		sleep(ctx, 250*time.Millisecond)
	case answer.status != http.StatusOK:
		l.violate(x.name, "resume: %s", answer)
	}
}

// commandInSandbox appends a line to a file, and checks what was in it.
func (l *ledger) commandInSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	line := fmt.Sprintf("%s-%d", x.name, r.Uint32())
	before := slices.Clone(x.log)
	m := l.gateways(r)[0]
	s := &liveSandbox{l.clientOf(m), x.id}
	code := fmt.Sprintf("cat log 2>/dev/null; echo %s >>log; sleep %.2f", line, 2*r.Float64())
	out, exit, err := s.runWithin(ctx, "user", code)
	l.log.note(x.name, "command by %s: %q, exit code %d, %v", m.name, out, exit, err)
	x.log = append(before, homeLine{line, err == nil})
	switch {
	case err != nil:
	case exit != 0:
		l.violate(x.name, "a command ended with %d: %q", exit, out)
	case !matchesLog(before, out):
		l.violate(x.name, "its file has %q, want %v", out, before)
	}
}

// deleteSandbox deletes a sandbox until that is confirmed.
func (l *ledger) deleteSandbox(ctx context.Context, r *rand.Rand, x *ledgerSandbox) {
	for ctx.Err() == nil {
		answer := l.sandboxRequest(ctx, r, x, http.MethodDelete, "/v1/sandboxes/"+x.id, nil)
		if answer != nil && answer.status == http.StatusNotFound && !x.created {
			return
		}
		if answer != nil && answer.status == http.StatusOK {
			x.ended = true
			return
		}
		sleep(ctx, 250*time.Millisecond)
	}
	l.violate(x.name, "it is not deleted")
}

// checkSandboxes checks that each sandbox has ended once, in the lists of all gateways, and that each of
// its starts is an execution that has ended.
func (l *ledger) checkSandboxes() {
	r := rand.New(rand.NewPCG(l.seed, 993))
	for _, m := range l.gateways(r) {
		a := l.clientOf(m)
		executions := a.listed(l.t, url.Values{})
		for _, x := range l.sandboxes {
			var list schema.LiveSandboxes
			answer, err := a.try(l.t.Context(), http.MethodGet, "/v1/sandboxes?name="+x.name, nil)
			if err != nil || answer.status != http.StatusOK || json.Unmarshal(answer.body, &list) != nil {
				l.violate(x.name, "not listed by %s: %v, %v", m.name, answer, err)
				continue
			}
			if n := len(list.Sandboxes); n > 1 || n == 0 && x.ended {
				l.violate(x.name, "listed %d times by %s", n, m.name)
			}
			for _, s := range list.Sandboxes {
				if s.State != proto.SandboxEnded || s.StoppedAt == nil {
					l.violate(x.name, "%s lists it as %s: %+v", m.name, s.State, s)
				}
				if x.ended && len(x.trace) > s.Starts {
					l.violate(x.name, "it has had the executions %v, and %d starts", x.trace, s.Starts)
				}
			}
			for id := range x.trace {
				if status := executions[string(id)]; !proto.Status(status).Terminal() {
					l.violate(x.name, "its execution %s is %q in the list of %s", id, status, m.name)
				}
			}
		}
	}
}
