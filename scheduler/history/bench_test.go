package history_test

import (
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/history"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	database "github.com/bullpen-run/bullpen/storage/history"
)

// BenchmarkCost measures the processor time of this process for the job and the two records of an
// execution, 250 of them a second, with and without an index. The difference is what the index
// costs.
func BenchmarkCost(b *testing.B) {
	for _, indexed := range []bool{false, true} {
		b.Run(fmt.Sprint("index=", indexed), func(b *testing.B) {
			st := storetest.Open(b, storetest.Server(b))
			if indexed {
				index, err := database.Open(filepath.Join(b.TempDir(), "index.db"), storetest.Log(b))
				if err != nil {
					b.Fatal(err)
				}
				h := &history.History{Store: st, Index: index, Log: storetest.Log(b)}
				done := make(chan struct{})
				go func() { defer close(done); _ = h.Run(b.Context()) }()
				b.Cleanup(func() { <-done; _ = index.Close() })
			}
			ctx := b.Context()
			pace := time.NewTicker(4 * time.Millisecond)
			defer pace.Stop()
			began := used(b)
			for b.Loop() {
				<-pace.C
				job := storetest.Job("acme", "k", proto.ModeInline)
				job.RequestID, job.Metadata = string(proto.NewTraceID()), map[string]string{"env": "prod", "customer": "c17"}
				if err := storetest.PutJob(ctx, st, job); err != nil {
					b.Fatal(err)
				}
				var seq uint64
				for _, result := range []*proto.Result{nil, new(proto.Exited(0))} {
					rec := &proto.Record{Meta: job.Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w", Result: result}
					if result != nil {
						rec.Status = proto.StatusSuccess
					}
					var err error
					if seq, err = st.Records.Put(ctx, rec, seq); err != nil {
						b.Fatal(err)
					}
				}
				if b.N%50 == 0 {
					if err := st.Jobs.Remove(ctx, store.RemovedJobs{Below: uint64(b.N)}); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.ReportMetric(float64((used(b)-began).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

// used returns the processor time of this process.
func used(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
