package gateway

import (
	"context"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Submissions accepts executions. Nothing of a job remains after an error, except for
// [proto.ErrMayRun].
type Submissions interface {
	// Submit accepts a job and returns the id of its execution. It returns that of an earlier request
	// with the same idempotency key if there is one. Its errors include [proto.ErrKeyReused],
	// [proto.ErrSubmissionPending], [proto.ErrNotConfirmed], [*proto.BusyError] and [*proto.Refusal].
	Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error)
	// Requeue submits the job of a dead letter as execution id, unless an earlier request has done so.
	// It returns the dead letter, which names the execution. build makes the job from the dead one.
	// Other errors are those of build, [proto.ErrNotFound] and [proto.ErrNoJob].
	Requeue(ctx context.Context, letter string, id proto.TraceID, build func(*proto.Job) (*proto.Job, error)) (*proto.DeadLetter, error)
	// Withdraw ends the execution of a submission if it has not started, and frees its idempotency key
	// then. It returns the record, and goes on if ctx is cancelled.
	Withdraw(ctx context.Context, sub *proto.Submission, reason string) (*proto.Record, error)
	// Release frees the idempotency key of a submission that did not start. It goes on if ctx is cancelled.
	Release(ctx context.Context, sub *proto.Submission) error
}

// Jobs reads and cancels executions.
type Jobs interface {
	// Lookup gives what is known of an execution. Its error is [proto.ErrNotFound] where nothing is.
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Wait blocks until the execution has ended. When ctx ends first, it gives the error of ctx.
	Wait(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Watch begins to listen for the end of an execution that is to be submitted next, so that nothing has to be read to wait for it.
	Watch(id proto.TraceID) (Watch, error)
	// Cancel records that the execution is to be ended, and gives its record as it is afterwards.
	Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Stats gives the state of the queue.
	Stats(ctx context.Context) (proto.QueueStats, error)
}

// Watch listens for the end of one execution.
type Watch interface {
	// Wait blocks until the execution has ended. When ctx ends first, it gives the error of ctx, and may be called again.
	Wait(ctx context.Context) (*proto.Record, error)
	// Close frees what the watch holds.
	Close()
}

// Events gives the output of executions, from their start and live.
type Events interface {
	// Follow reads the events of an execution whose sequence number is above after; the result event comes always.
	Follow(ctx context.Context, id proto.TraceID, after int64) (Tail, error)
	// Last gives the sequence number of the last event there is now, the result aside, of an execution in that attempt; 0 for none.
	Last(ctx context.Context, id proto.TraceID, attempt int) (int64, error)
}

// Tail is a reader of one execution's events. It is used by one goroutine at a time.
type Tail interface {
	// Next blocks until there are events. It gives [io.EOF] after the result event. When ctx ends first it gives the
	// error of ctx, and the next call goes on from there.
	Next(ctx context.Context) (proto.Batch, error)
	// Close frees what the tail holds.
	Close()
}

// Backups makes backups of what JetStream holds.
type Backups interface {
	// Backup writes one to w. What was written before an error is not one.
	Backup(ctx context.Context, w io.Writer) error
}

// Keys knows the API keys.
type Keys interface {
	// Authenticate gives the key whose secret this is, in a time that does not depend on how much of it is right.
	Authenticate(secret string) (key *proto.Key, ok bool)
	// Key gives the key of an id, also where it is revoked.
	Key(id string) (key *proto.Key, ok bool)
}

// KeyAdmin makes and revokes API keys.
type KeyAdmin interface {
	// Create stores a new key with the name, organisation, plan, rights and sandbox profile of k. The secret is given only here. Its
	// error is [proto.ErrNotFound] where there is no such profile.
	Create(ctx context.Context, k proto.Key) (key proto.Key, secret string, err error)
	// List gives all keys, the revoked ones included.
	List(ctx context.Context) ([]proto.Key, error)
	// Revoke ends a key. Its error is [proto.ErrNotFound] where there is none of that id.
	Revoke(ctx context.Context, id string) (proto.Key, error)
}

// Profiles keeps the sandbox profiles.
type Profiles interface {
	// Profile gives a profile. Its error is [proto.ErrNotFound] where there is none of that name.
	Profile(ctx context.Context, name string) (proto.Profile, error)
	// List gives all of them by name, without the default one.
	List(ctx context.Context) ([]proto.Profile, error)
	// Create stores a new profile. Its error is [proto.ErrExists] where there is one of that name.
	Create(ctx context.Context, p proto.Profile) error
	// Replace stores a profile in place of that of the same name. Its error is [proto.ErrNotFound] where there is none.
	Replace(ctx context.Context, p proto.Profile) error
	// Remove removes a profile and gives it as it was. Its error is [proto.ErrNotFound] where there is none, and a [*proto.BoundError]
	// where unrevoked keys are bound to it.
	Remove(ctx context.Context, name string) (proto.Profile, error)
}

// Images knows the sandbox images.
type Images interface {
	// Image gives an image. Its error is [proto.ErrNotFound] where there is none of that name.
	Image(ctx context.Context, name string) (*proto.Image, error)
}

// ImageAdmin stores and removes the images of sandboxes.
type ImageAdmin interface {
	// Put stores what is read from body as the image of that name, in place of an earlier one. A [*proto.FieldError] says what is
	// wrong with it, and a [*proto.Refusal] that there is no room.
	Put(ctx context.Context, name, digest string, body io.Reader) (img *proto.Image, replaced bool, err error)
	// List gives all images.
	List(ctx context.Context) ([]proto.Image, error)
	// Remove takes the name away and gives the image that had it. Its error is [proto.ErrNotFound] where none has.
	Remove(ctx context.Context, name string) (*proto.Image, error)
}

// Webhooks keeps the webhook settings of API keys, and knows the URLs that an organisation's deliveries fail at.
type Webhooks interface {
	// Webhook gives the settings of a key, the default where none are stored. A change by another gateway may be known a moment later.
	Webhook(key string) proto.Webhook
	// Stored gives the settings of a key as they are stored. Its error is [proto.ErrNotFound] where none are.
	Stored(ctx context.Context, key string) (proto.Webhook, error)
	// Change stores what f makes of a key's settings, nil where there are none, and gives it. f may be called more than once; its error is
	// given as it is.
	Change(ctx context.Context, key string, f func(old *proto.Webhook) (proto.Webhook, error)) (proto.Webhook, error)
	// Remove removes the settings of a key. Its error is [proto.ErrNotFound] where there are none.
	Remove(ctx context.Context, key string) error
	// Endpoint gives a URL that deliveries fail at; ok is false where they do not.
	Endpoint(org, url string) (e proto.Endpoint, ok bool)
	// Endpoints gives all of them.
	Endpoints(org string) []proto.Endpoint
	// Enable forgets that deliveries to a URL fail. Its error is [proto.ErrNotFound] where they do not.
	Enable(ctx context.Context, org, url string) error
}

// URLs knows where webhooks may be delivered to. What is wrong with a URL is a [*proto.FieldError] for that field.
type URLs interface {
	// CheckURL checks the text of a URL without resolving its host.
	CheckURL(field, url string) error
	// Check checks the form of a URL, and where its name leads to.
	Check(ctx context.Context, field, url string) error
}

// Deliveries knows what becomes of webhooks.
type Deliveries interface {
	// Delivery gives the webhook of an execution. Its error is [proto.ErrNotFound] where there is none, or none yet.
	Delivery(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
	// Replay makes a delivery that has ended begin again. Its error is [proto.ErrNotFound] where there is none, and [proto.ErrConflict]
	// while it is pending.
	Replay(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
	// ReplayFailed does so with those that have failed since a time and whose ids come after the one given, empty for all; with most of
	// them at most.
	ReplayFailed(ctx context.Context, org string, since time.Time, after proto.TraceID, most int) (proto.Replayed, error)
	// Test sends a test to the URL of a key, and tells what came of it. Its error is [proto.ErrNotFound] where whoever sends it knows of
	// no URL, and a [*proto.Refusal] where nobody is ready to.
	Test(ctx context.Context, key proto.Key) (*proto.DeliveryAttempt, error)
}

// DeadLetters keeps what nobody could act on.
type DeadLetters interface {
	// List gives up to limit dead letters, the newest first, those that come after the one given; nil for all. What cannot be read is told to
	// wrong.
	List(ctx context.Context, after *proto.DeadLetter, limit int, wrong func(error)) ([]proto.DeadLetter, error)
	// Get gives a dead letter with what it is about. Its error is [proto.ErrNotFound] where there is none of that id.
	Get(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error)
	// Remove removes a dead letter. Its error is [proto.ErrNotFound] where there is none of that id.
	Remove(ctx context.Context, id string) error
}

// Threads knows the threads of organisations. The Holder that it tells of has not ended: it is empty where it has.
type Threads interface {
	// Get gives a thread. Its error is [proto.ErrNotFound] where there is none of that id.
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// List gives up to limit threads in the order of their ids, from the first one after the id given on, empty for all.
	List(ctx context.Context, org, after string, limit int) ([]proto.ThreadSummary, error)
}

// Versions knows what threads have in the store.
type Versions interface {
	// Archive writes the home of that version of a thread as a tar; of version 0, the home as it is, with what was uploaded. Before it
	// writes, its error is [proto.ErrNotFound] where there is no such thread or version.
	Archive(ctx context.Context, org, thread string, version int64, w io.Writer) error
	// Fork makes a new thread whose first version is that of the number given of another, 0 for the home as it is. Its error is
	// [proto.ErrNotFound] where there is no such thread or version, and [proto.ErrExists] where there is a thread of the new id.
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// Remove removes a thread with its versions and what was uploaded. Its error is [proto.ErrNotFound] where there is none, and a
	// [*proto.BusyError] while an execution has it.
	Remove(ctx context.Context, org, thread string) error
}

// ThreadAdmin tidies the store of threads, for all organisations.
type ThreadAdmin interface {
	// Collect removes blobs older than safeAge, at least [proto.MinSafeAge], that nothing refers to.
	Collect(ctx context.Context, safeAge time.Duration) (proto.Collected, error)
	// Rebuild makes the heads of threads again from what the store has.
	Rebuild(ctx context.Context) (proto.Rebuilt, error)
}

// Files are the files in the homes of threads: those of the newest version, under those that were uploaded since. Paths are relative to
// the home and cleaned; that of the home is empty. Links are not followed.
type Files interface {
	// List calls each for what is in a directory, and with recursive also for what is below that, until each gives an error. Of an unknown
	// thread there is nothing. Its error is [proto.ErrNotFound] where the path is not that of a directory.
	List(ctx context.Context, org, thread, path string, recursive bool, each func(proto.File) error) error
	// Open gives a file's content. Its error is [proto.ErrNotFound] where there is no file.
	Open(ctx context.Context, org, thread, path string) (*proto.FileContent, error)
	// Stage stores a file of size bytes, which body gives, and makes the thread where there is none. From then on the file is in lists,
	// downloads and the next execution. A [*proto.FieldError] says what is wrong with it, a [*proto.StagedError] that too many wait
	// for an execution already, and a [*proto.RoomError] that with it the home would be more than most.
	Stage(ctx context.Context, org, thread, path string, size int64, most proto.Room, body io.Reader) error
	// CheckRoom gives the error with which Stage would refuse a file that it was not given yet.
	CheckRoom(ctx context.Context, org, thread, path string, size int64, most proto.Room) error
}
