package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// scheduleWait is how long the start of a scheduled execution waits for another process starting
// the same one.
const scheduleWait = 5 * time.Second

// CheckScheduled rejects a schedule whose execution would be rejected now. caller has written its
// request: only a global administrator may choose a profile or an image as one, also if the
// schedule's key is another global administrator's.
func (a *Admission) CheckScheduled(ctx context.Context, schedule *proto.Schedule, caller *proto.Key) error {
	key, e, err := a.ValidKey(ctx, schedule.Key)
	if err != nil {
		return err
	}
	with := *key
	with.Global = key.Global && caller.GlobalAdmin()
	_, err = a.scheduledJob(ctx, schedule, proto.Caller{Key: &with, Entitlement: e}, proto.NewTraceID())
	return err
}

// StartScheduled starts the execution of a schedule's tick, unless it was started before, and
// returns its id. refused is the reason if it will never start, otherwise empty. After an error it
// may have started.
func (a *Admission) StartScheduled(
	ctx context.Context, schedule *proto.Schedule, tick time.Time,
) (id proto.TraceID, refused string, err error) {
	id, err = a.submitScheduled(ctx, schedule, tickName(tick))
	switch {
	case err == nil:
		return id, "", nil
	case missesTick(err):
		return "", api.NewError(err).Message, nil
	default:
		refused, err = settle(err)
		return "", refused, err
	}
}

// missesTick reports whether a temporary refusal makes a tick fail: a tick does not start late
// because a limit was reached, or because another execution had its thread.
func missesTick(err error) bool {
	if rejection, ok := errors.AsType[*proto.Rejection](err); ok {
		switch rejection.Reason {
		case proto.RejectedConcurrency, proto.RejectedKeyConcurrency, proto.RejectedQueueFull:
			return true
		default:
			return false
		}
	}
	_, busy := errors.AsType[*proto.BusyError](err)
	_, removing := errors.AsType[*proto.RemovingError](err)
	return busy || removing
}

// StartNow starts an execution of a schedule apart from its ticks.
func (a *Admission) StartNow(ctx context.Context, schedule *proto.Schedule, now time.Time) (proto.TraceID, error) {
	return a.submitScheduled(ctx, schedule, fmt.Sprint("now ", now.UnixNano()))
}

// StartedTick returns the execution that was started for a schedule's tick, or [proto.ErrNotFound].
func (a *Admission) StartedTick(
	ctx context.Context, schedule *proto.Schedule, tick time.Time,
) (proto.TraceID, error) {
	return a.Submitter.Accepted(ctx, schedule.Org, schedule.Key, scheduledName(schedule, tickName(tick)))
}

// tickName names the execution of a tick among those of its schedule.
func tickName(tick time.Time) string { return fmt.Sprint("tick ", tick.Unix()) }

// scheduledName returns the idempotency key of an execution of a schedule.
func scheduledName(schedule *proto.Schedule, name string) string { return schedule.ID + " " + name }

// FailedTick returns the webhook of a refused tick, nil if neither the schedule's request nor its
// key has a URL.
func (a *Admission) FailedTick(schedule *proto.Schedule, run proto.ScheduleRun) (*proto.Delivery, error) {
	request, err := scheduledRequest(schedule)
	if err != nil {
		return nil, err
	}
	url := request.WebhookURL
	if _, ok := a.Principal(schedule.Key); ok && url == "" {
		url = a.Webhooks.Webhook(schedule.Org, schedule.Key).URL
	}
	if url == "" {
		return nil, nil
	}
	return schedule.NewDelivery(url, run)
}

// submitScheduled submits an execution of a schedule. One with the same name is the same execution.
func (a *Admission) submitScheduled(
	ctx context.Context, schedule *proto.Schedule, name string,
) (_ proto.TraceID, err error) {
	id := proto.NewTraceID()
	ctx, span := a.startSpan(ctx, id, "schedule", schedule.Org, schedule.Key)
	defer func() { endSpan(span, err) }()
	key, e, err := a.ValidKey(ctx, schedule.Key)
	if err != nil {
		return "", err
	}
	job, err := a.scheduledJob(ctx, schedule, proto.Caller{Key: key, Entitlement: e}, id)
	if err != nil {
		return "", err
	}
	return a.Submit(ctx, &proto.Submission{
		Job: job, IdempotencyKey: scheduledName(schedule, name), BodyHash: schedule.ID,
		WaitUntil: time.Now().Add(scheduleWait),
	})
}

// scheduledJob returns the job of a schedule's execution, under the schedule's own key.
func (a *Admission) scheduledJob(
	ctx context.Context, schedule *proto.Schedule, c proto.Caller, id proto.TraceID,
) (*proto.Job, error) {
	request, err := scheduledRequest(schedule)
	if err != nil {
		return nil, err
	}
	job, err := a.Job(ctx, request, c, proto.ModeAsync, id, 0)
	if err != nil {
		return nil, err
	}
	job.ScheduleID = schedule.ID
	return job, nil
}

func scheduledRequest(schedule *proto.Schedule) (*api.ExecuteRequest, error) {
	request := new(api.ExecuteRequest)
	if err := json.Unmarshal(schedule.Request, request); err != nil {
		return nil, fmt.Errorf("decode the request of schedule %s: %w", schedule.ID, err)
	}
	return request, nil
}
