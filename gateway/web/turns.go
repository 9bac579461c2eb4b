package web

import (
	"context"
	"io"
	"runtime"
	"slices"
	"sync"
)

const (
	// FreeBody is the size in bytes up to which a body is decoded immediately. Larger ones take
	// turns.
	FreeBody = 64 << 10
	// turnBytes is how much of a long body is decoded in one turn, in bytes.
	turnBytes = 1 << 20
)

// Turns shares the processor time that requests take before admission. Half the processors decode
// large bodies, and organisations with such bodies take turns, so that one sending many delays the
// others by one turn. The zero value is ready for use.
type Turns struct {
	mu      sync.Mutex
	held    int
	orgs    []string                   // with requests that wait, the next one first
	waiting map[string][]chan struct{} // by organisation, the first one first
}

// MaxTurns returns the number of turns at a time.
func MaxTurns() int { return max(1, runtime.GOMAXPROCS(0)/2) }

// Begin waits for an organisation's turn, which end ends.
func (t *Turns) Begin(ctx context.Context, org string) error {
	t.mu.Lock()
	if t.held < MaxTurns() {
		t.held++
		t.mu.Unlock()
		return nil
	}
	granted := make(chan struct{})
	if t.waiting == nil {
		t.waiting = make(map[string][]chan struct{})
	}
	if len(t.waiting[org]) == 0 {
		t.orgs = append(t.orgs, org)
	}
	t.waiting[org] = append(t.waiting[org], granted)
	t.mu.Unlock()
	select {
	case <-granted:
		return nil
	case <-ctx.Done():
		t.leave(org, granted)
		return context.Cause(ctx)
	}
}

// leave removes a request that waits no longer.
func (t *Turns) leave(org string, granted chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := slices.Index(t.waiting[org], granted)
	if at < 0 { // granted meanwhile
		t.next()
		return
	}
	t.waiting[org] = slices.Delete(t.waiting[org], at, at+1)
	if len(t.waiting[org]) == 0 {
		delete(t.waiting, org)
		t.orgs = slices.DeleteFunc(t.orgs, func(o string) bool { return o == org })
	}
}

// End ends a turn. The next organisation has the next one.
func (t *Turns) End() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next()
}

// next passes a turn on.
func (t *Turns) next() {
	if len(t.orgs) == 0 {
		t.held--
		return
	}
	org := t.orgs[0]
	t.orgs = t.orgs[1:]
	close(t.waiting[org][0])
	if t.waiting[org] = t.waiting[org][1:]; len(t.waiting[org]) > 0 {
		t.orgs = append(t.orgs, org)
	} else {
		delete(t.waiting, org)
	}
}

// Counts returns how many turns are held, and how many organisations wait for one.
func (t *Turns) Counts() (held, waiting int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.held, len(t.orgs)
}

// TurnBody is a body decoded while it arrives. Its reader holds a turn, but not while it waits for
// the client, and not for longer than turnBytes.
type TurnBody struct {
	turns *Turns
	ctx   context.Context // of the request
	org   string
	held  bool
	left  int // bytes until the turn ends
}

// TurnBody returns a body of an organisation that is decoded in turns.
func (c *Core) TurnBody(ctx context.Context, org string) *TurnBody {
	return &TurnBody{turns: &c.Turns, ctx: ctx, org: org}
}

// Plain returns a reader of the decoded body.
func (b *TurnBody) Plain(from io.Reader) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		if b.left <= 0 {
			b.End()
		}
		if err := b.begin(); err != nil {
			return 0, err
		}
		n, err := from.Read(p)
		b.left -= n
		if err != nil {
			b.End()
		}
		return n, err
	})
}

// Encoded returns a reader of the body as the client sends it.
func (b *TurnBody) Encoded(from io.Reader) io.Reader {
	return readerFunc(func(p []byte) (int, error) {
		b.End()
		n, err := from.Read(p)
		if wait := b.begin(); wait != nil {
			return 0, wait
		}
		return n, err
	})
}

func (b *TurnBody) begin() error {
	if b.held {
		return nil
	}
	if err := b.turns.Begin(b.ctx, b.org); err != nil {
		return err
	}
	b.held, b.left = true, turnBytes
	return nil
}

// End ends the turn, if there is one.
func (b *TurnBody) End() {
	if b.held {
		b.held = false
		b.turns.End()
	}
}
