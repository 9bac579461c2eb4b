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

// webhooks is the webhook role: it sends the results of executions to their receivers while this
// process leads. The gateway uses its settings, guard and deliveries.
type webhooks struct {
	*system
	settings   *registry.Webhooks
	guard      *guard.Guard
	deliveries *deliveries.Store
	dispatcher *webhook.Dispatcher
}

func (s *system) openWebhooks(ctx context.Context) (*webhooks, error) {
	urls, err := guard.New(guard.Config{
		AllowCIDRs: s.cfg.WebhookAllowCIDRs, AllowHTTP: s.cfg.WebhookAllowHTTP, AllowPorts: s.cfg.WebhookAllowPorts,
		CAFile: s.cfg.WebhookCAFile,
	})
	if err != nil {
		return nil, err
	}
	for _, w := range urls.Warnings() {
		s.log.Warn(w + ": for development and private networks only")
	}
	settings, err := registry.OpenWebhooks(ctx, s.store, s.keyring, s.log)
	if err != nil {
		return nil, err
	}
	store := &deliveries.Store{Store: s.store}
	w := &webhooks{system: s, settings: settings, guard: urls, deliveries: store, dispatcher: &webhook.Dispatcher{
		Deliveries: store, Records: s.queue, Settings: settings, Endpoints: settings,
		Sender:       &send.Sender{Guard: urls, UserAgent: "bullpen/" + Version()},
		MaxPerOrigin: s.cfg.WebhookConcurrency, MaxPending: s.cfg.maxPendingDeliveries(), Body: s.cfg.webhookBody,
		Log: s.log, Now: time.Now, OnAttempt: s.metrics.WebhookAttempted,
	}}
	s.metrics.PendingWebhooks(w.dispatcher.Pending)
	return w, nil
}

// webhookBody returns the body of the webhook of an execution that has ended.
func (c *Config) webhookBody(r *proto.Record) ([]byte, error) {
	return proto.WebhookBody(r, c.PublicURL+"/v1/executions/"+string(r.TraceID), int(c.WebhookMaxBody))
}

// run campaigns and sends until ctx is done. It then waits for the attempts in flight, for the
// drain time at most.
func (w *webhooks) run(ctx context.Context) error {
	abort, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := afterDrain(ctx, w.cfg.Drain, cancel)
	defer stop()
	timers, err := timer.Open(ctx, timer.Config{URL: w.cfg.RedisURL, CA: w.cfg.RedisCA, Log: w.log})
	if err != nil {
		return err
	}
	defer timers.Close()
	w.dispatcher.Timers = timers
	elector := leader.Elector{Store: w.store, Name: "webhook-dispatcher", Instance: w.instance, Log: w.log}
	elector.Run(ctx, func(term context.Context, _ *leader.Term) error { return w.lead(term, abort, timers) })
	return nil
}

// lead sends deliveries until term is done. Attempts in flight are aborted when abort is done.
func (w *webhooks) lead(term, abort context.Context, timers *timer.Timers) (err error) {
	ctx, cancel := context.WithCancel(term)
	timersDone := make(chan error, 1)
	go func() { timersDone <- timers.Run(ctx, w.dispatcher.Wake) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-timersDone)
	}()
	stop, err := w.deliveries.ServeTests(abort, w.dispatcher.Test)
	if err != nil {
		return err
	}
	defer stop()
	return w.dispatcher.Lead(ctx, abort)
}
