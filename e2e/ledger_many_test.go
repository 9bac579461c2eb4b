package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// ledgerItems is the largest number of items in a batch of a ledger.
	ledgerItems = 8
	// ledgerEvery is the time between two ticks of the schedule of a ledger, in seconds. No disruption
	// lasts for the 50 ticks that may wait.
	ledgerEvery = 3
	// tickName is the name under which all executions of the schedule have their effects.
	tickName = "tick"
)

// batchClient submits one batch after another until over is done. Each item is a submission. It
// follows a pending batch to its end, unless hard is done first.
func (l *ledger) batchClient(over, hard context.Context, r *rand.Rand) {
	for over.Err() == nil {
		items := make([]*submission, 1+r.IntN(ledgerItems))
		for i := range items {
			items[i] = l.draw(r, kindBatch)
		}
		l.batch(hard, r, items)
		sleep(over, time.Duration(50+r.IntN(300))*time.Millisecond)
	}
}

// batch submits items as a batch and follows them to their end.
func (l *ledger) batch(ctx context.Context, r *rand.Rand, items []*submission) {
	subject := "batch of " + items[0].name
	list := make([]request, len(items))
	for i, s := range items {
		s.call = l.log.now()
		l.log.note(s.name, "item %d of the %s, attempts %d, exit %d, %d lines, pause %s, timeout %d", i, subject, s.attempts,
			s.exit, s.lines, s.pause, s.timeout)
		list[i] = s.body()
	}
	body := listLast(l.t, request{"max_parallel": 1 + r.IntN(4)}, list)
	id := ""
	for id == "" && ctx.Err() == nil {
		m := l.gateways(r)[0]
		try, cancel := context.WithTimeout(ctx, requestTime)
		reply, err := l.clientOf(m).try(try, http.MethodPost, "/v1/batches", body, "Idempotency-Key",
			fmt.Sprintf("%d-%s", l.seed, items[0].name))
		cancel()
		l.log.note(subject, "sent to %s: %v, %v", m.name, reply, err)
		switch {
		case err != nil || reply.status >= http.StatusInternalServerError:
			for _, s := range items {
				s.unknown = true
			}
		case reply.status == http.StatusCreated:
			var made struct{ ID string }
			reply.into(l.t, &made)
			id = made.ID
		case reply.status != http.StatusTooManyRequests && reply.status != http.StatusConflict:
			l.violate(subject, "answered with %s", reply)
			return
		}
		if id == "" {
			sleep(ctx, 250*time.Millisecond)
		}
	}
	if id == "" {
		return
	}
	l.mu.Lock()
	l.batches = append(l.batches, id)
	l.mu.Unlock()
	counts, ended := l.awaitBatch(ctx, r, subject, id)
	if !ended {
		return
	}
	l.readBatch(ctx, r, subject, id, items, counts)
	for _, s := range items {
		for _, x := range s.ids {
			l.poll(ctx, r, s, x)
		}
		s.back = l.log.now()
		l.progress()
	}
}

// awaitBatch waits until a batch has ended.
func (l *ledger) awaitBatch(
	ctx context.Context, r *rand.Rand, subject, id string,
) (counts proto.BatchCounts, ended bool) {
	for ctx.Err() == nil {
		m := l.gateways(r)[0]
		reply, err := l.clientOf(m).try(ctx, http.MethodGet, "/v1/batches/"+id, nil)
		l.log.note(subject, "GET by %s: %v, %v", m.name, reply, err)
		if err == nil && reply.status == http.StatusNotFound {
			l.violate(subject, "%s: %s does not know it", id, m.name)
			return counts, false
		}
		var b struct {
			Counts      proto.BatchCounts
			CompletedAt *time.Time `json:"completed_at"`
		}
		if err == nil && reply.status == http.StatusOK && json.Unmarshal(reply.body, &b) == nil && b.CompletedAt != nil {
			return b.Counts, true
		}
		sleep(ctx, 250*time.Millisecond)
	}
	l.violate(subject, "%s: accepted, and has not ended", id)
	return counts, false
}

// readBatch reads the results of a batch that has ended, one line for each item.
func (l *ledger) readBatch(
	ctx context.Context, r *rand.Rand, subject, id string, items []*submission, counts proto.BatchCounts,
) {
	for ctx.Err() == nil {
		m := l.gateways(r)[0]
		reply, err := l.clientOf(m).try(ctx, http.MethodGet, "/v1/batches/"+id+"/results", nil)
		if err != nil || reply.status != http.StatusOK {
			l.log.note(subject, "its results by %s: %v, %v", m.name, reply, err)
			sleep(ctx, 250*time.Millisecond)
			continue
		}
		lines, n, succeeded := bufio.NewScanner(bytes.NewReader(reply.body)), 0, 0
		lines.Buffer(nil, 1<<22)
		for ; lines.Scan(); n++ {
			var line struct {
				record
				Index int
			}
			if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Index != n || n >= len(items) ||
				line.TraceID == "" || line.ExitCode == nil || line.DurationMS == nil {
				l.violate(subject, "%s: line %d of %d results: %s, %v", id, n, len(items), lines.Bytes(), err)
				return
			}
			s := items[n]
			x := s.observation(line.TraceID)
			l.markTime(&x.accepted)
			l.recordOutcome(s, x, "the results by "+m.name, endOfRecord(&line.record))
			if line.Status == "success" {
				succeeded++
			}
		}
		if n != len(items) || counts.Total != n || counts.Succeeded != succeeded || counts.Succeeded+counts.Failed != n {
			l.violate(subject, "%s: %d results of %d items, of which %d succeeded: %+v", id, n, len(items), succeeded, counts)
		}
		return
	}
}

// checkBatches checks that the webhook of each batch was delivered.
func (l *ledger) checkBatches(ctx context.Context) {
	for _, id := range l.batches {
		for len(l.hooksOf(id)) == 0 {
			if ctx.Err() != nil {
				l.violate(id, "its webhook was not delivered")
				break
			}
			sleep(ctx, 100*time.Millisecond)
		}
	}
}

// newSchedule creates a schedule none of whose ticks may be lost.
func (l *ledger) newSchedule() {
	l.t.Helper()
	a := l.clientOf(l.gateways(rand.New(rand.NewPCG(l.seed, 997)))[0])
	var s schedule
	program := bash(effectCode(tickName)).and("timeout", ledgerTimeout)
	a.do(http.MethodPost, "/v1/schedules", request{
		"name": "ledger", "cron": "*/" + strconv.Itoa(ledgerEvery) + " * * * * *", "overlap": "queue", "missed": "all",
		"request": program,
	}).into(l.t, &s)
	l.schedule = &tickLedger{
		id: s.ID, every: ledgerEvery * time.Second, outcomes: map[proto.RunOutcome]bool{proto.RunStarted: true},
		runs: map[time.Time]scheduleRun{},
	}
}

// watchSchedule reads the history of the schedule, which forgets, until over is done. It pauses the
// schedule then, and waits until its executions have ended.
func (l *ledger) watchSchedule(over, hard context.Context, r *rand.Rand) {
	path := "/v1/schedules/" + l.schedule.id
	read := func(ctx context.Context) bool {
		m := l.gateways(r)[0]
		reply, err := l.clientOf(m).try(ctx, http.MethodGet, path, nil)
		if err != nil || reply.status != http.StatusOK {
			l.log.note(tickName, "GET by %s: %v, %v", m.name, reply, err)
			return false
		}
		var s schedule
		reply.into(l.t, &s)
		l.schedule.add(l.t, &s)
		return true
	}
	for over.Err() == nil {
		read(over)
		sleep(over, time.Second)
	}
	for paused := false; !paused && hard.Err() == nil; sleep(hard, 250*time.Millisecond) {
		reply, err := l.clientOf(l.gateways(r)[0]).try(hard, http.MethodPatch, path, request{"paused": true})
		paused = err == nil && reply.status == http.StatusOK
	}
	l.schedule.paused = true
	for !read(hard) && hard.Err() == nil {
		sleep(hard, 250*time.Millisecond)
	}
}

// checkSchedule checks that each tick has one execution, that no tick is left out, and that each
// execution had its effect once.
func (l *ledger) checkSchedule() {
	for _, m := range l.gateways(rand.New(rand.NewPCG(l.seed, 996))) {
		a := l.clientOf(m)
		var s schedule
		a.get("/v1/schedules/"+l.schedule.id).into(l.t, &s)
		l.schedule.add(l.t, &s)
		l.schedule.check(l.t, a)
	}
	ticks := map[string]bool{} // executions of ticks
	for _, r := range l.schedule.runs {
		ticks[r.TraceID] = true
	}
	ran := l.effectsOf(tickName)
	a := l.clientOf(l.gateways(rand.New(rand.NewPCG(l.seed, 995)))[0])
	for id, status := range a.listed(l.t, url.Values{"schedule": {l.schedule.id}}) {
		e := ran[id]
		switch rec := a.record(id); {
		case !proto.Status(status).Terminal() || rec.Status != status:
			l.violate(tickName, "%s: %q in the list: %s", id, status, rec)
		case rec.Status == "success" && e.total != 1 || e.total > 1:
			l.violate(tickName, "%s: it had %d effects: %s", id, e.total, rec)
		case !ticks[id] && e.total == 0 && rec.ErrorCode != nil && *rec.ErrorCode == string(proto.CodeExpiredInQueue):
			// The queue did not confirm it in time and has not accepted it. The tick has another execution.
		case rec.Status != "success" && (rec.ErrorCode == nil || *rec.ErrorCode != string(proto.CodeWorkerLost)):
			l.violate(tickName, "%s: it was to end otherwise: %s", id, rec)
		}
		delete(ran, id)
	}
	for id := range ran {
		l.violate(tickName, "%s: it is no execution of the schedule, and ran", id)
	}
	l.t.Logf("%d ticks, %d batches", len(l.schedule.runs), len(l.batches))
}
