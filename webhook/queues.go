package webhook

import (
	"container/list"
	"time"
)

// Limits on concurrent attempts. A receiver that does not answer blocks the queue of one
// organisation and origin. An organisation with many such receivers blocks its own share.
const (
	maxInFlight       = 1000 // attempts of this process
	maxInFlightPerOrg = 100
)

// The circuit breaker of a queue. After breakerThreshold consecutive failures that concern the
// receiver as a whole, the queue gets one attempt at a time, with growing pauses. The breaker
// delays deliveries and drops none.
const (
	breakerThreshold = 5
	breakerMinPause  = time.Second
	breakerMaxPause  = 30 * time.Second
)

// queueKey identifies what one organisation sends to one origin (scheme, host and port).
type queueKey struct{ org, origin string }

// originQueue holds the deliveries of one organisation to one origin.
type originQueue struct {
	key      queueKey
	org      *orgQueues
	size     int       // pending deliveries, due or not
	due      list.List // of *pendingDelivery, in order of arrival
	inFlight int
	failures int           // consecutive
	pausedTo time.Time     // no attempt before that
	ready    *list.Element // in org.ready; nil while nothing can be sent
}

// orgQueues holds the queues of one organisation.
type orgQueues struct {
	org      string
	ready    list.List // of *originQueue that can send, round robin
	size     int       // queues, ready or not
	pending  int       // deliveries, due or not
	inFlight int
	elem     *list.Element // in queues.ready; nil while nothing can be sent
}

// queues selects the next delivery to attempt: round robin over organisations, then over the
// origins of each. It is not safe for concurrent use.
type queues struct {
	maxPerOrigin int
	byKey        map[queueKey]*originQueue
	orgs         map[string]*orgQueues
	ready        list.List // of *orgQueues that can send, round robin
	inFlight     int
}

func newQueues(maxPerOrigin int) *queues {
	return &queues{maxPerOrigin: maxPerOrigin, byKey: map[queueKey]*originQueue{}, orgs: map[string]*orgQueues{}}
}

// acquire returns the queue of key and counts one more pending delivery in it. Each call is
// paired with release.
func (s *queues) acquire(key queueKey) *originQueue {
	q := s.byKey[key]
	if q == nil {
		o := s.orgs[key.org]
		if o == nil {
			o = &orgQueues{org: key.org}
			s.orgs[key.org] = o
		}
		o.size++
		q = &originQueue{key: key, org: o}
		s.byKey[key] = q
	}
	q.size++
	q.org.pending++
	return q
}

// pending returns the number of pending deliveries of an organisation.
func (s *queues) pending(org string) int {
	if o := s.orgs[org]; o != nil {
		return o.pending
	}
	return 0
}

// release deletes a queue without pending deliveries, including its failure count.
func (s *queues) release(q *originQueue) {
	q.size--
	q.org.pending--
	if q.size > 0 || q.inFlight > 0 {
		return
	}
	delete(s.byKey, q.key)
	if q.org.size--; q.org.size == 0 && q.org.inFlight == 0 {
		delete(s.orgs, q.org.org)
	}
}

// enqueue appends a delivery that is due.
func (s *queues) enqueue(p *pendingDelivery, now time.Time) {
	p.elem = p.queue.due.PushBack(p)
	s.update(p.queue, now)
}

// dequeue removes a delivery that was enqueued.
func (s *queues) dequeue(p *pendingDelivery, now time.Time) {
	p.queue.due.Remove(p.elem)
	p.elem = nil
	s.update(p.queue, now)
}

// next dequeues the next delivery to attempt and counts it as in flight until finish is called. It
// returns nil if none can be attempted now.
func (s *queues) next(now time.Time) *pendingDelivery {
	if s.inFlight >= maxInFlight || s.ready.Len() == 0 {
		return nil
	}
	o := s.ready.Front().Value.(*orgQueues)
	q := o.ready.Front().Value.(*originQueue)
	p := q.due.Remove(q.due.Front()).(*pendingDelivery)
	p.elem = nil
	q.inFlight++
	o.inFlight++
	s.inFlight++
	s.update(q, now)
	if q.ready != nil {
		o.ready.MoveToBack(q.ready)
	}
	if o.elem != nil {
		s.ready.MoveToBack(o.elem)
	}
	return p
}

// finish ends an attempt that next began.
func (s *queues) finish(q *originQueue, now time.Time) {
	q.inFlight--
	q.org.inFlight--
	s.inFlight--
	s.update(q, now)
}

// recordVerdict updates the circuit breaker of q with the verdict on an attempt.
func (s *queues) recordVerdict(q *originQueue, v verdict, now time.Time) {
	if !v.backOff {
		q.failures, q.pausedTo = 0, time.Time{}
		s.update(q, now)
		return
	}
	q.failures++
	pause := v.pause
	if excess := q.failures - breakerThreshold; excess >= 0 {
		pause = max(pause, min(breakerMinPause<<min(excess, 10), breakerMaxPause))
	}
	if until := now.Add(pause); until.After(q.pausedTo) {
		q.pausedTo = until
	}
	s.update(q, now)
}

func (s *queues) canSend(q *originQueue, now time.Time) bool {
	limit := s.maxPerOrigin
	if q.failures >= breakerThreshold {
		limit = 1
	}
	return q.due.Len() > 0 && q.inFlight < limit && !now.Before(q.pausedTo)
}

// update adds q and its organisation to the ready lists, or removes them. It must also be called
// when a pause of q is over.
func (s *queues) update(q *originQueue, now time.Time) {
	o := q.org
	switch canSend := s.canSend(q, now); {
	case canSend && q.ready == nil:
		q.ready = o.ready.PushBack(q)
	case !canSend && q.ready != nil:
		o.ready.Remove(q.ready)
		q.ready = nil
	}
	switch canSend := o.ready.Len() > 0 && o.inFlight < maxInFlightPerOrg; {
	case canSend && o.elem == nil:
		o.elem = s.ready.PushBack(o)
	case !canSend && o.elem != nil:
		s.ready.Remove(o.elem)
		o.elem = nil
	}
}
