package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

const schedulesPath = "/v1/schedules"

func schedulePath(id string) string { return schedulesPath + "/" + url.PathEscape(id) }

// CreateSchedule creates a schedule and returns it. It is not resent when the connection breaks,
// because that could create two.
func (c *Client) CreateSchedule(ctx context.Context, r *api.ScheduleRequest) (*api.WholeSchedule, error) {
	return get[api.WholeSchedule](ctx, c, call{method: http.MethodPost, path: schedulesPath, body: r})
}

// Schedules returns the schedules of the key's organisation by id.
func (c *Client) Schedules(ctx context.Context) iter.Seq2[api.Schedule, error] {
	return pages[api.Schedule](ctx, c, schedulesPath, "schedules", largestPages())
}

// PreviewSchedule returns the first count ticks after a time of a schedule with r's timing. A zero
// time means now. It creates nothing.
func (c *Client) PreviewSchedule(ctx context.Context, r *api.ScheduleRequest, from time.Time, count int,
) (*api.SchedulePreview, error) {
	query := url.Values{"count": {strconv.Itoa(count)}}
	if r.Cron != nil {
		query.Set("cron", *r.Cron)
	}
	if r.Every != nil {
		query.Set("every", strconv.FormatFloat(time.Duration(*r.Every).Seconds(), 'f', -1, 64))
	}
	if r.TimeZone != nil {
		query.Set("time_zone", *r.TimeZone)
	}
	if !from.IsZero() {
		query.Set("from", from.Format(time.RFC3339Nano))
	}
	return read[api.SchedulePreview](ctx, c, schedulesPath+"/preview?"+query.Encode())
}

// Schedule returns a schedule, its next ticks and its last ones.
func (c *Client) Schedule(ctx context.Context, id string) (*api.WholeSchedule, error) {
	return read[api.WholeSchedule](ctx, c, schedulePath(id))
}

// ChangeSchedule changes the fields of a schedule that are not nil in r, and returns it.
func (c *Client) ChangeSchedule(ctx context.Context, id string, r *api.ScheduleRequest) (*api.WholeSchedule, error) {
	return get[api.WholeSchedule](ctx, c, call{method: http.MethodPatch, path: schedulePath(id), body: r, resend: true})
}

// RunSchedule starts an execution of a schedule now. It is not resent when the connection breaks,
// because that could start two.
func (c *Client) RunSchedule(ctx context.Context, id string) (*api.Accepted, error) {
	return get[api.Accepted](ctx, c, call{method: http.MethodPost, path: schedulePath(id) + "/run"})
}

// RemoveSchedule removes a schedule. Executions that have started continue.
func (c *Client) RemoveSchedule(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: schedulePath(id)})
}
