package app

import (
	"context"
	"errors"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/timer"
	"github.com/bullpen-run/bullpen/webhook"
	"github.com/bullpen-run/bullpen/webhook/guard"
	"github.com/bullpen-run/bullpen/webhook/send"
)

// webhooks is what the webhook role is made of, and what the gateway asks about webhooks. It sends the results of executions to their
// receivers while it leads.
type webhooks struct {
	*system
	settings   *registry.Webhooks
	guard      *guard.Guard
	deliveries *deliveries.Store
	dispatcher *webhook.Dispatcher
}

func (s *system) openWebhooks(ctx context.Context) (*webhooks, error) {
	urls, err := guard.New(guard.Config{
		AllowCIDRs: s.cfg.WebhookAllowCIDRs, AllowHTTP: s.cfg.WebhookAllowHTTP, AllowPorts: s.cfg.WebhookAllowPorts, CAFile: s.cfg.WebhookCAFile,
	})
	if err != nil {
		return nil, err
	}
	for _, w := range urls.Warnings() {
		s.log.Warn(w + ": for development and private networks only")
	}
	settings, err := registry.OpenWebhooks(ctx, s.set, s.log)
	if err != nil {
		return nil, err
	}
	store := &deliveries.Store{Set: s.set}
	w := &webhooks{system: s, settings: settings, guard: urls, deliveries: store, dispatcher: &webhook.Dispatcher{
		Deliveries: store, Records: s.queue, Settings: settings, Endpoints: settings,
		Sender: &send.Sender{Guard: urls, UserAgent: "bullpen/" + Version()},
		Lane:   s.cfg.WebhookConcurrency, MaxBody: int(s.cfg.WebhookMaxBody), ResultURL: s.cfg.resultURL, Log: s.log,
		Now: time.Now, Attempted: s.metrics.WebhookAttempted,
	}}
	s.metrics.PendingWebhooks(w.dispatcher.Pending)
	return w, nil
}

// resultURL is where clients find the result of an execution.
func (c *Config) resultURL(id proto.TraceID) string {
	return c.PublicURL + "/v1/executions/" + string(id)
}

// run leads when it can, until ctx ends and what was on its way has ended, or has been waited for long enough.
func (w *webhooks) run(ctx context.Context) error {
	cut, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := afterDrain(ctx, w.cfg.Drain, cancel)
	defer stop()
	timers, err := timer.Open(ctx, timer.Config{URL: w.cfg.RedisURL, CA: w.cfg.RedisCA, Log: w.log})
	if err != nil {
		return err
	}
	defer timers.Close()
	w.dispatcher.Timers = timers
	elector := leader.Elector{Set: w.set, Name: "webhook-dispatcher", Instance: w.instance, Log: w.log}
	elector.Run(ctx, func(term context.Context, _ *leader.Term) error { return w.lead(term, cut, timers) })
	return nil
}

// lead sends what is due until the term or cut ends.
func (w *webhooks) lead(term, cut context.Context, timers *timer.Timers) (err error) {
	ctx, cancel := context.WithCancel(term)
	woken := make(chan error, 1)
	go func() { woken <- timers.Run(ctx, w.dispatcher.Wake) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-woken)
	}()
	untest, err := w.deliveries.ServeTests(cut, w.dispatcher.Test)
	if err != nil {
		return err
	}
	defer untest()
	return w.dispatcher.Lead(ctx, cut)
}
