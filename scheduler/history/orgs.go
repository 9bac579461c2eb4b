package history

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

// removedKey is the key of the list of removed organisations in the control bucket.
const removedKey = "removed-orgs"

// removedOrg is an organisation of which no index may keep executions created before At. It stays
// listed as long as records are kept: an index that lagged at that time may still have them, and
// drops older ones by itself.
type removedOrg struct {
	Org string    `json:"org"`
	At  time.Time `json:"at"`
}

// CountOrg returns the number of executions of an organisation in the index of this process.
func (h *History) CountOrg(ctx context.Context, org string) (int64, error) {
	return h.Index.CountOrg(ctx, org)
}

// RemoveOrg removes all of an organisation's current executions from this process's index. Other
// processes follow within expireEvery, or when they start.
func (h *History) RemoveOrg(ctx context.Context, org string) error {
	now := time.Now().UTC()
	err := store.Update(ctx, func() error {
		list, revision, err := h.removed(ctx)
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(r removedOrg) bool { return r.Org == org || now.Sub(r.At) > h.Retention })
		body, err := json.Marshal(append(list, removedOrg{org, now}))
		if err != nil {
			return err
		}
		_, err = h.Store.Control.Update(ctx, removedKey, body, revision)
		return err
	})
	if err != nil {
		return fmt.Errorf("store that organisation %s is removed from the index of executions: %w", org, err)
	}
	return h.removeOrg(ctx, removedOrg{org, now})
}

// removed returns the list of removed organisations and its revision, 0 if there is none.
func (h *History) removed(ctx context.Context) (list []removedOrg, revision uint64, err error) {
	entry, err := h.Store.Control.Get(ctx, removedKey)
	if store.IsNotFound(err) {
		return nil, 0, nil
	}
	if err == nil {
		err = json.Unmarshal(entry.Value(), &list)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read the removed organisations: %w", err)
	}
	return list, entry.Revision(), nil
}

func (h *History) removeOrg(ctx context.Context, r removedOrg) error {
	return untilDone(ctx, func() (bool, error) { return h.Index.RemoveOrg(ctx, r.Org, r.At) })
}

// removeOrgs removes the executions of removed organisations that the index still has.
func (h *History) removeOrgs(ctx context.Context) error {
	list, _, err := h.removed(ctx)
	if err != nil {
		return err
	}
	for _, r := range list {
		if err := h.removeOrg(ctx, r); err != nil {
			return err
		}
	}
	return nil
}
