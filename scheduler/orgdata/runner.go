package orgdata

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	scanEvery   = time.Second
	handlers    = 4 // organisations that are deleted at the same time
	passTimeout = time.Hour
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
	Store    *store.Store
	Data     *Data
	Orgs     Orgs
	Settle   time.Duration // see [DefaultSettle]
	Instance string        // unique to this process
	Log      *slog.Logger
}

// Run campaigns and deletes organisations until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	d := deletions{Runner: r}
	e := engine.Engine[deletion]{
		Queue: &d.queue, Store: r.Store, Name: "org-deletion", Instance: r.Instance, Log: r.Log,
		Due: d.due, Handle: d.handle, Beside: []func(context.Context){engine.Every(scanEvery, d.find)},
		Forget: func(known *deletion) { *known = deletion{} },
		Pause:  scanEvery, Timeout: passTimeout, Handlers: handlers, HandlersOfOrg: 1,
	}
	return e.Run(ctx)
}

// deletions are the deletions of organisations. A process that takes over begins with the first kind of
// data.
type deletions struct {
	*Runner
	queue engine.Queue[deletion] // the ids are the organisations
}

// deletion is how far the deletion of an organisation is.
type deletion struct {
	began   time.Time // the organisation's DeletingAt
	empty   time.Time // when nothing was found; zero if something was
	failure string    // the last one, which is logged once
}

// due returns when to look for data of an organisation.
func (d *deletions) due(known *deletion) (at time.Time, ok bool) {
	if known.empty.IsZero() {
		return at, !known.began.IsZero()
	}
	return known.empty.Add(d.Settle), true
}

// find adds the organisations that are being deleted to the queue.
func (d *deletions) find(context.Context) {
	for _, o := range d.Orgs.List() {
		if o.DeletingAt == nil {
			continue
		}
		d.queue.Change(engine.Item{Org: o.Name, ID: o.Name}, func(known *deletion) bool {
			if !known.began.Equal(*o.DeletingAt) {
				*known = deletion{began: *o.DeletingAt}
				d.Log.Info("deleting organisation", "org", o.Name)
			}
			return true
		})
	}
}

var errGone = errors.New("another process has removed the organisation")

// handle removes what can be removed now.
func (d *deletions) handle(ctx context.Context, x engine.Item, known deletion) error {
	// There may be a new organisation of the name when another process has removed this one, of which the
	// list in memory does not know yet.
	check := func(ctx context.Context) error {
		o, err := d.Orgs.Stored(ctx, x.Org)
		if errors.Is(err, proto.ErrNotFound) || err == nil && (o.DeletingAt == nil || !o.DeletingAt.Equal(known.began)) {
			return errGone
		}
		return err
	}
	gone := false
	empty, err := d.Data.remove(ctx, x.Org, check)
	switch {
	case err != nil || !empty:
		known.empty = time.Time{}
	case known.empty.IsZero():
		known.empty = time.Now()
	default:
		if err = d.Orgs.Remove(ctx, x.Org); errors.Is(err, proto.ErrNotFound) {
			err = nil
		}
		gone = err == nil
	}
	gone = gone || errors.Is(err, errGone)
	if gone {
		d.Log.Info("organisation deleted", "org", x.Org, "took", time.Since(known.began))
	} else if err != nil && ctx.Err() == nil && err.Error() != known.failure {
		known.failure = err.Error()
		d.Log.Warn("deletion of an organisation failed, will retry", "org", x.Org, "error", err)
	}
	d.queue.Change(x, func(now *deletion) bool {
		*now = known
		return !gone
	})
	return nil
}
