package agentsessions

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Configs stores the tool configurations of directories. Changes by other gateways are visible only
// while Run is running.
type Configs struct {
	stored *store.Collection[proto.AgentConfig]
}

// OpenConfigs opens the store and reads all configurations.
func OpenConfigs(ctx context.Context, st *store.Store, log *slog.Logger) (*Configs, error) {
	stored, err := store.OpenCollection(ctx, store.CollectionConfig[proto.AgentConfig]{
		Store: st, Bucket: st.AgentSessions, Keys: "config.*.*", Name: "configurations of agents' tools",
		DropMalformed: true, Log: log,
		Order: store.ByKey[proto.AgentConfig],
		Check: func(_ *proto.AgentConfig, others []*proto.AgentConfig) error {
			if len(others) >= proto.MaxAgentConfigs {
				return &proto.QuotaError{What: "configurations of agents' tools", Limit: proto.MaxAgentConfigs}
			}
			return nil
		},
	})
	return &Configs{stored}, err
}

// Run applies changes by other gateways until ctx is done.
func (c *Configs) Run(ctx context.Context) error { return c.stored.Run(ctx) }

func configKey(org string, kind proto.AgentConfigKind, directory, name string) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%s", kind, directory, name))
	return "config." + org + "." + hex.EncodeToString(sum[:16])
}

// PutConfig stores a configuration. It returns a [*proto.QuotaError] if the organisation has too many
// configurations.
func (c *Configs) PutConfig(ctx context.Context, x *proto.AgentConfig) error {
	_, err := c.stored.Update(ctx, configKey(x.Org, x.Kind, x.Directory, x.Name),
		func(*proto.AgentConfig) (*proto.AgentConfig, error) { return x, nil })
	return err
}

// Config returns a configuration. It returns [proto.ErrNotFound] if there is none.
func (c *Configs) Config(
	ctx context.Context, org string, kind proto.AgentConfigKind, directory, name string,
) (*proto.AgentConfig, error) {
	x, err := c.stored.Find(ctx, configKey(org, kind, directory, name))
	return &x, err
}

// RemoveConfig removes a configuration, if there is one.
func (c *Configs) RemoveConfig(
	ctx context.Context, org string, kind proto.AgentConfigKind, directory, name string,
) error {
	_, err := c.stored.Remove(ctx, configKey(org, kind, directory, name), nil)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// Configs returns the configurations of an organisation, ordered by their keys.
func (c *Configs) Configs(org string) []proto.AgentConfig { return c.stored.List(org) }
