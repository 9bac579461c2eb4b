package gateway

import (
	"context"
	"sync"
	"time"
)

const (
	// maxTransfers is how many files and archives of an organisation may be on their way at a time. Each takes some memory, up to tens of
	// MiB with a store that is written in parts, and can be made to last.
	maxTransfers = 16
	// transferWait is how long another one waits for its turn. Clients want an answer within 5 s.
	transferWait = 4 * time.Second
)

// transfers gives turns to files and archives on their way, by organisation. The zero value has given none.
type transfers struct {
	mu sync.Mutex
	of map[string]*turns
}

type turns struct {
	taken chan struct{}
	users int // that have one or wait for one
}

// begin waits for a turn, which ends with done. Its error is errTransfers where none becomes free in time.
func (t *transfers) begin(ctx context.Context, org string) (done func(), err error) {
	t.mu.Lock()
	of := t.of[org]
	if of == nil {
		of = &turns{taken: make(chan struct{}, maxTransfers)}
		if t.of == nil {
			t.of = make(map[string]*turns)
		}
		t.of[org] = of
	}
	of.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if of.users--; of.users == 0 {
			delete(t.of, org)
		}
	}
	late := time.NewTimer(transferWait)
	defer late.Stop()
	select {
	case of.taken <- struct{}{}:
		return func() { <-of.taken; leave() }, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-late.C:
		err = errTransfers
	}
	leave()
	return nil, err
}
