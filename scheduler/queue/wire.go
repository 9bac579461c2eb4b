package queue

import "github.com/bullpen-run/bullpen/proto"

// submitReply carries neither when the job is stored.
type submitReply struct {
	Refusal *proto.Refusal `json:"refusal,omitempty"`
	Unknown string         `json:"unknown,omitempty"` // why it is not known whether the job is stored
}

// headerAssignment holds the assignment on a message to a worker. The rest of the message is the job's own while that is being stored.
const headerAssignment = "Bullpen-Assignment"

// Words on an assignment that was made while its job was being stored.
const (
	wordStored = "stored" // the program may start
	wordVoid   = "void"   // the job could not be stored
)

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
	Job     uint64        `json:"job"`            // sequence number of the job's message; 0 while it is being stored
	Word    string        `json:"word,omitempty"` // on an assignment made earlier, of which only the trace is repeated
	Attempt int           `json:"attempt"`
	// Revision is the sequence number of the execution's record, 0 where there is none yet: the claim is written over it.
	Revision uint64 `json:"revision"`
}
