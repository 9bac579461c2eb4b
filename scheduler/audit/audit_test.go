package audit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/audit"
	"github.com/bullpen-run/bullpen/scheduler/backup"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// record returns the record of an act by a key of an organisation.
func record(org, action string) api.AuditRecord {
	return api.AuditRecord{
		Time: api.Time{Time: time.Now()}, Stage: api.AuditIntent, Action: action,
		Actor: api.AuditActor{Type: "key", ID: "key_" + org, Name: "n", Org: org}, Object: api.AuditObject{Kind: "key"},
	}
}

func add(t *testing.T, l *audit.Log, records ...api.AuditRecord) (last api.AuditRecord) {
	t.Helper()
	for _, r := range records {
		var err error
		if last, err = l.Append(storetest.Context(t), r); err != nil {
			t.Fatal(err)
		}
	}
	return last
}

// verified exports the log and checks its chain.
func verified(t *testing.T, l *audit.Log) (c api.AuditChain, records []api.AuditRecord) {
	t.Helper()
	err := l.Export(storetest.Context(t), 0, func(_ *api.AuditRecord, line []byte) error {
		r, err := c.Add(line)
		if err == nil {
			records = append(records, *r)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return c, records
}

// Several processes append at once, and the chain has each record once.
func TestSeveralProcessesAppendAtOnce(t *testing.T) {
	server := storetest.Server(t)
	var logs []*audit.Log
	for range 4 {
		logs = append(logs, &audit.Log{Store: storetest.Open(t, server)})
	}
	appendAtOnce(t, logs)
}

func TestSeveralProcessesAppendToACluster(t *testing.T) {
	st := storetest.Cluster(t)
	appendAtOnce(t, []*audit.Log{{Store: st}, {Store: st}, {Store: st}})
}

func appendAtOnce(t *testing.T, logs []*audit.Log) {
	const each = 25
	processes := len(logs)
	var group sync.WaitGroup
	for p, l := range logs {
		group.Go(func() {
			for i := range each {
				if _, err := l.Append(storetest.Context(t), record("acme", fmt.Sprintf("key.a%d_%d", p, i))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	c, records := verified(t, logs[0])
	if c.First != 1 || c.Records != processes*each {
		t.Errorf("%+v", c)
	}
	seen := map[string]bool{}
	for _, r := range records {
		seen[r.Action] = true
	}
	if len(seen) != processes*each {
		t.Errorf("the log has %d of %d acts", len(seen), processes*each)
	}
}

func TestList(t *testing.T) {
	l := &audit.Log{Store: storetest.Open(t, storetest.Server(t))}
	if page, next, err := l.List(storetest.Context(t), &api.AuditFilter{}, 0, 10); err != nil ||
		len(page) != 0 || next != 0 {
		t.Fatalf("an empty log: %v, %d, %v", page, next, err)
	}
	for i := range 150 {
		r := record([]string{"acme", "other", "other"}[i%3], "key.create")
		if i == 4 {
			r.Object.Org = new("acme")
		}
		add(t, l, r)
	}
	list := func(f api.AuditFilter, limit int) (sequences []int64) {
		for before := int64(0); ; {
			page, next, err := l.List(storetest.Context(t), &f, before, limit)
			if err != nil {
				t.Fatal(err)
			}
			for i := range page {
				sequences = append(sequences, page[i].Sequence)
			}
			if before = next; next == 0 {
				return sequences
			}
		}
	}
	all := list(api.AuditFilter{}, 7)
	if len(all) != 150 || all[0] != 150 || all[149] != 1 {
		t.Errorf("all: %v", all)
	}
	acme := list(api.AuditFilter{Org: "acme"}, 7)
	if len(acme) != 51 || acme[0] != 148 || fmt.Sprint(acme[48:]) != "[5 4 1]" {
		t.Errorf("acme: %v", acme)
	}
	if got := list(api.AuditFilter{Actor: "key_acme"}, 20); len(got) != 50 {
		t.Errorf("of an actor: %v", got)
	}
	if got := list(api.AuditFilter{Action: "key.revoke"}, 20); len(got) != 0 {
		t.Errorf("of no action: %v", got)
	}
	if got := list(api.AuditFilter{Before: api.Time{Time: time.Now().Add(-time.Hour)}}, 20); len(got) != 0 {
		t.Errorf("of an earlier time: %v", got)
	}
	var exported []int64
	stop := errors.New("enough")
	err := l.Export(storetest.Context(t), 60, func(r *api.AuditRecord, _ []byte) error {
		if exported = append(exported, r.Sequence); len(exported) == 70 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || exported[0] != 61 || exported[69] != 130 {
		t.Errorf("%v, %v", exported, err)
	}
}

// Nobody removes a record by asking NATS, and no later setting of the stream allows it.
func TestNothingIsRemoved(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	l := &audit.Log{Store: st}
	add(t, l, record("acme", "key.create"), record("acme", "key.revoke"))
	if err := st.Audit.DeleteMsg(ctx, 1); err == nil {
		t.Error("a record was deleted")
	}
	if err := st.Audit.Purge(ctx); err == nil {
		t.Error("the log was purged")
	}
	cfg := st.Audit.CachedInfo().Config
	cfg.DenyDelete, cfg.DenyPurge = false, false
	if _, err := st.JS.UpdateStream(ctx, cfg); err == nil {
		t.Error("the stream allows the removal of records again")
	}
	if c, _ := verified(t, l); c.Records != 2 {
		t.Errorf("%+v", c)
	}
}

// A record that is appended in another way than by this package is found.
func TestForgedRecordIsFound(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	l := &audit.Log{Store: st}
	add(t, l, record("acme", "key.create"))
	forged := record("acme", "key.revoke")
	line, err := forged.Seal(&api.AuditRecord{Sequence: 1, Hash: strings.Repeat("1", 64)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := st.JS.Publish(storetest.Context(t), store.AuditSubject, line); err != nil {
		t.Fatal(err)
	}
	add(t, l, record("acme", "key.create"))
	var c api.AuditChain
	err = l.Export(storetest.Context(t), 0, func(_ *api.AuditRecord, line []byte) error {
		_, err := c.Add(line)
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "record 2 does not follow") {
		t.Errorf("%v", err)
	}
}

// A restored log goes on where its backup ends, also if retention has removed its first records.
func TestLogInABackup(t *testing.T) {
	ctx := storetest.Context(t)
	from := storetest.Open(t, storetest.Server(t))
	log := &audit.Log{Store: from}
	// As retention does: the stream begins at a later record.
	if err := from.JS.DeleteStream(ctx, from.Audit.CachedInfo().Config.Name); err != nil {
		t.Fatal(err)
	}
	cfg := from.Audit.CachedInfo().Config
	cfg.FirstSeq = 41
	var err error
	if from.Audit.Stream, err = from.JS.CreateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	first := record("acme", "key.create")
	line, err := first.Seal(&api.AuditRecord{Sequence: 40, Hash: strings.Repeat("4", 64)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := from.JS.Publish(ctx, store.AuditSubject, line); err != nil {
		t.Fatal(err)
	}
	add(t, log, record("acme", "key.a"), record("acme", "key.b"))
	var saved bytes.Buffer
	if err := (&backup.Maker{Store: from, Version: "v1"}).Backup(ctx, &saved); err != nil {
		t.Fatal(err)
	}
	server := storetest.Server(t)
	if _, err := backup.Restore(ctx, store.Access{InProcess: server}, store.Config{Replicas: 1, Retention: time.Hour},
		&saved, storetest.Log(t)); err != nil {
		t.Fatal(err)
	}
	restored := &audit.Log{Store: storetest.Open(t, server)}
	add(t, restored, record("acme", "key.c"))
	c, records := verified(t, restored)
	if c.First != 41 || c.Last != 44 || records[3].Action != "key.c" {
		t.Errorf("%+v, %v", c, records)
	}
	page, next, err := restored.List(ctx, &api.AuditFilter{}, 0, 2)
	if err != nil || len(page) != 2 || page[1].Sequence != 43 || next != 43 {
		t.Errorf("%v, %d, %v", page, next, err)
	}
	info, err := restored.Store.Audit.Info(ctx, jetstream.WithSubjectFilter(">"))
	if err != nil || !info.Config.DenyDelete || !info.Config.DenyPurge {
		t.Errorf("the restored stream: %+v, %v", info.Config, err)
	}
}

// When retention has removed all records, their numbers go on, and the chain begins anew.
func TestRetention(t *testing.T) {
	server := storetest.Server(t)
	connect := func(retention time.Duration) *audit.Log {
		st, err := store.Connect(storetest.Context(t), store.Access{InProcess: server, Name: t.Name()},
			store.Config{Replicas: 1, Retention: time.Hour, AuditRetention: retention}, storetest.Log(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(st.Close)
		return &audit.Log{Store: st}
	}
	add(t, connect(0), record("acme", "key.a"), record("acme", "key.b"))
	l := connect(100 * time.Millisecond)
	for page := make([]api.AuditRecord, 1); len(page) > 0; {
		var err error
		if page, _, err = l.List(storetest.Context(t), &api.AuditFilter{}, 0, 10); err != nil {
			t.Fatal(err)
		}
	}
	l = connect(time.Hour)
	add(t, l, record("acme", "key.c"), record("acme", "key.d"))
	if c, _ := verified(t, l); c.First != 3 || c.Last != 4 {
		t.Errorf("%+v", c)
	}
}

// The disk of the server that must store the record may be full, or there is no server.
func TestAppendFailsWithoutTheStore(t *testing.T) {
	server := storetest.Server(t)
	l := &audit.Log{Store: storetest.Open(t, server)}
	server.Close()
	ctx, cancel := context.WithTimeout(storetest.Context(t), 100*time.Millisecond)
	defer cancel()
	if _, err := l.Append(ctx, record("acme", "key.create")); err == nil {
		t.Error("a record was appended to nothing")
	}
}
