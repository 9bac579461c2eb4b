package gateway

import (
	"context"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/executions"
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
	executions.Admission
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
