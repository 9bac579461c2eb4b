package gateway

import (
	"context"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Submissions accepts executions. Nothing of a job remains after an error, except for
// [proto.ErrMayRun].
type Submissions interface {
	// Submit accepts a job and returns the id of its execution. If an earlier request had the same
	// idempotency key, Submit returns the id of the earlier execution. Its errors include
	// [proto.ErrKeyReused], [proto.ErrSubmissionPending], [proto.ErrNotConfirmed],
	// [*proto.BusyError], [*proto.Rejection] and those of sub.Admit.
	Submit(ctx context.Context, sub *proto.Submission) (proto.TraceID, error)
	// Accepted returns the execution that was accepted with an idempotency key of an API key. Its
	// errors include [proto.ErrNotFound] and [proto.ErrSubmissionPending].
	Accepted(ctx context.Context, key, idempotencyKey string) (proto.TraceID, error)
	// Requeue submits the job of a dead letter as execution id, unless an earlier request has done
	// so. It returns the dead letter, which names the execution. build makes the job from the dead
	// one. Other errors are the errors of build, [proto.ErrNotFound] and [proto.ErrNoJob].
	Requeue(ctx context.Context, letter string, id proto.TraceID, build func(*proto.Job) (*proto.Job, error)) (*proto.DeadLetter, error)
	// Withdraw ends the execution of a submission if it has not started, and frees its idempotency
	// key then. It returns the record, and goes on if ctx is cancelled.
	Withdraw(ctx context.Context, sub *proto.Submission, reason string) (*proto.Record, error)
	// Release frees the idempotency key of a submission that did not start. It goes on if ctx is
	// cancelled.
	Release(ctx context.Context, sub *proto.Submission) error
}

// Jobs reads and cancels executions.
type Jobs interface {
	// Lookup returns the record of an execution, or [proto.ErrNotFound].
	Lookup(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Wait blocks until the execution has ended. It returns ctx.Err() if ctx is done first.
	Wait(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Watch listens for the end of an execution that is about to be submitted, so that waiting for
	// it needs no reads.
	Watch(id proto.TraceID) (Watch, error)
	// Cancel stores a request to end the execution, and returns the new record.
	Cancel(ctx context.Context, id proto.TraceID) (*proto.Record, error)
	// Stats returns the state of the queue.
	Stats(ctx context.Context) (proto.QueueStats, error)
}

// History finds executions.
type History interface {
	// List returns the executions that match a filter, the newest first. It returns a
	// [*proto.HistoryError] if the index of executions cannot be used.
	List(ctx context.Context, f *proto.HistoryFilter) (proto.HistoryPage, error)
}

// Workers lists and drains the live workers.
type Workers interface {
	// Workers returns all live workers by name.
	Workers(ctx context.Context) ([]proto.Worker, error)
	// Pools returns all pools of workers with the demand for them, by name.
	Pools(ctx context.Context) ([]proto.Pool, error)
	// Drain makes a worker take no more jobs, or take jobs again, and returns the worker once it
	// does. It returns [proto.ErrNotFound] if there is none of that name.
	Drain(ctx context.Context, name string, drain bool) (proto.Worker, error)
}

// Queue shows the queue.
type Queue interface {
	// View returns the queue of an API key.
	View(ctx context.Context, req *proto.QueueRequest) (proto.QueueView, error)
}

// Usage reports what organisations used.
type Usage interface {
	// Report returns the usage that a filter selects. It returns a [*proto.FieldError] if there are
	// more than [proto.MaxUsageRows] rows.
	Report(ctx context.Context, f *proto.UsageFilter) (proto.UsageReport, error)
	// Month returns the usage of an organisation in the present month, as of a few seconds ago. It
	// reads memory only. Its maps must not be modified.
	Month(org string) proto.UsageMonth
	// Cross reports whether this is the first call for a limit that an organisation has reached, of
	// all calls in all processes.
	Cross(ctx context.Context, c proto.Crossing) (first bool, err error)
}

// Schedules stores schedules.
type Schedules interface {
	// Create stores a new schedule. It returns a [*proto.FieldError] if the schedule has no ticks,
	// or if the organisation has too many schedules.
	Create(ctx context.Context, schedule proto.Schedule) error
	// List returns the schedules of an organisation by id.
	List(org string) []proto.Schedule
	// Get returns a schedule with its state, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (proto.Schedule, proto.ScheduleState, error)
	// Next returns the next n ticks of a schedule. There are fewer if it has no more or is paused.
	Next(schedule *proto.Schedule, n int) []time.Time
	// Change stores what change makes of a schedule, and returns that. change may be called again.
	// Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such
	// schedule, and a [*proto.FieldError] if it has no ticks any more.
	Change(ctx context.Context, org, id string, change func(*proto.Schedule) error) (proto.Schedule, error)
	// Remove removes a schedule, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, id string) error
	// Record adds a run that did not come from a tick to the history of a schedule.
	Record(ctx context.Context, org, id string, run proto.ScheduleRun) error
}

// OrgData shows what is stored of organisations.
type OrgData interface {
	// List returns what is stored of an organisation, which need not exist.
	List(ctx context.Context, org string) (*proto.OrgData, error)
}

// Pipelines stores runs of pipelines.
type Pipelines interface {
	// Parse reads the file of a pipeline. Errors are [*proto.FieldError].
	Parse(file string) (*proto.Pipeline, error)
	// Schema returns the JSON schema of the files.
	Schema() []byte
	// Create stores a new run and returns its state. prepare is called before the run can start, and
	// its error is returned. Create returns a [*proto.Rejection] if the organisation has too many
	// runs, and a [*proto.FieldError] if the run is too large.
	Create(ctx context.Context, p *proto.Pipeline, prepare func(context.Context) error) (*proto.PipelineState, error)
	// List returns the runs of an organisation, the newest first.
	List(org string) []proto.PipelineState
	// Get returns the state of a run, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.PipelineState, error)
	// Definition returns the definition of a run, or [proto.ErrNotFound].
	Definition(ctx context.Context, org, id string) (*proto.Pipeline, error)
	// Cancel asks for the end of a run and returns its state, or [proto.ErrNotFound].
	Cancel(ctx context.Context, org, id string) (*proto.PipelineState, error)
}

// Batches stores batches.
type Batches interface {
	// Upload begins the storage of the items of a new batch. It returns a [*proto.QuotaError] if the
	// organisation has too many batches.
	Upload(org string) (BatchUpload, error)
	// Create stores a new batch. If there is one of its id, Create returns that and false.
	Create(ctx context.Context, batch *proto.Batch) (stored *proto.Batch, created bool, err error)
	// List returns the batches of an organisation, the newest first.
	List(org string) []proto.BatchAndState
	// Get returns a batch, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (proto.BatchAndState, error)
	// Change stores what change makes of a batch in its present state, and returns both. change may
	// be called again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if there
	// is no such batch.
	Change(ctx context.Context, org, id string, change func(*proto.Batch, *proto.BatchState) error) (proto.BatchAndState, error)
	// Remove removes a batch. It returns [proto.ErrNotFound] if there is none, and
	// [proto.ErrConflict] if it has not ended.
	Remove(ctx context.Context, org, id string) error
	// Items returns the items of a batch as they are now, or [proto.ErrNotFound].
	Items(ctx context.Context, org, id string) (BatchItems, error)
}

// BatchUpload stores the items of a new batch, in the blob store.
type BatchUpload interface {
	// Note makes a value part of the hash of the content.
	Note(value []byte)
	// Shared stores the JSON of the fields that all items share.
	Shared(ctx context.Context, fields []byte) error
	// Add stores the next item: JSON without line breaks. It returns a [*proto.QuotaError] if the
	// organisation stores too much.
	Add(ctx context.Context, item []byte) error
	// Finish returns what names the content, and the number of items.
	Finish(ctx context.Context) (content proto.BatchContent, items int, err error)
	// Discard removes what was stored.
	Discard(ctx context.Context)
}

// BatchItems are the items of a batch.
type BatchItems interface {
	Len() int
	Status(index int) proto.ItemStatus
	// Round returns how often the item was submitted anew.
	Round(index int) int
}

// Watch listens for the end of one execution.
type Watch interface {
	// Wait blocks until the execution has ended. It returns ctx.Err() if ctx is done first, and may
	// be called again.
	Wait(ctx context.Context) (*proto.Record, error)
	// Close releases the watch.
	Close()
}

// Events reads the output of executions, from their start and live.
type Events interface {
	// Follow reads the events of an execution with sequence numbers above after, and always the
	// result event.
	Follow(ctx context.Context, id proto.TraceID, after int64) (Tail, error)
	// Last returns the sequence number of the present last event of an attempt, without the result;
	// 0 for none.
	Last(ctx context.Context, id proto.TraceID, attempt int) (int64, error)
}

// Tail is a reader of one execution's events, for one goroutine at a time.
type Tail interface {
	// Next blocks until there are events. It returns [io.EOF] after the result event. It returns
	// ctx.Err() if ctx is done first, and may be called again.
	Next(ctx context.Context) (proto.Events, error)
	// Close releases the tail.
	Close()
}

// Backups creates backups of the content of JetStream.
type Backups interface {
	// Backup writes a backup to w. After an error, the written part is not a backup.
	Backup(ctx context.Context, w io.Writer) error
}

// AuditLog is the append-only log of administrative acts.
type AuditLog interface {
	// Append stores a record at the end of the log, and returns it with its sequence number and
	// hashes.
	Append(ctx context.Context, r api.AuditRecord) (api.AuditRecord, error)
	// List returns up to limit records that match, the newest first, of those below the sequence
	// number before, 0 for all. A page may be short. next is the before of the next page, 0 after
	// the last one.
	List(ctx context.Context, f *api.AuditFilter, before int64, limit int) (page []api.AuditRecord, next int64, err error)
	// Export calls each with the present records after a sequence number, the oldest first, and
	// their lines. It stops at an error of each.
	Export(ctx context.Context, after int64, each func(r *api.AuditRecord, line []byte) error) error
}

// Keys finds API keys.
type Keys interface {
	// Authenticate returns the key with this secret, in a time that does not depend on the secret.
	Authenticate(secret string) (key *proto.Key, ok bool)
	// Key returns the key of an id, also if it is revoked.
	Key(id string) (key *proto.Key, ok bool)
	// Hash returns the hash under which the key with a secret is stored.
	Hash(secret string) string
	// WithHash returns the key with a secret that has this hash, as Authenticate does.
	WithHash(hash string) (key *proto.Key, ok bool)
}

// Members stores the people who may sign in.
type Members interface {
	// Member returns the cached member of an id.
	Member(id string) (m proto.Member, ok bool)
	// Get returns a member, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Member, error)
	// List returns the members of all organisations.
	List() []proto.Member
	// Create stores a new member with the organisation, the address or subject, and the role of m,
	// and returns it. It returns [proto.ErrExists] if the organisation has that person, and a
	// [*proto.QuotaError] if it has too many.
	Create(ctx context.Context, m proto.Member) (proto.Member, error)
	// Change stores what change makes of a member, and returns that. change may be called again. Its
	// error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such member.
	Change(ctx context.Context, id string, change func(*proto.Member) error) (proto.Member, error)
	// Remove removes a member, for which check must return nil, and returns it. It returns
	// [proto.ErrNotFound] if there is none.
	Remove(ctx context.Context, id string, check func(proto.Member) error) (proto.Member, error)
}

// Sessions stores the logins of browsers.
type Sessions interface {
	// Session returns the session with a token, also if it has expired, or [proto.ErrNotFound].
	Session(ctx context.Context, token string) (proto.Session, error)
	// List returns all sessions that have not expired.
	List() []proto.Session
	// Create stores a new session, and returns it with its token.
	Create(ctx context.Context, s proto.Session) (session proto.Session, token string, err error)
	// Use stores that a session is used.
	Use(ctx context.Context, id string) error
	// End ends a session, or returns [proto.ErrNotFound].
	End(ctx context.Context, id string) error
}

// KeyUses remembers when API keys were used last.
type KeyUses interface {
	// Used notes that a key was used.
	Used(key string, at time.Time)
	// LastUsed returns when a key was used last. ok is false if it is not known to have been used.
	LastUsed(key string) (at time.Time, ok bool)
}

// KeyAdmin creates, changes and revokes API keys.
type KeyAdmin interface {
	// Create stores a new key with the name, organisation, plan, rights, limit and sandbox profile
	// of k, and returns it with its secret. It returns [proto.ErrNotFound] if the profile does not
	// exist.
	Create(ctx context.Context, k proto.Key) (key proto.Key, secret string, err error)
	// List returns all keys, the revoked ones included.
	List(ctx context.Context) ([]proto.Key, error)
	// Revoke revokes a key. It returns [proto.ErrNotFound] if the key does not exist, and a
	// [*proto.LastKeyError] if it is the last one of a global administrator.
	Revoke(ctx context.Context, id string) (proto.Key, error)
	// Get returns a key, also if it is revoked, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Key, error)
	// Change stores what change makes of a key, and returns that. change may be called again. Its
	// error is returned unchanged. Change returns [proto.ErrNotFound] if the key does not exist, and
	// a [*proto.LastKeyError] if none of a global administrator would be left.
	Change(ctx context.Context, id string, change func(*proto.Key) error) (proto.Key, error)
	// Rotate replaces the secret of a key and returns both. The previous secret works until the given
	// time. Rotate returns the same errors as Change.
	Rotate(ctx context.Context, id string, until time.Time) (key proto.Key, secret string, err error)
}

// Orgs stores organisations.
type Orgs interface {
	// Org returns an organisation, or [proto.ErrNotFound].
	Org(ctx context.Context, name string) (proto.Org, error)
	// List returns all organisations by name.
	List() []proto.Org
	// Create stores a new organisation. It returns [proto.ErrExists] if there is one of that name.
	Create(ctx context.Context, org proto.Org) error
	// Change stores what change makes of an organisation, and returns that. change may be called
	// again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such
	// organisation.
	Change(ctx context.Context, name string, change func(*proto.Org) error) (proto.Org, error)
}

// Plans stores plans.
type Plans interface {
	// Plan returns a built-in or a stored plan, or [proto.ErrNotFound].
	Plan(ctx context.Context, name string) (proto.Plan, error)
	// List returns all plans.
	List() []proto.Plan
	// Create stores a new plan. It returns [proto.ErrExists] if there is one of that name.
	Create(ctx context.Context, plan proto.Plan) error
	// Replace replaces the plan of the same name if check returns nil for the stored one. check may be
	// called again. Its error is returned unchanged. Replace returns [proto.ErrNotFound] if there is no
	// such plan.
	Replace(ctx context.Context, plan proto.Plan, check func(old proto.Plan) error) error
	// Remove removes a stored plan, for which check must return nil, and returns it. It returns
	// [proto.ErrNotFound] if there is none, and a [*proto.PlanInUseError] if it is needed.
	Remove(ctx context.Context, name string, check func(old proto.Plan) error) (proto.Plan, error)
}

// Secrets stores the named secrets of organisations.
type Secrets interface {
	// Put stores a secret, in place of one of the same name. If injection is nil, that of the replaced
	// one stays. Put returns [proto.ErrNoSecretsKey] if nothing can be encrypted, and a
	// [*proto.FieldError] if the organisation has too many secrets or the value cannot be injected.
	Put(ctx context.Context, org, name, value string, injection *proto.Injection) (proto.Secret, error)
	// Get returns a secret without its value, or [proto.ErrNotFound].
	Get(ctx context.Context, org, name string) (proto.Secret, error)
	// List returns the secrets of an organisation by name.
	List(org string) []proto.Secret
	// Remove removes a secret, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, name string) error
	// Value returns the value of a secret, or [proto.ErrNotFound].
	Value(ctx context.Context, org, name string) ([]byte, error)
	// Bind returns the secrets that bindings name, and their values encrypted for one execution. It sets
	// the injections of the bindings. It returns a [*proto.MissingSecretError] if one does not exist.
	Bind(ctx context.Context, org string, id proto.TraceID, bound []proto.SecretBinding) (secrets map[string]proto.Secret, sealed []byte, err error)
}

// Connections stores the storage connections of organisations.
type Connections interface {
	// Connection returns a connection, or [proto.ErrNotFound].
	Connection(ctx context.Context, org, slug string) (proto.Connection, error)
	// List returns the connections of an organisation by slug, or all of them, if org is empty, by
	// organisation first.
	List(org string) []proto.Connection
	// Create stores a new connection. It returns [proto.ErrExists] if the organisation has one of
	// that slug, and a [*proto.FieldError] if it has too many.
	Create(ctx context.Context, c proto.Connection) error
	// Change stores what change makes of a connection, and returns that. change may be called again.
	// Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such
	// connection.
	Change(ctx context.Context, org, slug string, change func(*proto.Connection) error) (proto.Connection, error)
	// Remove removes a connection, for which check must return nil, and returns it. It returns
	// [proto.ErrNotFound] if there is none, and a [*proto.BoundConnectionError] if unrevoked keys
	// name it. It marks a volume as being removed before it calls empty. After an error of empty the
	// mark stays, and the next Remove continues. Both may be called again.
	Remove(ctx context.Context, org, slug string, check, empty func(proto.Connection) error) (proto.Connection, error)
}

// Storage uses the buckets of storage connections.
type Storage interface {
	// CheckEndpoint returns a [*proto.FieldError] if buckets must not be at a URL.
	CheckEndpoint(ctx context.Context, field, url string) error
	// Test uses a bucket as a mount does. It returns a [*proto.StorageTestError] if that fails.
	Test(ctx context.Context, m proto.Mount, keys proto.S3Credentials) error
	// HasObjects reports whether a mount of a bucket has objects.
	HasObjects(ctx context.Context, m proto.Mount, keys proto.S3Credentials) (bool, error)
	// Bucket opens the files of a mount of kind s3. Errors of its files may also be
	// [*proto.StorageTestError], if the server must not be used.
	Bucket(m proto.Mount, keys proto.S3Credentials) (BucketFiles, error)
	// Directory opens the files of a mount of kind directory. It returns a [*proto.NoDirectoryError]
	// if this gateway does not have the directory.
	Directory(m proto.Mount) (MountFiles, error)
}

// MountFiles are the files of a mount or of a thread. Paths are cleaned and relative to the mount's
// prefix or the home, whose path is empty. Links are not followed. Errors about a path are
// [*proto.NoFileError], [*proto.PathError] and [*proto.FieldError]. Others of a mount wrap a
// syscall.Errno, fs.ErrPermission or os.ErrDeadlineExceeded.
type MountFiles interface {
	// List calls each for the entries of a directory, or for everything below it if recursive is
	// true. It stops at an error of each. It returns [proto.ErrNotFound] if the path does not name a
	// directory.
	List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error
	// Open returns the content of a file.
	Open(ctx context.Context, path string) (*proto.FileContent, error)
	// CheckPut returns the error with which Put would refuse a file of a size now.
	CheckPut(ctx context.Context, path string, size int64) error
	// Put stores size bytes of body as a file, which appears when it is complete.
	Put(ctx context.Context, path string, size int64, body io.Reader) error
	// Delete deletes what is at a path, a directory that is not empty only if recursive is true.
	// version is the new version of a thread, otherwise 0.
	Delete(ctx context.Context, path string, recursive bool) (version int64, err error)
	// Rename renames what is at a path; nothing may be at the new one.
	Rename(ctx context.Context, from, to string) (version int64, err error)
	// Close releases what the files use.
	Close() error
}

// BucketFiles are the files of a bucket, which stores uploads in parts itself.
type BucketFiles interface {
	MountFiles
	PartUploads
}

// PartUploads are the uploads in parts to a place with files. All methods but BeginUpload return
// [proto.ErrNotFound] if there is no such upload.
type PartUploads interface {
	// BeginUpload begins an upload of a file in parts, and returns its id.
	BeginUpload(ctx context.Context, path string, size int64) (id string, err error)
	// PutPart stores a part, which replaces an earlier one of its number.
	PutPart(ctx context.Context, path, id string, number int, content []byte) error
	// UploadedParts returns the parts of an upload by number.
	UploadedParts(ctx context.Context, path, id string) ([]proto.UploadedPart, error)
	// CompleteUpload turns the parts into the file if check, which gets them, returns nil.
	CompleteUpload(ctx context.Context, path, id string, check func([]proto.UploadedPart) error) error
	// AbortUpload removes an upload.
	AbortUpload(ctx context.Context, path, id string) error
}

// Parts stores the parts of files that are uploaded in parts, in the blob store. All methods but
// BeginUpload return [proto.ErrNotFound] if there is no such upload.
type Parts interface {
	// BeginUpload begins an upload of size bytes, and returns its id. It returns a
	// [*proto.PendingUploadsError] if the organisation has begun too much.
	BeginUpload(ctx context.Context, org string, size int64) (id string, err error)
	// PutPart stores a part of an upload of size bytes, which replaces an earlier one of its number.
	PutPart(ctx context.Context, org, id string, size int64, number int, content []byte) error
	// UploadedParts returns the parts of an upload of size bytes by number.
	UploadedParts(ctx context.Context, org, id string, size int64) ([]proto.UploadedPart, error)
	// OpenUpload returns all parts, joined in the order of their numbers.
	OpenUpload(ctx context.Context, org, id string) (io.ReadCloser, error)
	// RemoveUpload removes an upload of size bytes.
	RemoveUpload(ctx context.Context, org, id string, size int64) error
}

// SecretsKey is the operator's key, which protects all stored secrets.
type SecretsKey interface {
	// Rotate protects the secrets with the operator's present keys from now on, and returns their
	// names. It returns [proto.ErrNoSecretsKey] if there is no key.
	Rotate(ctx context.Context) (keys string, err error)
}

// Profiles stores the sandbox profiles.
type Profiles interface {
	// Profile returns a profile, or [proto.ErrNotFound].
	Profile(ctx context.Context, name string) (proto.Profile, error)
	// List returns all profiles by name, without the default one.
	List(ctx context.Context) ([]proto.Profile, error)
	// Create stores a new profile. It returns [proto.ErrExists] if the name is taken.
	Create(ctx context.Context, p proto.Profile) error
	// Replace replaces the profile of the same name, for which check must return nil. check may be
	// called again. Its error is returned unchanged. Replace returns [proto.ErrNotFound] if there is
	// no such profile.
	Replace(ctx context.Context, p proto.Profile, check func(old proto.Profile) error) error
	// Remove removes a profile, for which check must return nil, and returns it. It returns
	// [proto.ErrNotFound] if the profile does not exist, and a [*proto.BoundError] if valid keys are
	// bound to it.
	Remove(ctx context.Context, name string, check func(old proto.Profile) error) (proto.Profile, error)
}

// Images finds sandbox images.
type Images interface {
	// Image returns an image, or [proto.ErrNotFound].
	Image(ctx context.Context, name string) (*proto.Image, error)
}

// PreloadFailures knows which modules of sandboxes could not be preloaded.
type PreloadFailures interface {
	// PreloadFailure returns why the modules of a sandbox cannot be preloaded, or nil if no worker
	// has failed recently.
	PreloadFailure(ctx context.Context, s proto.Sandbox) (*proto.PreloadFailure, error)
}

// ImageAdmin stores and removes the images of sandboxes.
type ImageAdmin interface {
	// Put stores body as the image of that name, and reports whether it replaced another. It
	// returns a [*proto.FieldError] for an invalid image, and a [*proto.Rejection] if there is no
	// space.
	Put(ctx context.Context, name, digest string, body io.Reader) (img *proto.Image, replaced bool, err error)
	// List returns all images.
	List(ctx context.Context) ([]proto.Image, error)
	// Remove removes the name of an image and returns the image. It returns [proto.ErrNotFound] if
	// no image has the name.
	Remove(ctx context.Context, name string) (*proto.Image, error)
}

// Webhooks stores the webhook settings of API keys, and the URLs at which deliveries fail.
type Webhooks interface {
	// Webhook returns the cached settings of a key, the default if none are stored. Changes by
	// other gateways arrive with a delay.
	Webhook(key string) proto.Webhook
	// Stored returns the stored settings of a key, or [proto.ErrNotFound].
	Stored(ctx context.Context, key string) (proto.Webhook, error)
	// Change stores the settings that f returns for the present settings of a key, nil if there are
	// none, and returns them. f may be called more than once. Change returns an error of f
	// unchanged.
	Change(ctx context.Context, key string, f func(old *proto.Webhook) (proto.Webhook, error)) (proto.Webhook, error)
	// Remove removes the settings of a key. It returns [proto.ErrNotFound] if there are none.
	Remove(ctx context.Context, key string) error
	// Endpoint returns the state of a URL. ok is false if deliveries to it do not fail.
	Endpoint(org, url string) (e proto.Endpoint, ok bool)
	// Endpoints returns all URLs at which deliveries of an organisation fail.
	Endpoints(org string) []proto.Endpoint
	// Enable enables deliveries to a URL again. It returns [proto.ErrNotFound] if they do not fail.
	Enable(ctx context.Context, org, url string) error
}

// URLs checks webhook URLs. Its errors are [*proto.FieldError] for the given field.
type URLs interface {
	// CheckURL checks the text of a URL without resolving its host.
	CheckURL(field, url string) error
	// Check checks the text of a URL and the addresses of its host.
	Check(ctx context.Context, field, url string) error
}

// Deliveries reads and replays the deliveries of webhooks.
type Deliveries interface {
	// Delivery returns the delivery of an execution, or [proto.ErrNotFound] if it has none yet.
	Delivery(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
	// Replay makes a delivery that has ended pending again. It returns [proto.ErrNotFound] if there
	// is none, and [proto.ErrConflict] while it is pending.
	Replay(ctx context.Context, org string, id proto.TraceID) (*proto.Delivery, error)
	// ReplayFailed replays up to most deliveries that have failed since a time, in the order of
	// their ids and after the given one.
	ReplayFailed(ctx context.Context, org string, since time.Time, after proto.TraceID, most int) (proto.Replayed, error)
	// Test sends a test to the URL of a key, and returns the attempt. It returns
	// [proto.ErrNotFound] if the sending process does not know the URL yet, and a [*proto.Rejection]
	// if no such process is ready.
	Test(ctx context.Context, key proto.Key) (*proto.DeliveryAttempt, error)
}

// DeadLetters stores dead letters.
type DeadLetters interface {
	// List returns up to limit dead letters after the given one, nil for the first; the newest come
	// first. It calls wrong with the error of each letter that cannot be decoded.
	List(ctx context.Context, after *proto.DeadLetter, limit int, wrong func(error)) ([]proto.DeadLetter, error)
	// Get returns a dead letter with its content, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (*proto.DeadLetter, *proto.DeadContent, error)
	// Remove removes a dead letter. It returns [proto.ErrNotFound] if the letter does not exist.
	Remove(ctx context.Context, id string) error
}

// Threads reads the threads of organisations. The Holder of a thread is empty if the holding
// execution has ended.
type Threads interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// List returns up to limit threads with ids above after, in the order of their ids.
	List(ctx context.Context, org, after string, limit int) ([]proto.ThreadSummary, error)
	// ListUsed returns up to limit threads whose ids have a prefix and that were used since a time, in
	// the order of their ids.
	ListUsed(ctx context.Context, org, prefix string, since time.Time, limit int) ([]proto.ThreadSummary, error)
}

// Versions reads, forks and removes the stored versions of threads.
type Versions interface {
	// Archive writes a directory of a version as a tar, the home for the empty path; version 0 is the
	// newest with the staged files. Before it writes, it returns [proto.ErrNotFound] if there is no
	// such thread or version, and a [*proto.NoFileError] if that has no such directory.
	Archive(ctx context.Context, org, thread string, version int64, path string, w io.Writer) error
	// Unpack unpacks a tar below a directory in a new version, and returns its number. It creates the
	// thread and the directory if they do not exist. It returns a [*proto.FieldError] for a bad tar, a
	// [*proto.PathError] or a [*proto.SpaceError] if the files exceed tar.Most, and a
	// [*proto.BusyError] if an execution holds the thread at the end.
	Unpack(ctx context.Context, org, thread, path string, tar *proto.TarUpload) (version int64, err error)
	// Fork creates a thread that starts from a version of another; version 0 is the newest with the
	// staged files. It returns [proto.ErrNotFound] if there is no such thread or version, and
	// [proto.ErrExists] if the new id is taken.
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// Remove removes a thread with its versions and staged files. It returns [proto.ErrNotFound] if
	// there is none, and a [*proto.BusyError] while an execution holds it.
	Remove(ctx context.Context, org, thread string) error
}

// ThreadAdmin maintains the store of threads of all organisations.
type ThreadAdmin interface {
	// Collect removes unreferenced blobs older than safeAge, which is at least [proto.MinSafeAge].
	Collect(ctx context.Context, safeAge time.Duration) (proto.Collected, error)
	// Rebuild rebuilds the heads of threads from the store.
	Rebuild(ctx context.Context) (proto.Rebuilt, error)
}

// Files reads and stages files in the homes of threads: the newest version, overlaid by the staged
// files. Paths are cleaned and relative to the home. The path of the home itself is empty. Links
// are not followed.
type Files interface {
	// List calls each for the entries of a directory, or for everything below it if recursive is
	// true. It stops at an error of each. An unknown thread has no entries. List returns
	// [proto.ErrNotFound] if the path does not name a directory.
	List(ctx context.Context, org, thread, path string, recursive bool, each func(proto.File) error) error
	// Open returns the content of a file, or [proto.ErrNotFound].
	Open(ctx context.Context, org, thread, path string) (*proto.FileContent, error)
	// Stage stores size bytes of body as a file, and creates the thread if it does not exist. From
	// then on the file is in lists, downloads and the next execution. It returns a
	// [*proto.FieldError] for an invalid file, a [*proto.StagedError] if too many files are staged,
	// and a [*proto.SpaceError] if the home would exceed most.
	Stage(ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader) error
	// StageIfUnchanged is Stage on the condition that the file has a tag, as Open returns it, or with
	// an empty tag that Open finds no file. Otherwise it returns a [*proto.FileChangedError].
	StageIfUnchanged(ctx context.Context, org, thread, path, tag string, size int64, most proto.Space, body io.Reader) error
	// Put stores size bytes of body as a file of a volume in a new version. Its errors are those of
	// Stage, and a [*proto.BusyError] if an execution holds the volume when body has been read.
	Put(ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader) error
	// Delete deletes what is at a path in a new version, and returns its number. It returns
	// [proto.ErrNotFound] if there is no such thread, a [*proto.NoFileError] if nothing is at the
	// path, a [*proto.PathError] for a directory that is not empty unless recursive is true, and a
	// [*proto.BusyError] while an execution holds the thread.
	Delete(ctx context.Context, org, thread, path string, recursive bool) (version int64, err error)
	// Rename renames what is at a path in a new version, and returns its number. Its errors are those
	// of Delete, a [*proto.PathError] if the new path cannot be used, and a [*proto.SpaceError] if
	// the home would exceed most.
	Rename(ctx context.Context, org, thread, from, to string, most proto.Space) (version int64, err error)
	// CheckSpace returns the error with which Stage would refuse a file of that size.
	CheckSpace(ctx context.Context, org, thread, path string, size int64, most proto.Space) error
}
