package gateway

import (
	"context"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/files"
	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/login"
	"github.com/bullpen-run/bullpen/gateway/work"
	"github.com/bullpen-run/bullpen/proto"
)

// Admission decides what API keys may do, and makes and submits jobs. A request that is not admitted
// gets a [*proto.Rejection], a [*proto.FieldError] or another error whose text is for clients.
type Admission interface {
	admin.Credentials
	admin.OrgQuotas
	admin.Quotas
	admin.Requeuer
	admin.Sandboxes
	files.Principals
	filestore.Keys
	work.StartChecker
	work.PipelineChecker
	work.BatchChecker
	// ValidKey returns the API key under which work goes on without a request, and what it may do.
	ValidKey(ctx context.Context, id string) (*proto.Key, proto.Entitlement, error)
	// Entitlement returns what a key may do.
	Entitlement(ctx context.Context, key *proto.Key) (proto.Entitlement, error)
	// CheckMode rejects a mode that the plan does not include.
	CheckMode(ctx context.Context, e *proto.Entitlement, mode proto.Mode) error
	// Submit submits a job and returns the id of its execution. If an earlier request had the same
	// idempotency key, Submit returns the id of the earlier execution. Nothing of the job remains after
	// an error, except for [proto.ErrMayRun]. Its errors include [proto.ErrKeyReused],
	// [proto.ErrSubmissionPending], [proto.ErrNotConfirmed] and [*proto.BusyError].
	Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error)
}

// Submissions ends submissions that have not started.
type Submissions interface {
	// Withdraw ends the execution of a submission if it has not started, and frees its idempotency
	// key then. It returns the record, and goes on if ctx is cancelled.
	Withdraw(ctx context.Context, sub *proto.Submission, reason string) (*proto.Record, error)
	// Release frees the idempotency key of a submission that did not start. It goes on if ctx is
	// cancelled.
	Release(ctx context.Context, sub *proto.Submission) error
}

// Jobs reads and cancels executions.
type Jobs interface {
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Summary is Lookup without the outputs of the result.
	Summary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Wait blocks until the execution has ended. It returns ctx.Err() if ctx is done first.
	Wait(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Watch listens for the end of an execution that is about to be submitted, so that waiting for
	// it needs no reads.
	Watch(org string, id proto.TraceID) (Watch, error)
	// Cancel stores a request to end the execution, and returns the new record.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Stats returns the state of the queue.
	Stats(ctx context.Context) (proto.QueueStats, error)
}

// History finds executions.
type History interface {
	// List returns the executions that match a filter, the newest first. It returns a
	// [*proto.HistoryError] if the index of executions cannot be used.
	List(ctx context.Context, f *proto.HistoryFilter) (proto.HistoryPage, error)
}

// Capabilities knows what workers can run.
type Capabilities interface {
	// Missing returns what live workers lack to run an execution, nil if one of them can. It reads
	// memory only.
	Missing(m *proto.Meta) *proto.Missing
}

// Queue shows the queue.
type Queue interface {
	// View returns the queue of an API key.
	View(ctx context.Context, req *proto.QueueRequest) (proto.QueueView, error)
}

// Watch listens for the end of one execution.
type Watch interface {
	// Wait blocks until the execution has ended. It returns ctx.Err() if ctx is done first, and may
	// be called again.
	Wait(ctx context.Context) (*proto.Record, error)
	// Close releases the watch.
	Close()
}

// Events reads the output of executions, from their start and live.
type Events interface {
	// Follow reads the events of an execution with sequence numbers above after, and always the
	// result event.
	Follow(ctx context.Context, org string, id proto.TraceID, after int64) (Tail, error)
	// Last returns the sequence number of the present last event of an attempt, without the result;
	// 0 for none.
	Last(ctx context.Context, org string, id proto.TraceID, attempt int) (int64, error)
}

// Tail is a reader of one execution's events, for one goroutine at a time.
type Tail interface {
	// Next blocks until there are events. It returns [io.EOF] after the result event. It returns
	// ctx.Err() if ctx is done first, and may be called again.
	Next(ctx context.Context) (proto.Events, error)
	// Close releases the tail.
	Close()
}

// Members finds the people who may sign in, and stores them.
type Members interface {
	admin.Members
	login.Members
}

// Threads reads the threads of organisations. The Holder of a thread is empty if the holding
// execution has ended.
type Threads interface {
	files.Threads
	// ListUsed returns up to limit threads whose ids have a prefix and that were used since a time, in
	// the order of their ids.
	ListUsed(ctx context.Context, org, prefix string, since time.Time, limit int) ([]proto.ThreadSummary, error)
}

// Versions reads, changes and removes the stored versions of threads.
type Versions interface {
	files.Versions
	work.Versions
}

// Storage uses the buckets of storage connections.
type Storage interface {
	admin.Buckets
	filestore.Mounts
}

// Files reads and stages files in the homes of threads.
type Files interface {
	filestore.Homes
	// StageIfUnchanged is Stage on the condition that the file has a tag, as Open returns it, or with
	// an empty tag that Open finds no file. Otherwise it returns a [*proto.FileChangedError].
	StageIfUnchanged(ctx context.Context, org, thread, path, tag string, size int64, most proto.Space,
		body io.Reader) error
}
