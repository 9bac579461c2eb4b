// Package pipelines runs pipelines.
//
// A run has two entries in its bucket: its definition, which never changes but for its secrets,
// which are removed at the end, and its state. The leading process reads the executions of the
// cells that run, decides what follows, and stores the state by compare-and-set: first that a cell
// runs, then the id of its execution. The execution is submitted between the two under an
// idempotency key made of the run and the cell. So a process that takes over submits nothing twice,
// at whatever point the other one died.
//
// All steps of a run share a thread. Cells with a workspace of their own have a fork of it.
// Artifacts are files of these threads.
package pipelines

import (
	"cmp"
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
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	definitionPrefix = "def."
	statePrefix      = "run."

	maxDefinition = 768 << 10 // bytes; it must fit into a message
)

// Pipelines stores runs. Run must be running for changes to be seen.
type Pipelines struct {
	store  *store.Store
	states *store.Cache[proto.PipelineState]
}

// Open reads the states of all runs.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Pipelines, error) {
	states, err := store.OpenCache(ctx, store.CacheConfig[proto.PipelineState]{
		Store: st, Bucket: st.Pipelines, Keys: statePrefix + "*.*", Name: "states of pipelines", Decode: store.DecodeJSON[proto.PipelineState]("the state of run"), DropMalformed: true, Log: log,
	})
	return &Pipelines{st, states}, err
}

// Run applies changes by other processes until ctx is done.
func (p *Pipelines) Run(ctx context.Context) error { return p.states.Run(ctx) }

func definitionKey(org, id string) string { return definitionPrefix + org + "." + id }
func stateKey(org, id string) string      { return statePrefix + org + "." + id }

// Parse reads the file of a pipeline. Errors are [*proto.FieldError].
func (*Pipelines) Parse(file string) (*proto.Pipeline, error) { return spec.Parse(file) }

// Schema returns the JSON schema of the files.
func (*Pipelines) Schema() []byte { return spec.Schema }

// Create stores a new run and returns its state. prepare is called before the run can start. After
// an error of prepare nothing of the run remains but what prepare made. Create returns a
// [*proto.Rejection] if the organisation has [proto.MaxActivePipelines], and a [*proto.FieldError]
// if the run is too large.
func (p *Pipelines) Create(ctx context.Context, run *proto.Pipeline, prepare func(context.Context) error) (*proto.PipelineState, error) {
	body, err := json.Marshal(run)
	if err != nil {
		return nil, fmt.Errorf("encode run %s: %w", run.ID, err)
	}
	if len(body) > maxDefinition {
		return nil, proto.FieldErrorf("file", "makes a run of %d bytes with its secrets, as JSON; at most %d are possible", len(body), maxDefinition)
	}
	if err := p.reserve(ctx, run); err != nil {
		return nil, err
	}
	// A process that dies from here on leaves a definition without a state, which is swept.
	if _, err := p.store.Pipelines.Create(ctx, definitionKey(run.Org, run.ID), body); err != nil {
		return nil, fmt.Errorf("store run %s: %w", run.ID, err)
	}
	if err := prepare(ctx); err != nil {
		if errUndo := errors.Join(p.removeDefinition(ctx, run.Org, run.ID), p.release(ctx, run.Org, run.ID)); errUndo != nil {
			return nil, fmt.Errorf("%w (and the run is not removed: %w)", err, errUndo)
		}
		return nil, err
	}
	fault.Here(fault.AfterRunBeforeState)
	state := newState(run)
	return state, p.states.Create(ctx, stateKey(run.Org, run.ID), state)
}

// List returns the runs of an organisation, the newest first.
func (p *Pipelines) List(org string) []proto.PipelineState {
	list := []proto.PipelineState{}
	for _, s := range p.states.All() {
		if s.Org == org {
			list = append(list, *s)
		}
	}
	slices.SortFunc(list, func(a, b proto.PipelineState) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return list
}

// Get returns the state of a run, or [proto.ErrNotFound].
func (p *Pipelines) Get(ctx context.Context, org, id string) (*proto.PipelineState, error) {
	s, _, err := p.states.Read(ctx, stateKey(org, id))
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
		case old == nil:
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

func (p *Pipelines) removeDefinition(ctx context.Context, org, id string) error {
	if err := p.store.Pipelines.Purge(ctx, definitionKey(org, id), jetstream.PurgeTTL(store.WebhookMarkerTTL)); err != nil {
		return fmt.Errorf("remove run %s: %w", id, err)
	}
	return nil
}

// remove removes the entries of a run.
func (p *Pipelines) remove(ctx context.Context, s *proto.PipelineState) error {
	if err := p.removeDefinition(ctx, s.Org, s.ID); err != nil {
		return err
	}
	_, err := p.states.Remove(ctx, stateKey(s.Org, s.ID), nil, jetstream.PurgeTTL(store.WebhookMarkerTTL))
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// clone returns a copy of a state whose cells may be changed.
func clone(s *proto.PipelineState) *proto.PipelineState {
	c := *s
	c.Cells = slices.Clone(s.Cells)
	return &c
}

// late reports whether the retention of a run is over.
func late(s *proto.PipelineState, retention time.Duration) bool {
	return s.Status != proto.PipelineRunning && time.Since(s.EndedAt) > retention
}
