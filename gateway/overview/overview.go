package overview

import (
	"context"
	"math"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// queueTimeout bounds how long an overview waits for the leading dispatcher.
const queueTimeout = time.Second

// Queue shows the queue.
type Queue interface {
	// View returns the queue of an organisation.
	View(ctx context.Context, req *proto.QueueRequest) (proto.QueueView, error)
	// Orgs returns the queues of all organisations that have something queued or running.
	Orgs(ctx context.Context) ([]proto.OrgQueue, error)
}

// Stats returns the state of the workers and their queue.
type Stats interface {
	Stats(ctx context.Context) (proto.QueueStats, error)
}

// Sandboxes finds live sandboxes.
type Sandboxes interface {
	web.Pages[proto.LiveSandbox]
}

// Routes are the routes of the overview.
type Routes struct {
	*web.Core
	Counters  *Counters
	Queue     Queue
	Stats     Stats
	Sandboxes Sandboxes
	// Problems returns the unmet needs of this process.
	Problems func() []proto.Problem
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	return []web.Handler{{ID: "getOverview", Handle: s.get}}
}

// get answers with the overview of an organisation, or of all.
func (s *Routes) get(w http.ResponseWriter, r *web.Request) error {
	org, err := web.ListedOrg(r)
	if err != nil {
		return err
	}
	hour := s.Counters.lastHour(org)
	answer := api.Overview{
		From: api.Time{Time: hour.from}, Minutes: make([]api.OverviewMinute, span), Total: figuresOf(hour.total),
		Sandboxes: map[proto.SandboxState]int{},
	}
	for i, f := range hour.minutes {
		at := api.Time{Time: hour.start.Add(time.Duration(i) * time.Minute)}
		answer.Minutes[i] = api.OverviewMinute{At: at, OverviewFigures: figuresOf(f)}
	}
	s.Sandboxes.Page(org, "", -1, func(x *proto.LiveSandbox) bool {
		answer.Sandboxes[x.State]++
		return false
	})
	ctx, cancel := context.WithTimeout(r.Context(), queueTimeout)
	defer cancel()
	if org != "" {
		answer.Org = &org
		err = s.addQueue(ctx, &answer)
	} else {
		err = s.addServer(ctx, &answer)
	}
	if err != nil { // the rest is still useful, and needed most while something does not answer
		s.Log.WarnContext(ctx, "overview without the queue", "error", err)
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

// addQueue adds the queue of an organisation.
func (s *Routes) addQueue(ctx context.Context, answer *api.Overview) error {
	view, err := s.Queue.View(ctx, &proto.QueueRequest{Org: *answer.Org})
	if err == nil {
		answer.Queue = &view.Org
	}
	return err
}

// addServer adds the state of the deployment, and the queue of all organisations.
func (s *Routes) addServer(ctx context.Context, answer *api.Overview) error {
	answer.Server = &api.OverviewServer{Problems: []api.Problem{}}
	for _, p := range s.Problems() {
		answer.Server.Problems = append(answer.Server.Problems, api.Problem(p))
	}
	stats, err := s.Stats.Stats(ctx)
	if err != nil {
		return err
	}
	answer.Server.Workers = &api.OverviewWorkers{Count: stats.Workers, Slots: stats.Slots, FreeSlots: stats.FreeSlots}
	orgs, err := s.Queue.Orgs(ctx)
	if err != nil {
		return err
	}
	answer.Queue = new(proto.QueueCounts)
	for i := range orgs {
		answer.Queue.Queued.Interactive += orgs[i].Queued.Interactive
		answer.Queue.Queued.Background += orgs[i].Queued.Background
		answer.Queue.Running.Interactive += orgs[i].Running.Interactive
		answer.Queue.Running.Background += orgs[i].Running.Background
	}
	return nil
}

func figuresOf(f *figures) api.OverviewFigures {
	return api.OverviewFigures{
		Arrivals: f.arrivals, Ends: f.ends, Wait: quantilesOf(f.wait), Duration: quantilesOf(f.duration),
	}
}

func quantilesOf(h histogram) (q api.Quantiles) {
	if p50, ok := h.quantile(0.5); ok {
		p99, _ := h.quantile(0.99)
		q.P50, q.P99 = new(math.Round(p50)), new(math.Round(p99))
	}
	return q
}
