// Package orgdata knows what is stored of an organisation. It counts it, by kind and from the
// stores themselves, and removes all of it when the organisation is deleted.
//
// Each kind of data is a [Holder], a row of the table in [New]. A new kind is a row more: the tests
// fail while a stream or bucket is in none.
package orgdata

import (
	"context"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
)

// Holder is where one kind of data is stored.
type Holder struct {
	Kind string
	// Stores names the streams and buckets that have the data; none if it is elsewhere.
	Stores []string
	// Count counts what is stored of an organisation.
	Count func(ctx context.Context, org string) (Amount, error)
	// Remove removes it. It may be called again at any time, also after a crash. What it cannot
	// remove at once it begins to remove.
	Remove func(ctx context.Context, org string) error
}

// Amount is how much is stored.
type Amount struct{ Count, Bytes int64 }

// Data is what is stored of organisations.
type Data struct{ Holders []Holder }

// List returns what is stored of an organisation, which need not exist.
func (d *Data) List(ctx context.Context, org string) (*proto.OrgData, error) {
	list := &proto.OrgData{Org: org}
	for _, h := range d.Holders {
		n, err := h.Count(ctx, org)
		if err != nil {
			return nil, fmt.Errorf("count the %s of organisation %s: %w", h.Kind, org, err)
		}
		list.Kinds = append(list.Kinds, proto.StoredData{Kind: h.Kind, Count: n.Count, Bytes: n.Bytes})
	}
	return list, nil
}

// remove removes what is stored of an organisation, one kind after the other, and reports whether
// nothing was found. It stops at a kind of which something remains: running executions store more of
// the others. check is called before each removal, and its error ends the call.
func (d *Data) remove(ctx context.Context, org string, check func(context.Context) error) (empty bool, err error) {
	empty = true
	for _, h := range d.Holders {
		if h.Remove == nil {
			continue // the organisation itself
		}
		before, err := h.Count(ctx, org)
		if err == nil {
			err = check(ctx)
		}
		if err == nil {
			err = h.Remove(ctx, org)
		}
		if err != nil {
			return false, fmt.Errorf("remove the %s: %w", h.Kind, err)
		}
		if before.Count == 0 {
			continue
		}
		empty = false
		after, err := h.Count(ctx, org)
		if err != nil {
			return false, fmt.Errorf("count the %s: %w", h.Kind, err)
		}
		if after.Count > 0 {
			return false, nil
		}
	}
	return empty, nil
}
