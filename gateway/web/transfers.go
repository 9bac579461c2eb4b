package web

import (
	"context"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// MaxTransfers is how many files, archives and reports an organisation may transfer at a time,
	// including requests to its buckets. Each takes up to tens of MiB of memory, and a client or a
	// bucket's server can prolong it.
	MaxTransfers = 16
	// TransferWait is how long a transfer waits for another one to end. Clients want an answer
	// within 5 s.
	TransferWait = 4 * time.Second
)

// Transfers limits the concurrent transfers of files and archives of each organisation. The zero
// value is ready for use.
type Transfers struct {
	mu    sync.Mutex
	byOrg map[string]*semaphore
}

type semaphore struct {
	slots chan struct{}
	users int // that hold a slot or wait for one
}

// Begin acquires one of maxTransfers slots, which done releases. If none becomes free in time, the
// error is rate_limited.
func (t *Transfers) Begin(ctx context.Context, org string) (done func(), err error) {
	return t.Acquire(ctx, org, MaxTransfers)
}

// Acquire acquires one of an organisation's slots. All calls for it pass the same number.
func (t *Transfers) Acquire(ctx context.Context, org string, slots int) (done func(), err error) {
	t.mu.Lock()
	sem := t.byOrg[org]
	if sem == nil {
		sem = &semaphore{slots: make(chan struct{}, slots)}
		if t.byOrg == nil {
			t.byOrg = make(map[string]*semaphore)
		}
		t.byOrg[org] = sem
	}
	sem.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if sem.users--; sem.users == 0 {
			delete(t.byOrg, org)
		}
	}
	select {
	case sem.slots <- struct{}{}:
		return func() { <-sem.slots; leave() }, nil
	default:
	}
	timeout := time.NewTimer(TransferWait)
	defer timeout.Stop()
	select {
	case sem.slots <- struct{}{}:
		return func() { <-sem.slots; leave() }, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-timeout.C:
		err = &api.Error{
			Code: api.CodeRateLimited, RetryAfter: 1,
			Message: "too many files, archives, reports and results of this organisation are on their way; send the " +
				"request again",
		}
	}
	leave()
	return nil, err
}
