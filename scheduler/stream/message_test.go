package stream_test

import (
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/stream"
	"github.com/bullpen-run/bullpen/scheduler/streamtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// large writes a job whose body is stored apart, and returns its sequence number and the object's description.
func large(t *testing.T, set *stream.Set) (proto.TraceID, uint64, *jetstream.ObjectInfo) {
	t.Helper()
	ctx := streamtest.Context(t)
	job := streamtest.Job("acme", "k", proto.ModeAsync)
	job.Code = strings.Repeat("x", 1<<20)
	if err := streamtest.Store(ctx, set, job); err != nil {
		t.Fatal(err)
	}
	m, err := set.Jobs.GetLastMsgForSubject(ctx, stream.JobOf(job.TraceID))
	if err != nil {
		t.Fatal(err)
	}
	bodies, err := set.JS.ObjectStore(ctx, "bullpen_bodies")
	if err != nil {
		t.Fatal(err)
	}
	info, err := bodies.GetInfo(ctx, stream.BodyOf(m.Header))
	if err != nil {
		t.Fatal(err)
	}
	return job.TraceID, m.Sequence, info
}

// Each piece of a body that is stored apart is a durable write that somebody waits for.
func TestBodyIsStoredInTheLargestPieces(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	_, _, info := large(t, set)
	piece := uint64(set.Piece())
	if want := (info.Size + piece - 1) / piece; uint64(info.Chunks) != want {
		t.Errorf("%d bytes are in %d pieces, want %d of %d bytes at most", info.Size, info.Chunks, want, piece)
	}
	if most := uint64(set.Conn.MaxPayload()) / 2; piece > most {
		t.Errorf("a piece has %d bytes, want %d at most: it must fit into a message with its header", piece, most)
	}
}

// A record is in one message, which whoever waits for it gets, as long as it fits with its header; a larger one is stored apart.
func TestRecordFillsItsMessage(t *testing.T) {
	const most = 1<<20 - 16<<10
	for name, open := range map[string]func(*testing.T) *stream.Set{
		"one server": func(t *testing.T) *stream.Set { return streamtest.Set(t, streamtest.Server(t)) },
		"cluster":    func(t *testing.T) *stream.Set { return streamtest.Cluster(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := open(t)
			ctx := streamtest.Context(t)
			for size, apart := range map[int]bool{most: false, most + 1: true} {
				result := proto.Exited(0)
				rec := &proto.Record{
					Meta: streamtest.Job("acme", "k", proto.ModeInline).Meta, Status: result.Status(), Attempt: 1, Worker: strings.Repeat("w", 64), Result: &result,
				}
				result.Stdout = "x"
				small, err := proto.EncodeRecord(rec)
				if err != nil {
					t.Fatal(err)
				}
				result.Stdout = strings.Repeat("x", size-len(small)+1)
				for { // how long the output is, the record says as well
					body, err := proto.EncodeRecord(rec)
					if err != nil {
						t.Fatal(err)
					}
					if len(body) == size {
						break
					}
					result.Stdout = result.Stdout[:len(result.Stdout)+size-len(body)]
				}
				told, err := set.Conn.SubscribeSync(stream.Done(rec.TraceID))
				if err != nil {
					t.Fatal(err)
				}
				if _, err := set.WriteRecord(ctx, rec, 0); err != nil {
					t.Fatal(err)
				}
				m, err := told.NextMsgWithContext(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if (stream.BodyOf(m.Header) != "") != apart || (len(m.Data) == size) == apart {
					t.Errorf("of a record of %d bytes, %d are in its message, and %q", size, len(m.Data), stream.BodyOf(m.Header))
				}
				if got, _, err := set.Record(ctx, rec.TraceID); err != nil || got.Result.Stdout != result.Stdout {
					t.Errorf("a record of %d bytes is not read as it was written: %v", size, err)
				}
				if got, err := set.Newest(ctx, set.Execs, stream.Exec(rec.TraceID)); err != nil || len(got.Data) != size {
					t.Errorf("a record of %d bytes is not told by the leader: %v", size, err)
				}
			}
		})
	}
}

// A reader that has seen the message when both are removed must not wait for the body.
func TestBodyThatIsDeletedWhileItIsReadIsNotWaitedFor(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	_, seq, info := large(t, set)
	objects, err := set.JS.Stream(ctx, "OBJ_bullpen_bodies")
	if err != nil {
		t.Fatal(err)
	}
	if err := objects.Purge(ctx, jetstream.WithPurgeSubject("$O.bullpen_bodies.C."+info.NUID)); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := set.At(ctx, set.Jobs, seq)
		read <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for readers := 0; readers == 0; <-tick.C { // it waits for the chunks
		now, err := objects.Info(ctx)
		if err != nil {
			t.Fatal(err)
		}
		readers = now.State.Consumers
	}
	if err := set.RemoveJobs(ctx, seq+1, nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-read; !stream.Missing(err) {
		t.Fatalf("reading ended with %v", err)
	}
}

func TestMetaIsReadWithoutTheBody(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	id, seq, info := large(t, set)
	if err := set.RemoveJobs(ctx, 0, nil, []string{info.Name}); err != nil {
		t.Fatal(err)
	}
	if meta, err := set.JobMeta(ctx, id); err != nil || meta.Org != "acme" {
		t.Fatalf("%+v, %v", meta, err)
	}
	if err := set.RemoveJobs(ctx, seq+1, nil, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := set.JobMeta(ctx, id); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("after it was removed: %v", err)
	}
}

func TestWhatCannotBeRemovedKeepsNothingElse(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	first, seq, info := large(t, set)
	alone, last, _ := large(t, set)
	if err := set.RemoveJobs(ctx, seq+1, []uint64{last}, []string{"", info.Name}); err == nil {
		t.Error("an object without a name was removed")
	}
	for _, id := range []proto.TraceID{first, alone} {
		if _, err := set.JobMeta(ctx, id); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("job %s: %v", id, err)
		}
	}
	bodies, err := set.JS.ObjectStore(ctx, "bullpen_bodies")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bodies.GetInfo(ctx, info.Name); !stream.Missing(err) {
		t.Errorf("the body: %v", err)
	}
}

// A write that was carried out, without a word of it, is not a refused one because the server takes no more now.
// On a cluster a write takes a while, and the answer to it may be lost. The server refuses the next one on its subject until it is carried out.
func TestWriteThatIsStillBeingCarriedOutIsNoConflict(t *testing.T) {
	t.Parallel()
	set := streamtest.Cluster(t)
	ctx := streamtest.Context(t)
	for range 20 {
		m, err := set.StageJob(ctx, streamtest.Job("acme", "k", proto.ModeInline), nats.Header{})
		if err != nil {
			t.Fatal(err)
		}
		if err := set.Conn.PublishMsg(first(m)); err != nil { // nobody waits for the answer
			t.Fatal(err)
		}
		if _, err := set.WriteJob(ctx, m); err != nil {
			t.Fatal(err)
		}
	}
}

// first gives a message as it is written where there is none on its subject.
func first(m *nats.Msg) *nats.Msg {
	h := maps.Clone(m.Header)
	h.Set(jetstream.ExpectedLastSubjSeqHeader, "0")
	return &nats.Msg{Subject: m.Subject, Header: h, Data: m.Data}
}

func TestStoredJobIsNotRefusedWhenItIsWrittenAgain(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	m, err := set.StageJob(ctx, streamtest.Job("acme", "k", proto.ModeAsync), nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	first, err := set.WriteJob(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	never, err := set.StageJob(ctx, streamtest.Job("acme", "k", proto.ModeAsync), nats.Header{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := set.Jobs.CachedInfo().Config
	cfg.Sealed = true
	if _, err := set.JS.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	if again, err := set.WriteJob(ctx, m); err != nil || again != first {
		t.Errorf("written again: %d, %v; it lies at %d", again, err, first)
	}
	if _, err := set.WriteJob(ctx, never); !stream.Refused(err) {
		t.Errorf("another one: %v", err)
	}
}
