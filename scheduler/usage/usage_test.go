package usage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/agentlogs"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/scheduler/usage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// noon is the middle of a past day.
func noon(daysAgo int) time.Time {
	return time.Now().UTC().Truncate(24*time.Hour).Add(12*time.Hour).AddDate(0, 0, -daysAgo)
}

func dayOf(t time.Time) string { return t.Format(proto.UsageDayLayout) }

// count counts until the returned function is called.
func count(t *testing.T, st *store.Store) (stop func()) {
	t.Helper()
	c := &usage.Counter{Store: st, Retention: time.Hour, Log: storetest.Log(t)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); c.Count(ctx) }()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

// end stores the terminal record of an execution that took two seconds.
func end(t *testing.T, st *store.Store, org, key string, language proto.Language, r proto.Result, at time.Time) {
	t.Helper()
	job := storetest.Job(org, key, proto.ModeAsync)
	job.Language = language
	r.DurationMS = 2000
	rec := &proto.Record{
		Meta: job.Meta, Status: r.Status(), Attempt: 1, Worker: "w", CompletedAt: &at, Result: &r,
		Usage: &proto.Usage{
			CPUMS: 1500, MemoryPeak: 10 << 20, OutputBytes: 100,
			Network: &proto.NetworkUsage{Traffic: proto.Traffic{BytesIn: 7, BytesOut: 30}},
		},
	}
	ctx := storetest.Context(t)
	running := &proto.Record{Meta: job.Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w"}
	seq, err := st.Records.Put(ctx, running, 0)
	if err == nil {
		_, err = st.Records.Put(ctx, rec, seq)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// report returns the rows that a filter selects, once everything is counted.
func report(t *testing.T, st *store.Store, f proto.UsageFilter) []proto.UsageRow {
	t.Helper()
	if f.To.IsZero() {
		f.From, f.To = noon(40), noon(0)
	}
	u := &usage.Usage{Store: st}
	for deadline := time.Now().Add(30 * time.Second); ; {
		r, err := u.Report(storetest.Context(t), &f)
		if err != nil {
			t.Fatal(err)
		}
		if r.Complete {
			return r.Rows
		}
		if time.Now().After(deadline) {
			t.Fatalf("not complete: %+v", r)
		}
	}
}

func text(rows []proto.UsageRow) (s string) {
	for _, r := range rows {
		s += fmt.Sprintf("%s %s %s %s: %v cpu %d, memory %d, in %d, out %d, output %d, webhooks %d, stored %d\n",
			r.Org, r.Day, r.Key, r.Language, r.Executions, r.CPUMS, r.MemoryMS, r.BytesIn, r.BytesOut, r.OutputBytes,
			r.WebhookAttempts, r.StoredByteDays)
	}
	return s
}

func want(t *testing.T, when string, got []proto.UsageRow, want string) {
	t.Helper()
	if s := text(got); s != want {
		t.Errorf("%s:\n%swant\n%s", when, s, want)
	}
}

// Executions count for the day on which they ended, by key, language and outcome, however late they
// are stored. Every grouping has the same total.
func TestExecutionsByOutcome(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t, storetest.Server(t))
	today, before := noon(0), noon(31)
	end(t, st, "acme", "key_a", proto.Python, proto.Exited(0), today)
	count(t, st)
	end(t, st, "acme", "key_a", proto.Python, proto.Exited(3), today)
	end(t, st, "acme", "key_a", proto.Bash, proto.TimedOut(1), today)
	end(t, st, "acme", "key_b", proto.Python, proto.Cancelled(), before)
	end(t, st, "other", "key_c", proto.Python, proto.Exited(0), today)
	end(t, st, "acme", "key_a", proto.Python, proto.Exited(0), today.Truncate(24*time.Hour).Add(-time.Millisecond))

	one := "cpu 1500, memory 20000, in 7, out 30, output 100, webhooks 0, stored 0\n"
	two := "cpu 3000, memory 40000, in 14, out 60, output 200, webhooks 0, stored 0\n"
	all := []proto.UsageGroup{proto.UsageByOrg, proto.UsageByDay, proto.UsageByKey, proto.UsageByLanguage}
	late := "acme " + dayOf(before) + " key_b python: map[cancelled:1] " + one +
		"acme " + dayOf(noon(1)) + " key_a python: map[success:1] " + one
	want(t, "all groups", withoutStored(report(t, st, proto.UsageFilter{GroupBy: all})),
		late+"acme "+dayOf(today)+" key_a bash: map[timeout:1] "+one+
			"acme "+dayOf(today)+" key_a python: map[failed:1 success:1] "+two+
			"other "+dayOf(today)+" key_c python: map[success:1] "+one)
	want(t, "an organisation's days before today",
		withoutStored(report(t, st, proto.UsageFilter{Org: "acme", From: before, To: noon(1), GroupBy: all})), late)
	for _, groups := range [][]proto.UsageGroup{nil, {proto.UsageByKey}} {
		var sum proto.UsageSum
		for _, r := range report(t, st, proto.UsageFilter{Org: "acme", GroupBy: groups}) {
			sum.Add(&r.UsageSum)
		}
		if sum.CPUMS != 5*1500 || sum.Executions[proto.StatusSuccess] != 2 {
			t.Errorf("by %v: %+v", groups, sum)
		}
	}
	want(t, "by language", withoutStored(
		report(t, st, proto.UsageFilter{Org: "other", GroupBy: []proto.UsageGroup{proto.UsageByLanguage}})),
		"   python: map[success:1] "+one)
	want(t, "of nobody", report(t, st, proto.UsageFilter{Org: "nobody", GroupBy: all}), "")
}

// withoutStored removes the stored bytes, which depend on when they were sampled.
func withoutStored(rows []proto.UsageRow) (left []proto.UsageRow) {
	for _, r := range rows {
		if r.StoredByteDays = 0; len(r.Executions) > 0 || r.WebhookAttempts > 0 {
			left = append(left, r)
		}
	}
	return left
}

// dying is a bucket whose user dies after a number of writes: that write and later ones have no
// answer.
type dying struct {
	jetstream.KeyValue
	mu     sync.Mutex
	left   int
	die    context.CancelFunc
	before func() // the last write; nil for nothing
}

// written answers a write.
func (d *dying) written(write func() (uint64, error)) (uint64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left == 0 {
		return 0, context.Canceled
	}
	if d.left--; d.left > 0 {
		return write()
	}
	if d.before != nil {
		d.before()
	}
	_, _ = write()
	d.die()
	return 0, context.Canceled
}

func (d *dying) Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error) {
	return d.written(func() (uint64, error) { return d.KeyValue.Create(ctx, key, value, opts...) })
}

func (d *dying) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	return d.written(func() (uint64, error) { return d.KeyValue.Update(ctx, key, value, revision) })
}

func (d *dying) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	return d.written(func() (uint64, error) { return d.KeyValue.Put(ctx, key, value) })
}

// A counter that dies after any of its writes loses nothing and counts nothing twice.
func TestCounterDiesAfterEachWrite(t *testing.T) {
	t.Parallel()
	server := storetest.Server(t)
	st := storetest.Open(t, server)
	ended := 0
	const entries = 4 + 2 // of keys and organisations
	for round := range 2 * (entries + 1) {
		for _, key := range []string{"key_a", "key_b"} {
			end(t, st, "acme", key, proto.Python, proto.Exited(0), noon(0))
			end(t, st, "other", key, proto.Bash, proto.Exited(0), noon(0))
			ended += 2
		}
		ctx, cancel := context.WithCancel(storetest.Context(t))
		mortal := *st
		mortal.Usage = &dying{KeyValue: st.Usage, left: 1 + round%(entries+1), die: cancel}
		c := &usage.Counter{Store: &mortal, Retention: time.Hour, Log: storetest.Log(t)}
		c.Count(ctx)
		cancel()
	}
	stop := count(t, st)
	rows := withoutStored(report(
		t, st, proto.UsageFilter{GroupBy: []proto.UsageGroup{proto.UsageByOrg, proto.UsageByKey}}))
	stop()
	var byKey, byMonth proto.UsageSum
	for i := range rows {
		byKey.Add(&rows[i].UsageSum)
	}
	for _, r := range report(t, st, proto.UsageFilter{}) {
		byMonth.Add(&r.UsageSum)
	}
	for name, sum := range map[string]proto.UsageSum{"keys": byKey, "organisations": byMonth} {
		if sum.Executions[proto.StatusSuccess] != int64(ended) || sum.CPUMS != int64(ended)*1500 {
			t.Errorf("%s: %+v, want %d executions", name, sum, ended)
		}
	}
}

// Of two counters that run at a time each may change any entry. A third one reads everything again.
func TestTwoCountersAndRedelivery(t *testing.T) {
	t.Parallel()
	server := storetest.Server(t)
	st := storetest.Open(t, server)
	n := int64(300)
	one, two := count(t, st), count(t, storetest.Open(t, server))
	for i := range n {
		end(t, st, "acme", fmt.Sprint("key_", i%3), proto.Python, proto.Exited(0), noon(int(i%2)))
	}
	check := func(when string) {
		t.Helper()
		for _, groups := range [][]proto.UsageGroup{nil, {proto.UsageByLanguage}} {
			var sum proto.UsageSum
			for _, r := range report(t, st, proto.UsageFilter{Org: "acme", GroupBy: groups}) {
				sum.Add(&r.UsageSum)
			}
			if sum.Executions[proto.StatusSuccess] != n || sum.OutputBytes != 100*n {
				t.Errorf("%s, by %v: %+v, want %d", when, groups, sum, n)
			}
		}
	}
	check("two counters")
	one()
	two()

	// Another counter writes what it has read before that, and dies.
	ctx, cancel := context.WithCancel(storetest.Context(t))
	mortal := *st
	waits, write := make(chan struct{}), make(chan struct{})
	mortal.Usage = &dying{KeyValue: st.Usage, left: 1, die: cancel, before: func() { close(waits); <-write }}
	end(t, st, "acme", "key_0", proto.Python, proto.Exited(0), noon(0))
	n++
	stopped := count(t, &mortal)
	<-waits
	stop := count(t, st)
	end(t, st, "acme", "key_0", proto.Python, proto.Exited(0), noon(0))
	n++
	check("while another one waits")
	stop()
	close(write)
	<-ctx.Done()
	stopped()
	stop = count(t, st)
	check("after a late write")
	stop()
	if err := st.Usage.Purge(storetest.Context(t), "position"); err != nil {
		t.Fatal(err)
	}
	count(t, st)
	check("without a position")
}

// A backup counts what it has counted once, also if it is restored while it is being counted, and a
// backup of that is restored.
func TestBackupsAreCountedOnce(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	server := storetest.Server(t)
	st := storetest.Open(t, server)
	want := map[string]int64{}
	add := func(key string) {
		end(t, st, "acme", key, proto.Python, proto.Exited(0), noon(0))
		want[key]++
	}
	check := func(when string) {
		t.Helper()
		got := map[string]int64{}
		for _, r := range withoutStored(
			report(t, st, proto.UsageFilter{Org: "acme", GroupBy: []proto.UsageGroup{proto.UsageByKey}})) {
			got[r.Key] = r.Executions[proto.StatusSuccess]
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	restore := func() {
		t.Helper()
		var file bytes.Buffer
		if err := (&backup.Maker{Store: st, Version: "test"}).Backup(ctx, &file); err != nil {
			t.Fatal(err)
		}
		server = storetest.Server(t)
		access := store.Access{InProcess: server, Name: t.Name()}
		if _, err := backup.Restore(ctx, access, store.Config{Replicas: 1, Retention: time.Hour}, &file,
			storetest.Log(t)); err != nil {
			t.Fatal(err)
		}
		st = storetest.Open(t, server)
	}
	stop := count(t, st)
	add("key_a")
	check("at first")
	stop()
	add("key_a")
	add("key_b")
	restore()
	add("key_b") // before the restored ones are counted
	restore()
	stop = count(t, st)
	check("restored twice")
	add("key_a")
	check("and then")
	stop()
	restore()
	count(t, st)
	add("key_c")
	check("restored again")
}

// The attempts of a delivery count when it has ended, on the days on which they began, and after a
// replay only the new ones.
func TestWebhookAttempts(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	count(t, st)
	hooks := &deliveries.Store{Store: st}
	job := storetest.Job("acme", "key_a", proto.ModeAsync)
	job.WebhookURL = "https://example.com/"
	if err := hooks.Create(ctx, proto.NewDelivery(&job.Meta, noon(1))); err != nil {
		t.Fatal(err)
	}
	attempt := func(at time.Time, status proto.DeliveryStatus) {
		t.Helper()
		d, revision, err := hooks.Get(ctx, "acme", job.TraceID)
		if err != nil {
			t.Fatal(err)
		}
		d.Status = status
		d.Record(proto.DeliveryAttempt{At: at})
		if _, err := hooks.Update(ctx, d, revision); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string, yesterday, today int64) {
		t.Helper()
		got := map[string]int64{}
		for _, r := range report(
			t, st, proto.UsageFilter{Org: "acme", GroupBy: []proto.UsageGroup{proto.UsageByDay, proto.UsageByKey}}) {
			if r.WebhookAttempts > 0 && r.Key == "key_a" {
				got[r.Day] = r.WebhookAttempts
			}
		}
		if got[dayOf(noon(1))] != yesterday || got[dayOf(noon(0))] != today {
			t.Errorf("%s: %v", when, got)
		}
	}
	attempt(noon(1), proto.DeliveryPending)
	attempt(noon(1), proto.DeliveryPending)
	check("pending", 0, 0)
	attempt(noon(0), proto.DeliveryFailed)
	check("failed", 2, 1)
	attempt(noon(0), proto.DeliveryDelivered) // by another dispatcher
	check("ended twice", 2, 2)
	if _, err := hooks.Replay(ctx, "acme", job.TraceID); err != nil {
		t.Fatal(err)
	}
	attempt(noon(0), proto.DeliveryDelivered)
	check("replayed", 2, 3)
}

// A turn of an agent session counts once, for the API key of its session.
func TestAgentTurns(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	count(t, st)
	logs := &agentlogs.Logs{Store: st}
	at, err := logs.Append(ctx, "acme", "session", 0, []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if at, err = logs.AppendTurn(ctx, "acme", "session", at, []byte("{}"), "key_a"); err != nil {
			t.Fatal(err)
		}
	}
	count(t, st) // another one
	rows := report(t, st, proto.UsageFilter{Org: "acme", GroupBy: []proto.UsageGroup{proto.UsageByKey}})
	if len(rows) != 1 || rows[0].Key != "key_a" || rows[0].AgentTurns != 2 {
		t.Errorf("%+v", rows)
	}
}

// What is malformed is skipped, and too long a report is refused.
func TestMalformedAndTooMuch(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	ended := nats.Header{store.HeaderStatus: {"success"}, store.HeaderSummary: {"{"}}
	for subject, h := range map[string]nats.Header{
		store.ExecSubject("acme", "nothing"): ended, store.ExecSubject("acme", proto.NewTraceID()): ended,
		store.DeliverySubject("acme", proto.NewTraceID()): {
			store.HeaderStatus: {"failed"}, store.HeaderUsed: {`{"key":"key_a","attempts":{"today":1}}`},
		},
		store.DeliverySubject("acme", "nothing"): {store.HeaderStatus: {"failed"}},
	} {
		if _, err := st.JS.PublishMsg(ctx, &nats.Msg{Subject: subject, Header: h, Data: []byte("{")}); err != nil {
			t.Fatal(err)
		}
	}
	end(t, st, "acme", "key.with.dots", proto.Python, proto.Exited(0), noon(0))
	end(t, st, "acme", "key_a", proto.Python, proto.Exited(0), noon(0))
	count(t, st)
	all := proto.UsageFilter{GroupBy: []proto.UsageGroup{proto.UsageByDay, proto.UsageByKey, proto.UsageByLanguage}}
	if rows := withoutStored(report(t, st, all)); len(rows) != 1 || rows[0].Key != "key_a" ||
		rows[0].Executions[proto.StatusSuccess] != 1 {
		t.Errorf("%+v", rows)
	}

	var sums strings.Builder
	for i := range proto.MaxUsageRows {
		_, _ = fmt.Fprintf(&sums, `"%s lang%d":{"cpu_ms":1},`, dayOf(noon(0)), i)
	}
	entry := `{"sums":{` + strings.TrimSuffix(sums.String(), ",") + `},"counted":{}}`
	if _, err := st.Usage.Put(ctx, "key.big."+dayOf(noon(0))[:7]+".key_b", []byte(entry)); err != nil {
		t.Fatal(err)
	}
	all.From, all.To, all.Org = noon(0), noon(0), "big"
	if rows := report(t, st, all); len(rows) != proto.MaxUsageRows {
		t.Errorf("%d rows", len(rows))
	}
	all.Org = ""
	_, err := (&usage.Usage{Store: st}).Report(ctx, &all)
	if field := new(proto.FieldError); !errors.As(err, &field) || field.Field != "group_by" {
		t.Errorf("one row too many: %v", err)
	}
}

// The stored bytes include threads, their staged files, and the results that are kept.
func TestStoredBytesAndMonth(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	heads := &threads.Threads{Store: st}
	staged := proto.StagedFile{Path: "a", At: noon(0), Blob: proto.Blob{Key: "k", Size: 1000}}
	if err := heads.Stage(ctx, "acme", "t", staged, func([]proto.StagedFile, *proto.Thread) error {
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := heads.Create(ctx,
		&proto.Thread{Org: "acme", ID: "u", Version: &proto.Version{Number: 1, Bytes: 20000}}); err != nil {
		t.Fatal(err)
	}
	lastMonth := time.Now().UTC().AddDate(0, 0, -time.Now().UTC().Day())
	entry := fmt.Sprintf(`{"sums":{},"stored":{%q:900},"stored_bytes":800,"counted":{}}`, dayOf(lastMonth))
	if _, err := st.Usage.Put(ctx, "org.gone."+lastMonth.Format("2006-01"), []byte(entry)); err != nil {
		t.Fatal(err)
	}
	u, err := usage.Open(ctx, st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	watching, stopWatching := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() { defer close(watched); _ = u.Run(watching) }()
	defer func() { stopWatching(); <-watched }()
	month := func(bytes, output int64) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			m := u.Month("acme")
			if m.StoredBytes == bytes && m.OutputBytes == output {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%+v, want %d bytes stored and %d of output", m, bytes, output)
			}
		}
	}
	if m := u.Month("gone"); m.StoredBytes != 800 || m.StoredByteDays != 0 {
		t.Errorf("before the first sample of the month: %+v", m)
	}
	stop := count(t, st) // samples at its start
	month(21000, 0)
	for deadline := time.Now().Add(30 * time.Second); u.Month("gone").StoredBytes != 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after the first sample: %+v", u.Month("gone"))
		}
	}
	end(t, st, "acme", "key_a", proto.Python, proto.Exited(0), time.Now().UTC())
	month(21000, 100)
	stop()
	stop = count(t, st)
	month(21100, 100)
	stop()
	for _, id := range []string{"t", "u"} {
		if _, err := heads.Tombstone(ctx, "acme", id, func(*proto.Thread) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	count(t, st)
	month(100, 100)
	for _, r := range report(t, st, proto.UsageFilter{Org: "acme"}) {
		if r.StoredByteDays < 21100 {
			t.Errorf("the largest sample of the day is lost: %+v", r)
		}
	}
	if m := u.Month("nobody"); m.StoredBytes != 0 || len(m.Executions) != 0 {
		t.Errorf("%+v", m)
	}
}

// Of the three years that are stored, a process has the present month and the one before in memory.
func TestMonthsInMemory(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	now := time.Now().UTC()
	first := time.Date(now.Year(), now.Month(), 1, 0, 0, 0, 0, time.UTC)
	storetest.Fill(t, st, st.Usage, 36, func(i int) (string, any) {
		return "org.acme." + first.AddDate(0, -i, 0).Format("2006-01"), map[string]any{"stored_bytes": 800}
	})
	u, err := usage.Open(ctx, st, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	if n, m := u.Held(), u.Month("acme"); n != 2 || m.StoredBytes != 800 {
		t.Errorf("%d months are in memory; %+v", n, m)
	}
	u.Forget(first.AddDate(0, 1, 0))
	if n := u.Held(); n != 1 {
		t.Errorf("%d months are in memory a month later", n)
	}
}

// A limit that is reached is reported by one of several gateways, and again in another month or
// under another limit.
func TestCrossingIsReportedOnce(t *testing.T) {
	t.Parallel()
	ctx := storetest.Context(t)
	server := storetest.Server(t)
	gateways := []*usage.Usage{{Store: storetest.Open(t, server)}, {Store: storetest.Open(t, server)}}
	month := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []proto.Crossing{
		{Org: "acme", Month: month, Name: proto.QuotaCPU, Level: "soft", Limit: 10},
		{Org: "acme", Month: month, Name: proto.QuotaCPU, Level: "soft", Limit: 20},
		{Org: "acme", Month: month, Name: proto.QuotaCPU, Level: "hard", Limit: 10},
		{Org: "acme", Month: month.AddDate(0, 1, 0), Name: proto.QuotaCPU, Level: "soft", Limit: 10},
		{Org: "other", Month: month, Name: proto.QuotaCPU, Level: "soft", Limit: 10},
	} {
		for i := range 4 {
			first, err := gateways[i%2].Cross(ctx, c)
			if err != nil || first != (i == 0) {
				t.Errorf("%+v, call %d: %t %v", c, i, first, err)
			}
		}
	}
	if rows := report(t, gateways[0].Store, proto.UsageFilter{}); len(rows) != 0 {
		t.Errorf("in a report: %+v", rows)
	}
}
