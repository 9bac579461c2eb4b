package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// kind is how a client submits executions and learns their outcome.
type kind string

const (
	kindInline    kind = "inline"
	kindStreaming kind = "streaming" // NDJSON, resumed after a break
	kindSSE       kind = "sse"       // async, followed by server-sent events
	kindPolling   kind = "polling"
	kindWebhook   kind = "webhook"
	kindThread    kind = "thread"
	kindCancel    kind = "cancel" // async, then cancelled at a random time
	kindLeaving   kind = "leaving"
	kindBatch     kind = "batch" // an item of a batch
)

// ledgerTimeout is the timeout of each program, in seconds. Only programs that are meant to time
// out run that long.
const ledgerTimeout = 20

// submission is a client's request and all responses to it.
type submission struct {
	name     string
	kind     kind
	thread   string // empty for none
	key      string // Idempotency-Key; empty for none
	attempts int
	timeout  int      // seconds
	exit     int      // exit code of the program
	lines    int      // lines that it prints, except the first and last
	args     []string // with some, no interpreter that waits can run it
	pause    time.Duration
	seq      int64 // random number for checks: where a reader resumes

	// When it was first sent, and when its end was known.
	call, back time.Duration
	unknown    bool           // some response left its fate open
	ids        []*observation // in the order of the responses
}

// accepted reports whether a response confirmed that it will run.
func (s *submission) accepted() bool {
	return slices.ContainsFunc(s.ids, func(x *observation) bool { return x.accepted.is() })
}

// observation is what a client knows about an execution.
type observation struct {
	id        string
	accepted  moment // when it was known that it will run
	withdrawn moment // when it was known that it never ran and will not
	missing   bool   // the last gateway that was asked did not know it
	// It was withdrawn, but the deployment may have been restored to an earlier time.
	revived   bool
	outcomes  []seen
	final     string          // status in its record at the end; empty if there is none
	events    map[int64]piece // output events by seq
	last      int64           // seq of the last event read
	gap       bool            // events are missing in between
	truncated bool            // the last result event reported missing events
}

func newObservation(id string) *observation { return &observation{id: id, events: map[int64]piece{}} }

// moment is when something was first observed; 0 if not yet.
type moment time.Duration

func (m moment) is() bool { return m != 0 }

// before returns m if it was before other, and 0 otherwise.
func (m moment) before(other time.Duration) moment {
	if time.Duration(m) < other {
		return m
	}
	return 0
}

// seen is an observed outcome, with its source and time.
type seen struct {
	by string
	at time.Duration
	end
}

// piece is an output event.
type piece struct {
	text string // the stream, a space and the output
	at   time.Duration
}

// end is the part of an outcome that every API returns.
type end struct {
	Status, Stdout, Stderr, Error, Code, Message string
	Exit                                         int
	Duration                                     int64
}

func endOf(status string, r *proto.Result) end {
	if status == "" {
		status = string(r.Status())
	}
	return end{
		status, r.Stdout, r.Stderr, deref(r.Error), deref(r.ErrorCode), deref(r.ErrorMessage), r.ExitCode,
		r.DurationMS,
	}
}

// code returns the program's source.
func (s *submission) code() string {
	var b strings.Builder
	b.WriteString(effectCode(s.name))
	if s.thread != "" {
		fmt.Fprintf(&b, "echo found $(cat log 2>/dev/null)\necho %s >>log\n", s.name)
	}
	for i := range s.lines {
		fmt.Fprintf(&b, "sleep %.2f\necho line %d\n", s.pause.Seconds(), i+1)
	}
	fmt.Fprintf(&b, "echo end\nexit %d\n", s.exit)
	return b.String()
}

// script returns the lines that the program prints. Where a line ends in *, anything may follow.
func (s *submission) script() []string {
	lines := []string{"run *"}
	if s.thread != "" {
		lines = append(lines, "found*")
	}
	for i := range s.lines {
		lines = append(lines, fmt.Sprintf("line %d", i+1))
	}
	return append(lines, "end")
}

// matches returns how many of the lines, from the first, are the output of one run of the program.
func (s *submission) matches(lines []string) int {
	script := s.script()
	for i, want := range script {
		if i == len(lines) {
			return i
		}
		begins, open := strings.CutSuffix(want, "*")
		if !strings.HasPrefix(lines[i], begins) || !open && lines[i] != want {
			return i
		}
	}
	return len(script)
}

// timesOut reports whether the program is meant to end by its timeout.
func (s *submission) timesOut() bool { return s.timeout < ledgerTimeout }

func (s *submission) body() request {
	r := bash(s.code()).and("timeout", s.timeout, "max_attempts", s.attempts)
	if s.args != nil {
		r["args"] = s.args
	}
	if s.thread != "" {
		r["thread_id"] = s.thread
	}
	if s.kind == kindWebhook {
		r["webhook_url"] = hookURL + s.name
	}
	return r
}

func (s *submission) headers() []string {
	var h []string
	switch s.kind {
	case kindStreaming:
		h = append(h, accept, ndjson)
	case kindSSE, kindPolling, kindWebhook, kindCancel:
		h = append(h, "Prefer", "respond-async")
	}
	if s.key != "" {
		h = append(h, "Idempotency-Key", s.key)
	}
	return h
}

// draw returns a random submission.
func (l *ledger) draw(r *rand.Rand, k kind) *submission {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &submission{
		name: fmt.Sprintf("s%d", len(l.all)+1), kind: k, attempts: 1, timeout: ledgerTimeout, lines: r.IntN(4),
		seq:   int64(r.IntN(6)),
		pause: time.Duration(r.IntN(1200)) * time.Millisecond,
	}
	if r.IntN(3) == 0 {
		s.attempts = 3
	}
	if r.IntN(2) == 0 {
		s.args = []string{"a"}
	}
	if r.IntN(2) == 0 && k != kindLeaving && k != kindBatch {
		s.key = fmt.Sprintf("%d-%s", l.seed, s.name)
	}
	switch {
	case k == kindThread:
		s.thread = fmt.Sprintf("ledger-%d", r.IntN(ledgerThreads))
	case r.IntN(8) == 0:
		s.exit = 3
	case r.IntN(16) == 0:
		s.timeout, s.lines, s.pause = 1, 2, time.Minute
	}
	l.all = append(l.all, s)
	return s
}

// client makes submissions one after another until over is done. It follows a pending one to its
// end, unless hard is done first.
func (l *ledger) client(over, hard context.Context, r *rand.Rand, k kind) {
	if k == kindBatch {
		l.batchClient(over, hard, r)
		return
	}
	if k == kindSession {
		l.sessionClient(over, hard, r)
		return
	}
	if k == kindSandbox {
		l.sandboxClient(over, hard, r)
		return
	}
	for over.Err() == nil {
		s := l.draw(r, k)
		for again := true; again; {
			again = l.whileUp(hard, func(ctx context.Context) { l.submit(ctx, r, s) })
		}
		pause := time.NewTimer(time.Duration(50+r.IntN(300)) * time.Millisecond)
		select {
		case <-over.Done():
		case <-pause.C:
		}
		pause.Stop()
	}
}

// submit sends a submission and follows it to its end. It retries a submission with a key that got
// no response. After a restore of the deployment, submit is called once more: it resends a
// submission with a key and follows any other that was accepted.
func (l *ledger) submit(ctx context.Context, r *rand.Rand, s *submission) {
	first := s.call == 0
	if first {
		s.call = l.log.now()
		l.log.note(s.name, "%s, attempts %d, thread %q, key %q, exit %d, %d lines, pause %s, timeout %d", s.kind, s.attempts,
			s.thread, s.key, s.exit, s.lines, s.pause, s.timeout)
	}
	for try := 1; ctx.Err() == nil && (first || s.key != ""); try++ {
		known := l.ask(ctx, r, s)
		if known || s.key == "" || try == 40 {
			break
		}
		sleep(ctx, 250*time.Millisecond)
	}
	if s.accepted() {
		x := s.ids[len(s.ids)-1]
		switch s.kind {
		case kindStreaming, kindSSE:
			l.follow(ctx, r, s, x)
		case kindCancel:
			sleep(ctx, time.Duration(r.IntN(1500))*time.Millisecond)
			l.cancel(ctx, r, s, x)
			l.poll(ctx, r, s, x)
		default:
			l.poll(ctx, r, s, x)
		}
		if len(x.outcomes) > 0 {
			l.progress()
		}
	}
	s.back = l.log.now()
}

// sleep waits for d or until ctx is done.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// requestTime is how long a client waits for a response. It is longer than any gateway needs.
const requestTime = (ledgerTimeout + 40) * time.Second

// ask sends a submission once. It reports whether the client knows its fate, or at least where to
// ask.
func (l *ledger) ask(ctx context.Context, r *rand.Rand, s *submission) (known bool) {
	limit := requestTime
	if s.kind == kindLeaving {
		limit = time.Duration(r.IntN(1000)) * time.Millisecond
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	m := l.gateways(r)[0]
	l.log.note(s.name, "is sent to %s", m.name)
	// If a connection breaks, net/http resends a request that has a key. The final response then
	// does not settle the first request.
	var sent atomic.Int32
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { sent.Add(1) }})
	resp, err := l.clientOf(m).open(ctx, http.MethodPost, executePath, s.body(), s.headers()...)
	s.unknown = s.unknown || sent.Load() > 1 || err != nil && sent.Load() > 0
	if err != nil {
		l.log.note(s.name, "no answer: %v", err)
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	l.log.note(s.name, "HTTP %d %s from %s", resp.StatusCode, resp.Header.Get("X-Trace-Id"), m.name)
	var x *observation
	if id := resp.Header.Get("X-Trace-Id"); id != "" {
		x = s.observation(id)
	}
	switch resp.StatusCode {
	case http.StatusOK, http.StatusAccepted:
		if x == nil {
			l.violate(s.name, "accepted without an id")
			return true
		}
		l.markTime(&x.accepted)
		l.answer(s, x, resp)
		return true
	case http.StatusGatewayTimeout, http.StatusInternalServerError:
		s.unknown = true
		if resp.StatusCode == http.StatusGatewayTimeout && x != nil {
			l.markTime(&x.accepted)
		}
		return s.accepted()
	case http.StatusServiceUnavailable:
		if x != nil {
			l.markTime(&x.withdrawn)
		}
		return false
	case http.StatusTooManyRequests, http.StatusConflict:
		return false
	default:
		body, _ := bufio.NewReader(resp.Body).ReadString('\n')
		l.violate(s.name, "answered with HTTP %d: %s", resp.StatusCode, body)
		return true
	}
}

// markTime records the time of a first observation.
func (l *ledger) markTime(m *moment) {
	if !m.is() {
		*m = moment(l.log.now())
	}
}

// observation returns the observation of an id and moves it to the end of s.ids. It adds the id if
// it is new.
func (s *submission) observation(id string) *observation {
	if i := slices.IndexFunc(s.ids, func(x *observation) bool { return x.id == id }); i >= 0 {
		x := s.ids[i]
		s.ids = append(slices.Delete(s.ids, i, i+1), x)
		return x
	}
	x := newObservation(id)
	s.ids = append(s.ids, x)
	return x
}

// answer reads the response body of an accepted submission.
func (l *ledger) answer(s *submission, x *observation, resp *http.Response) {
	switch s.kind {
	case kindStreaming:
		// The stream starts at the beginning, even if it was requested again.
		x.last, x.gap = 0, false
		l.read(s, x, "its stream", resp)
	case kindInline, kindThread, kindLeaving:
		var res proto.Result
		if err := json.NewDecoder(resp.Body).Decode(&res); err != nil {
			l.log.note(s.name, "%s: no whole answer: %v", x.id, err)
			return
		}
		l.recordOutcome(s, x, "the answer", endOf("", &res))
	}
}

// read records events until the result or until the stream breaks. It reports whether the result
// came.
func (l *ledger) read(s *submission, x *observation, by string, resp *http.Response) bool {
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<22)
	for lines.Scan() {
		line := lines.Bytes()
		if resp.Header.Get("Content-Type") == sse {
			var is bool
			if line, is = bytes.CutPrefix(line, []byte("data: ")); !is {
				continue
			}
		}
		var e event
		if len(line) == 0 || json.Unmarshal(line, &e) != nil {
			l.log.note(s.name, "%s: %s broke off within %q", x.id, by, line)
			return false
		}
		if e.Type == "keepalive" {
			continue
		}
		l.event(s, x, by, &e)
		if e.Type == "result" {
			return true
		}
	}
	l.log.note(s.name, "%s: %s broke off after %d: %v", x.id, by, x.last, lines.Err())
	return false
}

// event records one event.
func (l *ledger) event(s *submission, x *observation, by string, e *event) {
	l.log.note(s.name, "%s: %s: %s %d %s%s", x.id, by, e.Type, e.Seq, e.Data, e.Status)
	if e.Type == "result" {
		if e.Result == nil || e.OutputTruncated == nil {
			l.violate(s.name, "%s: %s: a result event without its parts", x.id, by)
			return
		}
		if (x.gap || e.Seq != x.last+1 && e.Seq != x.last) && !*e.OutputTruncated {
			l.violate(s.name, "%s: %s: the result is event %d after %d, events are missing before (%v), and the gap is "+
				"not reported", x.id, by, e.Seq, x.last, x.gap)
		}
		x.truncated = *e.OutputTruncated
		l.recordOutcome(s, x, by, endOf(e.Status, e.Result))
		return
	}
	if e.Seq <= x.last {
		l.violate(s.name, "%s: %s: event %d after %d", x.id, by, e.Seq, x.last)
	}
	if (e.Seq == 1) != (e.Type == "status") {
		l.violate(s.name, "%s: %s: event %d is %s", x.id, by, e.Seq, e.Type)
	}
	x.gap = x.gap || e.Seq != x.last+1
	x.last = e.Seq
	text := e.Stream + " " + e.Data
	before, is := x.events[e.Seq]
	switch {
	case !is:
		x.events[e.Seq] = piece{text, l.log.now()}
	case before.text != text:
		l.violate(s.name, "%s: %s: event %d is %q, was %q before", x.id, by, e.Seq, text, before.text)
	}
}

// follow reads the output of an execution from its current position until the result.
func (l *ledger) follow(ctx context.Context, r *rand.Rand, s *submission, x *observation) {
	for len(x.outcomes) == 0 && !x.missing && ctx.Err() == nil {
		if !l.output(ctx, l.gateways(r)[0], s, x, s.kind == kindSSE) {
			sleep(ctx, 250*time.Millisecond)
		}
	}
}

// output requests the events after the last one that was read.
func (l *ledger) output(ctx context.Context, m *member, s *submission, x *observation, served bool) bool {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	headers, by := []string{accept, ndjson}, "NDJSON by "+m.name
	path := execution(x.id, "output") + "?after_seq=" + strconv.FormatInt(x.last, 10)
	if served {
		headers, by = []string{accept, sse}, "SSE by "+m.name
		if x.last > 0 {
			headers = append(headers, "Last-Event-ID", strconv.FormatInt(x.last, 10))
		}
	}
	resp, err := l.clientOf(m).open(ctx, http.MethodGet, path, nil, headers...)
	if err != nil {
		l.log.note(s.name, "%s: %s: %v", x.id, by, err)
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		l.recordNotFound(s, x, by, resp.StatusCode)
		return false
	}
	return l.read(s, x, by, resp)
}

// recordNotFound records a response other than 200 about an execution.
func (l *ledger) recordNotFound(s *submission, x *observation, by string, status int) {
	x.missing = status == http.StatusNotFound
	if x.missing && x.accepted.is() {
		l.violate(s.name, "%s: %s does not know it", x.id, by)
	}
	l.log.note(s.name, "%s: %s: HTTP %d", x.id, by, status)
}

// poll polls an execution until it has ended or is unknown.
func (l *ledger) poll(ctx context.Context, r *rand.Rand, s *submission, x *observation) {
	for len(x.outcomes) == 0 && !x.missing && ctx.Err() == nil {
		if rec := l.getRecord(ctx, l.gateways(r)[0], s, x, 2); rec == nil {
			sleep(ctx, 250*time.Millisecond)
		}
	}
}

// getRecord requests an execution from a gateway once. It returns nil without a response.
func (l *ledger) getRecord(ctx context.Context, m *member, s *submission, x *observation, wait int) *record {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	by := "GET by " + m.name
	r, err := l.clientOf(m).try(ctx, http.MethodGet, execution(x.id)+"?wait="+strconv.Itoa(wait), nil)
	if err != nil {
		l.log.note(s.name, "%s: %s: %v", x.id, by, err)
		return nil
	}
	if r.status != http.StatusOK {
		l.recordNotFound(s, x, by, r.status)
		return nil
	}
	var rec record
	if err := json.Unmarshal(r.body, &rec); err != nil {
		l.violate(s.name, "%s: %s: %v in %s", x.id, by, err, r)
		return nil
	}
	if !proto.Status(rec.Status).Terminal() {
		l.log.note(s.name, "%s: %s: %s", x.id, by, rec.Status)
		if len(x.outcomes) > 0 {
			l.violate(s.name, "%s: %s: it is %s, after its end was reported", x.id, by, rec.Status)
		}
		return &rec
	}
	if rec.ExitCode == nil || rec.DurationMS == nil {
		l.violate(s.name, "%s: %s: ended without a result: %s", x.id, by, r)
		return &rec
	}
	l.recordOutcome(s, x, by, endOfRecord(&rec))
	return &rec
}

// endOfRecord returns the outcome in the record of an execution that has ended.
func endOfRecord(rec *record) end {
	return end{
		rec.Status, deref(rec.Stdout), deref(rec.Stderr), deref(rec.Error), deref(rec.ErrorCode), deref(rec.ErrorMessage),
		*rec.ExitCode, *rec.DurationMS,
	}
}

// cancel requests the cancellation of an execution until the request succeeds.
func (l *ledger) cancel(ctx context.Context, r *rand.Rand, s *submission, x *observation) {
	for ctx.Err() == nil {
		m := l.gateways(r)[0]
		try, stop := context.WithTimeout(ctx, requestTime)
		r, err := l.clientOf(m).try(try, http.MethodPost, execution(x.id, "cancel"), nil)
		stop()
		l.log.note(s.name, "%s: cancelled by %s: %v %v", x.id, m.name, r, err)
		if err == nil && r.status < http.StatusInternalServerError {
			return
		}
		sleep(ctx, 250*time.Millisecond)
	}
}

// recordOutcome records an observed outcome. All outcomes of an execution must be the same.
func (l *ledger) recordOutcome(s *submission, x *observation, by string, e end) {
	l.log.note(s.name, "%s: %s: %s exit %d %s %q %q", x.id, by, e.Status, e.Exit, e.Code, e.Stdout, e.Message)
	if len(x.outcomes) > 0 && x.outcomes[0].end != e {
		l.violate(s.name, "%s: %s reports %+v, and %s reported %+v", x.id, by, e, x.outcomes[0].by, x.outcomes[0].end)
	}
	x.outcomes = append(x.outcomes, seen{by, l.log.now(), e})
}
