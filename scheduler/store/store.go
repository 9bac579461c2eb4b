// Package store opens what bullpen keeps in JetStream, and reads and writes it: the streams and
// buckets with their retention, the subjects, and the encoding of stored messages, including bodies
// too large for a message. It makes no decisions: packages queue, events and registry do.
package store

import (
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

// Config configures the streams.
type Config struct {
	Replicas  int           // 1, or 3 or 5 on a cluster
	Retention time.Duration // of records and events
	// AuditRetention is how long the audit log is kept, 0 for ever.
	AuditRetention time.Duration
	// AttachOnly opens only what a worker needs, and waits for another process to create it. A
	// worker, which is close to untrusted code, needs no permission to change streams or to read
	// API keys.
	AttachOnly bool
	// Restoring opens the streams while a backup is being restored, when other processes may not.
	Restoring bool
}

// Store is everything bullpen keeps in JetStream.
type Store struct {
	Buckets
	Conn        *nats.Conn
	JS          jetstream.JetStream
	Leaders     *Leaders // reports changes of leaders
	Jobs        Jobs     // one message per job that has not ended
	Records     Records  // one message per execution
	Leases      Stream   // one message per epoch of a worker
	Output      Output   // output events
	DeadLetters Stream   // one message per dead letter
	Deliveries  Stream   // one message per delivery
	Threads     Stream   // one message per thread
	Audit       Stream   // the audit log
	AgentLogs   Stream   // what happened in runs of agents
	Bodies      Bodies   // bodies too large for a message

	// MaxInline is the size in bytes up to which a body is stored in the message, except for records.
	MaxInline int

	// OnChange, if not nil, is called for each change in a [Collection] that has a Kind. It must be
	// set before collections are opened, and must not block.
	OnChange func(proto.Change)

	maxRecord int // the same for records
}

// ackTimeout is how long an asynchronous write waits for its acknowledgement.
const ackTimeout = 2 * time.Second

// maxInline is the largest [Store.MaxInline].
const maxInline = 512 << 10

// The record of an execution may fill a message of the usual size but for its header. With 1 MB of
// output it is one write then, which also reaches waiting clients.
const (
	usualPayload = 1 << 20
	maxRecord    = usualPayload - 16<<10
)
