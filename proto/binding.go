package proto

import "time"

// MaxIdempotencyKeyLen is the largest length of an idempotency key, in characters.
const MaxIdempotencyKeyLen = 255

// Binding maps an idempotency key of an API key to its execution.
type Binding struct {
	Trace    TraceID   `json:"trace"`
	BodyHash string    `json:"body_hash"` // of the submission; distinguishes a retry from a reuse of the key
	BoundAt  time.Time `json:"bound_at"`
	// Revision is the store's revision of this binding. Replacing and releasing need it.
	Revision uint64 `json:"-"`
}
