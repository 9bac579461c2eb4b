package store_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// large writes a job whose body is stored apart, and returns its id, its sequence number and the subject
// of the chunks.
func large(t *testing.T, st *store.Store) (id proto.TraceID, seq uint64, chunks string) {
	t.Helper()
	ctx := storetest.Context(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Code = strings.Repeat("x", 1<<20)
	if err := storetest.PutJob(ctx, st, job); err != nil {
		t.Fatal(err)
	}
	m, err := st.Jobs.GetLastMsgForSubject(ctx, store.JobPattern(job.Org, job.TraceID))
	if err != nil {
		t.Fatal(err)
	}
	return job.TraceID, m.Sequence, "bullpen.body." + store.BodyName(m.Header)
}

// bodies returns the numbers of chunks of an organisation's bodies, by their subjects.
func bodies(t *testing.T, st *store.Store, org string) map[string]uint64 {
	t.Helper()
	found, err := st.Bodies.Subjects(storetest.Context(t), store.BodyPatternOf(org))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// Each chunk of a body is a durable write that the caller waits for.
func TestBodyIsStoredInLargestChunks(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	_, _, chunks := large(t, st)
	if n := bodies(t, st, "acme")[chunks]; n != 3 { // with the rest of the job
		t.Errorf("1 MiB of code is in %d chunks of up to %d bytes", n, st.MaxInline)
	}
	if most := int(st.Conn.MaxPayload()) / 2; st.MaxInline > most {
		t.Errorf("a chunk has %d bytes, want %d at most: it must fit into a message with its header", st.MaxInline, most)
	}
	if others := bodies(t, st, "other"); len(others) > 0 {
		t.Errorf("another organisation has %v", others)
	}
}

// A record is in the message, which waiting clients receive, as long as it fits with its header. A
// larger one is stored apart.
func TestRecordFillsItsMessage(t *testing.T) {
	const most = 1<<20 - 16<<10
	for name, open := range map[string]func(*testing.T) *store.Store{
		"one server": func(t *testing.T) *store.Store { return storetest.Open(t, storetest.Server(t)) },
		"cluster":    func(t *testing.T) *store.Store { return storetest.Cluster(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			st := open(t)
			ctx := storetest.Context(t)
			for size, apart := range map[int]bool{most: false, most + 1: true} {
				result := proto.Exited(0)
				rec := &proto.Record{
					Meta: storetest.Job("acme", "k", proto.ModeInline).Meta, Status: result.Status(), Attempt: 1,
					Worker: strings.Repeat("w", 64), Result: &result,
				}
				result.Stdout = "x"
				small, err := proto.EncodeRecord(rec)
				if err != nil {
					t.Fatal(err)
				}
				result.Stdout = strings.Repeat("x", size-len(small)+1)
				for { // the record contains the length of the output too
					body, err := proto.EncodeRecord(rec)
					if err != nil {
						t.Fatal(err)
					}
					if len(body) == size {
						break
					}
					result.Stdout = result.Stdout[:len(result.Stdout)+size-len(body)]
				}
				done, err := st.Conn.SubscribeSync(store.DoneSubject(rec.Org, rec.TraceID))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := st.Records.Put(ctx, rec, 0); err != nil {
					t.Fatal(err)
				}
				m, err := done.NextMsgWithContext(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if (store.BodyName(m.Header) != "") != apart || (len(m.Data) == size) == apart {
					t.Errorf("of a record of %d bytes, %d are in its message, and %q", size, len(m.Data), store.BodyName(m.Header))
				}
				if got, _, err := st.Records.Get(ctx, rec.Org, rec.TraceID); err != nil || got.Result.Stdout != result.Stdout {
					t.Errorf("a record of %d bytes is not read as it was written: %v", size, err)
				}
				if got, err := st.Records.Last(ctx, store.ExecSubject(rec.Org, rec.TraceID), store.FromLeader); err != nil ||
					len(got.Data) != size {
					t.Errorf("a record of %d bytes is not read from the leader: %v", size, err)
				}
			}
		})
	}
}

// A reader that has seen the message must not wait for its body when both are removed.
func TestReaderDoesNotWaitForDeletedBody(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	_, seq, chunks := large(t, st)
	if err := st.Bodies.PurgeSubject(ctx, chunks); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := st.Jobs.At(ctx, seq)
		read <- err
	}()
	if err := st.Jobs.Remove(ctx, store.RemovedJobs{Below: seq + 1}); err != nil {
		t.Fatal(err)
	}
	if err := <-read; !store.IsNotFound(err) {
		t.Fatalf("reading ended with %v", err)
	}
}

func TestMetaIsReadWithoutTheBody(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	id, seq, chunks := large(t, st)
	body := strings.TrimPrefix(chunks, "bullpen.body.")
	if err := st.Jobs.Remove(ctx, store.RemovedJobs{Bodies: []string{body}}); err != nil {
		t.Fatal(err)
	}
	if meta, err := st.Jobs.Meta(ctx, "acme", id); err != nil || meta.Org != "acme" {
		t.Fatalf("%+v, %v", meta, err)
	}
	if err := st.Jobs.Remove(ctx, store.RemovedJobs{Below: seq + 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Jobs.Meta(ctx, "acme", id); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("after it was removed: %v", err)
	}
}

func TestRemovedJobsMayBeRemovedAgain(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	_, seq, chunks := large(t, st)
	for range 2 {
		body := strings.TrimPrefix(chunks, "bullpen.body.")
		if err := st.Jobs.Remove(ctx, store.RemovedJobs{Single: []uint64{seq}, Bodies: []string{body}}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRemoveJobsContinuesAfterFailure(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	first, seq, chunks := large(t, st)
	alone, last, _ := large(t, st)
	if err := st.Jobs.Remove(ctx,
		store.RemovedJobs{
			Below: seq + 1, Single: []uint64{last}, Bodies: []string{"", "*.*", strings.TrimPrefix(chunks, "bullpen.body.")},
		}); err == nil {
		t.Error("a body without a name was removed")
	}
	for _, id := range []proto.TraceID{first, alone} {
		if _, err := st.Jobs.Meta(ctx, "acme", id); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("job %s: %v", id, err)
		}
	}
	if n := bodies(t, st, "acme")[chunks]; n > 0 {
		t.Errorf("%d chunks of the body remain", n)
	}
}

// On a cluster a write takes a while, and its answer may be lost. The server rejects the next write
// on the subject meanwhile.
func TestWriteInProgressIsNoConflict(t *testing.T) {
	t.Parallel()
	st := storetest.Cluster(t)
	ctx := storetest.Context(t)
	for range 20 {
		m, err := st.Jobs.Stage(ctx, storetest.Job("acme", "k", proto.ModeInline), nats.Header{})
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Conn.PublishMsg(first(m)); err != nil { // nobody waits for the answer
			t.Fatal(err)
		}
		if _, err := st.Jobs.Put(ctx, m); err != nil {
			t.Fatal(err)
		}
	}
}

// first returns a message for a subject that has none.
func first(m *nats.Msg) *nats.Msg {
	h := maps.Clone(m.Header)
	h.Set(jetstream.ExpectedLastSubjSeqHeader, "0")
	return &nats.Msg{Subject: m.Subject, Header: h, Data: m.Data}
}

func TestStoredJobCanBeWrittenAgain(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	m, err := st.Jobs.Stage(ctx, storetest.Job("acme", "k", proto.ModeAsync), nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	first, err := st.Jobs.Put(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	never, err := st.Jobs.Stage(ctx, storetest.Job("acme", "k", proto.ModeAsync), nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := st.Jobs.CachedInfo().Config
	cfg.Sealed = true
	if _, err := st.JS.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if again, err := st.Jobs.Put(ctx, m); err != nil || again != first {
		t.Errorf("written again: %d, %v; it is at %d", again, err, first)
	}
	if _, err := st.Jobs.Put(ctx, never); !store.IsRejected(err) {
		t.Errorf("another one: %v", err)
	}
}

// Delayed jobs are removed apart from the others.
func TestRemoveJobsByDelay(t *testing.T) {
	ctx := storetest.Context(t)
	st := storetest.Open(t, storetest.Server(t))
	var left []proto.TraceID
	for i := range 6 {
		job := storetest.Job("acme", "k", []proto.Mode{proto.ModeInline, proto.ModeAsync, proto.ModeAsync}[i%3])
		if i%3 == 2 {
			job.RunAt = time.Now().Add(time.Hour)
		}
		if err := storetest.PutJob(ctx, st, job); err != nil {
			t.Fatal(err)
		}
		left = append(left, job.TraceID)
	}
	for _, step := range []struct {
		remove store.RemovedJobs
		left   []proto.TraceID
	}{
		{store.RemovedJobs{PromptBelow: 5}, []proto.TraceID{left[2], left[4], left[5]}},
		{store.RemovedJobs{DelayedBelow: 6}, []proto.TraceID{left[4], left[5]}},
		{store.RemovedJobs{Below: 6}, []proto.TraceID{left[5]}},
	} {
		if err := st.Jobs.Remove(ctx, step.remove); err != nil {
			t.Fatal(err)
		}
		for _, id := range left {
			if _, err := st.Jobs.Meta(ctx, "acme", id); (err == nil) != slices.Contains(step.left, id) {
				t.Errorf("after %+v, job %d: %v", step.remove, slices.Index(left, id), err)
			}
		}
	}
}

// The header of a message that is not bullpen's may name anything as its body.
func TestMalformedNamesOfBodies(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	_, _, chunks := large(t, st)
	name := strings.TrimPrefix(chunks, "bullpen.body.")
	for _, body := range []string{
		"x", "*.*", "> 1 x", "acme.> 1 x", name, name + " -1 x", name + " x x", "acme.other 5 x",
		name + " 1 not-its-digest",
	} {
		ack, err := st.JS.PublishMsg(ctx, &nats.Msg{
			Subject: store.DeliverySubject("acme", "x"), Header: nats.Header{"Bullpen-Body": {body}},
		})
		if err != nil {
			t.Fatal(err)
		}
		m, err := st.Deliveries.At(ctx, ack.Sequence, store.WithoutBody)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Deliveries.At(ctx, ack.Sequence); err == nil {
			t.Errorf("%q: a body was read", body)
		}
		if strings.HasPrefix(body, name) {
			continue
		}
		st.Bodies.Discard(ctx, m.Header)
		if n := bodies(t, st, "acme")[chunks]; n == 0 {
			t.Fatalf("%q: the body of another message was removed", body)
		}
	}
}

// What is stored on the subject of an execution counts for its organisation alone.
func TestRecordOfAnotherOrganisationIsMalformed(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	rec := &proto.Record{
		Meta: storetest.Job("acme", "k", proto.ModeAsync).Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w",
	}
	if _, err := st.Records.Put(ctx, rec, 0); err != nil {
		t.Fatal(err)
	}
	stored, err := st.Records.Last(ctx, store.ExecSubject("acme", rec.TraceID))
	if err != nil {
		t.Fatal(err)
	}
	for _, opts := range [][]store.ReadOption{nil, {store.WithoutBody}} {
		if _, _, err := st.Records.Get(ctx, "acme", rec.TraceID, opts...); err != nil {
			t.Error(err)
		}
		if _, _, err := st.Records.Get(ctx, "other", rec.TraceID, opts...); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("for another organisation: %v", err)
		}
	}
	if _, err := st.JS.PublishMsg(ctx, &nats.Msg{
		Subject: store.ExecSubject("other", rec.TraceID), Header: stored.Header, Data: stored.Data,
	}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := st.Records.Get(ctx, "other", rec.TraceID); !errors.Is(err, store.ErrMalformed) {
		t.Errorf("a copy of the record: %v", err)
	}
	if _, _, err := st.Records.Get(ctx, "other", rec.TraceID, store.WithoutBody); !errors.Is(err, store.ErrMalformed) {
		t.Errorf("a copy of the summary: %v", err)
	}
}
