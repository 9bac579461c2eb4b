package app

import (
	"context"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/admission"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/queue"
)

// scheduled implements [schedules.Executions].
type scheduled struct {
	*admission.Admission
	*queue.Queue
	deliveries *deliveries.Store
}

// ReportFailed implements [schedules.Executions].
func (s scheduled) ReportFailed(ctx context.Context, schedule *proto.Schedule, run proto.ScheduleRun) error {
	delivery, err := s.FailedTick(schedule, run)
	if err != nil || delivery == nil {
		return err
	}
	return s.deliveries.Create(ctx, delivery)
}
