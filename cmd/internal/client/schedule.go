package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Schedule is a schedule in a list.
type Schedule = api.Schedule

// WholeSchedule is a schedule with what it executes and its history.
type WholeSchedule = api.WholeSchedule

// ScheduleRequest is the part of a schedule that a request sets.
type ScheduleRequest = api.ScheduleRequest

const schedulesPath = "/v1/schedules"

func schedulePath(id string) string { return schedulesPath + "/" + url.PathEscape(id) }

// CreateSchedule creates a schedule and returns it.
func (c *Client) CreateSchedule(ctx context.Context, r *ScheduleRequest) (*WholeSchedule, json.RawMessage, error) {
	return get[WholeSchedule](ctx, c, call{method: http.MethodPost, path: schedulesPath, body: r})
}

// Schedules lists all schedules of the key's organisation.
func (c *Client) Schedules(ctx context.Context) ([]Schedule, error) {
	return pages(ctx, c, schedulesPath, func(p *api.Schedules) ([]Schedule, *string) { return p.Schedules, p.NextCursor })
}

// Schedule returns a schedule, and the answer's bytes.
func (c *Client) Schedule(ctx context.Context, id string) (*WholeSchedule, json.RawMessage, error) {
	return get[WholeSchedule](ctx, c, call{method: http.MethodGet, path: schedulePath(id), resend: true})
}

// ChangeSchedule changes a schedule and returns it.
func (c *Client) ChangeSchedule(ctx context.Context, id string, r *ScheduleRequest) (*WholeSchedule, json.RawMessage, error) {
	return get[WholeSchedule](ctx, c, call{method: http.MethodPatch, path: schedulePath(id), body: r, resend: true})
}

// RunSchedule starts an execution of a schedule now.
func (c *Client) RunSchedule(ctx context.Context, id string) (*Accepted, error) {
	a, _, err := get[Accepted](ctx, c, call{method: http.MethodPost, path: schedulePath(id) + "/run"})
	return a, err
}

// RemoveSchedule removes a schedule.
func (c *Client) RemoveSchedule(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: schedulePath(id)})
}
