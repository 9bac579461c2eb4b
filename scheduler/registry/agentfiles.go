package registry

import (
	"context"
	"errors"
	"log/slog"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// AgentFiles stores the files of organisations' agents, without their content. Run must be running
// for changes to be seen.
type AgentFiles struct {
	// Limit is the number of files of an organisation. It is not changed after the first use.
	Limit int

	*store.Collection[proto.AgentFile]
}

// OpenAgentFiles reads all files.
func OpenAgentFiles(ctx context.Context, st *store.Store, log *slog.Logger) (*AgentFiles, error) {
	l := &AgentFiles{Limit: proto.MaxAgentFiles}
	var err error
	l.Collection, err = store.OpenCollection(ctx, store.CollectionConfig[proto.AgentFile]{
		Store: st, Bucket: st.AgentFiles, Keys: "*.*", Name: "files of agents", Log: log,
		Order: func(f *proto.AgentFile) string { return store.NewestFirst(f.CreatedAt) },
		Check: func(_ *proto.AgentFile, others []*proto.AgentFile) error {
			if len(others) >= l.Limit {
				return &proto.QuotaError{What: "files of agents", Limit: int64(l.Limit)}
			}
			return nil
		},
	})
	return l, err
}

func agentFileKey(org, id string) string { return org + "." + id }

// Put stores a file, replacing an existing one with its id. It returns a [*proto.QuotaError] if the
// organisation has too many.
func (l *AgentFiles) Put(ctx context.Context, f proto.AgentFile) error {
	err := l.Create(ctx, agentFileKey(f.Org, f.ID), &f)
	if errors.Is(err, proto.ErrExists) {
		return l.Collection.Put(ctx, agentFileKey(f.Org, f.ID), &f)
	}
	return err
}

// Get returns a file, or [proto.ErrNotFound].
func (l *AgentFiles) Get(ctx context.Context, org, id string) (proto.AgentFile, error) {
	return l.Find(ctx, agentFileKey(org, id))
}

// Remove removes a file, or returns [proto.ErrNotFound].
func (l *AgentFiles) Remove(ctx context.Context, org, id string) error {
	_, err := l.Collection.Remove(ctx, agentFileKey(org, id), nil)
	return err
}
