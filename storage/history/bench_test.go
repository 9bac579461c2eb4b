package history_test

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

var (
	benchRows  = flag.Int("rows", 100_000, "executions in the index of BenchmarkPages")
	benchIndex = flag.String("index", "",
		"file of the index of BenchmarkPages, which is kept: the next run with as many rows does not fill it again")
	benchPostgres = flag.Bool("postgres", false, "measure PostgreSQL instead of SQLite")
)

// customers is the number of values of a common key of the metadata.
const customers = 1000

// synthetic returns the i-th of n executions: a week of an organisation with five keys and 1,000
// customers, and of a small one.
func synthetic(r *rand.Rand, i, n int) *proto.Record {
	pick := func(p float64) bool { return r.Float64() < p }
	rec := &proto.Record{
		Meta: proto.Meta{
			TraceID: proto.NewTraceID(), Org: "acme", Key: fmt.Sprint("key_", r.IntN(5)), Mode: proto.ModeInline,
			Language: proto.Python, Timeout: 60, MaxAttempts: 1,
			CreatedAt: start.Add(time.Duration(float64(7*24*time.Hour) * float64(i) / float64(n))),
			RequestID: fmt.Sprint("req_", r.Uint64()), Profile: "default",
			UserAgent: "python-httpx/0.28.1", ClientID: "baponi-python/0.5.1",
			Metadata: map[string]string{"env": "prod", "customer": fmt.Sprint("c", r.IntN(customers))},
		},
		Status: proto.StatusSuccess, Attempt: 1, Worker: "worker-abcdefgh",
	}
	result := proto.Exited(0)
	switch {
	case pick(0.1):
		result = proto.Exited(1)
	case pick(0.01):
		result = proto.TimedOut(60)
	case pick(0.0001):
		result = proto.Failure(proto.CodeMemory, "The program used more than its memory limit of 1024 MiB.")
	}
	rec.Result, rec.Status = &result, result.Status()
	if pick(0.3) {
		rec.Language = proto.Node
	}
	if pick(0.2) {
		rec.Mode = proto.ModeAsync
	}
	if pick(0.3) {
		rec.ThreadID = fmt.Sprint("thread-", r.IntN(n/50+1))
	}
	if pick(0.01) {
		rec.Metadata["env"], rec.Key = "test", "key_test" // no other key has it
	}
	if pick(0.00001) {
		rec.Org = "small"
	}
	if i < 20 { // deep in the past
		rec.Metadata["incident"] = "42"
	}
	at := rec.CreatedAt.Add(20 * time.Millisecond)
	rec.StartedAt, rec.CompletedAt = &at, new(at.Add(500*time.Millisecond))
	return rec
}

// BenchmarkPages builds an index of -rows executions, and measures pages of lists.
func BenchmarkPages(b *testing.B) {
	dir := b.TempDir()
	file := cmp.Or(*benchIndex, filepath.Join(dir, "index.db"))
	address := file
	if *benchPostgres {
		address = postgres(b)
	}
	x := newIndex(b, address)
	r, n := rand.New(rand.NewPCG(1, 2)), *benchRows
	var took time.Duration
	for i := int(x.at.Records); i < n; {
		changes, to := make([]proto.HistoryChange, 0, 2048), x.at
		for ; len(changes) < cap(changes) && i < n; i++ {
			to.Records++
			changes = append(changes, proto.HistoryChange{Record: synthetic(r, i, n), Seq: to.Records})
		}
		began := time.Now()
		if err := x.Apply(b.Context(), x.at, to, changes); err != nil {
			b.Fatal(err)
		}
		took, x.at = took+time.Since(began), to
	}
	b.Logf("%d executions in %v, %.0f a second, %.0f µs each", n, took, float64(n)/took.Seconds(),
		took.Seconds()*1e6/float64(n))
	if info, err := os.Stat(file); err == nil {
		b.Logf("%d MB, %d bytes each", info.Size()/1e6, info.Size()/int64(n))
	}

	meta := func(pairs ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return m
	}
	customer := func() string { return fmt.Sprint("c", r.IntN(customers)) }
	somewhere := func() time.Time { return start.Add(time.Duration(r.Int64N(int64(7 * 24 * time.Hour)))) }
	for _, c := range []struct {
		name string
		f    func() proto.HistoryFilter
	}{
		{"no filter", func() proto.HistoryFilter { return proto.HistoryFilter{} }},
		{"no filter, another organisation", func() proto.HistoryFilter { return proto.HistoryFilter{Org: "small"} }},
		{"created_before", func() proto.HistoryFilter { return proto.HistoryFilter{Until: somewhere()} }},
		{"status=failed", func() proto.HistoryFilter { return proto.HistoryFilter{Status: proto.StatusFailed} }},
		{"status=oom (1 in 10,000)", func() proto.HistoryFilter { return proto.HistoryFilter{Status: proto.StatusOOM} }},
		{"status=cancelled (none)", func() proto.HistoryFilter { return proto.HistoryFilter{Status: proto.StatusCancelled} }},
		{"status, language, mode, time", func() proto.HistoryFilter {
			return proto.HistoryFilter{Status: proto.StatusOOM, Language: proto.Node, Mode: proto.ModeAsync, Until: somewhere()}
		}},
		{"thread_id", func() proto.HistoryFilter {
			return proto.HistoryFilter{ThreadID: fmt.Sprint("thread-", r.IntN(n/50+1))}
		}},
		{"request_id (none)", func() proto.HistoryFilter { return proto.HistoryFilter{RequestID: "nothing"} }},
		{"key", func() proto.HistoryFilter { return proto.HistoryFilter{Key: "key_1"} }},
		{"key, status=oom", func() proto.HistoryFilter { return proto.HistoryFilter{Key: "key_1", Status: proto.StatusOOM} }},
		{"metadata.customer (1 in 1,000)", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("customer", customer())}
		}},
		{"metadata.customer, status=failed, time", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("customer", customer()), Status: proto.StatusFailed, Until: somewhere()}
		}},
		{"metadata.customer, metadata.env=test", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("customer", customer(), "env", "test")}
		}},
		{"metadata.customer, key, status=oom", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("customer", customer()), Key: "key_2", Status: proto.StatusOOM}
		}},
		{"metadata.incident (20, the oldest)", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("incident", "42")}
		}},
		{"metadata.incident, metadata.env, key", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("incident", "42", "env", "prod"), Key: "key_1"}
		}},
		{"metadata.env=test, key that never has it", func() proto.HistoryFilter {
			return proto.HistoryFilter{Metadata: meta("env", "test"), Key: "key_1"}
		}},
	} {
		const pages = 300
		times := make([]time.Duration, pages)
		found := 0
		for i := range times {
			f := c.f()
			f.Org, f.Limit = cmp.Or(f.Org, "acme"), 20
			began := time.Now()
			page, err := x.List(b.Context(), &f)
			if err != nil {
				b.Fatal(err)
			}
			times[i], found = time.Since(began), found+len(page.Records)
		}
		slices.Sort(times)
		ms := func(d time.Duration) float64 { return d.Seconds() * 1000 }
		b.Logf("%-42s %5.1f found, p50 %6.2f ms, p99 %6.2f ms, most %6.2f ms", c.name, float64(found)/pages,
			ms(times[pages/2]), ms(times[pages*99/100]), ms(times[pages-1]))
	}
}
