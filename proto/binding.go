package proto

import "time"

// MaxIdempotencyKeyLen is the largest length of an idempotency key, in characters.
const MaxIdempotencyKeyLen = 255

// Binding ties an idempotency key of an API key to the one execution it stands for.
type Binding struct {
	Trace    TraceID   `json:"trace"`
	BodyHash string    `json:"body_hash"` // of the submission, to tell a retry from a reuse of the key
	BoundAt  time.Time `json:"bound_at"`
	// Revision is the store's fencing number of this binding, needed to replace or release it.
	Revision uint64 `json:"-"`
}
