package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"time"

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
	job, err := request(proto.Bash, fairLong, programTimeout)
	if err != nil {
		return nil, err
	}
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

// waits submits a short program every 100 ms. It returns how long each was queued, in milliseconds.
func (a *api) waits(ctx context.Context, d time.Duration) (*summary, error) {
	var mu sync.Mutex
	var waited []float64
	sum := &summary{}
	tick := time.NewTicker(fairEvery)
	defer tick.Stop()
	var asked sync.WaitGroup
	for began := time.Now(); time.Since(began) < d; {
		asked.Go(func() {
			result, id, err := a.execute(ctx, proto.Bash, fairShort, programTimeout)
			if err == nil && !result.Success {
				err = fmt.Errorf("execution %s did not succeed", id)
			}
			queued := 0.0
			if err == nil {
				queued, err = a.queued(ctx, id)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				sum.Errors++
				sum.FirstError = err.Error()
				return
			}
			waited = append(waited, queued)
		})
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
	asked.Wait()
	s := summarise(waited)
	s.Errors, s.FirstError = sum.Errors, sum.FirstError
	return s, nil
}

// queued returns how long an execution was queued, in milliseconds.
func (a *api) queued(ctx context.Context, id string) (float64, error) {
	body, err := a.get(ctx, "/v1/executions/"+id)
	if err != nil {
		return 0, err
	}
	var e struct {
		QueuedMS float64 `json:"queued_ms"`
	}
	if err := json.Unmarshal(body, &e); err != nil {
		return 0, fmt.Errorf("execution %s is not understood: %w", id, err)
	}
	return e.QueuedMS, nil
}

// newKey creates a key and returns a client that uses it.
func (a *api) newKey(ctx context.Context, name, org string) (*api, error) {
	body, err := json.Marshal(map[string]string{"name": name, "org": org, "plan": "enterprise"})
	if err != nil {
		return nil, err
	}
	resp, err := a.do(ctx, http.MethodPost, "/v1/admin/keys", "application/json", body)
	if err != nil {
		return nil, err
	}
	var made struct {
		Key string `json:"key"`
	}
	err = json.NewDecoder(resp.Body).Decode(&made)
	return &api{a.url, made.Key, a.http}, errors.Join(err, resp.Body.Close())
}
