package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// saveGrace is how long after its timeout the slot still waits for a save: a file system may hang
// in a system call.
const saveGrace = 10 * time.Second

// errSaveTimeout is the cause of the end of a save's context.
var errSaveTimeout = errors.New("the save timeout has passed")

// saveError is why a home or a volume was not saved.
type saveError struct {
	volume  string        // the slug; empty for the thread's home
	timeout time.Duration // of the save
	err     error
}

func (e *saveError) Error() string { return e.err.Error() }
func (e *saveError) Unwrap() error { return e.err }

func (e *saveError) log(ctx context.Context, a *attempt) {
	if e.volume != "" {
		a.log.ErrorContext(ctx, "volume save failed", "volume", e.volume, "error", e.err)
		return
	}
	a.log.ErrorContext(ctx, "thread save failed", "thread", a.job.ThreadID, "error", e.err)
}

// apply returns r with the failure.
func (e *saveError) apply(r proto.Result) proto.Result {
	why := e.why()
	if e.volume == "" {
		return r.Unsaved(fmt.Sprintf("The thread was not changed: %v.", why))
	}
	if limit, ok := errors.AsType[*proto.LimitError](e.err); ok {
		why = fmt.Errorf("it has %d bytes in %d files and directories, and its quota is %d bytes in %d",
			limit.Bytes, limit.Files, limit.MaxBytes, limit.MaxFiles)
	}
	if depth, ok := errors.AsType[*proto.DepthError](e.err); ok {
		why = fmt.Errorf("it has more than %d directories in each other, itself included", depth.Most)
	}
	return r.Unwritten(fmt.Sprintf("The volume %s was not changed: %v.", e.volume, why))
}

// why is the cause as the tenant may know it.
func (e *saveError) why() error {
	var limit *proto.LimitError
	var attributes *proto.AttributesError
	var depth *proto.DepthError
	var file *proto.FileError
	switch {
	case errors.As(e.err, &limit):
		return limit
	case errors.As(e.err, &attributes):
		return attributes
	case errors.As(e.err, &depth):
		return depth
	case errors.As(e.err, &file):
		return file
	case errors.Is(e.err, jail.ErrFrozenTooLong):
		return fmt.Errorf("reading what changed since the sandbox started took longer than %s, for which its processes "+
			"may stand still; pause it to save more", proto.MaxSandboxFreeze)
	case errors.Is(e.err, jail.ErrNotFrozen):
		return fmt.Errorf("its processes could not be stopped for a moment within %s; try again", proto.MaxSandboxFreeze)
	case errors.Is(e.err, errSaveTimeout):
		return fmt.Errorf("saving it took longer than the %s that this server allows; save less at a time", e.timeout)
	default:
		return errors.New("it could not be stored; the cause is in the worker's log")
	}
}

// saving is the save of a home or of a volume.
type saving struct {
	home   Home
	volume string // the slug; empty for the thread's home
	commit *proto.Commit
	err    error
}

// savings returns what to save of a sandbox, the thread's home last.
func (b *sandbox) savings() (all []*saving) {
	for _, v := range b.volumes {
		if v.home != nil {
			all = append(all, &saving{home: v.home, volume: v.slug})
		}
	}
	if b.home != nil {
		all = append(all, &saving{home: b.home})
	}
	return all
}

// save saves the home and the volumes of a sandbox, and adds the commits, or the reason why there
// are none, to out.
func (a *attempt) save(ctx context.Context, b *sandbox, out *Outcome) {
	began := time.Now()
	saved := b.save(ctx, a.SaveTimeout)
	for _, s := range saved {
		switch {
		case s.err != nil:
			failed := &saveError{s.volume, a.SaveTimeout, s.err}
			failed.log(ctx, a)
			out.Result = failed.apply(out.Result)
		case s.commit == nil:
		case s.volume != "":
			out.Volumes = append(out.Volumes, proto.VolumeCommit{Volume: s.volume, Commit: *s.commit})
		default:
			out.Commit = s.commit
		}
	}
	a.spent.save = time.Since(began)
	if len(saved) > 0 {
		a.spent.steps.Save = a.spent.interval(period{began, a.spent.save})
	}
}

// save saves the home and the volumes within timeout. If some are still in use after that, it sets
// b.saving, and none is saved.
func (b *sandbox) save(ctx context.Context, timeout time.Duration) []*saving {
	all := b.savings()
	if len(all) == 0 {
		return nil
	}
	if b.saving != nil { // a save while the sandbox ran
		return b.unsaved(errSaveTimeout)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errSaveTimeout)
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
	b.saving = saved
	return b.unsaved(context.Cause(ctx))
}

// unsaved returns what to save of a sandbox, none of which was saved because of cause.
func (b *sandbox) unsaved(cause error) []*saving {
	failed := b.savings()
	for _, s := range failed {
		s.err = fmt.Errorf("save the home: %w", cause)
	}
	return failed
}
