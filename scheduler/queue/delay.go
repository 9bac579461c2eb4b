package queue

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// delayHeap holds the delayed jobs, the next one first. It implements [heap.Interface].
type delayHeap []*job

func (h delayHeap) Len() int { return len(h) }

func (h delayHeap) Less(a, b int) bool { return h[a].compareRunAt(h[b]) < 0 }

func (h delayHeap) Swap(a, b int) {
	h[a], h[b] = h[b], h[a]
	h[a].delayIndex, h[b].delayIndex = a, b
}

// Push implements [heap.Interface].
func (h *delayHeap) Push(x any) {
	j := x.(*job)
	j.delayIndex = len(*h)
	*h = append(*h, j)
}

// Pop implements [heap.Interface].
func (h *delayHeap) Pop() any {
	last := len(*h) - 1
	j := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return j
}

// compareRunAt orders jobs by RunAt.
func (j *job) compareRunAt(other *job) int {
	return cmp.Or(j.meta.RunAt.Compare(other.meta.RunAt), cmp.Compare(j.order, other.order))
}

// delay keeps a new job out of the queue until its RunAt. It counts against the limit of queued
// jobs like any other.
func (q *fairQueue) delay(j *job) {
	j.state = delayed
	q.org(j.meta.Org).queued[j.meta.Class()]++
	heap.Push(&q.delayed, j)
}

// undelay takes a job out of the delayed ones.
func (q *fairQueue) undelay(j *job) {
	q.org(j.meta.Org).queued[j.meta.Class()]--
	heap.Remove(&q.delayed, j.delayIndex)
	q.current[j] = struct{}{}
}

// due returns the next delayed job if its RunAt has come, or nil.
func (q *fairQueue) due(now time.Time) *job {
	if len(q.delayed) == 0 || q.delayed[0].meta.RunAt.After(now) {
		return nil
	}
	return q.delayed[0]
}

// releaseDelayed queues the delayed jobs that are due, behind those that are queued already.
func (t *term) releaseDelayed(now time.Time) {
	for j := t.queue.due(now); j != nil && !j.unchecked; j = t.queue.due(now) {
		t.observe(&j.meta, now)
		t.queue.undelay(j)
		t.queue.jobSeq++
		j.order, j.since = t.queue.jobSeq, now
		t.queue.enqueue(j)
	}
}

// checkDelayed reads the records of the delayed jobs found at the start of the term. One may have
// been cancelled long ago by a leader that died before removing it, and the loop only follows
// records since the oldest queued job. No job is released before its record is read.
func (t *term) checkDelayed(ctx context.Context) {
	jobs := slices.SortedFunc(slices.Values(t.queue.delayed), (*job).compareRunAt)
	type execution struct {
		org string
		id  proto.TraceID
	}
	executions := make([]execution, len(jobs))
	for i, j := range jobs {
		j.unchecked, executions[i] = true, execution{j.meta.Org, j.meta.TraceID}
	}
	go func() {
		for _, x := range executions {
			var rec *proto.Record
			var revision uint64
			if t.retry(ctx, x.id, "read record of a delayed job", func() (err error) {
				rec, revision, err = t.Store.Records.Get(ctx, x.org, x.id)
				if errors.Is(err, proto.ErrNotFound) {
					return nil
				}
				return err
			}) != nil {
				return
			}
			t.post(ctx, func() { t.onChecked(ctx, x.id, rec, revision) })
		}
	}()
}

// onChecked applies the record of a delayed job, nil for none.
func (t *term) onChecked(ctx context.Context, id proto.TraceID, rec *proto.Record, revision uint64) {
	j := t.queue.jobs[id]
	if j == nil {
		return
	}
	j.unchecked = false
	if rec != nil {
		t.apply(ctx, j, stateOf(rec, revision))
	}
}
