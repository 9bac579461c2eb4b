package queue

import "github.com/bullpen-run/bullpen/proto"

// admitRequest asks the dispatcher whether a job may be published. The place is kept for a few seconds.
type admitRequest struct {
	Trace      proto.TraceID `json:"trace"`
	Org        string        `json:"org"`
	Class      proto.Class   `json:"class"`
	Concurrent int           `json:"concurrent"`
	MaxQueued  int           `json:"max_queued"`
}

// admitReply carries no refusal when the job may be published.
type admitReply struct {
	Refusal *proto.Refusal `json:"refusal,omitempty"`
}

// announcement is how a worker tells the dispatcher of itself: at once when something changes, and as a sign of life.
type announcement struct {
	Worker string          `json:"worker"`
	Slots  int             `json:"slots"`
	Offers []string        `json:"offers"` // capabilities, of each slot
	Free   []uint64        `json:"free"`   // each the ticket of one free slot, never used twice
	Held   []proto.TraceID `json:"held"`   // assigned or running here
	// Dropped were assigned to slots that are not free any more.
	Dropped []proto.TraceID `json:"dropped,omitempty"`
	Gone    bool            `json:"gone"` // the last word of a worker that stops
}

// assignment hands a job to one free slot.
type assignment struct {
	Ticket  uint64        `json:"ticket"`
	Trace   proto.TraceID `json:"trace"`
	Job     uint64        `json:"job"` // sequence number of the job's message
	Attempt int           `json:"attempt"`
	// Revision is the sequence number of the execution's record, 0 where there is none yet: the claim is written over it.
	Revision uint64 `json:"revision"`
}
