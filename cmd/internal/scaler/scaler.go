// Package scaler makes the number of workers what the dispatcher recommends. A [Driver] does so in
// one environment. The package decides nothing about the number itself.
package scaler

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// repeatEvery is how often a driver is called with the same number.
	repeatEvery = time.Minute
	// retryEvery is how often a driver that failed is called again.
	retryEvery = 10 * time.Second
)

// Driver changes the number of workers.
type Driver interface {
	// Scale makes a pool have p.Desired.Workers workers. It is called for one pool at a time, when
	// the number changes and every minute.
	Scale(ctx context.Context, p proto.Pool) error
}

// Scaler calls a driver with the numbers of the leading dispatcher.
type Scaler struct {
	Driver Driver
	Failed func(pool string) // is called with each failure of the driver
	Log    *slog.Logger

	once   sync.Once
	latest chan []proto.Pool
}

// call is the last call of the driver for a pool.
type call struct {
	at      time.Time
	workers int
	running bool
	failed  bool
}

// due reports whether to call the driver for n workers.
func (c *call) due(now time.Time, n int) bool {
	switch {
	case c.running:
		return false
	case c.failed:
		return now.Sub(c.at) >= retryEvery
	default:
		return c.at.IsZero() || c.workers != n || now.Sub(c.at) >= repeatEvery
	}
}

func (s *Scaler) init() { s.once.Do(func() { s.latest = make(chan []proto.Pool, 1) }) }

// Set replaces the pools. It does not block. It is called by one goroutine.
func (s *Scaler) Set(pools []proto.Pool) {
	s.init()
	select {
	case <-s.latest:
	default:
	}
	s.latest <- pools
}

// Run calls the driver until ctx is done and its calls have returned. It always returns nil.
func (s *Scaler) Run(ctx context.Context) error {
	s.init()
	var running sync.WaitGroup
	defer running.Wait()
	calls := map[string]*call{}
	ended := make(chan func())
	for {
		select {
		case <-ctx.Done():
			return nil
		case end := <-ended:
			end()
		case pools := <-s.latest:
			for _, p := range pools {
				c := calls[p.Name]
				if c == nil {
					c = &call{}
					calls[p.Name] = c
				}
				if p.Desired == nil || !c.due(time.Now(), p.Desired.Workers) {
					continue
				}
				c.running = true
				running.Go(func() {
					err := s.Driver.Scale(ctx, p)
					if err != nil && ctx.Err() == nil {
						s.Failed(p.Name)
						s.Log.Error("pool not scaled, will retry", "pool", p.Name, "workers", p.Desired.Workers, "error", err)
					}
					select {
					case ended <- func() { *c = call{at: time.Now(), workers: p.Desired.Workers, failed: err != nil} }:
					case <-ctx.Done():
					}
				})
			}
		}
	}
}
