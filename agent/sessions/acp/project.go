package acp

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	// maxBatch bounds the entries of sessions that become one entry of a server's log.
	maxBatch = 64
	// retryAfter is the delay before a retry after an error of the store.
	retryAfter = time.Second
)

// projectors holds the projectors of this process. Concurrent requests for a server share one.
type projectors struct {
	mu      sync.Mutex
	running map[string]*running // by organisation and log
}

// running is a projector in use.
type running struct {
	users  int
	cancel context.CancelFunc
	done   chan struct{}
}

// project translates the events of a server's sessions until release is called.
func (s *Server) project(ctx context.Context, host Host, server string) (release func()) {
	org, _ := host.Caller()
	key := org + "." + logID(server)
	s.projectors.mu.Lock()
	defer s.projectors.mu.Unlock()
	if s.projectors.running == nil {
		s.projectors.running = map[string]*running{}
	}
	r := s.projectors.running[key]
	if r == nil {
		ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		r = &running{cancel: cancel, done: make(chan struct{})}
		s.projectors.running[key] = r
		p := &projector{
			Server: s, host: host, log: serverLog{logs: s.Logs, org: org, id: logID(server)},
			readers: map[string]context.CancelFunc{},
			items:   make(chan item, maxBatch),
		}
		go func() {
			defer close(r.done)
			p.run(ctx)
		}()
	}
	r.users++
	return sync.OnceFunc(func() {
		s.projectors.mu.Lock()
		r.users--
		last := r.users == 0
		if last {
			delete(s.projectors.running, key)
		}
		s.projectors.mu.Unlock()
		if last {
			r.cancel()
			<-r.done
		}
	})
}

// item is an entry of a session's log.
type item struct {
	session string
	at      uint64
	*sessions.Entry
	removed error  // not nil if the session was removed
	release func() // releases the memory of the entry
}

// size returns the size of the parts that can make an entry large, in bytes.
func (it *item) size() (n int) {
	if it.Entry == nil {
		return 0
	}
	for i := range it.Events {
		n += len(it.Events[i].Data) + len(it.Events[i].Raw)
	}
	if it.Message != nil {
		n += len(it.Message.Text)
	}
	return n
}

// projector translates the events of the sessions in a server's state. Other processes may do so at
// the same time. If another one appends first, the projector continues with the state after that
// entry.
type projector struct {
	*Server
	host    Host // of the request that began, which may have ended
	log     serverLog
	readers map[string]context.CancelFunc // stop the readers of sessions, by session id
	items   chan item
	pending []item // translated to no message so far, and not in the log
	work    sync.WaitGroup
}

// run translates until ctx is done.
func (p *projector) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer p.drop()
	defer p.work.Wait()
	defer cancel()
	err := p.load(ctx)
	for err != nil && ctx.Err() == nil {
		pause(ctx)
		err = p.load(ctx)
	}
	changed := make(chan uint64)
	after := p.log.at
	p.work.Go(func() { p.watch(ctx, after, changed) })
	for {
		if err != nil && ctx.Err() == nil {
			p.logStore(ctx, "events not translated", &p.log, err)
			pause(ctx)
			p.stopReaders()
			p.drop()
			if err = p.load(ctx); err != nil {
				continue
			}
		}
		p.follow(ctx)
		select {
		case <-ctx.Done():
			return
		case at := <-changed:
			if at > p.log.at {
				err = p.load(ctx)
			}
		case it := <-p.items:
			err = p.translate(ctx, p.batch(it))
		}
	}
}

// load reads the last entry of the log.
func (p *projector) load(ctx context.Context) error {
	ctx, release := p.host.LimitReads(ctx)
	defer release()
	return p.log.load(ctx)
}

// drop forgets the items that were read and are not in the log.
func (p *projector) drop() {
	releaseItems(p.pending)
	for p.pending = nil; ; {
		select {
		case it := <-p.items:
			it.release()
		default:
			return
		}
	}
}

func releaseItems(list []item) {
	for i := range list {
		list[i].release()
	}
}

func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(retryAfter):
	}
}

// watch sends the number of each entry appended to the server's log after a number.
func (p *projector) watch(ctx context.Context, after uint64, changed chan<- uint64) {
	follower, err := p.Logs.Follow(p.log.org, p.log.id)
	for err != nil && ctx.Err() == nil {
		pause(ctx)
		follower, err = p.Logs.Follow(p.log.org, p.log.id)
	}
	if err != nil {
		return
	}
	defer follower.Close()
	for ctx.Err() == nil {
		limited, release := p.host.LimitReads(ctx)
		_, at, err := follower.Next(limited, after)
		switch release(); {
		case errors.Is(err, proto.ErrNotFound): // removed
			after = 0
			continue
		case err != nil:
			pause(ctx)
			continue
		}
		after = at
		select {
		case changed <- at:
		case <-ctx.Done():
		}
	}
}

// follow starts readers of the sessions in the state and stops all others.
func (p *projector) follow(ctx context.Context) {
	for id, stop := range p.readers {
		if p.log.state.Sessions[id] == nil {
			stop()
			delete(p.readers, id)
		}
	}
	for id, x := range p.log.state.Sessions {
		if p.readers[id] == nil {
			ctx, cancel := context.WithCancel(ctx)
			p.readers[id] = cancel
			p.work.Go(func() { p.read(ctx, id, x.After) })
		}
	}
}

func (p *projector) stopReaders() {
	for id, stop := range p.readers {
		stop()
		delete(p.readers, id)
	}
}

// read sends the entries of a session's log.
func (p *projector) read(ctx context.Context, id string, after uint64) {
	r := p.Sessions.ReadTurn(p.log.org, id, &sessions.Sent{After: after})
	defer r.Close()
	for ctx.Err() == nil {
		limited, release := p.host.LimitReads(ctx)
		it := item{session: id, release: release}
		var err error
		it.Entry, err = r.Next(limited, true)
		it.at = r.After()
		if _, gone := errors.AsType[*sessions.Error](err); gone {
			it.removed = err
		} else if err != nil {
			release()
			pause(ctx)
			continue
		}
		select {
		case p.items <- it:
		case <-ctx.Done():
			release()
		}
		if it.removed != nil {
			return
		}
	}
}

// batch returns the pending entries, first, and the entries available without waiting.
func (p *projector) batch(first item) []item {
	batch := append(p.pending, first)
	for len(batch) < maxBatch {
		select {
		case it := <-p.items:
			batch = append(batch, it)
		default:
			return batch
		}
	}
	return batch
}

// translate appends the messages for a batch of entries. It only keeps the batch in p.pending if
// the batch leads to no message.
func (p *projector) translate(ctx context.Context, batch []item) error {
	p.pending = nil
	size := 0
	for i := range batch {
		size += batch[i].size()
	}
	ctx, release := p.host.LimitReads(ctx)
	defer release()
	err := p.log.append(ctx, func(e *entry) (bool, error) {
		known := len(e.State.Sessions)
		for i := range batch {
			if err := translateItem(e, &batch[i]); err != nil {
				return false, err
			}
		}
		if len(e.Messages) == 0 && len(e.State.Sessions) == known && len(batch) < maxBatch && size < maxReplay {
			p.pending = batch
			return false, nil
		}
		p.pending = nil
		return true, nil
	})
	if p.pending == nil {
		releaseItems(batch)
	}
	return err
}

// translateItem adds the messages for an entry of a session, unless the entry was translated
// before.
func translateItem(e *entry, it *item) error {
	x := e.State.Sessions[it.session]
	if x == nil {
		return nil
	}
	t := &translator{state: &e.State, id: it.session, session: x}
	switch {
	case it.removed != nil:
		if err := t.sessionRemoved(it.removed); err != nil {
			return err
		}
	case it.at <= x.After:
		return nil
	default:
		x.After = it.at
		if err := t.entry(it.Entry); err != nil {
			return err
		}
	}
	e.Messages = append(e.Messages, t.out...)
	return nil
}
