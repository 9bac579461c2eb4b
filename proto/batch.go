package proto

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"
	"time"
)

// Limits of batches.
const (
	// MaxBatchItems bounds the executions of a batch.
	MaxBatchItems = 100_000
	// MaxBatchBytes bounds the request that creates a batch.
	MaxBatchBytes = 256 << 20
	// MaxBatches bounds the stored batches of an organisation.
	MaxBatches = 1000
	// MaxBatchStored bounds the stored programs of an organisation's batches, in compressed bytes.
	MaxBatchStored = 4 << 30
	// MaxBatchRetries bounds the retries of a batch.
	MaxBatchRetries = 100
	// MaxBatchURLs bounds the different webhook URLs of a batch's executions.
	MaxBatchURLs = 100
)

// Batch is a set of executions accepted together. Its items are numbered from 0 and start in that
// order.
type Batch struct {
	ID  string `json:"id"`
	Org string `json:"org"`
	// API, if not empty, names the agent API that the items are requests to, see [AgentRun.API].
	// Each item is then a run instead of an execution.
	API           string            `json:"api,omitempty"`
	Key           string            `json:"key"`                    // the id of the API key under which the items run
	Total         int               `json:"total"`                  // number of items
	MaxParallel   int               `json:"max_parallel,omitempty"` // 0: as many as the plan allows
	StopOnFailure bool              `json:"stop_on_failure,omitempty"`
	Priority      int               `json:"priority,omitempty"`
	Metadata      map[string]string `json:"metadata,omitempty"`
	WebhookURL    string            `json:"webhook_url,omitempty"`   // called when the batch ends; empty for none
	ItemWebhooks  bool              `json:"item_webhooks,omitempty"` // items have webhooks of their own
	Content       BatchContent      `json:"content"`
	CreatedAt     time.Time         `json:"created_at"`
	// ExpiresAt is when items that have not ended are cancelled; zero for never.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	// What clients asked for since.
	Paused      bool      `json:"paused,omitempty"`
	Cancelled   bool      `json:"cancelled,omitempty"`
	CancelledAt time.Time `json:"cancelled_at,omitzero"`
	// Retries counts the requested retries. RetryCancelled makes the last one include the cancelled
	// items.
	Retries        int  `json:"retries,omitempty"`
	RetryCancelled bool `json:"retry_cancelled,omitempty"`
	// Removed is set while a batch of agent requests is removed together with its runs. Clients no
	// longer see it.
	Removed bool `json:"removed,omitempty"`
}

// BatchContent names what a client uploaded for a batch.
type BatchContent struct {
	Index  Blob   `json:"index"`  // lists the blobs with the items
	Stored int64  `json:"stored"` // bytes of all blobs
	Hash   string `json:"hash"`   // of settings and items
}

// BatchState is how far a batch has come.
type BatchState struct {
	// Content is the key of the batch's index. A state with another content is stale: it belongs to
	// a removed batch with the same id.
	Content string `json:"content,omitempty"`
	// Items and Rounds have one byte per item, compressed: its [ItemStatus], and how often it was
	// resubmitted after it had ended. An empty Rounds is all zeros.
	Items  []byte      `json:"items,omitempty"`
	Rounds []byte      `json:"rounds,omitempty"`
	Counts BatchCounts `json:"counts"`
	// Rate is the number of items that ended per second, lately.
	Rate      float64   `json:"rate,omitempty"`
	StartedAt time.Time `json:"started_at,omitzero"`
	UpdatedAt time.Time `json:"updated_at"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	// Stopped is why waiting items no longer start; empty while they do.
	Stopped BatchStop `json:"stopped,omitempty"`
	Reason  string    `json:"reason,omitempty"` // describes it
	// Retries counts the retries that were carried out.
	Retries int `json:"retries,omitempty"`
	// Notified is set once the webhook of the end is stored, or if there is none.
	Notified bool `json:"notified,omitempty"`
}

// BatchAndState is a batch with its state.
type BatchAndState struct {
	Batch Batch
	State BatchState
}

// BatchCounts counts the items of a batch by their status.
type BatchCounts struct {
	Total     int `json:"total" minimum:"1"`
	Waiting   int `json:"waiting" minimum:"0" doc:"Not in the queue yet."`
	Queued    int `json:"queued" minimum:"0"`
	Running   int `json:"running" minimum:"0"`
	Succeeded int `json:"succeeded" minimum:"0"`
	Failed    int `json:"failed" minimum:"0" doc:"Ended in any other way, except by a cancellation."`
	Cancelled int `json:"cancelled" minimum:"0"`
}

// Ended returns the number of items that have ended.
func (c *BatchCounts) Ended() int { return c.Succeeded + c.Failed + c.Cancelled }

// ItemStatus is the status of an item.
type ItemStatus byte

// The statuses. An item that is ItemSubmitted may be queued, running or ended: its record says
// which. An item without a record must be submitted.
const (
	ItemWaiting ItemStatus = iota
	ItemSubmitted
	ItemSucceeded
	ItemFailed
	ItemCancelled
)

// Ended reports whether the item has ended.
func (s ItemStatus) Ended() bool { return s >= ItemSucceeded }

// BatchStop is why the waiting items of a batch do not start.
type BatchStop string

// The reasons.
const (
	StopCancelled BatchStop = "cancelled" // a client asked for it
	StopFailed    BatchStop = "failed"    // an item failed, or cannot be submitted
	StopExpired   BatchStop = "expired"   // the batch reached its ExpiresAt
)

// BatchStatus is the status of a batch.
type BatchStatus string

// The closed list of statuses. The last three are terminal, unless a client asks for a retry.
const (
	BatchQueued    BatchStatus = "queued"    // no item was submitted yet
	BatchRunning   BatchStatus = "running"   // items are submitted
	BatchPaused    BatchStatus = "paused"    // no more items are submitted
	BatchStopping  BatchStatus = "stopping"  // waiting items are cancelled, submitted ones have not ended
	BatchCompleted BatchStatus = "completed" // all items have ended
	BatchCancelled BatchStatus = "cancelled" // by a client, or because it expired
	BatchFailed    BatchStatus = "failed"    // stopped by a failed item, or because items could not be submitted
)

// BatchStatuses returns all statuses.
func BatchStatuses() []BatchStatus {
	return []BatchStatus{
		BatchQueued, BatchRunning, BatchPaused, BatchStopping, BatchCompleted, BatchCancelled,
		BatchFailed,
	}
}

// Ended reports whether all items of the batch have ended and none will be retried.
func (b *Batch) Ended(s *BatchState) bool { return !s.EndedAt.IsZero() && s.Retries == b.Retries }

// Expired reports whether the batch has expired at the time now.
func (b *Batch) Expired(now time.Time) bool { return !b.ExpiresAt.IsZero() && !now.Before(b.ExpiresAt) }

// Finished reports whether the batch has ended, and its webhook is stored.
func (b *Batch) Finished(s *BatchState) bool { return b.Ended(s) && s.Notified }

// Status returns the status of the batch in a state.
func (b *Batch) Status(s *BatchState) BatchStatus {
	ended := b.Ended(s)
	switch {
	case ended && (s.Stopped == StopCancelled || s.Stopped == StopExpired):
		return BatchCancelled
	case ended && s.Stopped == StopFailed:
		return BatchFailed
	case ended:
		return BatchCompleted
	case b.Cancelled || s.Stopped != "" && s.Retries == b.Retries:
		return BatchStopping
	case b.Paused:
		return BatchPaused
	case s.StartedAt.IsZero():
		return BatchQueued
	default:
		return BatchRunning
	}
}

const batchIDPrefix = "bat_"

// NewBatchID returns the id of a new batch: derived from the idempotency key, or random without
// one.
func NewBatchID(org, key, idempotencyKey string) string {
	text := rand.Text()
	if idempotencyKey != "" {
		sum := sha256.Sum256([]byte("batch\x00" + org + "\x00" + key + "\x00" + idempotencyKey))
		text = base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:16])
	}
	return batchIDPrefix + strings.ToLower(text)
}

// ValidBatchID reports whether text has the form of a batch's id.
func ValidBatchID(text string) bool {
	rest, ok := strings.CutPrefix(text, batchIDPrefix)
	return ok && len(rest) == len(rand.Text()) && strings.Trim(rest, "abcdefghijklmnopqrstuvwxyz234567") == ""
}

// ItemTrace returns the trace id of an item in a round. It depends on the random content name, too,
// because a removed batch may be created again with the same id.
func (b *Batch) ItemTrace(index, round int) TraceID {
	return DerivedTraceID(fmt.Sprintf("item %s %s %d %d", b.ID, b.Content.Index.Key, index, round))
}

// runPrefix begins the ids of the runs of a batch's items.
const runPrefix = "msg_"

// RunID returns the id of the agent run for the batch item with a trace id.
func RunID(item TraceID) string { return runPrefix + strings.TrimPrefix(string(item), tracePrefix) }

// NewBatchDelivery returns the delivery of a batch that has ended, nil if it has no webhook. Its
// trace id is its own and belongs to no execution.
func NewBatchDelivery(b *Batch, s *BatchState) (*Delivery, error) {
	if b.WebhookURL == "" {
		return nil, nil
	}
	return NewEventDelivery(batchEventName(b), b.Org, b.Key, b.WebhookURL, struct {
		Event     string            `json:"event"`
		BatchID   string            `json:"batch_id"`
		Timestamp string            `json:"timestamp"`
		Status    BatchStatus       `json:"status"`
		Reason    string            `json:"reason,omitempty"`
		Counts    BatchCounts       `json:"counts"`
		Metadata  map[string]string `json:"metadata,omitempty"`
	}{EventBatch, b.ID, s.EndedAt.UTC().Format(TimeLayout), b.Status(s), s.Reason, s.Counts, b.Metadata}, s.EndedAt)
}

// batchEventName names the end of a batch. Each retry of the batch has another one.
func batchEventName(b *Batch) string {
	return fmt.Sprintf("end %s %s %d", b.ID, b.Content.Index.Key, b.Retries)
}

// BatchDeliveryTrace returns the trace id under which the delivery of a batch is stored.
func BatchDeliveryTrace(b *Batch) TraceID { return DerivedTraceID(batchEventName(b)) }
