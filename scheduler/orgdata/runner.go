package orgdata

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/leader"
)

const (
	scanEvery = time.Second
	// DefaultSettle is how long nothing of an organisation may be found before the organisation itself
	// is removed. It is longer than another gateway takes to learn of the deletion and to finish what
	// it has accepted.
	DefaultSettle = 10 * time.Second
)

// Orgs is the list of organisations.
type Orgs interface {
	List() []proto.Org
	// Stored reads an organisation from the bucket. It returns [proto.ErrNotFound] if there is none.
	Stored(ctx context.Context, name string) (proto.Org, error)
	// Remove removes an organisation that is being deleted. It returns [proto.ErrNotFound] if there
	// is none.
	Remove(ctx context.Context, name string) error
}

// Runner deletes organisations while it leads.
type Runner struct {
	Data     *Data
	Orgs     Orgs
	Settle   time.Duration // see [DefaultSettle]
	Instance string        // unique to this process
	Log      *slog.Logger
}

// Run campaigns and deletes organisations until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	elector := leader.Elector{Store: r.Data.Store, Name: "org-deletion", Instance: r.Instance, Log: r.Log}
	elector.Run(ctx, func(ctx context.Context, _ *leader.Term) error {
		tick := time.NewTicker(scanEvery)
		defer tick.Stop()
		deletions := map[string]*deletion{}
		for {
			for _, o := range r.Orgs.List() {
				if o.DeletingAt == nil {
					continue
				}
				d := deletions[o.Name]
				if d == nil || !d.began.Equal(*o.DeletingAt) {
					d = &deletion{Runner: r, org: o.Name, began: *o.DeletingAt}
					deletions[o.Name] = d
					r.Log.Info("deleting organisation", "org", o.Name)
				}
				if d.advance(ctx) {
					r.Log.Info("organisation deleted", "org", o.Name, "took", time.Since(*o.DeletingAt))
					delete(deletions, o.Name)
				}
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-tick.C:
			}
		}
	})
	return nil
}

// deletion is how far the deletion of an organisation is. A process that takes over begins with
// the first kind of data.
type deletion struct {
	*Runner
	org     string
	began   time.Time // the organisation's DeletingAt
	empty   time.Time // when nothing was found; zero if something was
	failure string    // the last one, which is logged once
}

var errGone = errors.New("another process has removed the organisation")

// check returns errGone if another process has removed the organisation. There may be a new one of
// its name by then, of which the list in memory does not know yet.
func (d *deletion) check(ctx context.Context) error {
	o, err := d.Orgs.Stored(ctx, d.org)
	if errors.Is(err, proto.ErrNotFound) || err == nil && (o.DeletingAt == nil || !o.DeletingAt.Equal(d.began)) {
		return errGone
	}
	return err
}

// advance removes what can be removed now. It reports whether the organisation is gone.
func (d *deletion) advance(ctx context.Context) (gone bool) {
	if !d.empty.IsZero() && time.Since(d.empty) < d.Settle {
		return false
	}
	empty, err := d.Data.remove(ctx, d.org, d.check)
	switch {
	case err != nil || !empty:
		d.empty = time.Time{}
	case d.empty.IsZero():
		d.empty = time.Now()
	default:
		if err = d.Orgs.Remove(ctx, d.org); err == nil || errors.Is(err, proto.ErrNotFound) {
			return true
		}
	}
	if errors.Is(err, errGone) {
		return true
	}
	if err != nil && ctx.Err() == nil && err.Error() != d.failure {
		d.failure = err.Error()
		d.Log.Warn("deletion of an organisation failed, will retry", "org", d.org, "error", err)
	}
	return false
}
