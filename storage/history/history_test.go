package history_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/history"
)

func TestMain(m *testing.M) {
	code := m.Run()
	stopPostgres()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Println(err)
		code = 1
	}
	os.Exit(code)
}

func log(t testing.TB) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

func open(t testing.TB, address string) *history.DB {
	t.Helper()
	d, err := history.Open(address, log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// index is an index with a position that goes on with each change.
type index struct {
	t testing.TB
	*history.DB
	at proto.HistoryPosition
}

func newIndex(t testing.TB, address string) *index {
	t.Helper()
	x := &index{t: t, DB: open(t, address)}
	x.prepare("one")
	return x
}

func (x *index) prepare(streams string) {
	x.t.Helper()
	var err error
	if x.at, err = x.Prepare(x.t.Context(), streams); err != nil {
		x.t.Fatal(err)
	}
}

// job stores queued executions, and record others.
func (x *index) job(records ...*proto.Record) {
	x.t.Helper()
	x.apply(func(c *proto.HistoryChange, to *proto.HistoryPosition) { to.Jobs++; c.JobSeq = to.Jobs }, records)
}

func (x *index) record(records ...*proto.Record) {
	x.t.Helper()
	x.apply(func(c *proto.HistoryChange, to *proto.HistoryPosition) { to.Records++; c.Seq = to.Records }, records)
}

func (x *index) apply(number func(*proto.HistoryChange, *proto.HistoryPosition), records []*proto.Record) {
	x.t.Helper()
	to := x.at
	changes := make([]proto.HistoryChange, len(records))
	for i, r := range records {
		changes[i].Record = r
		number(&changes[i], &to)
	}
	if err := x.Apply(x.t.Context(), x.at, to, changes); err != nil {
		x.t.Fatal(err)
	}
	x.at = to
}

// list returns the executions that a filter selects, in pages of two.
func (x *index) list(f proto.HistoryFilter) (ids []proto.TraceID) {
	x.t.Helper()
	f.Limit = 2
	if f.Org == "" {
		f.Org = "acme"
	}
	for {
		page, err := x.List(x.t.Context(), &f)
		if err != nil {
			x.t.Fatal(err)
		}
		for _, r := range page.Records {
			ids = append(ids, r.TraceID)
		}
		if f.Before = page.Next; page.Next == 0 {
			return ids
		}
	}
}

func (x *index) want(f proto.HistoryFilter, want ...*proto.Record) {
	x.t.Helper()
	var ids []proto.TraceID
	for _, r := range want {
		ids = append(ids, r.TraceID)
	}
	if got := x.list(f); !slices.Equal(got, ids) {
		x.t.Errorf("%+v selects %v, want %v", f, got, ids)
	}
}

var start = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

// execution returns an execution that was created n milliseconds after the first.
func execution(n int, status proto.Status) *proto.Record {
	r := &proto.Record{
		Meta: proto.Meta{
			TraceID: proto.NewTraceID(), Org: "acme", Key: "key_1", Mode: proto.ModeInline, Language: proto.Python, Timeout: 60,
			CreatedAt: start.Add(time.Duration(n)*time.Millisecond + 300*time.Microsecond),
		},
		Status: status,
	}
	if status.Terminal() {
		result := proto.Exited(0)
		result.Stdout = "not for lists"
		r.Result = &result
	}
	return r
}

// databases calls f with each kind of database.
func databases(t *testing.T, f func(t *testing.T, address string)) {
	t.Run("SQLite", func(t *testing.T) { f(t, filepath.Join(t.TempDir(), "a ?b#.db")) })
	t.Run("PostgreSQL", func(t *testing.T) { f(t, postgres(t)) })
}

func TestListsFilterAndPage(t *testing.T) {
	databases(t, func(t *testing.T, address string) {
		x := newIndex(t, address)
		queued, failed, other := execution(1, proto.StatusQueued), execution(2, proto.StatusFailed),
			execution(3, proto.StatusSuccess)
		failed.Language, failed.ThreadID, failed.Metadata = proto.Bash, "t-1",
			map[string]string{"env": "prod", "né": "ü\x00\n"}
		other.Org = "other"
		async, success, newest := execution(4, proto.StatusSuccess), execution(5, proto.StatusSuccess),
			execution(6, proto.StatusFailed)
		async.Mode, async.Key, async.RequestID, async.ScheduleID = proto.ModeAsync, "key_2", "request 1", "sch_1"
		queued.Batch, newest.PipelineID = "bat_1", "pip_1"
		success.Metadata, success.ThreadID = map[string]string{"env": "prod", "team": "a"}, "t-1"
		newest.Language = "a language of a later version"
		x.job(queued)
		x.record(success, newest, failed, other, async) // as they ended, not as they were created

		x.want(proto.HistoryFilter{}, newest, success, async, failed, queued)
		x.want(proto.HistoryFilter{Org: "other"}, other)
		x.want(proto.HistoryFilter{Org: "nobody"})
		x.want(proto.HistoryFilter{Status: proto.StatusFailed}, newest, failed)
		x.want(proto.HistoryFilter{Status: proto.StatusQueued}, queued)
		x.want(proto.HistoryFilter{Status: proto.StatusOOM})
		x.want(proto.HistoryFilter{Language: proto.Bash}, failed)
		x.want(proto.HistoryFilter{Mode: proto.ModeAsync}, async)
		x.want(proto.HistoryFilter{Key: "key_2"}, async)
		x.want(proto.HistoryFilter{ThreadID: "t-1"}, success, failed)
		x.want(proto.HistoryFilter{RequestID: "request 1"}, async)
		x.want(proto.HistoryFilter{Schedule: "sch_1"}, async)
		x.want(proto.HistoryFilter{Batch: "bat_1"}, queued)
		x.want(proto.HistoryFilter{Pipeline: "pip_1"}, newest)
		x.want(proto.HistoryFilter{Batch: "pip_1"})
		x.want(proto.HistoryFilter{Metadata: map[string]string{"env": "prod"}}, success, failed)
		x.want(proto.HistoryFilter{Metadata: map[string]string{"env": "prod", "team": "a"}}, success)
		x.want(proto.HistoryFilter{Metadata: map[string]string{"né": "ü\x00\n"}}, failed)
		x.want(proto.HistoryFilter{Metadata: map[string]string{"env": "test"}})
		x.want(proto.HistoryFilter{
			ThreadID: "t-1", Status: proto.StatusFailed, Key: "key_1", Metadata: map[string]string{"env": "prod"},
		}, failed)
		x.want(proto.HistoryFilter{Key: "key_1", RequestID: "request 1"})
		x.want(proto.HistoryFilter{From: async.CreatedAt.Truncate(time.Millisecond)}, newest, success, async)
		x.want(proto.HistoryFilter{From: async.CreatedAt}, newest, success)
		x.want(proto.HistoryFilter{Until: async.CreatedAt.Truncate(time.Millisecond)}, failed, queued)
		x.want(proto.HistoryFilter{From: start, Until: start.Add(3 * time.Millisecond), Key: "key_1"}, failed, queued)
		x.want(proto.HistoryFilter{From: time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)})
		x.want(proto.HistoryFilter{Until: time.Date(1, 1, 1, 0, 0, 0, 1, time.UTC)})

		page, err := x.List(t.Context(), &proto.HistoryFilter{Org: "acme", Limit: 1, ThreadID: "t-1"})
		if err != nil || len(page.Records) != 1 {
			t.Fatalf("%+v, %v", page, err)
		}
		if r := page.Records[0]; r.Result.Stdout != "" || !r.CreatedAt.Equal(success.CreatedAt) ||
			r.Metadata["team"] != "a" || r.Key != "key_1" {
			t.Errorf("%+v", r)
		}
		// Pages go on where they were while new executions come.
		x.record(execution(7, proto.StatusSuccess))
		page, err = x.List(t.Context(), &proto.HistoryFilter{Org: "acme", Limit: 1, ThreadID: "t-1", Before: page.Next})
		if err != nil || len(page.Records) != 1 || page.Records[0].TraceID != failed.TraceID || page.Next != 0 {
			t.Errorf("%+v, %v", page, err)
		}
	})
}

func TestChangesReplaceOlderOnes(t *testing.T) {
	databases(t, func(t *testing.T, address string) {
		x := newIndex(t, address)
		r := execution(1, proto.StatusQueued)
		x.job(r)
		running := *r
		running.Status = proto.StatusRunning
		x.record(&running)
		x.job(r) // read late
		x.want(proto.HistoryFilter{Status: proto.StatusRunning}, r)
		x.want(proto.HistoryFilter{Status: proto.StatusQueued})
		ended := *r
		ended.Status, ended.Result = proto.StatusSuccess, new(proto.Exited(0))
		x.record(&ended)
		x.want(proto.HistoryFilter{Status: proto.StatusRunning, Key: "key_1"})
		x.want(proto.HistoryFilter{Status: proto.StatusSuccess, Key: "key_1"}, r)

		back := x.at
		back.Records--
		if err := x.Apply(t.Context(), back, x.at, nil); !errors.Is(err, proto.ErrConflict) {
			t.Errorf("a second writer: %v", err)
		}
		if at, err := x.Position(t.Context()); err != nil || at != x.at {
			t.Errorf("%+v, %v", at, err)
		}
		again := open(t, address)
		if at, err := again.Prepare(t.Context(), "one"); err != nil || at != x.at {
			t.Errorf("opened again at %+v, %v", at, err)
		}
		x.want(proto.HistoryFilter{}, r)
		x.prepare("two")
		if x.at != (proto.HistoryPosition{Streams: "two"}) {
			t.Errorf("other streams: %+v", x.at)
		}
		x.want(proto.HistoryFilter{})
	})
}

// More executions than fit into a millisecond have places of their own.
func TestManyInOneMillisecond(t *testing.T) {
	databases(t, func(t *testing.T, address string) {
		x := newIndex(t, address)
		const n = 3000
		want := map[proto.TraceID]bool{}
		var list []*proto.Record
		for range n {
			r := execution(1, proto.StatusQueued)
			want[r.TraceID], list = true, append(list, r)
		}
		x.job(list...)
		for _, r := range list {
			r.Status = proto.StatusRunning
		}
		x.record(list...)
		f := proto.HistoryFilter{Org: "acme", Limit: 100, Status: proto.StatusRunning}
		for {
			page, err := x.List(t.Context(), &f)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range page.Records {
				if !want[r.TraceID] {
					t.Fatalf("%s twice", r.TraceID)
				}
				delete(want, r.TraceID)
			}
			if f.Before = page.Next; page.Next == 0 {
				break
			}
		}
		if len(want) != 0 {
			t.Errorf("%d of %d are missing", len(want), n)
		}
	})
}

// Terms that are frequent and rarely meet are searched for in several pages, some of them empty.
func TestTermsThatRarelyMeet(t *testing.T) {
	databases(t, func(t *testing.T, address string) {
		x := newIndex(t, address)
		const n = 10_000
		var both, list []*proto.Record
		for i := range n {
			r := execution(i, []proto.Status{proto.StatusSuccess, proto.StatusFailed, proto.StatusTimeout}[i%3])
			r.ThreadID, r.Metadata = "t", map[string]string{}
			if i%2 == 0 || i%3001 == 1 {
				r.Metadata["env"] = "test"
			}
			if i%2 == 1 {
				r.Metadata["team"] = "a"
			}
			if len(r.Metadata) == 2 {
				both = append(both, r)
			}
			list = append(list, r)
		}
		x.record(list...)
		slices.Reverse(both)
		meet := map[string]string{"env": "test", "team": "a"}
		x.want(proto.HistoryFilter{Metadata: meet, ThreadID: "t"}, both...)
		x.want(proto.HistoryFilter{Metadata: meet, Status: proto.StatusFailed},
			both[slices.IndexFunc(both, func(r *proto.Record) bool { return r.Status == proto.StatusFailed })])
		oldest := both[len(both)-1]
		page, err := x.List(t.Context(), &proto.HistoryFilter{
			Org: "acme", Limit: 2, Metadata: meet,
			Until: both[len(both)-2].CreatedAt.Truncate(time.Millisecond), Status: oldest.Status,
		})
		if err != nil || len(page.Records) != 1 || page.Next != 0 {
			t.Errorf("a short range: %+v, %v", page, err)
		}
		never := proto.HistoryFilter{
			Org: "acme", Limit: 2, Metadata: map[string]string{"env": "test", "team": "a"},
			Until: oldest.CreatedAt.Truncate(time.Millisecond),
		}
		x.want(never)
		never.Until, never.Metadata = time.Time{}, meet
		never.From = both[0].CreatedAt.Add(time.Millisecond)
		x.want(never)
		pages, f := 0, proto.HistoryFilter{Org: "acme", Limit: len(both) + 1, Metadata: meet}
		for more := true; more; pages++ {
			page, err := x.List(t.Context(), &f)
			if err != nil {
				t.Fatal(err)
			}
			more, f.Before = page.Next != 0, page.Next
		}
		if pages < 2 {
			t.Errorf("all %d executions were looked at for one page", n)
		}
	})
}

func TestExpire(t *testing.T) {
	databases(t, func(t *testing.T, address string) {
		x := newIndex(t, address)
		var old []*proto.Record
		for i := range 700 {
			r := execution(i, proto.StatusSuccess)
			r.Metadata = map[string]string{"n": fmt.Sprint(i % 3)}
			old = append(old, r)
		}
		x.record(old...)
		withdrawn, waiting, kept := execution(900, proto.StatusQueued), execution(901, proto.StatusQueued),
			execution(902, proto.StatusFailed)
		x.job(withdrawn, waiting)
		x.record(kept)
		for more := true; more; {
			var err error
			if more, err = x.Expire(t.Context(), 2, x.at.Records); err != nil {
				t.Fatal(err)
			}
		}
		x.want(proto.HistoryFilter{}, kept, waiting)
		x.want(proto.HistoryFilter{Metadata: map[string]string{"n": "1"}})
	})
}

func TestLostFilesBeginAnew(t *testing.T) {
	for name, spoil := range map[string]func(file string) error{
		"removed": os.Remove,
		"replaced": func(file string) error {
			return errors.Join(os.Rename(file, file+"-old"), os.WriteFile(file, []byte("something else"), 0o600))
		},
		"corrupt": func(file string) error {
			f, err := os.OpenFile(file, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }()
			_, err = f.WriteAt(make([]byte, 64<<10), 0)
			return errors.Join(err, os.Remove(file+"-wal"))
		},
	} {
		for _, running := range []bool{true, false} {
			if running && name == "corrupt" {
				continue // pages in memory are sound
			}
			t.Run(fmt.Sprint(name, " running ", running), func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "index.db")
				x := newIndex(t, file)
				x.record(execution(1, proto.StatusSuccess))
				if !running {
					if err := x.Close(); err != nil {
						t.Fatal(err)
					}
				}
				if err := spoil(file); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
				if running {
					to := x.at
					to.Records++
					err := x.Apply(t.Context(), x.at, to,
						[]proto.HistoryChange{{Record: execution(2, proto.StatusSuccess), Seq: to.Records}})
					if !errors.Is(err, history.ErrReset) {
						t.Errorf("a write: %v", err)
					}
				} else {
					x.DB = open(t, file)
				}
				// A corrupt file may be noticed late.
				r, err := execution(3, proto.StatusSuccess), history.ErrReset
				for range 3 {
					if err != nil {
						x.prepare("one")
						to := x.at
						to.Records++
						err = x.Apply(t.Context(), x.at, to, []proto.HistoryChange{{Record: r, Seq: to.Records}})
					}
				}
				if err != nil || x.at.Records != 0 {
					t.Fatalf("the new index is at %+v: %v", x.at, err)
				}
				x.want(proto.HistoryFilter{}, r)
			})
		}
	}
}

func TestCheck(t *testing.T) {
	for address, ok := range map[string]bool{
		"postgres://u:p@db:5432/bullpen": true, "postgresql://db/x?sslmode=disable": true, "mysql://x": false,
		"postgres://db:port/x": false, "/file": false,
	} {
		err := history.Check(address)
		if (err == nil) != ok || err != nil && errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func TestRemoveOrg(t *testing.T) {
	databases(t, func(t *testing.T, address string) {
		x := newIndex(t, address)
		var all []*proto.Record
		for i := range 700 {
			r := execution(i, proto.StatusSuccess)
			r.Metadata = map[string]string{"n": fmt.Sprint(i % 3)}
			all = append(all, r)
		}
		other, queued, later := execution(800, proto.StatusSuccess), execution(801, proto.StatusQueued),
			execution(2000, proto.StatusSuccess)
		other.Org = "beta"
		x.record(append(all, other, later)...)
		x.job(queued)
		count := func(org string, want int64) {
			t.Helper()
			if n, err := x.CountOrg(t.Context(), org); err != nil || n != want {
				t.Errorf("%s has %d executions, %v; want %d", org, n, err, want)
			}
		}
		count("acme", 702)
		for more := true; more; {
			var err error
			if more, err = x.RemoveOrg(t.Context(), "acme", start.Add(time.Second)); err != nil {
				t.Fatal(err)
			}
		}
		count("acme", 1) // of a later organisation of the same name
		count("beta", 1)
		count("nobody", 0)
		x.want(proto.HistoryFilter{}, later)
		x.want(proto.HistoryFilter{Metadata: map[string]string{"n": "1"}})
		x.want(proto.HistoryFilter{Org: "beta"}, other)
	})
}
