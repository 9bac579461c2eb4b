package admission

import (
	"context"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Requeue submits the job of a dead letter as execution id, unless an earlier request has done so.
// It returns the dead letter, which names the execution. Its errors include [proto.ErrNotFound] and
// [proto.ErrNoJob].
func (a *Admission) Requeue(
	ctx context.Context, letter string, id proto.TraceID, requestID string,
) (*proto.DeadLetter, error) {
	key := ""
	found, err := a.Submitter.Requeue(ctx, letter, id, func(dead *proto.Job) (*proto.Job, error) {
		key = dead.Key
		job, err := a.renewJob(ctx, dead, id)
		if err != nil {
			return nil, err
		}
		job.RequestID = requestID
		return job, nil
	})
	return found, a.suggest(ctx, err, key)
}

// renewJob returns the job for re-running a dead job. The request, the sandbox and the webhook
// stay; the limits of the key's current plan apply, and its mounts narrow the job's. No connection
// waits for it, so it may be queued as long as an async job.
func (a *Admission) renewJob(ctx context.Context, dead *proto.Job, id proto.TraceID) (*proto.Job, error) {
	key, e, err := a.ValidKey(ctx, dead.Key)
	if err != nil {
		return nil, err
	}
	if err := a.checkPlan(ctx, &e, dead.Mode, dead.Timeout, dead.KillGrace); err != nil {
		return nil, err
	}
	if err := a.CheckQuota(ctx, dead.Org); err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	job := *dead
	job.TraceID, job.Prefer = id, ""
	job.CreatedAt, job.RunAt, job.QueueDeadline = now, time.Time{}, now.Add(a.QueueExpiry)
	setLimits(&job, &e)
	job.Bound = slices.Clone(dead.Bound)
	mounts, err := a.renewMounts(ctx, key, dead.Mounts)
	if err != nil {
		return nil, err
	}
	job.SetMounts(mounts)
	return &job, a.sealSecrets(ctx, &job, nil)
}
