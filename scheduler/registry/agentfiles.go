package registry

import (
	"context"
	"log/slog"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// AgentFiles stores the files of organisations' agents, without their content. Run must be running
// for changes to be seen.
type AgentFiles struct{ cache *store.Cache[proto.AgentFile] }

// OpenAgentFiles reads all files.
func OpenAgentFiles(ctx context.Context, st *store.Store, log *slog.Logger) (*AgentFiles, error) {
	cache, err := store.OpenCache(ctx, store.CacheConfig[proto.AgentFile]{
		Store: st, Bucket: st.AgentFiles, Keys: "*.*", Name: "files of agents", Decode: store.DecodeJSON[proto.AgentFile]("file of an agent"), Log: log,
	})
	return &AgentFiles{cache}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *AgentFiles) Run(ctx context.Context) error { return l.cache.Run(ctx) }

func agentFileKey(org, id string) string { return org + "." + id }

// Create stores a new file. It returns a [*proto.QuotaError] if the organisation has too many.
// Files that are created at the same time may exceed the limit by a few.
func (l *AgentFiles) Create(ctx context.Context, f proto.AgentFile) error {
	_, err := l.cache.Update(ctx, agentFileKey(f.Org, f.ID), func(old *proto.AgentFile) (*proto.AgentFile, error) {
		switch {
		case old != nil:
			return nil, proto.ErrExists
		case len(l.List(f.Org)) >= proto.MaxAgentFiles:
			return nil, &proto.QuotaError{What: "files of agents", Limit: proto.MaxAgentFiles}
		}
		return &f, nil
	})
	return err
}

// Get returns a file, or [proto.ErrNotFound].
func (l *AgentFiles) Get(ctx context.Context, org, id string) (proto.AgentFile, error) {
	if f := l.cache.Get(agentFileKey(org, id)); f != nil {
		return *f, nil
	}
	f, _, err := l.cache.Read(ctx, agentFileKey(org, id)) // another gateway may have created it
	if err != nil {
		return proto.AgentFile{}, err
	}
	return *f, nil
}

// List returns the files of an organisation, the newest first.
func (l *AgentFiles) List(org string) []proto.AgentFile {
	list := []proto.AgentFile{}
	for _, f := range l.cache.All() {
		if f.Org == org {
			list = append(list, *f)
		}
	}
	slices.SortFunc(list, func(a, b proto.AgentFile) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return list
}

// Remove removes a file, or returns [proto.ErrNotFound].
func (l *AgentFiles) Remove(ctx context.Context, org, id string) error {
	_, err := l.cache.Remove(ctx, agentFileKey(org, id), nil, jetstream.PurgeTTL(store.WebhookMarkerTTL))
	return err
}
