package queue

import "github.com/bullpen-run/bullpen/proto"

// submitReply is the dispatcher's answer to a submission. Both fields are empty if the job is
// stored.
type submitReply struct {
	Rejection *proto.Rejection `json:"rejection,omitempty"`
	Unknown   string           `json:"unknown,omitempty"` // why it is unknown whether the job is stored
}

// headerAssignment holds the assignment in a message to a worker. The other headers and the body
// are those of the job while it is being stored.
const headerAssignment = "Bullpen-Assignment"

// Acknowledgements of an assignment that was sent while its job was being stored.
const (
	ackStored = "ack"  // the program may start
	ackFailed = "nack" // the job is not stored and must not start
)

// announcement is the state of a worker, sent when it changes, when requested, and every
// announceEvery.
type announcement struct {
	Worker       string   `json:"worker"`
	Pool         string   `json:"pool,omitempty"` // empty for [proto.DefaultPool]
	Slots        int      `json:"slots"`
	Live         bool     `json:"live,omitempty"` // the slots are for live sandboxes
	Capabilities []string `json:"capabilities"`   // of each slot
	Free         []uint64 `json:"free"`           // tickets, one per free slot, each used once
	// Memory is the maximum sum of the memory limits of live sandboxes, in bytes; 0 for no limit.
	// FreeMemory is the part that the worker's current sandboxes leave.
	Memory     int64           `json:"memory,omitempty"`
	FreeMemory int64           `json:"free_memory,omitempty"`
	Held       []proto.TraceID `json:"held"` // jobs assigned or running
	// Dropped holds jobs that were assigned with a stale ticket, or that the worker has no memory
	// for.
	Dropped []proto.TraceID `json:"dropped,omitempty"`
	Gone    bool            `json:"gone"` // the worker stops
	// Draining workers announce no free slots.
	Draining bool `json:"draining,omitempty"`
	// Info is present in repeated and requested announcements.
	Info *proto.Worker `json:"info,omitempty"`
}

// assignment assigns a job to a free slot, or acknowledges an earlier assignment.
type assignment struct {
	Ticket  uint64        `json:"ticket"`
	Org     string        `json:"org,omitempty"`
	Trace   proto.TraceID `json:"trace"`
	Job     uint64        `json:"job"`           // sequence number of the job; 0 while it is being stored
	Ack     string        `json:"ack,omitempty"` // with the trace alone
	Attempt int           `json:"attempt"`
	// Revision is the revision of the execution's record that the claim replaces, or 0 if there is
	// none.
	Revision uint64 `json:"revision"`
	// Memory is the memory limit of a live sandbox, in bytes.
	Memory int64 `json:"memory,omitempty"`
}
