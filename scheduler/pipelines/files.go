package pipelines

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// Threads are the threads of the runs.
type Threads interface {
	// List calls f for everything below a directory of a thread's home. An unknown thread has no
	// files.
	List(ctx context.Context, org, thread, path string, recursive bool, f func(proto.File) error) error
	// Open returns the content of a file, or [proto.ErrNotFound].
	Open(ctx context.Context, org, thread, path string) (*proto.FileContent, error)
	// Stage stores size bytes of a file, and creates the thread if it does not exist.
	Stage(ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader) error
	// Fork creates a thread from the newest version of another, with its staged files, if version
	// is 0. It returns [proto.ErrNotFound] and [proto.ErrExists].
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// Remove removes a thread, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, thread string) error
}

// refusedError is a reason for which a cell fails, in words for the client.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

func refusef(format string, args ...any) error { return &refusedError{fmt.Sprintf(format, args...)} }

// asRefusal turns errors that come again with each try into refusals.
func asRefusal(what string, err error) error {
	var conflict interface{ Conflict() }
	var field *proto.FieldError
	if errors.As(err, &conflict) || errors.As(err, &field) {
		return refusef("%s: %v", what, err)
	}
	return err
}

// budget is what a cell may still copy.
type budget struct {
	files int
	bytes int64
}

func newBudget() *budget { return &budget{proto.MaxArtifactFiles, proto.MaxArtifactBytes} }

// workspace returns the thread of a cell.
func workspace(p *proto.Pipeline, step *proto.PipelineStep, i int) string {
	if step.Own {
		return fmt.Sprintf("%s-%d", p.ID, i)
	}
	return p.ID
}

// kept returns the thread that keeps the artifacts of a cell.
func kept(p *proto.Pipeline, i int) string { return fmt.Sprintf("%s-%d", p.ID, i) }

// cacheThread returns the thread of a cache.
func cacheThread(key string) string { return "ci-cache-" + key }

// prepare makes the workspace of a cell: a fork if it is its own, the artifacts of the cells that
// it needs if they are not in it, and its cache. It may be called again.
func (r *Runner) prepare(ctx context.Context, p *proto.Pipeline, s *proto.PipelineState, i int, at []cellIndex) error {
	step := &p.Steps[at[i].step]
	thread := workspace(p, step, i)
	if step.Own {
		_, err := r.Threads.Fork(ctx, p.Org, p.ID, 0, thread)
		if err != nil && !errors.Is(err, proto.ErrExists) && !errors.Is(err, proto.ErrNotFound) {
			return asRefusal("copy the workspace", err)
		}
	}
	most, err := r.space(ctx, p, at[i])
	if err != nil {
		return err
	}
	left := newBudget()
	for _, need := range step.Needs {
		for j := range s.Cells {
			from, c := &p.Steps[at[j].step], &s.Cells[j]
			if from.Name != need || !from.Own || c.Thread == "" {
				continue
			}
			prefix := path.Join("artifacts", c.Step, c.Cell)
			if err := r.copy(ctx, p.Org, c.Thread, artifactPaths(from), thread, prefix, most, left); err != nil {
				return asRefusal("copy the artifacts of "+spec.Label(c.Step, c.Cell), err)
			}
		}
	}
	if key := step.Cells[at[i].cell].CacheKey; key != "" {
		return asRefusal("copy the cache", r.copy(ctx, p.Org, cacheThread(key), step.Cache, thread, "", most, left))
	}
	return nil
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

// copy copies the files at some paths to another thread, below a directory.
func (r *Runner) copy(
	ctx context.Context, org, from string, paths []string, to, prefix string, most proto.Space, left *budget,
) error {
	var files []proto.File
	err := r.Threads.List(ctx, org, from, "", true, func(f proto.File) error {
		if f.IsDirectory || !spec.Match(paths, f.Path) {
			return nil
		}
		left.files, left.bytes = left.files-1, left.bytes-f.Size
		if left.files < 0 || left.bytes < 0 {
			return refusef("more than %d files or %d bytes; pack them into an archive, or keep fewer", proto.MaxArtifactFiles, proto.MaxArtifactBytes)
		}
		files = append(files, f)
		return nil
	})
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := r.copyFile(ctx, org, from, f.Path, to, path.Join(prefix, f.Path), most); err != nil {
			return err
		}
	}
	return nil
}

func (r *Runner) copyFile(ctx context.Context, org, from, name, to, target string, most proto.Space) error {
	content, err := r.Threads.Open(ctx, org, from, name)
	if errors.Is(err, proto.ErrNotFound) {
		return nil // a link
	}
	if err != nil {
		return fmt.Errorf("open %s of thread %s: %w", name, from, err)
	}
	body, err := content.Read(ctx, 0, content.Size)
	if err != nil {
		return fmt.Errorf("read %s of thread %s: %w", name, from, err)
	}
	err = r.Threads.Stage(ctx, org, to, target, content.Size, most, body)
	if errClose := body.Close(); err == nil {
		err = errClose
	}
	if err != nil {
		return fmt.Errorf("copy %s from thread %s to %s: %w", name, from, to, err)
	}
	return nil
}

// keep keeps the artifacts and the cache of a cell that has ended. It may be called again.
func (r *Runner) keep(ctx context.Context, p *proto.Pipeline, i int, at cellIndex, succeeded bool) (thread string, err error) {
	step := &p.Steps[at.step]
	from := workspace(p, step, i)
	if len(step.Artifacts) > 0 {
		thread = kept(p, i)
		if !step.Own {
			_, err := r.Threads.Fork(ctx, p.Org, from, 0, thread)
			switch {
			case errors.Is(err, proto.ErrNotFound): // the program did not start
				thread = ""
			case err != nil && !errors.Is(err, proto.ErrExists):
				return "", asRefusal("keep the artifacts", err)
			}
		}
	}
	key := step.Cells[at.cell].CacheKey
	if key == "" || !succeeded {
		return thread, nil
	}
	return thread, asRefusal("keep the cache", r.keepCache(ctx, p, i, at, from, key))
}

// keepCache stores a cache that does not exist yet. It is copied to a thread of its own first, so
// that nobody sees a part of it. That thread is removed in any case: a process that died may have
// left it.
func (r *Runner) keepCache(ctx context.Context, p *proto.Pipeline, i int, at cellIndex, from, key string) error {
	draft := fmt.Sprintf("%s-cache-%d", p.ID, i)
	err := r.storeCache(ctx, p, at, from, draft, key)
	if errRemove := r.removeThread(ctx, p.Org, draft); errRemove != nil {
		return fmt.Errorf("remove thread %s: %w", draft, errRemove) // is tried again
	}
	return err
}

func (r *Runner) storeCache(ctx context.Context, p *proto.Pipeline, at cellIndex, from, draft, key string) error {
	exists := false
	err := r.Threads.List(ctx, p.Org, cacheThread(key), "", false, func(proto.File) error {
		exists = true
		return nil
	})
	if err != nil || exists {
		return err
	}
	most, err := r.space(ctx, p, at)
	if err != nil {
		return err
	}
	if err := r.copy(ctx, p.Org, from, p.Steps[at.step].Cache, draft, "", most, newBudget()); err != nil {
		return err
	}
	_, err = r.Threads.Fork(ctx, p.Org, draft, 0, cacheThread(key))
	if errors.Is(err, proto.ErrExists) || errors.Is(err, proto.ErrNotFound) { // not found: nothing to keep
		return nil
	}
	return err
}

func (r *Runner) removeThread(ctx context.Context, org, thread string) error {
	err := r.Threads.Remove(ctx, org, thread)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}
