package proto

import (
	"regexp"
	"time"
)

// DeadReason is why a job or a message was dead-lettered.
type DeadReason string

// The reasons. Their list may only grow.
const (
	// every worker that was assigned the job was lost before it started the program
	DeadWorkersLost DeadReason = "workers_lost"
	DeadMalformed   DeadReason = "malformed" // a message in the stream of jobs that is no job
)

// DeadLetter is a job or a message that cannot be processed, kept for operators.
type DeadLetter struct {
	ID string `json:"id"` // the trace id of a job; dead_ and the number in the stream of a malformed message
	// Org is the organisation of a job, or the one in a malformed message's subject. It may be
	// empty.
	Org     string     `json:"org,omitempty"`
	Reason  DeadReason `json:"reason"`
	Message string     `json:"message"` // the reason in a sentence
	At      time.Time  `json:"at"`
	Meta    *Meta      `json:"meta,omitempty"`    // of a job
	Attempt int        `json:"attempt,omitempty"` // the attempt of the job that could not start
	Workers []string   `json:"workers,omitempty"` // the workers that were lost with a job, in this order
	// Requeued is the new execution of a job, which may not be queued yet, and RequeuedAt the time
	// of its creation.
	Requeued   TraceID    `json:"requeued,omitempty"`
	RequeuedAt *time.Time `json:"requeued_at,omitempty"`
	Revision   uint64     `json:"-"` // of the store; updates need it
}

// DeadMessage is a malformed message as it was found.
type DeadMessage struct {
	Subject string              `json:"subject"`
	Header  map[string][]string `json:"header"`
	Data    []byte              `json:"data"`
}

// DeadContent is the content of a dead letter: either a job or a message.
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
