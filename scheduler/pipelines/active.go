package pipelines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	activePrefix = "active."

	// creationTimeout is when a run whose creation began has a state, or never gets one. It is longer
	// than the gateway tries.
	creationTimeout = 5 * time.Minute
)

// activeRun is an entry of the list of an organisation's runs that may not have ended. The list is
// changed by compare-and-set, so that no two gateways exceed the limit together. Runs that have
// ended leave it when it is full.
type activeRun struct {
	ID      string    `json:"id"`
	BeganAt time.Time `json:"began_at"` // its creation
}

func activeKey(org string) string { return activePrefix + org }

// reserve adds a run to the list of its organisation. It returns a [*proto.Rejection] if too many
// of the others have not ended.
func (p *Pipelines) reserve(ctx context.Context, run *proto.Pipeline) error {
	return p.updateActive(ctx, run.Org, func(list []activeRun) ([]activeRun, error) {
		if len(list) >= proto.MaxActivePipelines {
			var err error
			if list, err = p.unended(ctx, run.Org, list); err != nil {
				return nil, err
			}
		}
		if len(list) >= proto.MaxActivePipelines {
			return nil, &proto.Rejection{Reason: proto.RejectedPipelines, Limit: proto.MaxActivePipelines, Used: len(list)}
		}
		return append(list, activeRun{run.ID, time.Now().UTC()}), nil
	})
}

// release removes a run that will not start from the list of its organisation.
func (p *Pipelines) release(ctx context.Context, org, id string) error {
	return p.updateActive(ctx, org, func(list []activeRun) ([]activeRun, error) {
		return slices.DeleteFunc(list, func(x activeRun) bool { return x.ID == id }), nil
	})
}

// unended returns the runs of a list that have not ended, and those that are being created.
func (p *Pipelines) unended(ctx context.Context, org string, list []activeRun) (rest []activeRun, err error) {
	for _, x := range list {
		s, err := p.Get(ctx, org, x.ID)
		switch {
		case errors.Is(err, proto.ErrNotFound):
			if time.Since(x.BeganAt) < creationTimeout {
				rest = append(rest, x)
			}
		case err != nil:
			return nil, err
		case s.Status == proto.PipelineRunning:
			rest = append(rest, x)
		}
	}
	return rest, nil
}

// updateActive stores what change makes of the list of an organisation.
func (p *Pipelines) updateActive(ctx context.Context, org string, change func([]activeRun) ([]activeRun, error)) error {
	key := activeKey(org)
	return store.Update(ctx, func() error {
		var list []activeRun
		var revision uint64
		e, err := p.store.Pipelines.Get(ctx, key)
		switch {
		case store.IsNotFound(err):
		case err != nil:
			return fmt.Errorf("read the active runs of %s: %w", org, err)
		default:
			revision = e.Revision()
			if err := json.Unmarshal(e.Value(), &list); err != nil {
				return fmt.Errorf("decode the active runs of %s: %w", org, err)
			}
		}
		if list, err = change(list); err != nil {
			return err
		}
		body, err := json.Marshal(list)
		if err != nil {
			return fmt.Errorf("encode the active runs of %s: %w", org, err)
		}
		if _, err := p.store.Pipelines.Update(ctx, key, body, revision); err != nil {
			return fmt.Errorf("store the active runs of %s: %w", org, err)
		}
		return nil
	})
}

// orphans returns the runs whose creation began long ago and left no state.
func (p *Pipelines) orphans(ctx context.Context) (list []*proto.Pipeline, err error) {
	keys, err := p.store.Pipelines.ListKeysFiltered(ctx, definitionPrefix+"*.*")
	if err != nil {
		return nil, fmt.Errorf("list the definitions of runs: %w", err)
	}
	defer keys.Stop() //nolint:errcheck // it ends with the connection at the latest
	for key := range keys.Keys() {
		org, id, _ := strings.Cut(strings.TrimPrefix(key, definitionPrefix), ".")
		if p.states.Get(stateKey(org, id)) != nil {
			continue
		}
		run, err := p.Definition(ctx, org, id)
		if errors.Is(err, proto.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if time.Since(run.CreatedAt) < creationTimeout {
			continue
		}
		if _, err := p.Get(ctx, org, id); errors.Is(err, proto.ErrNotFound) {
			list = append(list, run)
		}
	}
	return list, nil
}
