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

// Leaders whose changes [Leaders] reports.
const (
	OutputLeader  = outputName
	ControlLeader = bucketPrefix + controlName
	Dispatcher    = AnnounceSubject
)

// Leaders tells waiting requests to retry: the stream has a new leader, there is a new dispatcher, or the
// connection was restored. Notifications may get lost, so requests also need timeouts.
type Leaders struct {
	mu      sync.Mutex
	waiting map[string]change // by the name of a stream, or Dispatcher
}

// change is cancelled at the next change of one leader.
type change struct {
	ctx    context.Context
	cancel context.CancelFunc
}

func (l *Leaders) next(leader string) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, ok := l.waiting[leader]
	if !ok {
		next.ctx, next.cancel = context.WithCancel(context.Background())
		l.waiting[leader] = next
	}
	return next.ctx
}

func (l *Leaders) notify(leader string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if next, ok := l.waiting[leader]; ok {
		next.cancel()
		delete(l.waiting, leader)
	}
}

func (l *Leaders) notifyAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, next := range l.waiting {
		next.cancel()
	}
	clear(l.waiting)
}

// watch sends notifications until the connection is closed. A user without permission to subscribe to
// the announcements has to rely on timeouts.
func (l *Leaders) watch(conn *nats.Conn) error {
	for subject, leader := range map[string]func(*nats.Msg) string{
		leaderElected + "*": func(m *nats.Msg) string { return strings.TrimPrefix(m.Subject, leaderElected) },
		AnnounceSubject:     func(*nats.Msg) string { return Dispatcher },
	} {
		if _, err := conn.Subscribe(subject, func(m *nats.Msg) {
			time.AfterFunc(announceDelay, func() { l.notify(leader(m)) })
		}); err != nil {
			return err
		}
	}
	connected := conn.StatusChanged(nats.CONNECTED, nats.CLOSED)
	go func() {
		for status := range connected {
			if status == nats.CLOSED {
				return
			}
			l.notifyAll()
		}
	}()
	return nil
}

// Changed returns a channel that is closed at the next change of leader.
func (l *Leaders) Changed(leader string) <-chan struct{} { return l.next(leader).Done() }

// Attempt returns a context for one request to leader. It is cancelled after timeout, or at the next
// change of leader.
func (l *Leaders) Attempt(
	ctx context.Context, leader string, timeout time.Duration,
) (context.Context, context.CancelFunc) {
	attempt, cancel := context.WithTimeout(ctx, timeout)
	stop := context.AfterFunc(l.next(leader), cancel)
	return attempt, func() {
		stop()
		cancel()
	}
}

// Retry returns the policy for requests to leader. A change of leader repeats the request at once.
func (l *Leaders) Retry(leader string, timeout time.Duration) Retry {
	return Retry{Timeout: timeout, leader: leader, leaders: l}
}
