package gateway

import (
	"github.com/bullpen-run/bullpen/gateway/admin"
	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/executions"
	"github.com/bullpen-run/bullpen/gateway/files"
	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/login"
	"github.com/bullpen-run/bullpen/gateway/work"
)

// Admission decides what API keys may do, and builds and submits jobs. It refuses a request with a
// [*proto.Rejection], a [*proto.FieldError] or another error whose text is for clients.
type Admission interface {
	admin.Credentials
	admin.OrgQuotas
	admin.OrgPlans
	admin.Quotas
	admin.ProfileResolver
	agents.Keys
	executions.Admission
	files.Principals
	filestore.Keys
	work.StartChecker
	work.PipelineChecker
	work.BatchChecker
}

// Members finds the people who may sign in, and stores them.
type Members interface {
	admin.Members
	login.Members
}

// Threads reads the threads of organisations. The Holder of a thread is empty if the holding
// execution has ended.
type Threads interface {
	agents.Threads
	files.Threads
}

// Versions reads, changes and removes the stored versions of threads.
type Versions interface {
	agents.Versions
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
	agents.Homes
	filestore.Homes
}

// Queue shows the queue.
type Queue interface {
	admin.OrgQueues
	executions.Queue
}
