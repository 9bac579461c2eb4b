package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/mount"
)

// sandbox is a jail with its programs' resources.
type sandbox struct {
	jail     *preparedJail // nil if not even the image could be opened
	home     Home          // nil if there is no thread
	volumes  []*volume
	mounts   *mount.Set // nil if there are no mounts
	secrets  map[string][]byte
	injector *inject.Proxy // nil if no secret is added to requests
	// saving, if not nil, is closed when a save that the execution does not wait for ends. The
	// home, the volumes and the jail are in use until then.
	saving <-chan struct{}

	start      Start
	began      time.Time
	checkedOut period // without the staging of files
	checkOut   time.Duration
	took       time.Duration // without checkOut
}

// close releases everything. committed is the execution's record if this worker stored it after
// commits, otherwise nil.
func (b *sandbox) close(committed *proto.Record) error {
	var errs []error
	if b.jail != nil {
		errs = append(errs, b.jail.Close())
	}
	if b.mounts != nil {
		errs = append(errs, b.mounts.Close())
	}
	if b.home != nil {
		errs = append(errs, b.home.Close(committed != nil && !endedAs(committed, proto.CodeThreadSave)))
	}
	for _, v := range b.volumes {
		// These codes may be about others. The next execution then fetches what was saved.
		errs = append(errs, v.close(committed != nil && !endedAs(committed, proto.CodeThreadSave, proto.CodeStorageWrite)))
	}
	return errors.Join(errs...)
}

// part is a part of a sandbox.
type part int

const (
	partImage part = iota
	partJail       // that it cannot be made suggests that this worker cannot make any
	partHome
	partSecrets
	partMounts // storage connections and volumes
	partAgent
	partProgram
)

// step is one step of preparing a sandbox.
type step struct {
	part part
	run  func(ctx context.Context, b *sandbox) error
}

// steps returns the steps of preparing a sandbox for the job's program.
func (a *attempt) steps() []step {
	return []step{
		{partMounts, a.openMounts},
		{partImage, a.takeJail},
		{partHome, a.checkOutHome},
		{partJail, a.makeJail},
		{partHome, a.stageFiles},
		{partHome, a.writeProgram},
		{partHome, limitHome},
		{partJail, a.bindContainer},
		{partAgent, a.mountAgent},
		{partSecrets, a.openSecrets},
		{partMounts, a.mountData},
		{partProgram, a.load},
	}
}

// prepared is the end of the stage prepare. The sandbox must be closed after an error too.
type prepared struct {
	sandbox *sandbox
	err     error // a [*prepareError] or a [*programError]
}

// startPreparing prepares a sandbox for the job's program in the background.
func (a *attempt) startPreparing(ctx context.Context) <-chan prepared {
	done := make(chan prepared, 1)
	go func() {
		b := &sandbox{began: time.Now()}
		err := b.prepare(ctx, a.steps())
		done <- prepared{b, err}
	}()
	return done
}

// prepare takes steps. Its error is a [*prepareError] or a [*programError].
func (b *sandbox) prepare(ctx context.Context, steps []step) error {
	defer func() { b.took = time.Since(b.began) - b.checkOut }()
	for _, s := range steps {
		began := time.Now()
		err := s.run(ctx, b)
		if s.part == partHome {
			b.checkOut += time.Since(began)
		}
		if _, unusable := errors.AsType[*programError](err); unusable {
			return err
		}
		if err != nil {
			return &prepareError{s.part, err}
		}
	}
	return nil
}

// sandboxBroken is the message for the tenant about an internal failure. The cause, with the host's
// paths, is in the log.
const sandboxBroken = "The sandbox failed; the cause is in the worker's log."

// prepareError is why a part of a sandbox could not be made ready.
type prepareError struct {
	part part
	err  error
}

func (e *prepareError) Error() string { return e.err.Error() }
func (e *prepareError) Unwrap() error { return e.err }

// result returns the result of an execution whose sandbox could not be prepared.
func (e *prepareError) result() proto.Result {
	if uploads, ok := errors.AsType[*proto.UploadsError](e.err); ok && e.part == partHome {
		return proto.Failure(proto.CodeThreadMount, fmt.Sprintf(
			"The program was not started: %v. Upload smaller files in the place of some, or remove the thread.", uploads))
	}
	if failed, ok := errors.AsType[*volumeError](e.err); ok {
		return failed.result()
	}
	switch {
	case e.part == partHome:
		return proto.Failure(proto.CodeThreadMount,
			"The thread's home could not be made ready on this worker, so the program was not started.")
	case e.part == partMounts:
		text := "The storage connections of the program could not be mounted on this worker, so it was not started; " +
			"the cause is in the worker's log."
		if failed, ok := errors.AsType[*mount.Error](e.err); ok {
			text = fmt.Sprintf("The storage connection %s could not be mounted, so the program was not started: %s.",
				failed.Slug, failed.Message)
		}
		return proto.Failure(proto.CodeStorageMount, text)
	case e.part == partSecrets:
		return proto.Failure(proto.CodeSandboxStart, "The secrets of the program could not be decrypted, so it was not "+
			"started; the cause is in the logs of the worker and of the dispatcher.")
	case e.part == partAgent:
		return proto.Failure(proto.CodeSandboxStart, "The program of the agent could not be mounted on this worker, so the "+
			"sandbox was not started; the cause is in the worker's log.")
	case errors.Is(e.err, jail.ErrHostOutOfMemory):
		return proto.Failure(proto.CodeHostMemory,
			"The worker's host ran out of memory while the sandbox was created, so the program was not started.")
	default:
		return proto.Failure(proto.CodeSandboxStart, sandboxBroken)
	}
}

// openMounts starts serving the mounts of a job, while its jail is being prepared.
func (a *attempt) openMounts(_ context.Context, b *sandbox) (err error) {
	if len(a.job.Mounts) == 0 {
		return nil
	}
	if a.Mounts == nil {
		return errors.New("this worker cannot mount storage connections")
	}
	b.mounts, err = a.Mounts.Open(a.job.Mounts)
	if err == nil && a.job.Live != nil { // a live sandbox has several users
		b.mounts.AllowAllUsers()
	}
	return err
}

// takeJail takes a prewarmed or forked jail. If there is none, it opens the image for one.
func (a *attempt) takeJail(ctx context.Context, b *sandbox) (err error) {
	k := a.keyOf(a.job)
	b.jail, b.start = a.takePrepared(ctx, k, a.job.Key)
	a.Warm.OnStart(a.job.Language, b.start)
	if b.start == Cold {
		b.jail, err = k.openImage(ctx)
	}
	return err
}

// checkOutHome checks out the home of the job's thread, if it has one.
func (a *attempt) checkOutHome(ctx context.Context, b *sandbox) error {
	if a.job.ThreadID == "" {
		return nil
	}
	began := time.Now()
	home, err := a.Homes.CheckOut(ctx, proto.CheckoutRequest{
		Org: a.job.Org, Thread: a.job.ThreadID, Trace: a.job.TraceID,
		Most: proto.Space{Bytes: a.job.Sandbox.HomeBytes, Files: a.job.Sandbox.Inodes},
	})
	b.checkedOut = period{began, time.Since(began)}
	if err != nil {
		return err
	}
	b.home = home
	return nil
}

// makeJail creates a jail with the home, or mounts the home in the prepared one.
func (a *attempt) makeJail(ctx context.Context, b *sandbox) (err error) {
	switch {
	case b.start == Cold:
		spec := a.keyOf(a.job).spec(b.jail.image.Root)
		if b.home != nil {
			spec.Home = b.home
		}
		b.jail.Jail, err = a.Jails.Prepare(ctx, spec)
	case b.home != nil:
		err = b.jail.MountHome(ctx, b.home)
	}
	return err
}

// stageFiles adds the uploaded files to the home.
func (a *attempt) stageFiles(ctx context.Context, b *sandbox) error {
	if b.home == nil {
		return nil
	}
	if err := b.home.PutStaged(ctx); err != nil {
		return err
	}
	if a.job.Container {
		return b.home.MakeTmp(proto.ContainerTmp)
	}
	return nil
}

// limitHome limits what programs can write to the home.
func limitHome(_ context.Context, b *sandbox) error {
	if b.home == nil {
		return nil
	}
	return b.home.LimitSpace()
}

// bindContainer mounts the home of a container where programs of models expect it, and that of a live
// sandbox where clients do.
func (a *attempt) bindContainer(ctx context.Context, b *sandbox) error {
	if b.home == nil {
		return nil
	}
	if a.job.Live != nil {
		if err := b.jail.BindHome(ctx, ".", proto.SandboxHome); err != nil {
			return err
		}
	}
	if !a.job.Container {
		return nil
	}
	return errors.Join(b.jail.BindHome(ctx, proto.ContainerTmp, "/tmp"), b.jail.BindHome(ctx, ".", proto.ContainerData))
}

// mountAgent mounts the program of the agent that the live sandbox is for, if it is for one.
func (a *attempt) mountAgent(ctx context.Context, b *sandbox) error {
	if a.job.Live == nil || a.job.Agent == "" {
		return nil
	}
	dir, err := a.Agents.Find(a.job.Agent, a.job.AgentVersion)
	if err != nil {
		return err
	}
	return b.jail.MountAgent(ctx, a.job.Agent, dir)
}

// openSecrets gets the secrets of the job, and starts the proxy that adds some of them to requests.
func (a *attempt) openSecrets(ctx context.Context, b *sandbox) (err error) {
	if len(a.job.Sealed) == 0 && len(a.job.Bound) == 0 {
		return nil
	}
	if b.secrets, err = a.lease.Secrets(ctx); err != nil {
		return err
	}
	b.injector, err = a.newInjector(a.job, b.secrets)
	return err
}

// mountData mounts what the program sees below [proto.MountsDir].
func (a *attempt) mountData(ctx context.Context, b *sandbox) error {
	if b.mounts == nil {
		return nil
	}
	if err := b.mounts.Use(b.secrets); err != nil {
		return err
	}
	if a.job.HasVolumes {
		began := time.Now()
		err := a.checkOutVolumes(ctx, b)
		b.checkOut += time.Since(began)
		if err != nil {
			return err
		}
	}
	if err := b.jail.MountData(ctx, b.mounts); err != nil {
		return err
	}
	return b.limitVolumes(ctx)
}
