package orgdata_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/batches"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/history"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/orgdata"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/storage/blob"
	database "github.com/bullpen-run/bullpen/storage/history"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/storage/thread"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("database/sql.(*DB).connectionOpener"))
}

// ofNobody says why a row of the store's table has nothing of an organisation.
var ofNobody = map[string]string{
	"bullpen_plans":    "plans are the operator's, and any organisation may have them",
	"bullpen_profiles": "sandbox profiles are the operator's",
	"bullpen_images":   "images are the operator's",
	"bullpen_preload":  "it is about modules in images",
	"BULLPEN_LEASES":   "workers hold them for executions of all",
	"BULLPEN_AUDIT":    "the audit log must outlive what it tells about",
	"bullpen_control":  "of organisations it has names alone: of those that submitted lately, and of removed ones",
}

// world is a server with a dispatcher, an index and two organisations that have everything.
type world struct {
	t       *testing.T
	server  *natsembed.Server
	st      *store.Store
	blobs   *blob.Store
	orgs    *registry.Orgs
	batches *batches.Batches
	history *history.History
}

// background runs a part until the test ends.
func background(t *testing.T, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newWorld(t *testing.T) *world {
	server, ctx, log := storetest.Server(t), storetest.Context(t), storetest.Log(t)
	st := storetest.Open(t, server)
	w := &world{t: t, server: server, st: st, blobs: &blob.Store{Backend: &storagetest.Memory{}}}
	w.orgs = must[*registry.Orgs](t)(registry.OpenOrgs(ctx, st, log))
	w.batches = must[*batches.Batches](t)(batches.Open(ctx, st, w.blobs, log))
	index := must[*database.DB](t)(database.Open(filepath.Join(t.TempDir(), "index.db"), log))
	t.Cleanup(func() { _ = index.Close() })
	w.history = &history.History{Store: st, Index: index, Instance: "test", Retention: time.Hour, Log: log}
	background(t, w.orgs.Run)
	background(t, w.history.Run)
	background(t, (&queue.Dispatcher{Store: st, Instance: "test", Log: log}).Run)
	return w
}

func (w *world) data() *orgdata.Data {
	return orgdata.New(w.st, orgdata.Sources{
		Executions: &queue.Queue{Store: w.st}, Blobs: w.blobs, Threads: thread.Prefixes, Batches: w.batches.Prefixes,
		Index: w.history,
	})
}

// fill stores something of each kind of an organisation, with a marker in it wherever there is room.
func (w *world) fill(org, marker string) {
	t, st, ctx := w.t, w.st, storetest.Context(w.t)
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(w.orgs.Create(ctx, proto.Org{Name: org, Title: marker, Plan: proto.UnlimitedPlan}))
	keys := must[*registry.Keys](t)(registry.OpenKeys(ctx, st, &keyring.Keyring{}, "local", storetest.Log(t)))
	key, _, err := keys.Create(ctx, proto.Key{Name: marker, Org: org})
	check(err)
	put := func(bucket jetstream.KeyValue, name string, value any) {
		t.Helper()
		check(err)
		body, err := json.Marshal(value)
		check(err)
		_, err = bucket.Put(ctx, name, body)
		check(err)
	}
	put(st.Webhooks, "key."+org+"."+key.ID, proto.Webhook{URL: "https://" + marker, MaxAttempts: 1, Timeout: 1})
	put(st.Webhooks, "key."+org+"."+proto.MemberPrefix+"1",
		proto.Webhook{URL: "https://" + marker, MaxAttempts: 1, Timeout: 1})
	put(st.Webhooks, "url."+org+".1", proto.Endpoint{URL: "https://" + marker})
	put(st.Members, org+"."+proto.MemberPrefix+"1", proto.Member{Org: org, Email: marker})
	put(st.Sessions, org+".session", proto.Session{Org: org, Name: marker})
	put(st.KeyUses, org+"."+key.ID, map[string]string{"at": marker})
	put(st.Usage, "org."+org+".2026-11", marker)
	put(st.Usage, "key."+org+".2026-11."+key.ID, marker)
	put(st.Secrets, "secret."+org+".NAME", proto.Secret{Org: org, Name: marker})
	put(st.Connections, org+".data", proto.Connection{Org: org, Slug: "data", Description: marker})
	put(st.AgentFiles, org+".file_1", proto.AgentFile{Org: org, Name: marker})
	put(st.AgentSessions, org+"."+proto.AgentSessionKey("session"),
		proto.AgentSession{Org: org, ID: "session", Title: marker})
	put(st.AgentRuns, org+".run", proto.ActiveAgentRun{Org: org, ID: marker})
	_, err = st.AgentLogs.Write(ctx, store.AgentLogSubject(org, "run"), nats.Header{}, []byte(marker), 0)
	check(err)
	put(st.Schedules, "def."+org+".s", proto.Schedule{ID: marker})
	put(st.Schedules, "run."+org+".s", marker)
	put(st.Batches, "run."+org+".b", marker)
	put(st.Pipelines, "def."+org+".p", marker)
	put(st.Pipelines, "run."+org+".p", marker)
	put(st.Sandboxes, org+".i", marker)
	content := func(blobKey string) proto.Blob {
		sum := sha256.Sum256([]byte(marker))
		b := proto.Blob{Key: blobKey, Size: int64(len(marker)), Digest: "sha256:" + hex.EncodeToString(sum[:])}
		check(w.blobs.Put(ctx, b, strings.NewReader(marker)))
		return b
	}
	for _, prefix := range thread.Prefixes(org) {
		content(prefix + "x")
	}
	upload := must[*batches.Upload](t)(w.batches.Upload(org)) // of a batch that was never created
	check(upload.Add(ctx, []byte(`"`+marker+`"`)))
	_, _, err = upload.Finish(ctx)
	check(err)
	batch := &proto.Batch{
		ID: "b", Org: org, Key: key.ID, Total: 1,
		Content: proto.BatchContent{Index: content("batches/earlier" + strings.ReplaceAll(org, "-", "") + "/1")},
	}
	content("batches/earlier" + strings.ReplaceAll(org, "-", "") + "/0")
	put(st.Batches, "def."+org+".b", batch)

	queued := storetest.Job(org, key.ID, proto.ModeAsync)
	queued.Code = marker
	check(storetest.PutJob(ctx, st, queued))
	large := storetest.Job(org, key.ID, proto.ModeAsync)
	large.Code = marker + strings.Repeat("x", 600<<10)
	check(storetest.PutJob(ctx, st, large))
	done := storetest.Job(org, key.ID, proto.ModeInline)
	result := proto.Exited(0)
	result.Stdout = marker + strings.Repeat("y", 2<<20)
	_, err = st.Records.Put(ctx,
		&proto.Record{Meta: done.Meta, Status: proto.StatusSuccess, Attempt: 1, Result: &result}, 0)
	check(err)
	for _, subject := range []string{
		store.OutputSubject(done.Org, done.TraceID, 1), store.ExcessSubject(done.Org, done.TraceID, 1),
		store.OutputSubject(org, proto.NewTraceID(), 1), // whose record has expired
	} {
		_, err = st.JS.Publish(ctx, subject, []byte(marker))
		check(err)
	}
	put(st.Bindings, org+".hash", proto.Binding{Trace: done.TraceID, BodyHash: marker})
	check((&deliveries.Store{Store: st}).Create(
		ctx, proto.NewDelivery(&proto.Meta{
			TraceID: done.TraceID, Org: org, Mode: proto.ModeAsync, WebhookURL: "https://" + marker,
		}, time.Now())))
	_, _, err = (&threads.Threads{Store: st}).Lock(ctx, org, marker, done.TraceID)
	check(err)
	dead := func(letter *proto.DeadLetter, content any) {
		t.Helper()
		head, err := json.Marshal(letter)
		check(err)
		body, err := json.Marshal(content)
		check(err)
		_, err = st.DeadLetters.Write(
			ctx, store.DeadLetterSubject(org, letter.ID), nats.Header{store.HeaderDead: {string(head)}}, body, 0)
		check(err)
	}
	lost := storetest.Job(org, key.ID, proto.ModeAsync) // whose record has expired
	dead(&proto.DeadLetter{ID: string(lost.TraceID), Org: org, Reason: proto.DeadWorkersLost, Meta: &lost.Meta},
		&proto.Job{Meta: lost.Meta, Code: marker + strings.Repeat("z", 600<<10)})
	dead(&proto.DeadLetter{ID: fmt.Sprint("dead_", len(org)), Org: org, Reason: proto.DeadMalformed},
		&proto.DeadMessage{Subject: store.JobSubject(&lost.Meta), Data: []byte(marker)})
	// the marker of a removed one
	_, err = st.DeadLetters.Write(ctx, store.DeadLetterSubject(org, string(done.TraceID)), nats.Header{}, nil, 0)
	check(err)
}

// counts returns the listing of an organisation by kind, once the index has everything.
func (w *world) counts(org string) map[string]proto.StoredData {
	w.t.Helper()
	for page := (proto.HistoryPage{}); !page.Complete; {
		page = must[proto.HistoryPage](w.t)(w.history.List(storetest.Context(w.t), &proto.HistoryFilter{Org: org, Limit: 1}))
	}
	list := must[*proto.OrgData](w.t)(w.data().List(storetest.Context(w.t), org))
	kinds := map[string]proto.StoredData{}
	for _, k := range list.Kinds {
		kinds[k.Kind] = k
	}
	return kinds
}

// find returns the subjects of the messages, and the keys of the blobs, that contain text.
func (w *world) find(text string) (found []string) {
	w.t.Helper()
	ctx := storetest.Context(w.t)
	streams := w.st.JS.ListStreams(ctx)
	for info := range streams.Info() {
		st := must[jetstream.Stream](w.t)(w.st.JS.Stream(ctx, info.Config.Name))
		for seq := max(1, info.State.FirstSeq); seq <= info.State.LastSeq; seq++ {
			m, err := st.GetMsg(ctx, seq)
			if store.IsNotFound(err) {
				continue
			}
			if err != nil {
				w.t.Fatal(err)
			}
			headers := fmt.Sprint(m.Header)
			if bytes.Contains(m.Data, []byte(text)) || strings.Contains(headers, text) || strings.Contains(m.Subject, text) {
				found = append(found, m.Subject)
			}
		}
	}
	if err := streams.Err(); err != nil {
		w.t.Fatal(err)
	}
	for e, err := range w.blobs.List(ctx, "") {
		if err != nil {
			w.t.Fatal(err)
		}
		found = append(found, w.content(e.Key, text)...)
	}
	return found
}

// content returns the key of a blob that contains text.
func (w *world) content(key, text string) []string {
	e := must[blob.Entry](w.t)(w.blobs.Stat(storetest.Context(w.t), key))
	r, err := w.blobs.Backend.Get(storetest.Context(w.t), key, blob.Span{Size: e.Size, Length: e.Size})
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	var body bytes.Buffer
	if _, err := body.ReadFrom(r); err != nil {
		w.t.Fatal(err)
	}
	if strings.Contains(body.String(), text) {
		return []string{key}
	}
	return nil
}

func TestEveryStoreIsAccountedFor(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	held := map[string]bool{}
	for _, h := range orgdata.New(st, orgdata.Sources{}).Holders {
		for _, name := range h.Stores {
			held[name] = true
			if !slices.Contains(store.Rows(), name) {
				t.Errorf("%s are in %s, which is no store", h.Kind, name)
			}
		}
	}
	for _, name := range store.Rows() {
		if held[name] == (ofNobody[name] != "") {
			t.Errorf("%s: give it a row in orgdata.New, or say in ofNobody why it has nothing of an organisation", name)
		}
	}
}

// A deletion is interrupted after each step of it, and goes on in another process each time. The
// name of one organisation begins like that of the other.
func TestDeletionRemovesEverythingOfOneOrganisation(t *testing.T) {
	w := newWorld(t)
	const marker, otherMarker = "marker-of-acme", "sign-of-the-other"
	w.fill("acme-2", otherMarker)
	w.fill("acme", marker)
	for kind, n := range w.counts("acme") {
		if n.Count == 0 {
			t.Errorf("nothing is stored of the kind %s", kind)
		}
	}
	others, otherFound := w.counts("acme-2"), w.find(otherMarker)
	_, err := w.orgs.Change(storetest.Context(t), "acme", func(o *proto.Org) error {
		o.DeletingAt = new(time.Now())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	run := func(data *orgdata.Data, until func(cancel func())) {
		ctx, cancel := context.WithCancel(storetest.Context(t))
		defer cancel()
		until(cancel)
		r := &orgdata.Runner{
			Store: w.st, Data: data, Orgs: w.orgs, Settle: time.Millisecond, Instance: "test", Log: storetest.Log(t),
		}
		_ = r.Run(ctx) // always nil
		if ctx.Err() != context.Canceled {
			t.Fatal(context.Cause(ctx))
		}
	}
	for i := range w.data().Holders {
		data := w.data()
		remove := data.Holders[i].Remove
		if remove == nil {
			continue
		}
		run(data, func(cancel func()) {
			data.Holders[i].Remove = func(ctx context.Context, org string) error {
				err := remove(ctx, org)
				if err != nil {
					t.Errorf("remove the %s: %v", data.Holders[i].Kind, err)
				}
				cancel()
				return err
			}
		})
	}
	if w.orgs.List()[0].Name != "acme" {
		t.Fatal("the organisation is gone before its deletion has ended")
	}
	run(w.data(), func(cancel func()) {
		go func() {
			defer cancel()
			for len(w.orgs.List()) > 1 {
				time.Sleep(10 * time.Millisecond)
			}
		}()
	})

	for kind, n := range w.counts("acme") {
		if n.Count != 0 || n.Bytes != 0 {
			t.Errorf("of %s remain %d, %d bytes", kind, n.Count, n.Bytes)
		}
	}
	if found := w.find(marker); len(found) > 0 {
		t.Errorf("the marker is in %v", found)
	}
	now := w.counts("acme-2")
	for kind, before := range others {
		if now[kind] != before {
			t.Errorf("%s of the other organisation: %+v, before %+v", kind, now[kind], before)
		}
	}
	left := w.find(otherMarker)
	gone := slices.DeleteFunc(otherFound, func(place string) bool { return slices.Contains(left, place) })
	if len(gone) > 0 {
		t.Errorf("gone of the other organisation: %v", gone)
	}
}

// Requests that name no subjects: they are about a stream, a consumer or one message that was found
// before.
var unnamed = regexp.MustCompile(
	`^\$JS\.API\.(STREAM\.INFO\.\w+ $|STREAM\.MSG\.DELETE\.|CONSUMER\.(INFO|DELETE|MSG\.NEXT)\.)`)

// To count and to remove what an organisation has, the server looks at its subjects and keys alone, of
// each kind of data.
func TestOnlySubjectsOfTheOrganisationAreUsed(t *testing.T) {
	w, ctx := newWorld(t), storetest.Context(t)
	w.fill("other", "sign")
	w.fill("acme", "marker")
	// The inbox tells the requests of this connection from those of the rest of the world.
	const role = "observed"
	st := must[*store.Store](t)(store.Connect(ctx, store.Access{InProcess: w.server, Name: role, Role: role},
		store.Config{Replicas: 1, Retention: time.Hour}, storetest.Log(t)))
	t.Cleanup(st.Close)
	data := orgdata.New(st, orgdata.Sources{
		Executions: &queue.Queue{Store: st}, Blobs: w.blobs, Threads: thread.Prefixes,
		Batches: must[*batches.Batches](t)(batches.Open(ctx, st, w.blobs, storetest.Log(t))).Prefixes, Index: w.history,
	})
	all := must[*nats.Subscription](t)(w.st.Conn.SubscribeSync(">"))
	if err := all.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	const end = "test.end"
	for _, h := range data.Holders {
		if _, err := h.Count(ctx, "acme"); err != nil {
			t.Errorf("count the %s: %v", h.Kind, err)
		}
		if h.Remove != nil {
			if err := h.Remove(ctx, "acme"); err != nil {
				t.Errorf("remove the %s: %v", h.Kind, err)
			}
		}
		if err := st.Conn.PublishRequest(end, store.Inbox(role)+".end", nil); err != nil {
			t.Fatal(err)
		}
		named := 0
		for {
			m := must[*nats.Msg](t)(all.NextMsgWithContext(ctx))
			if m.Subject == end {
				break
			}
			request := m.Subject + " " + string(m.Data)
			switch {
			case !strings.HasPrefix(m.Reply, store.Inbox(role)) || unnamed.MatchString(request):
			case regexp.MustCompile(`\.acme([. "]|$)`).MatchString(request) && !strings.Contains(request, "other"):
				named++
			default:
				t.Errorf("the %s: a request of others: %s", h.Kind, proto.Shorten(request))
			}
		}
		if named == 0 && len(h.Stores) > 0 {
			t.Errorf("the %s: no request was seen", h.Kind)
		}
	}
}

// An organisation whose data cannot be removed now delays no other one.
func TestSlowDeletionDelaysNoOther(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(storetest.Context(t))
	defer cancel()
	for _, org := range []string{"a-slow", "quick"} {
		if err := w.orgs.Create(ctx, proto.Org{Name: org, DeletingAt: new(time.Now().UTC())}); err != nil {
			t.Fatal(err)
		}
	}
	data := w.data()
	data.Holders = []orgdata.Holder{{
		Kind: "slow things", Count: func(context.Context, string) (n orgdata.Amount, err error) { return n, nil },
		Remove: func(ctx context.Context, org string) error {
			if org == "a-slow" {
				<-ctx.Done()
			}
			return ctx.Err()
		},
	}}
	r := &orgdata.Runner{
		Store: w.st, Data: data, Orgs: w.orgs, Settle: time.Millisecond, Instance: "test", Log: storetest.Log(t),
	}
	background(t, r.Run)
	for len(w.orgs.List()) > 1 {
		select {
		case <-ctx.Done():
			t.Fatalf("not deleted: %v", w.orgs.List())
		case <-time.After(10 * time.Millisecond):
		}
	}
	if w.orgs.List()[0].Name != "a-slow" {
		t.Errorf("left: %v", w.orgs.List())
	}
}

// staleOrgs is what a process knows that was not running for a while.
type staleOrgs struct {
	*registry.Orgs
	list   []proto.Org
	listed func()
}

func (l *staleOrgs) List() []proto.Org {
	l.listed()
	return l.list
}

// A process that was frozen may lead when another one has deleted the organisation, and somebody has
// created a new one of its name.
func TestNewOrganisationOfTheNameOfADeletedOneStays(t *testing.T) {
	w := newWorld(t)
	w.fill("acme", "marker")
	before := w.counts("acme")
	list := w.orgs.List()
	list[0].DeletingAt = new(time.Now().UTC())
	ctx, cancel := context.WithCancel(storetest.Context(t))
	defer cancel()
	looks := 0
	stale := &staleOrgs{Orgs: w.orgs, list: list, listed: func() {
		if looks++; looks > 2 {
			cancel()
		}
	}}
	r := &orgdata.Runner{
		Store: w.st, Data: w.data(), Orgs: stale, Settle: time.Millisecond, Instance: "test", Log: storetest.Log(t),
	}
	_ = r.Run(ctx) // always nil
	for kind, n := range w.counts("acme") {
		if n != before[kind] {
			t.Errorf("%s: %+v, before %+v", kind, n, before[kind])
		}
	}
}
