package store

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// leaderElected precedes the stream's name in the subject on which the servers of a cluster
// announce a new leader.
const leaderElected = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED."

// announceDelay delays notifications: a server announces that it leads a stream a moment before it
// accepts requests for it.
const announceDelay = 50 * time.Millisecond

// Leaders whose changes [Store.LeaderChanged] reports.
const (
	OutputLeader  = outputName
	ControlLeader = bucketPrefix + controlName
	Dispatcher    = AnnounceSubject
)

// leaderChanges notifies waiting requests that it is worth asking again: the stream has
// a new leader, there is a new dispatcher, or the connection was made again. Notifications may get
// lost, which timeouts make up for.
type leaderChanges struct {
	mu      sync.Mutex
	waiting map[string]change // by the name of a stream, or Dispatcher
}

// change is cancelled at the next change of one leader.
type change struct {
	ctx    context.Context
	cancel context.CancelFunc
}

func (c *leaderChanges) next(leader string) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, ok := c.waiting[leader]
	if !ok {
		next.ctx, next.cancel = context.WithCancel(context.Background())
		c.waiting[leader] = next
	}
	return next.ctx
}

func (c *leaderChanges) notify(leader string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if next, ok := c.waiting[leader]; ok {
		next.cancel()
		delete(c.waiting, leader)
	}
}

func (c *leaderChanges) notifyAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, next := range c.waiting {
		next.cancel()
	}
	clear(c.waiting)
}

// attempt returns a context that is cancelled after timeout, or at the next change of leader.
func (c *leaderChanges) attempt(
	ctx context.Context, leader string, timeout time.Duration,
) (context.Context, context.CancelFunc) {
	attempt, cancel := context.WithTimeout(ctx, timeout)
	stop := context.AfterFunc(c.next(leader), cancel)
	return attempt, func() {
		stop()
		cancel()
	}
}

// watchLeaders sends notifications until the connection is closed. A user without permission to
// subscribe to the announcements has to rely on timeouts.
func (s *Store) watchLeaders() error {
	for subject, leader := range map[string]func(*nats.Msg) string{
		leaderElected + "*": func(m *nats.Msg) string { return strings.TrimPrefix(m.Subject, leaderElected) },
		AnnounceSubject:     func(*nats.Msg) string { return Dispatcher },
	} {
		if _, err := s.Conn.Subscribe(subject, func(m *nats.Msg) {
			time.AfterFunc(announceDelay, func() { s.leaders.notify(leader(m)) })
		}); err != nil {
			return err
		}
	}
	connected := s.Conn.StatusChanged(nats.CONNECTED, nats.CLOSED)
	go func() {
		for status := range connected {
			if status == nats.CLOSED {
				return
			}
			s.leaders.notifyAll()
		}
	}()
	return nil
}

// LeaderChanged returns a channel that is closed at the next change of leader.
func (s *Store) LeaderChanged(leader string) <-chan struct{} { return s.leaders.next(leader).Done() }

// AttemptContext returns a context for one request to leader. It is cancelled after timeout, or at
// the next change of leader.
func (s *Store) AttemptContext(
	ctx context.Context, leader string, timeout time.Duration,
) (context.Context, context.CancelFunc) {
	return s.leaders.attempt(ctx, leader, timeout)
}
