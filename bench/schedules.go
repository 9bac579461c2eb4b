package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	dueSchedules = 10_000
	// dueOrgs share the schedules. The first has more than half of them, the others the rest.
	dueOrgs = 10
	// scheduleCreation is about how long the creation of a schedule takes.
	scheduleCreation = 5 * time.Millisecond
	// readPause is the time between two looks at an execution that has not started.
	readPause = 100 * time.Millisecond
)

// schedules is the outcome of many schedules with the same tick.
type schedules struct {
	Schedules int      `json:"schedules"`
	Orgs      int      `json:"organisations"`
	Large     int      `json:"schedules_of_the_largest_organisation"`
	Accepted  *summary `json:"accepted"`       // of all executions, after the tick, milliseconds
	Small     *summary `json:"accepted_small"` // of the executions of the small organisations
	Started   *summary `json:"started"`        // of all programs
	SmallRuns *summary `json:"started_small"`  // of the programs of the small organisations
}

// scheduled is a schedule of the measurement.
type scheduled struct {
	*api
	id    string
	small bool
}

// measureSchedules creates schedules that have one tick together, on its own server.
func measureSchedules(ctx context.Context, program, dir string, quick bool) (s *schedules, err error) {
	s = &schedules{Schedules: dueSchedules, Orgs: dueOrgs}
	if quick {
		s.Schedules /= quickDivides
	}
	s.Large = s.Schedules * (dueOrgs + 1) / (2 * dueOrgs)
	dir = filepath.Join(dir, "schedules")
	t, err := startServer(ctx, program, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if err := t.ready(ctx); err != nil {
		return nil, err
	}
	tick := time.Now().Add(time.Duration(s.Schedules)*scheduleCreation + 10*time.Second).Truncate(
		time.Second).UTC() //nolint:mnd // for a slow machine
	all, err := s.create(ctx, t, tick)
	if err != nil {
		return nil, fmt.Errorf("create schedules: %w", err)
	}
	if late := time.Since(tick); late > 0 {
		return nil, fmt.Errorf("the schedules were created %s after their tick: this machine is too slow", late)
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(time.Until(tick)):
	}
	return s, s.read(ctx, all, tick)
}

// create creates the schedules, those of the large organisation first.
func (s *schedules) create(ctx context.Context, t *target, tick time.Time) ([]scheduled, error) {
	all := make([]scheduled, s.Schedules)
	var keys []*api
	for org := range dueOrgs {
		key, err := t.newKey(ctx, fmt.Sprintf("key %d", org), fmt.Sprintf("due%d", org))
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	body, err := json.Marshal(map[string]any{
		"name": "due", "cron": fmt.Sprintf("%d %d %d %d %d *", tick.Second(), tick.Minute(), tick.Hour(), tick.Day(),
			tick.Month()),
		"request": asked{Language: proto.Bash, Code: fairShort, Timeout: programTimeout},
	})
	if err != nil {
		return nil, err
	}
	return all, each(len(all), func(i int) error {
		key := keys[0]
		if i >= s.Large {
			key = keys[1+i%(dueOrgs-1)]
		}
		resp, err := key.do(ctx, http.MethodPost, "/v1/schedules", "application/json", body)
		if err != nil {
			return err
		}
		var made struct {
			ID string `json:"id"`
		}
		err = json.NewDecoder(resp.Body).Decode(&made)
		all[i] = scheduled{key, made.ID, i >= s.Large}
		return errors.Join(err, resp.Body.Close())
	})
}

// read waits until all programs have started, and reads when.
func (s *schedules) read(ctx context.Context, all []scheduled, tick time.Time) error {
	var mu sync.Mutex
	var accepted, small, started, smallRuns []float64
	slices.Reverse(all) // wait for the last ones first, so that few are read twice
	err := each(len(all), func(i int) error {
		e, err := all[i].started(ctx)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		at := float64(e.CreatedAt.Sub(tick)) / float64(time.Millisecond)
		accepted, started = append(accepted, at), append(started, at+e.QueuedMS)
		if all[i].small {
			small, smallRuns = append(small, at), append(smallRuns, at+e.QueuedMS)
		}
		return nil
	})
	s.Accepted, s.Small, s.Started, s.SmallRuns = summarise(accepted), summarise(small), summarise(started),
		summarise(smallRuns)
	return err
}

// execution is the part of an execution that the measurement uses.
type execution struct {
	CreatedAt time.Time `json:"created_at"`
	QueuedMS  float64   `json:"queued_ms"`
	Status    string    `json:"status"`
}

// started waits until the only execution of a schedule has started.
func (s *scheduled) started(ctx context.Context) (*execution, error) {
	var whole struct {
		Runs []struct {
			TraceID *string `json:"trace_id"`
			Reason  *string `json:"reason"`
		} `json:"runs"`
	}
	for {
		if err := s.decode(ctx, "/v1/schedules/"+s.id, &whole); err != nil {
			return nil, err
		}
		if len(whole.Runs) > 0 && whole.Runs[0].TraceID == nil {
			return nil, fmt.Errorf("schedule %s: %s", s.id, *whole.Runs[0].Reason)
		}
		if len(whole.Runs) > 1 {
			return nil, fmt.Errorf("schedule %s: %d runs for one tick", s.id, len(whole.Runs))
		}
		if len(whole.Runs) == 1 {
			e := new(execution)
			if err := s.decode(ctx, "/v1/executions/"+*whole.Runs[0].TraceID, e); err != nil ||
				e.Status != string(proto.StatusQueued) {
				return e, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(readPause):
		}
	}
}

func (a *api) decode(ctx context.Context, path string, to any) error {
	body, err := a.get(ctx, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, to); err != nil {
		return fmt.Errorf("the answer of %s is not understood: %w", path, err)
	}
	return nil
}

// figures returns the figures of schedules. s is nil if they were not measured.
func (s *schedules) figures() []figure {
	accepted := atMost("10,000 schedules with one tick: all executions accepted", targetDueS, "s")
	small := atMost("those of the small organisations, relative to all", targetDueSmall, "")
	if s == nil {
		const why = "needs a server that is started here"
		return []figure{accepted.unknown(why), small.unknown(why)}
	}
	last := s.Accepted.Max / 1000
	share := s.Small.P50 / s.Accepted.P50
	return []figure{
		accepted.is(last, last <= targetDueS,
			fmt.Sprintf("%d schedules; the last program started after %.1f s", s.Schedules, s.Started.Max/1000)),
		small.is(share, share <= targetDueSmall, fmt.Sprintf("median %.1f s, of all %.1f s; an organisation of %d has %d",
			s.Small.P50/1000, s.Accepted.P50/1000, s.Orgs, s.Large)),
	}
}
