package proto

import (
	"regexp"
	"time"
)

// DeadReason is why something was set aside.
type DeadReason string

// The reasons. Their list may only grow.
const (
	DeadWorkersLost DeadReason = "workers_lost" // every worker that was to start the job's program was lost before it did
	DeadMalformed   DeadReason = "malformed"    // a message that is no job lay where jobs lie
)

// DeadLetter is a job or a message that nobody can act on, set aside for people to look at.
type DeadLetter struct {
	ID      string     `json:"id"` // of a job, its trace id; of a malformed message, dead_ and its number in the stream
	Reason  DeadReason `json:"reason"`
	Message string     `json:"message"` // the reason in a sentence
	At      time.Time  `json:"at"`
	Meta    *Meta      `json:"meta,omitempty"`    // of a job
	Attempt int        `json:"attempt,omitempty"` // of a job: the attempt that could not start
	Workers []string   `json:"workers,omitempty"` // that were lost with a job, in this order
	// Requeued is the execution that was made of a job, and RequeuedAt when: it may be still on its way into the queue.
	Requeued   TraceID    `json:"requeued,omitempty"`
	RequeuedAt *time.Time `json:"requeued_at,omitempty"`
	Revision   uint64     `json:"-"` // to change it by
}

// DeadMessage is a malformed message as it was found.
type DeadMessage struct {
	Subject string              `json:"subject"`
	Header  map[string][]string `json:"header"`
	Data    []byte              `json:"data"`
}

// DeadContent is what a dead letter is about: one of the two.
type DeadContent struct {
	Job     *Job
	Message *DeadMessage
}

var deadMessagePattern = regexp.MustCompile(`^dead_[1-9][0-9]{0,19}$`)

// ValidDeadLetterID reports whether s may be the id of a dead letter.
func ValidDeadLetterID(s string) bool {
	_, err := ParseTraceID(s)
	return err == nil || deadMessagePattern.MatchString(s)
}
