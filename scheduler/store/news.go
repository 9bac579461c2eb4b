package store

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// elected begins the subjects on which the servers of a cluster tell that a stream has a new leader.
const elected = "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED."

// newsDelay is how long news wait: a server tells that it leads a stream a moment before it takes anything for it.
const newsDelay = 50 * time.Millisecond

// Who may be asked anew when there are news of them, see [Store.AttemptContext].
const (
	OutputLeader  = outName
	ControlLeader = bucketStreams + controlName
	Dispatcher    = AnnounceSubject
)

// news tell who waits for an answer in vain that asking again may help: the stream has a new leader, there is a new dispatcher, or the
// connection was made again. What they do not tell, since they were lost themselves for example, is made up for by timeouts.
type news struct {
	mu sync.Mutex
	of map[string]*page // by the name of a stream, or OfDispatcher
}

// page is turned at the next news.
type page struct {
	unturned context.Context
	turn     context.CancelFunc
}

func (n *news) next(of string) context.Context {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.of[of]
	if p == nil {
		p = &page{}
		p.unturned, p.turn = context.WithCancel(context.Background())
		n.of[of] = p
	}
	return p.unturned
}

func (n *news) tell(of string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.of[of]; p != nil {
		p.turn()
		delete(n.of, of)
	}
}

func (n *news) tellAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.of {
		p.turn()
	}
	clear(n.of)
}

// hear has news told until the connection is closed. A user who may not listen to them is left with timeouts.
func (s *Store) watchLeaders() error {
	for subject, of := range map[string]func(*nats.Msg) string{
		elected + "*":   func(m *nats.Msg) string { return strings.TrimPrefix(m.Subject, elected) },
		AnnounceSubject: func(*nats.Msg) string { return Dispatcher },
	} {
		if _, err := s.Conn.Subscribe(subject, func(m *nats.Msg) {
			time.AfterFunc(newsDelay, func() { s.news.tell(of(m)) })
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
			s.news.tellAll()
		}
	}()
	return nil
}

// News gives a channel that is closed at the next news of who is named, when it is worth asking again.
func (s *Store) LeaderChanged(of string) <-chan struct{} { return s.news.next(of).Done() }

// Try gives a context for asking who is named once: it ends after that time at most, and at the next news.
func (s *Store) AttemptContext(ctx context.Context, of string, most time.Duration) (context.Context, context.CancelFunc) {
	return s.news.try(ctx, of, most)
}

func (n *news) try(ctx context.Context, of string, most time.Duration) (context.Context, context.CancelFunc) {
	try, cancel := context.WithTimeout(ctx, most)
	unheard := context.AfterFunc(n.next(of), cancel)
	return try, func() {
		unheard()
		cancel()
	}
}
