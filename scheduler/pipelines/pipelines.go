// Package pipelines runs pipelines.
//
// A run has two entries in its bucket: its state and its definition. The definition is immutable,
// except that its secrets are removed at the end. The state is created first and removed last, so
// that nothing else remains without it. The leading process reads the executions of the running
// cells, decides what follows, and stores the state by compare-and-set: first that a cell runs,
// then the id of its execution. In between it submits the execution under an idempotency key made
// of the run and the cell. So a process that takes over submits nothing twice, wherever its
// predecessor died.
//
// All steps of a run share a thread. Cells with a workspace of their own have a fork of it.
// Artifacts are files of these threads.
package pipelines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	definitionPrefix = "def."
	statePrefix      = "run."

	maxDefinition = 768 << 10 // bytes; it must fit into a message

	// creationTimeout is the age at which a run is complete or never will be. It is longer than the
	// gateway tries.
	creationTimeout = 5 * time.Minute
)

// Pipelines stores runs. Run must be running for changes to be seen.
type Pipelines struct {
	store  *store.Store
	states *store.Collection[proto.PipelineState]
	queue  engine.Queue[entry]
}

// Open reads the states of all runs.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Pipelines, error) {
	p := &Pipelines{store: st}
	var err error
	p.states, err = store.OpenCollection(ctx, store.CollectionConfig[proto.PipelineState]{
		Store: st, Bucket: st.Pipelines, Keys: statePrefix + "*.*", Name: "states of pipelines",
		Kind: proto.ChangedPipelines, DropMalformed: true, Log: log,
		Order: func(s *proto.PipelineState) string { return store.NewestFirst(s.CreatedAt) },
		Clone: clone, Check: checkActive, OnChange: engine.Watch(&p.queue, statePrefix, (*entry).set),
	})
	return p, err
}

// checkActive returns a [*proto.Rejection] if too many runs of an organisation have not ended.
func checkActive(_ *proto.PipelineState, others []*proto.PipelineState) error {
	active := 0
	for _, s := range others {
		if s.Status == proto.PipelineRunning {
			active++
		}
	}
	if active >= proto.MaxActivePipelines {
		return &proto.Rejection{Reason: proto.RejectedPipelines, Limit: proto.MaxActivePipelines, Used: active}
	}
	return nil
}

// Run applies changes by other processes until ctx is done.
func (p *Pipelines) Run(ctx context.Context) error { return p.states.Run(ctx) }

func definitionKey(org, id string) string { return definitionPrefix + org + "." + id }
func stateKey(org, id string) string      { return statePrefix + org + "." + id }

// Parse reads the file of a pipeline. Errors are [*proto.FieldError].
func (*Pipelines) Parse(file string) (*proto.Pipeline, error) { return spec.Parse(file) }

// Schema returns the JSON schema of the files.
func (*Pipelines) Schema() []byte { return spec.Schema }

// Create stores a new run and returns its state. prepare is called before the run can start. If it
// fails, only its own side effects remain. Create returns a [*proto.Rejection] if the organisation
// has [proto.MaxActivePipelines], and a [*proto.FieldError] if the run is too large.
func (p *Pipelines) Create(
	ctx context.Context, run *proto.Pipeline, prepare func(context.Context) error,
) (*proto.PipelineState, error) {
	body, err := json.Marshal(run)
	if err != nil {
		return nil, fmt.Errorf("encode run %s: %w", run.ID, err)
	}
	if len(body) > maxDefinition {
		return nil, proto.FieldErrorf("file", "makes a run of %d bytes with its secrets, as JSON; at most %d are possible",
			len(body), maxDefinition)
	}
	// A process that dies from here on leaves an unfinished run, which the leader removes.
	state, key := newState(run), stateKey(run.Org, run.ID)
	state.Creating = true
	if err := p.states.Create(ctx, key, state); err != nil {
		return nil, err
	}
	if _, err = p.store.Pipelines.Create(ctx, definitionKey(run.Org, run.ID), body); err == nil {
		err = prepare(ctx)
	}
	if err != nil {
		if errUndo := p.remove(ctx, state); errUndo != nil {
			return nil, fmt.Errorf("%w (and run %s is not removed: %w)", err, run.ID, errUndo)
		}
		return nil, err
	}
	fault.Here(fault.AfterRunBeforeState)
	created, err := p.states.Change(ctx, key, func(s *proto.PipelineState) error {
		s.Creating = false
		return nil
	})
	return &created, err
}

// List returns the runs of an organisation, the newest first.
func (p *Pipelines) List(org string) []proto.PipelineState {
	list, _ := p.Page(org, "", -1, nil)
	return list
}

// Page returns a page of List, see [store.Collection.Page].
func (p *Pipelines) Page(
	org, after string, limit int, keep func(*proto.PipelineState) bool,
) (page []proto.PipelineState, next string) {
	return p.states.Page(org, after, limit, func(s *proto.PipelineState) bool {
		return !s.Creating && (keep == nil || keep(s))
	})
}

// Get returns the state of a run, or [proto.ErrNotFound].
func (p *Pipelines) Get(ctx context.Context, org, id string) (*proto.PipelineState, error) {
	s, _, err := p.states.Read(ctx, stateKey(org, id))
	if err == nil && s.Creating {
		return nil, fmt.Errorf("run %s is being created: %w", id, proto.ErrNotFound)
	}
	return s, err
}

// Definition returns the definition of a run, or [proto.ErrNotFound].
func (p *Pipelines) Definition(ctx context.Context, org, id string) (*proto.Pipeline, error) {
	e, err := p.store.Pipelines.Get(ctx, definitionKey(org, id))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, proto.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read run %s: %w", id, err)
	}
	run := new(proto.Pipeline)
	if err := json.Unmarshal(e.Value(), run); err != nil {
		return nil, fmt.Errorf("decode run %s: %w", id, err)
	}
	return run, nil
}

// Cancel asks for the end of a run and returns its state, or [proto.ErrNotFound]. A run that has
// ended stays as it is.
func (p *Pipelines) Cancel(ctx context.Context, org, id string) (*proto.PipelineState, error) {
	return p.states.Update(ctx, stateKey(org, id), func(old *proto.PipelineState) (*proto.PipelineState, error) {
		switch {
		case old == nil || old.Creating:
			return nil, fmt.Errorf("run %s: %w", id, proto.ErrNotFound)
		case old.Cancelling || old.Status != proto.PipelineRunning:
			return old, nil
		}
		s := *old
		s.Cancelling = true
		return &s, nil
	})
}

// forgetSecrets removes the secrets of a run that has ended from its definition.
func (p *Pipelines) forgetSecrets(ctx context.Context, s *proto.PipelineState) error {
	run, err := p.Definition(ctx, s.Org, s.ID)
	if err != nil && !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	if err == nil && run.Secrets != nil {
		run.Secrets = nil
		body, err := json.Marshal(run)
		if err != nil {
			return fmt.Errorf("encode run %s: %w", s.ID, err)
		}
		if _, err := p.store.Pipelines.Put(ctx, definitionKey(s.Org, s.ID), body); err != nil {
			return fmt.Errorf("remove the secrets of run %s: %w", s.ID, err)
		}
	}
	_, err = p.states.Update(ctx, stateKey(s.Org, s.ID), func(old *proto.PipelineState) (*proto.PipelineState, error) {
		if old == nil || !old.HasSecrets {
			return nil, nil
		}
		without := *old
		without.HasSecrets = false
		return &without, nil
	})
	return err
}

// remove removes the entries of a run.
func (p *Pipelines) remove(ctx context.Context, s *proto.PipelineState) error {
	if err := p.store.Pipelines.Purge(ctx, definitionKey(s.Org, s.ID)); err != nil {
		return fmt.Errorf("remove run %s: %w", s.ID, err)
	}
	_, err := p.states.Remove(ctx, stateKey(s.Org, s.ID), nil)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// clone returns a copy of a state with mutable cells.
func clone(s *proto.PipelineState) *proto.PipelineState {
	c := *s
	c.Cells = slices.Clone(s.Cells)
	return &c
}
