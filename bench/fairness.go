package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	fairSlots    = 8
	fairBacklog  = 10_000
	fairEvery    = 100 * time.Millisecond
	fairSides    = 5 // multiple of the time for one side of a cell
	fairLong     = "sleep 0.3"
	fairShort    = "true"
	quickDivides = 20 // divides the backlog with --quick
)

// fairness is how long one key's executions wait for a slot while another key has a backlog.
type fairness struct {
	Backlog int      `json:"backlog"`
	Slots   int      `json:"slots"`
	Job     *summary `json:"job"`           // how long a job of the backlog holds a slot
	Orgs    *summary `json:"organisations"` // from accepted to claimed, for a key of another organisation
	Keys    *summary `json:"keys"`          // the same, for another key of the same organisation
}

// measureFairness queues a backlog under one key on its own server. Under another key, it submits a
// program every 100 ms.
func measureFairness(ctx context.Context, program, dir string, quick bool, d time.Duration) (f *fairness, err error) {
	f = &fairness{Backlog: fairBacklog, Slots: fairSlots}
	if quick {
		f.Backlog /= quickDivides
	}
	dir = filepath.Join(dir, "fairness")
	t, err := startServer(ctx, program, dir, fmt.Sprintf("BULLPEN_SLOTS=%d", fairSlots))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if err := t.ready(ctx); err != nil {
		return nil, err
	}
	keys := map[string]*api{}
	for name, org := range map[string]string{"loud": "loud", "same": "loud", "other": "other"} {
		if keys[name], err = t.newKey(ctx, name, org); err != nil {
			return nil, err
		}
	}
	job := request(proto.Bash, fairLong, programTimeout)
	loud := map[string]bool{}
	var mu sync.Mutex
	err = each(f.Backlog, func(int) error {
		id, err := keys["loud"].submit(ctx, job)
		mu.Lock()
		defer mu.Unlock()
		loud[id] = true
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("queue a backlog: %w", err)
	}
	if f.Orgs, err = keys["other"].waits(ctx, d); err == nil {
		f.Keys, err = keys["same"].waits(ctx, d)
	}
	if err != nil {
		return nil, err
	}
	lines, err := readLog(t.log, loud)
	if err != nil {
		return nil, err
	}
	var took []float64
	for _, l := range lines {
		if l.prepare != nil && l.run != nil {
			took = append(took, *l.prepare+*l.run)
		}
	}
	f.Job = summarise(took)
	return f, nil
}

// waits submits a short program every 100 ms. It returns how long each was queued.
func (a *api) waits(ctx context.Context, d time.Duration) (*summary, error) {
	var s series
	load.Open(ctx, load.Steady(1/fairEvery.Seconds(), d), 0, func(load.Due) {
		s.once(ctx, func(ctx context.Context) (sample, error) {
			result, id, err := a.execute(ctx, proto.Bash, fairShort, programTimeout)
			if err == nil && !result.Success {
				err = fmt.Errorf("execution %s did not succeed", id)
			}
			if err != nil {
				return sample{}, err
			}
			queued, err := a.queued(ctx, id)
			return sample{took: max(queued, 1), id: id}, err
		})
	})
	return s.summary(), ctx.Err()
}
