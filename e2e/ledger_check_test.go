package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// eachSubmission calls f for every submission, with some calls running concurrently.
func (l *ledger) eachSubmission(f func(r *rand.Rand, s *submission)) {
	work := make(chan *submission)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			r := rand.New(rand.NewPCG(l.seed, 1000+uint64(i)))
			for s := range work {
				f(r, s)
			}
		})
	}
	for _, s := range l.all {
		work <- s
	}
	close(work)
	group.Wait()
}

// settle waits until all executions have ended, including those that no client knows of, or ctx is
// done.
func (l *ledger) settle(ctx context.Context) {
	l.awaitEmpty(ctx)
	l.eachSubmission(func(r *rand.Rand, s *submission) {
		// Ids without a response are inserted first. The last id is the one in the response.
		for id := range l.effectsOf(s.name) {
			if !slices.ContainsFunc(s.ids, func(x *observation) bool { return x.id == id }) {
				l.log.note(s.name, "%s: known by its effect only", id)
				s.ids = slices.Insert(s.ids, 0, newObservation(id))
			}
		}
		for _, x := range s.ids {
			if !x.withdrawn.is() {
				l.poll(ctx, r, s, x)
			}
		}
	})
}

// awaitEmpty waits until bullpen reports that nothing is queued or running. No further effects
// occur after that.
func (l *ledger) awaitEmpty(ctx context.Context) {
	for i := 0; ; i++ {
		// Only the leading dispatcher reports the queue.
		r, err := l.clientOf(l.members[i%len(l.members)]).try(l.t.Context(), http.MethodGet, "/metrics", nil)
		if err == nil && r.status == http.StatusOK {
			lines := strings.Split(string(r.body), "\n")
			if slices.Contains(lines, "bullpen_queue_depth 0") && slices.Contains(lines, "bullpen_executions_running 0") {
				return
			}
		}
		if ctx.Err() != nil {
			l.violate(disruptionSubject, "something waits or runs for ever: %s, %v", r, err)
			return
		}
		if (i+1)%len(l.members) == 0 {
			sleep(ctx, 250*time.Millisecond)
		}
	}
}

// check compares all observations with the guarantees.
func (l *ledger) check() {
	webhooks, cancel := context.WithTimeout(l.t.Context(), l.longest)
	defer cancel()
	l.eachSubmission(func(r *rand.Rand, s *submission) {
		ran := l.effectsOf(s.name)
		if len(ran) > 0 && !s.unknown && !s.accepted() {
			l.violate(s.name, "was refused, and ran: %v", ran)
		}
		once := 0
		for _, x := range s.ids {
			e := ran[x.id]
			// the lost run, if there was one
			kept := len(x.outcomes) > 0 && x.outcomes[0].Code != string(proto.CodeExpiredInQueue)
			if !x.revived && (e.certain > 0 || e.total > 0 && kept) {
				once++
			}
		}
		if once > 1 {
			l.violate(s.name, "ran as several executions: %v", ran)
		}
		for _, x := range s.ids {
			l.checkExecution(webhooks, r, s, x, ran[x.id])
		}
	})
	l.checkThreads()
	l.checkLists()
	l.checkBatches(webhooks)
	l.checkSandboxes()
	if l.schedule != nil {
		l.checkSchedule()
	}
}

// checkLists checks that every gateway lists each execution once, with the status of its record.
func (l *ledger) checkLists() {
	for _, m := range l.gateways(rand.New(rand.NewPCG(l.seed, 998))) {
		list := l.clientOf(m).listed(l.t, url.Values{})
		for _, s := range l.all {
			for _, x := range s.ids {
				if x.final != "" && list[x.id] != x.final {
					l.violate(s.name, "%s: %q in the list of %s, %q in its record", x.id, list[x.id], m.name, x.final)
				}
			}
		}
	}
}

// checkExecution checks one execution against its observed effects. It waits for the webhook until
// the context webhooks is done.
func (l *ledger) checkExecution(webhooks context.Context, r *rand.Rand, s *submission, x *observation, felt effects) {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	var rec *record
	for _, m := range l.gateways(r) {
		rec = l.getRecord(ctx, m, s, x, 0)
		if rec == nil { // never stored
			if felt.certain > 0 || x.accepted.is() {
				l.violate(s.name, "%s: it is gone", x.id)
			}
			l.ends.add("gone")
			return
		}
	}
	if len(x.outcomes) == 0 {
		l.violate(s.name, "%s: accepted, and has not ended: %s", x.id, rec)
		return
	}
	x.final = rec.Status
	e := x.outcomes[0].end
	l.ends.add(strings.TrimSpace(e.Status + " " + e.Code))
	l.checkEnd(s, x, rec, felt)
	if took, most := rec.CompletedAt.Sub(rec.CreatedAt), l.maxTime(s, rec); took > most {
		l.violate(s.name, "%s: it took %s to end, and %s at most were promised", x.id, took, most)
	}
	l.checkOutput(ctx, r, s, x, rec)
	if s.kind == kindWebhook {
		l.checkWebhook(webhooks, r, s, x)
	}
}

// maxTime returns the longest time that an execution may take. It allows each attempt its deadline
// and the time to detect a loss, plus the time during which a fault was active. The process that
// detects losses may itself have failed and then starts over.
func (l *ledger) maxTime(s *submission, rec *record) time.Duration {
	const noticed = 15 * time.Second
	most := time.Duration(s.attempts)*(time.Duration(s.timeout)*time.Second+noticed) + noticed
	from, to := rec.CreatedAt.Sub(l.log.began), rec.CompletedAt.Sub(l.log.began)
	for _, h := range l.outages {
		if h.from < to && h.to > from {
			most += h.to - h.from + noticed
		}
	}
	return most
}

// checkEnd checks an execution's outcome against its program and its effects.
func (l *ledger) checkEnd(s *submission, x *observation, rec *record, felt effects) {
	e := x.outcomes[0].end
	lines := strings.Split(strings.TrimSuffix(e.Stdout, "\n"), "\n")
	script := s.script()
	wrong := func(why string) {
		l.violate(s.name, "%s: %s: %s, and %+v effects", x.id, why, rec, felt)
	}
	if felt.certain > rec.Attempt || rec.Attempt > s.attempts {
		wrong(fmt.Sprintf("it ran more often than its record shows, or than the %d attempts it had", s.attempts))
	}
	if x.withdrawn.is() && e.Code != string(proto.CodeExpiredInQueue) {
		wrong("it was withdrawn")
	}
	if e.Stderr != "" {
		wrong("standard error has " + e.Stderr)
	}
	ranTo := s.matches(lines)
	switch proto.ErrorCode(e.Code) {
	case "":
		status := "success"
		if s.exit != 0 {
			status = "failed"
		}
		if e.Status != status || e.Exit != s.exit || ranTo != len(script) || len(lines) != len(script) || s.timesOut() {
			wrong("its program ends otherwise")
		}
		if felt.total == 0 || lines[0] != fmt.Sprintf("run %d", felt.total) {
			wrong("it ended well without its last effect")
		}
	case proto.CodeExpiredInQueue:
		if felt.certain > 0 || s.kind.async() && x.accepted.is() {
			wrong("it was withdrawn from the queue")
		}
	case proto.CodeWorkerLost:
	case proto.CodeThreadSave, proto.CodeThreadMount:
		if s.thread == "" {
			wrong("it has no thread")
		}
	case proto.CodeTimeout:
		if !s.timesOut() {
			wrong("it was not to time out")
		}
	case proto.CodeCancelled:
		if s.kind != kindCancel {
			wrong("nobody cancelled it")
		}
	default:
		wrong("it was to end otherwise")
	}
}

// async reports whether clients of this kind do not wait for the result.
func (k kind) async() bool {
	return slices.Contains([]kind{kindSSE, kindPolling, kindWebhook, kindCancel, kindBatch}, k)
}

// checkOutput reads the output from each gateway, once from the beginning and once from the middle.
func (l *ledger) checkOutput(ctx context.Context, r *rand.Rand, s *submission, x *observation, rec *record) {
	replay := &observation{id: x.id, events: maps.Clone(x.events), outcomes: x.outcomes[:1]}
	if x.truncated { // live output may have been lost before it was stored
		clear(replay.events)
	}
	truncated := false
	for i, m := range l.gateways(r) {
		replay.last, replay.gap = 0, false
		served := i%2 == 1
		if served {
			replay.last = s.seq
			for seq := range replay.last + 1 { // past the end there is only the result
				if _, is := replay.events[seq]; seq > 0 && !is {
					replay.last = seq - 1
					break
				}
			}
		}
		if !l.output(ctx, m, s, replay, served) {
			l.violate(s.name, "%s: its output is not returned completely by %s", x.id, m.name)
			return
		}
		truncated = truncated || replay.truncated
	}
	if truncated {
		return
	}
	var printed strings.Builder
	for _, seq := range slices.Sorted(maps.Keys(replay.events)) {
		if data, is := strings.CutPrefix(replay.events[seq].text, "stdout "); is {
			printed.WriteString(data)
		}
	}
	l.checkPrinted(s, x, rec, printed.String())
}

// checkPrinted checks the output of all attempts together. Each attempt's output must be contiguous
// and in order, and the last one must equal the result's output.
func (l *ledger) checkPrinted(s *submission, x *observation, rec *record, printed string) {
	e := x.outcomes[0].end
	// The output of a lost attempt is unknown. A cancelled execution may have been lost as well.
	known := e.Code != string(proto.CodeWorkerLost) && e.Code != string(proto.CodeCancelled)
	if known && rec.Attempt == 1 && printed != e.Stdout || !strings.HasSuffix(printed, e.Stdout) {
		l.violate(s.name, "%s: its events print %q, and its result %q", x.id, printed, e.Stdout)
	}
	var lines []string
	if printed != "" {
		lines = strings.Split(strings.TrimSuffix(printed, "\n"), "\n")
	}
	for len(lines) > 0 {
		n := s.matches(lines)
		if n == 0 {
			l.violate(s.name, "%s: its events print %q, which is not what its attempts print", x.id, printed)
			return
		}
		lines = lines[n:]
	}
}

// checkWebhook waits for an execution's webhook and checks that it has the same result.
func (l *ledger) checkWebhook(ctx context.Context, r *rand.Rand, s *submission, x *observation) {
	var d delivery
	gateways := l.gateways(r)
	for {
		reply, err := l.clientOf(gateways[0]).try(l.t.Context(), http.MethodGet, execution(x.id, "webhook"), nil)
		if err == nil && reply.status == http.StatusOK {
			err = json.Unmarshal(reply.body, &d)
		}
		if d.Status == string(proto.DeliveryDelivered) {
			break
		}
		if ctx.Err() != nil {
			l.violate(s.name, "%s: its webhook was not delivered: %s, %v", x.id, reply, err)
			return
		}
		sleep(ctx, 100*time.Millisecond)
	}
	hooks := l.hooksOf(x.id)
	if len(hooks) == 0 || len(hooks) < d.AttemptsMade {
		l.violate(s.name, "%s: its webhook came %d times: %+v", x.id, len(hooks), d)
	}
	for i := range hooks {
		if !hooks[i].undone {
			l.recordOutcome(s, x, "a webhook", endOf(x.outcomes[0].Status, &hooks[i].Result))
		}
	}
}
