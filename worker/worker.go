// Package worker runs jobs, each in one straight line: take it, claim it while a jail is prepared,
// run the program, stream its output, write the result. Package jail defines jails; interfaces
// connect the worker with queues, images and homes.
package worker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/mount"
	"github.com/bullpen-run/bullpen/worker/pool"
)

// ErrShutdown is the cause with which the context of running programs is cancelled after the drain
// time.
var ErrShutdown = errors.New("the worker was shut down")

// Jobs assigns jobs to slots.
type Jobs interface {
	// Take blocks until a job is assigned to this slot. It returns ctx.Err() if ctx is done first.
	Take(ctx context.Context) (Lease, error)
}

// Lease is the right to run one attempt of one job.
type Lease interface {
	Job() *proto.Job
	Attempt() int
	// Secrets returns the values of the job's secrets by name.
	Secrets(ctx context.Context) (map[string][]byte, error)
	// Claim records that the program starts. The returned context is cancelled with
	// [proto.ErrCancelled] or [proto.ErrLost] when the program must be stopped. After an error the
	// program must not be started.
	Claim(ctx context.Context) (claimed context.Context, baseSeq int64, err error)
	// Finish writes the result unless there is one already, and returns the record as it is then.
	Finish(ctx context.Context, e Outcome) (*proto.Record, error)
	// Release ends the lease without a result.
	Release()
}

// Outcome is the outcome of an attempt.
type Outcome struct {
	Result          proto.Result
	LastSeq         int64 // of the last event published
	OutputTruncated bool  // events were evicted or lost
	Usage           *proto.Usage
	Steps           *proto.Steps
	Commit          *proto.Commit        // the thread's next version; nil if nothing changed, or there is no thread
	Volumes         []proto.VolumeCommit // the next versions of volumes that changed
}

// Output publishes the events of one attempt.
type Output interface {
	Stream(s proto.Stream) Stream
	// Close returns the number of the last event. truncated reports whether events are missing for
	// readers.
	Close() (last int64, truncated bool)
	// OverBudget reports, after Close, whether less is kept because the organisation has used up its
	// budget of stored output.
	OverBudget() bool
}

// Stream publishes one of a program's outputs.
type Stream interface {
	io.Writer
	// Keep returns how many of the next n bytes the result is to hold. It is called before Write.
	Keep(n int) int
}

// Sandboxes prepares jails.
type Sandboxes interface {
	Prepare(ctx context.Context, spec jail.Spec) (jail.Jail, error)
	// Zygote creates a jail to fork others from.
	Zygote(ctx context.Context, spec jail.Spec) (jail.Zygote, error)
}

// Images provides the root file systems of sandboxes.
type Images interface {
	// Get returns the image with a digest. The image stays until release is called.
	Get(ctx context.Context, digest string) (img Image, release func(), err error)
}

// Image is a root file system.
type Image struct {
	Root      string                    // its directory; empty for the host's runtimes
	Languages map[proto.Language]string // the absolute path of each interpreter; nil for the usual names
	Env       map[string]string         // variables that the image sets
}

// Homes provides the homes of threads, and volumes, which are threads as well.
type Homes interface {
	// CheckOut returns the home of a thread at its newest version.
	CheckOut(ctx context.Context, req proto.CheckoutRequest) (Home, error)
	// Read returns the newest version of a thread. It is empty if there is no thread.
	Read(ctx context.Context, org, thread string) (VolumeVersion, error)
}

// VolumeVersion is a version of a volume, which does not change. Its methods must not be called
// concurrently.
type VolumeVersion interface {
	// MountPart mounts a part of it, see [mount.Volume].
	MountPart(uid, gid int, open func(root int) (dir int, err error)) (*os.File, error)
	// Close releases it after the death of the jail.
	Close()
}

// Home is a thread's home, or a volume, for one execution. Its methods must not be called
// concurrently.
type Home interface {
	jail.Home
	// MountPart is Mount for a part of it, see [mount.Volume].
	MountPart(v jail.Volume, uid, gid int, open func(root int) (dir int, err error)) (*os.File, error)
	// PutStaged writes the thread's staged files. The error is a [*proto.UploadsError] if they do
	// not fit.
	PutStaged(ctx context.Context) error
	// PutProgram writes the program's file and returns its name, which differs from usual if the
	// home has a file of that name. It may be called repeatedly.
	PutProgram(usual string, content []byte) (name string, err error)
	// LimitSpace limits what the program can write to what is left of the home's limit. It is called
	// after PutStaged and PutProgram.
	LimitSpace() error
	// Save stores the changes of the program and returns the commit that makes them the thread's
	// next version, nil if there are none. The jail must be dead. It returns a [*proto.LimitError],
	// [*proto.AttributesError], [*proto.DepthError] or [*proto.FileError] if the home exceeds a limit.
	Save(ctx context.Context) (*proto.Commit, error)
	// Close releases the home after the death of the jail. committed reports whether the commit of
	// Save is the thread's newest version.
	Close(committed bool) error
}

// Worker runs jobs in a number of slots.
type Worker struct {
	Jobs   Jobs
	Open   func(ctx context.Context, job *proto.Job, attempt int, baseSeq int64) Output
	Jails  Sandboxes
	Images Images
	Homes  Homes
	Home   string // inside the jail
	Slots  int
	Warm   Warm
	// SaveTimeout limits how long the home of a thread may take to be saved.
	SaveTimeout time.Duration
	Log         *slog.Logger
	Done        func(rec *proto.Record) // is called for every execution that ended here
	// OnHealth is called when the worker's ability to create sandboxes changes: with the cause when
	// it is lost, with nil when it is restored. The worker accepts no jobs in between.
	OnHealth func(err error)
	// Roots prove the names of the servers that get secrets.
	Roots inject.Roots
	// Mounts mounts storage connections; nil if this worker cannot.
	Mounts *mount.Opener

	health  health
	pool    *pool.Pool[*preparedJail]
	zygotes *zygotePool
	limiter *batchLimiter
}

// Run accepts jobs until ctx is done, and returns when all of them have ended. Programs that still
// run when cut is done are killed and recorded as lost to the shutdown.
func (w *Worker) Run(ctx, cut context.Context) error {
	var slots sync.WaitGroup
	w.health.test, w.health.notify = w.selfTest, w.OnHealth
	w.health.markHealthy(ctx)
	defer w.health.markUnhealthy()
	defer w.startPrewarming(ctx)()
	w.limiter = newBatchLimiter()
	for range w.Slots {
		slots.Go(func() {
			for {
				lease, err := w.Jobs.Take(w.health.awaitHealthy(ctx))
				switch {
				case err == nil:
					w.job(cut, lease)
				case ctx.Err() != nil:
					return
				}
			}
		})
	}
	slots.Wait()
	return nil
}

// job runs one job and logs one wide line.
func (w *Worker) job(ctx context.Context, lease Lease) {
	job := lease.Job()
	spent := timings{steps: proto.Steps{AssignedAt: time.Now().UTC()}}
	ctx, spans := startTrace(ctx, job, lease.Attempt())
	log := w.Log.With("trace_id", job.TraceID, "attempt", lease.Attempt())
	rec, err := w.execute(ctx, lease, &spent)
	spans.end(ctx, rec, err)
	if err != nil {
		lease.Release()
		log.WarnContext(ctx, "execution abandoned", "error", err)
		return
	}
	w.Done(rec)
	line := []any{
		"org", job.Org, "key", job.Key, "language", job.Language, "mode", job.Mode, "status", rec.Status,
		"exit_code", rec.Result.ExitCode, "duration_ms", rec.Result.DurationMS, "request_id", job.RequestID,
		"stdout_bytes", len(rec.Result.Stdout), "stderr_bytes", len(rec.Result.Stderr),
		"start", spent.start, "prepare_ms", millis(spent.prepare), "run_ms", millis(spent.run),
	}
	if job.ThreadID != "" {
		line = append(line, "thread", job.ThreadID)
	}
	if job.ThreadID != "" || job.HasVolumes {
		line = append(line, "check_out_ms", millis(spent.checkOut), "save_ms", millis(spent.save))
	}
	if len(job.Mounts) > 0 {
		line = append(line, "mounts", len(job.Mounts), "store_ms", millis(spent.store))
	}
	if rec.StartedAt != nil {
		line = append(line, "queued_ms", rec.StartedAt.Sub(job.QueuedAt()).Milliseconds())
	}
	if rec.Result.OutputBudgetExceeded {
		line = append(line, "output_budget_exceeded", true)
	}
	if rec.Usage != nil {
		line = append(line, "cpu_ms", rec.Usage.CPUMS, "memory_peak", rec.Usage.MemoryPeak)
	}
	if rec.Result.ErrorCode != nil {
		line = append(line, "error_code", *rec.Result.ErrorCode, "detail", *rec.Result.ErrorMessage)
	}
	log.InfoContext(ctx, "execution ended", line...)
}

// timings are the durations of an execution's steps, for the log and the record.
type timings struct {
	steps                        proto.Steps
	start                        Start
	checkOut, prepare, run, save time.Duration
	store                        time.Duration // from the program's end until what it wrote to mounts was stored
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// finishGrace limits the writing of a result after a shutdown.
const finishGrace = 5 * time.Second

// execute runs the job and returns its terminal record. After an error this worker no longer holds
// the job.
func (w *Worker) execute(ctx context.Context, lease Lease, spent *timings) (*proto.Record, error) {
	job := lease.Job()
	if job.Class() == proto.ClassBatch {
		defer w.limiter.acquire(ctx)()
	} else {
		w.limiter.onInteractive()
	}
	// The claim is written while the jail is being made: it must be durable before the program
	// starts, not before its jail does.
	wanted, giveUp := context.WithCancel(ctx)
	defer giveUp()
	defer w.pool.Busy()()
	preparing := w.prepare(wanted, lease)
	fault.Here(fault.AfterTakeBeforeClaim)
	running, base, claimErr := lease.Claim(ctx)
	if claimErr != nil {
		giveUp()
	} else {
		defer context.AfterFunc(running, giveUp)()
	}
	m := <-preparing
	spent.prepared(m)
	var ended *proto.Record // the result, if this worker stored it after commits
	release := func() {
		if err := m.close(ended); err != nil {
			w.Log.ErrorContext(ctx, "sandbox removal failed", "trace_id", job.TraceID, "error", err)
		}
	}
	defer func() {
		if m.saving == nil {
			release()
			return
		}
		w.Log.ErrorContext(ctx, "thread save does not end, sandbox is removed when it does", "trace_id", job.TraceID, "threads", job.Threads())
		go func() {
			<-m.saving
			release()
		}()
	}()
	switch {
	case claimErr != nil:
		return nil, claimErr
	case m.err != nil && errors.Is(context.Cause(running), proto.ErrLost):
		return nil, context.Cause(running)
	case m.err != nil && running.Err() != nil:
		return w.finish(ctx, lease, Outcome{Result: resultOf(job, jail.Outcome{Kind: jail.Killed}, context.Cause(running)), LastSeq: base, Steps: &spent.steps})
	case errors.Is(m.err, jail.ErrHostOutOfMemory) && lease.Attempt() < job.MaxAttempts:
		return nil, m.err
	case m.err != nil:
		w.Log.ErrorContext(ctx, "sandbox preparation failed", "trace_id", job.TraceID, "error", m.err)
		if m.suspect {
			w.health.markUnhealthy()
		}
		return w.finish(ctx, lease, Outcome{Result: m.failure(), LastSeq: base, Steps: &spent.steps})
	}
	if m.unusable != nil {
		return w.finish(ctx, lease, Outcome{Result: proto.Failure(proto.CodeSandboxStart, m.unusable.Error()), LastSeq: base, Steps: &spent.steps})
	}
	program := m.program
	events := w.Open(ctx, job, lease.Attempt(), base)
	stdout := newCollector(job.Sandbox.OutputBytes, events.Stream(proto.Stdout))
	stderr := newCollector(job.Sandbox.OutputBytes, events.Stream(proto.Stderr))
	secrets := newMasks(job, m.secrets)
	maskedOut, maskedErr := secrets.Writer(stdout), secrets.Writer(stderr)
	program.Stdout, program.Stderr = maskedOut, maskedErr
	began := time.Now()
	fault.Here(fault.AfterClaimBeforeStart)
	outcome, err := m.jail.Run(running, program)
	spent.run = time.Since(began)
	spent.steps.Program = spent.interval(period{began, spent.run})
	maskedOut.Flush()
	maskedErr.Flush()
	last, truncated := events.Close()
	fault.Here(fault.AfterOutputBeforeResult)
	// A program that exited has a result. Finish decides whether the lease was lost.
	if cause := context.Cause(running); errors.Is(cause, proto.ErrLost) && (err != nil || outcome.Kind == jail.Killed) {
		return nil, cause
	}
	if err == nil && outcome.Kind == jail.HostOutOfMemory && lease.Attempt() < job.MaxAttempts && running.Err() == nil {
		return nil, jail.ErrHostOutOfMemory
	}
	if err != nil {
		w.Log.ErrorContext(ctx, "sandbox failed", "trace_id", job.TraceID, "error", err)
		outcome = jail.Outcome{Kind: jail.StartFailed, Step: "run", Detail: sandboxBroken}
	}
	result := resultOf(job, outcome, context.Cause(running))
	result.DurationMS = outcome.Duration.Milliseconds()
	result.Stdout, result.StdoutTruncated = stdout.text()
	result.Stderr, result.StderrTruncated = stderr.text()
	result.OutputBudgetExceeded = events.OverBudget()
	out := Outcome{
		Result: result, LastSeq: last, OutputTruncated: truncated, Steps: &spent.steps,
		Usage: &proto.Usage{
			CPUMS: outcome.CPUTime.Milliseconds(), MemoryPeak: outcome.MemoryPeak, Network: outcome.Network,
			OutputBytes: int64(len(result.Stdout) + len(result.Stderr)),
		},
	}
	if m.data != nil {
		began := time.Now()
		err := m.data.Finish(running)
		spent.store = time.Since(began)
		spent.steps.Mounts = spent.interval(period{began, spent.store})
		if err != nil {
			w.Log.ErrorContext(ctx, "storage write failed", "trace_id", job.TraceID, "error", err)
			out.Result = out.Result.Unwritten(notWritten(err))
		}
	}
	if !errors.Is(context.Cause(running), ErrShutdown) && outcome.Kind != jail.HostOutOfMemory {
		began := time.Now()
		saved := w.save(ctx, m)
		for _, s := range saved {
			w.addSaved(ctx, job, &out, s)
		}
		spent.save = time.Since(began)
		if len(saved) > 0 {
			spent.steps.Save = spent.interval(period{began, spent.save})
		}
	}
	rec, err := w.finish(ctx, lease, out)
	if err == nil && (out.Commit != nil || len(out.Volumes) > 0) {
		ended = rec
	}
	return rec, err
}

// notWritten returns the message for the tenant about files in mounts that were not stored.
func notWritten(err error) string {
	if failed, ok := errors.AsType[*mount.WriteError](err); ok {
		return failed.Error()
	}
	return "It is not known whether all that the program wrote to its storage connections was stored; the cause is in the worker's log."
}

// saveGrace is how long a save may go on after its timeout until the slot does not wait for it any
// more: a file system may hang in a system call.
const saveGrace = 10 * time.Second

// errSaveTimeout is the cause of the end of a save's context.
var errSaveTimeout = errors.New("the save timeout has passed")

// saving is the save of a home or of a volume.
type saving struct {
	home   Home
	volume string // the slug; empty for the thread's home
	commit *proto.Commit
	err    error
}

// savings returns what is to be saved of an execution, the thread's home last.
func (m *preparation) savings() (all []*saving) {
	for _, v := range m.volumes {
		if v.home != nil {
			all = append(all, &saving{home: v.home, volume: v.slug})
		}
	}
	if m.home != nil {
		all = append(all, &saving{home: m.home})
	}
	return all
}

// save saves the home and the volumes of an execution within w.SaveTimeout. It sets m.saving if some
// are in use after that, and then none is saved.
func (w *Worker) save(ctx context.Context, m *preparation) []*saving {
	all := m.savings()
	if len(all) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, w.SaveTimeout, errSaveTimeout)
	defer cancel()
	var running sync.WaitGroup
	for _, s := range all {
		running.Go(func() {
			s.commit, s.err = s.home.Save(ctx)
			if s.err != nil && errors.Is(context.Cause(ctx), errSaveTimeout) {
				s.err = fmt.Errorf("%w: %w", errSaveTimeout, s.err)
			}
		})
	}
	saved := make(chan struct{})
	go func() {
		defer close(saved)
		running.Wait()
	}()
	select {
	case <-saved:
		return all
	case <-ctx.Done():
	}
	grace := time.NewTimer(saveGrace)
	defer grace.Stop()
	select {
	case <-saved:
		return all
	case <-grace.C:
	}
	m.saving = saved
	failed := m.savings()
	for _, s := range failed {
		s.err = fmt.Errorf("save the home: %w", context.Cause(ctx))
	}
	return failed
}

// addSaved adds a commit, or why there is none, to an outcome.
func (w *Worker) addSaved(ctx context.Context, job *proto.Job, out *Outcome, s *saving) {
	switch {
	case s.err != nil && s.volume != "":
		w.Log.ErrorContext(ctx, "volume save failed", "trace_id", job.TraceID, "volume", s.volume, "error", s.err)
		out.Result = out.Result.Unwritten(w.volumeNotSaved(s.volume, s.err))
	case s.err != nil:
		w.Log.ErrorContext(ctx, "thread save failed", "trace_id", job.TraceID, "thread", job.ThreadID, "error", s.err)
		out.Result = out.Result.Unsaved(fmt.Sprintf("The thread was not changed: %v.", w.notSaved(s.err)))
	case s.commit == nil:
	case s.volume != "":
		out.Volumes = append(out.Volumes, proto.VolumeCommit{Volume: s.volume, Commit: *s.commit})
	default:
		out.Commit = s.commit
	}
}

// endedAs reports whether an execution ended with one of some error codes.
func endedAs(rec *proto.Record, codes ...proto.ErrorCode) bool {
	return rec.Result.ErrorCode != nil && slices.Contains(codes, proto.ErrorCode(*rec.Result.ErrorCode))
}

// notSaved returns why a home was not saved, for the tenant.
func (w *Worker) notSaved(err error) error {
	var limit *proto.LimitError
	var attributes *proto.AttributesError
	var depth *proto.DepthError
	var file *proto.FileError
	switch {
	case errors.As(err, &limit):
		return limit
	case errors.As(err, &attributes):
		return attributes
	case errors.As(err, &depth):
		return depth
	case errors.As(err, &file):
		return file
	case errors.Is(err, errSaveTimeout):
		return fmt.Errorf("saving it took longer than the %s that this server allows; save less at a time", w.SaveTimeout)
	default:
		return errors.New("it could not be stored; the cause is in the worker's log")
	}
}

// sandboxBroken is the message for the tenant about an internal failure. The cause, with the host's
// paths, is in the log.
const sandboxBroken = "The sandbox failed; the cause is in the worker's log."

// preparation is the result of preparing a jail for a job.
type preparation struct {
	jail       *preparedJail // nil if not even the image could be opened
	home       Home          // nil if there is no thread
	volumes    []*volume
	file       string // name of the program's file, if it is in the home
	program    jail.Program
	unusable   error // why there is no program, a sentence for the user
	err        error
	homeFailed bool // err concerns the home
	secrets    map[string][]byte
	// secretsFailed means that err concerns the secrets.
	secretsFailed bool
	// saving, if not nil, is closed when a save that the execution does not wait for ends. The home, the
	// volumes and the jail are in use until then.
	saving   <-chan struct{}
	injector *inject.Proxy // nil if no secret is added to requests
	data     *mount.Set    // nil if there are no mounts
	// dataFailed means that err concerns the mounts.
	dataFailed bool
	suspect    bool // err suggests that this worker cannot create sandboxes
	start      Start
	began      time.Time
	checkedOut period // without the staging of files
	checkOut   time.Duration
	took       time.Duration // without checkOut
}

// close releases everything. ended is the record with which the execution ended, if this worker
// stored it after commits, and otherwise nil.
func (m *preparation) close(ended *proto.Record) error {
	var errs []error
	if m.jail != nil {
		errs = append(errs, m.jail.Close())
	}
	if m.data != nil {
		errs = append(errs, m.data.Close())
	}
	if m.home != nil {
		errs = append(errs, m.home.Close(ended != nil && !endedAs(ended, proto.CodeThreadSave)))
	}
	for _, v := range m.volumes {
		// These codes may be about others. The next execution then fetches what was saved.
		errs = append(errs, v.close(ended != nil && !endedAs(ended, proto.CodeThreadSave, proto.CodeStorageWrite)))
	}
	return errors.Join(errs...)
}

// failure returns the result for m.err.
func (m *preparation) failure() proto.Result {
	if uploads, ok := errors.AsType[*proto.UploadsError](m.err); ok {
		return proto.Failure(proto.CodeThreadMount, fmt.Sprintf(
			"The program was not started: %v. Upload smaller files in the place of some, or remove the thread.", uploads))
	}
	if m.homeFailed {
		return proto.Failure(proto.CodeThreadMount, "The thread's home could not be made ready on this worker, so the program was not started.")
	}
	if failed, ok := errors.AsType[*volumeError](m.err); ok {
		return volumeFailure(failed)
	}
	if m.dataFailed {
		text := "The storage connections of the program could not be mounted on this worker, so it was not started; the cause is in the worker's log."
		if failed, ok := errors.AsType[*mount.Error](m.err); ok {
			text = fmt.Sprintf("The storage connection %s could not be mounted, so the program was not started: %s.", failed.Slug, failed.Message)
		}
		return proto.Failure(proto.CodeStorageMount, text)
	}
	if m.secretsFailed {
		return proto.Failure(proto.CodeSandboxStart, "The secrets of the program could not be decrypted, so it was not started; the cause is in the logs of the worker and of the dispatcher.")
	}
	if errors.Is(m.err, jail.ErrHostOutOfMemory) {
		return proto.Failure(proto.CodeHostMemory, "The worker's host ran out of memory while the sandbox was created, so the program was not started.")
	}
	return proto.Failure(proto.CodeSandboxStart, sandboxBroken)
}

func (w *Worker) prepare(ctx context.Context, lease Lease) <-chan *preparation {
	done := make(chan *preparation, 1)
	go func() {
		m := &preparation{}
		m.err = w.prepareJail(ctx, lease, m)
		done <- m
	}()
	return done
}

// prepareJail prepares a jail with the home of the job's thread, if it has one.
func (w *Worker) prepareJail(ctx context.Context, lease Lease, m *preparation) (err error) {
	job, began := lease.Job(), time.Now()
	defer func() { m.began, m.took = began, time.Since(began)-m.checkOut }()
	if len(job.Mounts) > 0 {
		if err := w.openMounts(job, m); err != nil {
			m.dataFailed = true
			return err
		}
	}
	k := w.poolKey(job.Sandbox, job.Language, job.ThreadID != "")
	m.jail, m.start = w.takePrepared(ctx, k, job.Key)
	w.Warm.OnStart(job.Language, m.start)
	if m.start == Cold {
		if m.jail, err = k.openImage(ctx); err != nil {
			return err
		}
	}
	spec := Spec(job.Sandbox, m.jail.image.Root)
	if job.ThreadID != "" {
		began := time.Now()
		m.home, err = w.Homes.CheckOut(ctx, proto.CheckoutRequest{
			Org: job.Org, Thread: job.ThreadID, Trace: job.TraceID, Most: proto.Space{Bytes: job.Sandbox.HomeBytes, Files: job.Sandbox.Inodes},
		})
		m.checkOut = time.Since(began)
		m.checkedOut = period{began, m.checkOut}
		if err != nil {
			m.home, m.homeFailed = nil, true
			return err
		}
		spec.Home = m.home
	}
	switch {
	case m.start == Cold:
		m.jail.Jail, err = w.Jails.Prepare(ctx, spec)
	case m.home != nil:
		err = m.jail.MountHome(ctx, m.home)
	}
	if err != nil {
		m.suspect = true
		return err
	}
	if m.home != nil {
		began := time.Now()
		m.file, err = stageFiles(ctx, m.home, job)
		m.checkOut += time.Since(began)
		if err != nil {
			m.homeFailed = true
			return err
		}
	}
	if len(job.Sealed) > 0 || len(job.Bound) > 0 {
		if m.secrets, err = lease.Secrets(ctx); err != nil {
			m.secretsFailed = true
			return err
		}
		if m.injector, err = w.newInjector(job, m.secrets); err != nil {
			m.secretsFailed = true
			return err
		}
	}
	if m.data != nil {
		if err := w.mountData(ctx, job, m); err != nil {
			m.dataFailed = true
			return err
		}
	}
	if m.program, m.unusable = w.program(job, m); m.unusable == nil {
		err = m.jail.Load(ctx, m.program)
	}
	return err
}

// openMounts starts what serves the mounts of a job, while its jail is being prepared.
func (w *Worker) openMounts(job *proto.Job, m *preparation) (err error) {
	if w.Mounts == nil {
		return errors.New("this worker cannot mount storage connections")
	}
	m.data, err = w.Mounts.Open(job.Mounts)
	return err
}

// mountData mounts what the program sees below [proto.MountsDir].
func (w *Worker) mountData(ctx context.Context, job *proto.Job, m *preparation) error {
	if err := m.data.Use(m.secrets); err != nil {
		return err
	}
	if job.HasVolumes {
		began := time.Now()
		err := w.checkOutVolumes(ctx, job, m)
		m.checkOut += time.Since(began)
		if err != nil {
			return err
		}
	}
	if err := m.jail.MountData(ctx, m.data); err != nil {
		return err
	}
	return m.limitVolumes(ctx)
}

// stageFiles adds the uploaded files and the program's file to a home. It returns the name of the
// program's file, empty if that is elsewhere.
func stageFiles(ctx context.Context, h Home, job *proto.Job) (file string, err error) {
	if err := h.PutStaged(ctx); err != nil {
		return "", err
	}
	if usual := jail.FileInHome(string(job.Language)); usual != "" {
		if file, err = h.PutProgram(usual, []byte(job.Code)); err != nil {
			return "", err
		}
	}
	return file, h.LimitSpace()
}

// selfTest creates a default sandbox.
func (w *Worker) selfTest(ctx context.Context) error {
	j, err := w.Jails.Prepare(ctx, Spec(proto.DefaultSandbox(), ""))
	if err != nil {
		return err
	}
	return j.Close()
}

// finish writes the result, during a shutdown too.
func (w *Worker) finish(ctx context.Context, lease Lease, e Outcome) (*proto.Record, error) {
	write, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(finishGrace, cancel) })
	defer stop()
	return lease.Finish(write, e)
}

// program returns the program that the jail runs. Its error is a sentence for the user.
func (w *Worker) program(job *proto.Job, m *preparation) (jail.Program, error) {
	source, ok := w.poolKey(job.Sandbox, job.Language, m.home != nil).source(m.jail.image)
	if !ok {
		return jail.Program{}, fmt.Errorf("language '%s' is not available in this sandbox image", job.Language)
	}
	source.Code, source.Args, source.Stdin, source.Env = job.Code, job.Args, job.Stdin, job.Env
	source.TraceID, source.File = string(job.TraceID), m.file
	source.Env = withSecrets(job, m.secrets)
	if m.injector != nil {
		source.Env = withTrust(source.Env)
	}
	p, err := source.Program()
	if m.file != "" { // it is in the home
		p.Files = nil
	}
	p.Files = append(p.Files, secretFiles(job, m.secrets)...)
	if m.injector != nil {
		p.Interception = m.injector.Interception()
		p.Files = append(p.Files, trustFile(w.Roots, m.injector))
	}
	p.Timeout = time.Duration(job.Timeout) * time.Second
	p.LowWeight = job.Class() == proto.ClassBatch // nobody waits for it
	return p, err
}

// Spec returns the spec of a sandbox's jail. root is the directory of its root file system, empty
// for the host's runtimes.
func Spec(s proto.Sandbox, root string) jail.Spec {
	return jail.Spec{
		Root: root, Network: s.Network, CPU: s.CPU, Memory: s.Memory, Pids: s.Pids, HomeBytes: s.HomeBytes, TmpBytes: s.TmpBytes,
		Inodes: s.Inodes, OpenFiles: cmp.Or(s.OpenFiles, proto.DefaultOpenFiles), SystemCalls: s.SystemCalls,
	}
}

func resultOf(job *proto.Job, o jail.Outcome, cause error) proto.Result {
	switch o.Kind {
	case jail.Exited:
		return proto.Exited(o.ExitCode)
	case jail.Signaled:
		return proto.Signaled(o.Signal)
	case jail.TimedOut:
		return proto.TimedOut(job.Timeout)
	case jail.OutOfMemory:
		if o.Uncharged > 0 {
			return proto.Failure(proto.CodeMemory, fmt.Sprintf("The program made the kernel of the worker's host hold about %d MiB for it, "+
				"in addition to what counts towards its %d MiB of memory, and was killed.", o.Uncharged>>20, job.Sandbox.Memory>>20))
		}
		return proto.Failure(proto.CodeMemory, fmt.Sprintf("The program used more than its %d MiB of memory and was killed.", job.Sandbox.Memory>>20))
	case jail.HostOutOfMemory:
		return proto.Failure(proto.CodeHostMemory, fmt.Sprintf(
			"The worker's host ran out of memory or was about to, and the program was killed. The program had not exceeded its %d MiB.", job.Sandbox.Memory>>20))
	case jail.Seccomp:
		return proto.Failure(proto.CodeSeccomp, "The program made a system call that the sandbox forbids and was killed.")
	case jail.Killed:
		if errors.Is(cause, proto.ErrCancelled) {
			return proto.Cancelled()
		}
		return shutdown(o.Duration)
	default:
		return proto.Failure(proto.CodeSandboxStart, fmt.Sprintf("The program could not be started: %s: %s", o.Step, o.Detail))
	}
}

func shutdown(ran time.Duration) proto.Result {
	return proto.Failure(proto.CodeWorkerLost, fmt.Sprintf(
		"The worker was shut down and did not wait longer; the program had run for %s and was killed.", ran.Round(time.Millisecond)))
}
