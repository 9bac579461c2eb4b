package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

// Jobs is the stream of jobs that have not ended.
type Jobs struct{ Stream }

// Stage prepares the message that [Jobs.Put] stores.
func (j Jobs) Stage(ctx context.Context, job *proto.Job, h nats.Header) (*nats.Msg, error) {
	body, err := json.Marshal(job)
	if err != nil {
		return nil, fmt.Errorf("encode job %s: %w", job.TraceID, err)
	}
	meta, err := json.Marshal(&job.Meta)
	if err != nil {
		return nil, fmt.Errorf("encode job %s: %w", job.TraceID, err)
	}
	h.Set(HeaderMeta, string(meta))
	return j.store.Bodies.stage(ctx, JobSubject(&job.Meta), h, body, j.store.MaxInline)
}

// Put stores a staged job that is not stored yet, and returns its sequence number. Storing the
// same message again is no error.
func (j Jobs) Put(ctx context.Context, m *nats.Msg) (uint64, error) {
	return j.write(ctx, m, 0, true)
}

// Meta returns the metadata in the header of a job, without reading its body. It returns
// [proto.ErrNotFound] if there is no such job.
func (j Jobs) Meta(ctx context.Context, org string, id proto.TraceID) (*proto.Meta, error) {
	m, err := j.Last(ctx, JobPattern(org, id), WithoutBody)
	if IsNotFound(err) {
		return nil, fmt.Errorf("job %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("read job %s: %w", id, err)
	}
	meta, err := DecodeMeta(m.Header)
	if err == nil && (meta.TraceID != id || meta.Org != org) {
		err = fmt.Errorf("decode job %s of %s: its id is %q, of %q", id, org, meta.TraceID, meta.Org)
	}
	return meta, err
}

// DecodeJob decodes the job of an execution of an organisation.
func DecodeJob(m *Message, org string, id proto.TraceID) (*proto.Job, error) {
	var job proto.Job
	if err := json.Unmarshal(m.Data, &job); err != nil {
		return nil, fmt.Errorf("decode job %s: %w", id, err)
	}
	if job.TraceID != id || job.Org != org {
		return nil, fmt.Errorf("decode job %s of %s: its id is %q, of %q", id, org, job.TraceID, job.Org)
	}
	return &job, nil
}

// DecodeMeta decodes the metadata in the header of a job.
func DecodeMeta(h nats.Header) (*proto.Meta, error) {
	var meta proto.Meta
	if err := json.Unmarshal([]byte(h.Get(HeaderMeta)), &meta); err != nil {
		return nil, fmt.Errorf("decode the header of a job: %w", err)
	}
	return &meta, nil
}

// RemovedJobs are jobs to remove. Each sequence number is one above the last job to remove, 0 for
// none.
type RemovedJobs struct {
	Below          uint64 // of all jobs
	PromptBelow    uint64 // of those of the kinds that are not named below
	DelayedBelow   uint64 // of those with a RunAt
	SandboxesBelow uint64 // of those of live sandboxes
	Single         []uint64
	Bodies         []string // names of their bodies
}

// Remove removes jobs. A job that is gone already is no error. One failure does not stop the
// rest.
func (j Jobs) Remove(ctx context.Context, r RemovedJobs) error {
	var failed []error
	purge := func(below uint64, subject string) {
		if below == 0 {
			return
		}
		// Without a subject, the server drops the beginning of the stream, which is much cheaper.
		opts := []jetstream.StreamPurgeOpt{jetstream.WithPurgeSequence(below)}
		if subject != "" {
			opts = append(opts, jetstream.WithPurgeSubject(subject))
		}
		if err := j.Purge(ctx, opts...); err != nil {
			failed = append(failed, fmt.Errorf("remove jobs %s below %d: %w", subject, below, err))
		}
	}
	purge(r.Below, "")
	for _, class := range []proto.Class{proto.ClassInteractive, proto.ClassBackground} {
		purge(r.PromptBelow, jobPrefix(string(class))+">")
	}
	purge(r.DelayedBelow, jobPrefix(delayedJobs)+">")
	purge(r.SandboxesBelow, jobPrefix(sandboxJobs)+">")
	for _, seq := range r.Single {
		if err := j.unlessGone(ctx, seq, j.DeleteMsg(ctx, seq)); err != nil {
			failed = append(failed, fmt.Errorf("remove job %d: %w", seq, err))
		}
	}
	for _, name := range r.Bodies {
		if err := j.store.Bodies.remove(ctx, name); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}
