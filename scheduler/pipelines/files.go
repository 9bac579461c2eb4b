package pipelines

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// maxCopies limits the copies of files that a process makes at the same time. Each keeps the names
// of two homes in memory, and its content in a file on disk.
const maxCopies = 4

// Threads are the threads of the runs.
type Threads interface {
	// Get returns the head of a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, thread string) (*proto.Thread, error)
	// Copy copies parts of homes to the home of a thread. It returns [proto.ErrExists] if the thread must
	// be new and exists.
	Copy(ctx context.Context, org, thread string, c *proto.TreeCopy) error
	// Fork creates a thread from the newest version of another, with its staged files, if version
	// is 0. It returns [proto.ErrNotFound] and [proto.ErrExists].
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// Remove removes a thread, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, thread string) error
}

// refusedError is a cell's reason for failure, worded for the client.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

func refusef(format string, args ...any) error { return &refusedError{fmt.Sprintf(format, args...)} }

// asRefusal turns permanent errors into refusals.
func asRefusal(what string, err error) error {
	if !proto.Final(err) {
		return err
	}
	return refusef("%s: %s", what, api.NewError(err).Message) // without the names of threads
}

// asWarning adds a refusal to the warnings of a cell. It returns all other errors.
func asWarning(c *proto.CellState, err error) error {
	refused, ok := errors.AsType[*refusedError](err)
	if ok && !slices.Contains(c.Warnings, refused.reason) { // the cell may be prepared more than once
		c.Warnings = append(slices.Clip(c.Warnings), refused.reason)
	}
	if ok {
		return nil
	}
	return err
}

// workspace returns the thread of a cell.
func workspace(p *proto.Pipeline, step *proto.PipelineStep, i int) string {
	if step.Own {
		return proto.CellThread(p.ID, i)
	}
	return proto.RunThread(p.ID)
}

// prepare makes the workspace of a cell: a fork if it is its own, missing artifacts of the cells
// that it needs, and its cache. It may be repeated, even after the execution has started.
func (r *Runner) prepare(ctx context.Context, p *proto.Pipeline, s *proto.PipelineState, i int, at []cellIndex) error {
	step := &p.Steps[at[i].step]
	thread := workspace(p, step, i)
	if step.Own {
		_, err := r.Threads.Fork(ctx, p.Org, proto.RunThread(p.ID), 0, thread)
		if err != nil && !errors.Is(err, proto.ErrExists) && !errors.Is(err, proto.ErrNotFound) {
			return asRefusal("copy the workspace", err)
		}
	}
	home, err := r.space(ctx, p, at[i])
	if err != nil {
		return err
	}
	var artifacts []proto.TreePart
	for _, need := range step.Needs {
		for j := range s.Cells {
			from, c := &p.Steps[at[j].step], &s.Cells[j]
			if from.Name == need && from.Own && c.Thread != "" {
				artifacts = append(artifacts,
					proto.TreePart{Thread: c.Thread, Paths: artifactPaths(from), Dir: path.Join("artifacts", c.Step, c.Cell)})
			}
		}
	}
	key := step.Cells[at[i].cell].CacheKey
	if len(artifacts) == 0 && key == "" {
		return nil
	}
	if started, err := r.started(ctx, p.Org, thread, s); started || err != nil {
		return err // the program may have changed the files
	}
	if len(artifacts) > 0 {
		if err := r.copy(ctx, p.Org, thread, &proto.TreeCopy{Parts: artifacts, Home: home}); err != nil {
			return asRefusal("copy the artifacts of "+spec.Label(s.Cells[i].Step, s.Cells[i].Cell), err)
		}
	}
	if key == "" {
		return nil
	}
	cache := proto.TreePart{Thread: proto.OwnerCache.Thread(key), Paths: step.Cache}
	err = r.copy(ctx, p.Org, thread, &proto.TreeCopy{Parts: []proto.TreePart{cache}, Home: home})
	return asWarning(&s.Cells[i], asRefusal("the cache "+key+" is not used", err))
}

// started reports whether an execution that the state does not know yet holds the cell's workspace:
// a process has started it and died, or is about to store its id.
func (r *Runner) started(ctx context.Context, org, thread string, s *proto.PipelineState) (bool, error) {
	head, err := r.Threads.Get(ctx, org, thread)
	if errors.Is(err, proto.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up thread %s: %w", thread, err)
	}
	known := slices.ContainsFunc(s.Cells, func(c proto.CellState) bool { return c.TraceID == head.Holder })
	return head.Holder != "" && !known, nil
}

// copy copies files to a thread. If an execution holds the thread, another process has just started
// the cell's execution, and there is nothing to do.
func (r *Runner) copy(ctx context.Context, org, thread string, c *proto.TreeCopy) error {
	select {
	case r.copies <- struct{}{}:
		defer func() { <-r.copies }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	c.Most = proto.Space{Bytes: proto.MaxArtifactBytes, Files: proto.MaxArtifactFiles}
	err := r.Threads.Copy(ctx, org, thread, c)
	if _, busy := errors.AsType[*proto.BusyError](err); busy {
		return nil
	}
	return err
}

// space returns the largest size of the home of a cell.
func (r *Runner) space(ctx context.Context, p *proto.Pipeline, at cellIndex) (proto.Space, error) {
	most, refused, err := r.Executions.StepSpace(ctx, p, at.step, at.cell)
	if refused != "" {
		return most, &refusedError{refused}
	}
	return most, err
}

// artifactPaths returns the paths of all artifacts of a step.
func artifactPaths(step *proto.PipelineStep) (all []string) {
	for _, paths := range step.Artifacts {
		all = append(all, paths...)
	}
	return all
}

// keep keeps the artifacts and the cache of a cell that has ended. It may be called again. The error is
// about the artifacts; a cache that cannot be kept is a warning of the cell.
func (r *Runner) keep(
	ctx context.Context, p *proto.Pipeline, c *proto.CellState, i int, at cellIndex, succeeded bool,
) (thread string, err error) {
	step := &p.Steps[at.step]
	from := workspace(p, step, i)
	if key := step.Cells[at.cell].CacheKey; key != "" && succeeded {
		cache := &proto.TreeCopy{Parts: []proto.TreePart{{Thread: from, Paths: step.Cache}}, New: true}
		cache.Home = proto.Space{Bytes: proto.MaxArtifactBytes, Files: proto.MaxArtifactFiles}
		err := r.copy(ctx, p.Org, proto.OwnerCache.Thread(key), cache)
		if err := asWarning(c, asRefusal("the cache "+key+" is not saved", err)); err != nil &&
			!errors.Is(err, proto.ErrExists) {
			return "", err
		}
	}
	if len(step.Artifacts) == 0 {
		return "", nil
	}
	if step.Own {
		return from, nil
	}
	thread = proto.CellThread(p.ID, i)
	_, err = r.Threads.Fork(ctx, p.Org, from, 0, thread)
	switch {
	case errors.Is(err, proto.ErrNotFound): // the program did not start
		return "", nil
	case err != nil && !errors.Is(err, proto.ErrExists):
		return "", asRefusal("keep the artifacts", err)
	}
	return thread, nil
}

func (r *Runner) removeThread(ctx context.Context, org, thread string) error {
	err := r.Threads.Remove(ctx, org, thread)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}
