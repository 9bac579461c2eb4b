package queue

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// views is the data shared by answers about the queue. It is discarded at each review, so that
// frequent requests cost little.
type views struct {
	orders map[string]classOrders // by key
	orgs   map[string]rival       // with jobs that a live worker can run
	pools  []proto.Pool           // see [term.currentPools]
}

// classOrders are the orders of a key's queued jobs, by class: a sorted list for each set of needs.
type classOrders map[proto.Class][][]uint64

// rival is a party that competes for slots.
type rival struct {
	queued, weight int
}

// servedBefore estimates how many of a rival's jobs are served before a job with the given number
// of its own party's jobs ahead of it.
func (r rival) servedBefore(ahead, weight int) int {
	return min(r.queued, (ahead+1)*max(1, r.weight)/max(1, weight))
}

// besidesClass returns how many jobs of the key's other class are served before a job of class with
// the given number of jobs of its class ahead of it.
func besidesClass(class proto.Class, ahead, others int) int {
	if class == proto.ClassInteractive {
		return min(others, ahead/interactiveShare)
	}
	return min(others, (ahead+1)*interactiveShare)
}

// limit is a number of concurrent executions, and how many more may start now.
type limit struct {
	all, free int
}

// rounds returns how many times all executions must end before a job with the given number of jobs
// ahead of it starts.
func (l limit) rounds(ahead int) float64 {
	if ahead < l.free {
		return 0
	}
	return float64(ahead-max(0, l.free)+1) / float64(max(1, l.all))
}

// less returns the limit without a reserved part.
func (l limit) less(reserved int) limit { return limit{l.all - reserved, max(0, l.free-reserved)} }

// answerQueue answers a request for the queue of a key.
func (t *term) answerQueue(m *nats.Msg) {
	var req proto.QueueRequest
	if err := json.Unmarshal(m.Data, &req); err != nil || len(req.Traces) > proto.MaxQueuePlaces {
		t.Log.Error("malformed request for a queue ignored", "error", err)
		return
	}
	if !t.stillLeader() {
		return
	}
	var view proto.QueueView
	if req.Orgs {
		view.Orgs = t.viewOrgs(req.After)
	} else {
		view = t.view(&req, time.Now())
	}
	go t.reply(m, view)
}

// viewOrgs returns the next organisations, by name, that have something queued or running.
func (t *term) viewOrgs(after string) (list []proto.OrgQueue) {
	for _, org := range slices.Sorted(maps.Keys(t.queue.orgs)) {
		o := t.queue.orgs[org]
		c := counts(o.queued, o.active)
		if org <= after || c == (proto.QueueCounts{}) {
			continue
		}
		if list = append(list, proto.OrgQueue{Org: org, QueueCounts: c}); len(list) == proto.MaxQueueOrgs {
			break
		}
	}
	return list
}

func (t *term) view(req *proto.QueueRequest, now time.Time) (v proto.QueueView) {
	o := t.queue.orgs[req.Org]
	if o == nil {
		return v
	}
	v.Org = counts(o.queued, o.active)
	if k := o.keys[req.Key]; k != nil {
		v.Key = counts(k.queued, k.active)
		if j := k.oldest(); j != nil {
			place := t.place(o, j, now)
			v.Oldest = &place
		}
	}
	for _, id := range req.Traces {
		if j := t.queue.jobs[id]; j != nil && j.meta.Org == req.Org && j.state == queued {
			v.Places = append(v.Places, t.place(o, j, now))
		}
	}
	return v
}

func counts(queued map[proto.Class]int, active tally) proto.QueueCounts {
	return proto.QueueCounts{
		Queued:  proto.ClassCounts{Interactive: queued[proto.ClassInteractive], Background: queued[proto.ClassBackground]},
		Running: proto.ClassCounts{Interactive: active.all - active.background, Background: active.background},
	}
}

// oldest returns the oldest queued job, or nil.
func (q *keyQueue) oldest() (oldest *job) {
	for _, class := range q.jobs {
		for _, jobs := range class {
			if j := jobs.Front().Value.(*job); oldest == nil || j.order < oldest.order {
				oldest = j
			}
		}
	}
	return oldest
}

// place estimates the queue position of a job of o, assuming no further submissions.
func (t *term) place(o *orgQueue, j *job, now time.Time) proto.QueuePlace {
	k, class := o.keys[j.meta.Key], j.meta.Class()
	ofKey := t.ahead(k, j)
	ofKey += besidesClass(class, ofKey, k.queued[proto.ClassInteractive]+k.queued[proto.ClassBackground]-k.queued[class])
	ofOrg := ofKey
	for _, f := range o.sfq.flows {
		if f.party != k {
			ofOrg += rival{f.jobs, 1}.servedBefore(ofKey, 1)
		}
	}
	position := ofOrg
	for org, r := range t.rivals() {
		if org != o.org {
			position += r.servedBefore(ofOrg, j.meta.Weight)
		}
	}
	place := proto.QueuePlace{
		TraceID: j.meta.TraceID, Class: class, CreatedAt: j.meta.CreatedAt, Position: position,
		WaitingFor: t.offers.missing(j.needs.needs, j.needs.memory, now),
	}
	slots, ofPlan := t.slotsFor(j.needs), limit{j.meta.Concurrent, j.meta.Concurrent - o.active.all}
	if class == proto.ClassBackground {
		since := now.Add(-submittedWithin)
		if d := t.demands.all[needKey(j.needs.needs)]; d != nil && t.Interactive != nil && d.Interactive.After(since) {
			slots = slots.less(t.Interactive(slots.all))
		}
		r := &round{term: t, since: since}
		ofPlan = ofPlan.less(ofPlan.all - r.backgroundLimit(o.org, "", ofPlan.all))
	}
	rounds := max(slots.rounds(position), ofPlan.rounds(ofOrg))
	if l := j.meta.KeyConcurrent; l > 0 {
		rounds = max(rounds, limit{l, l - k.active.all}.rounds(ofKey))
	}
	mean := 0.0
	if p := t.poolFor(j.needs.needs); p != nil {
		mean = p.Duration.Value()
	}
	if wait := rounds * mean; slots.all > 0 && (mean > 0 || rounds == 0) {
		place.Wait = &wait
	}
	return place
}

// ahead returns how many queued jobs of the same key and class are older than j.
func (t *term) ahead(k *keyQueue, j *job) (n int) {
	orders := t.views.orders[k.key]
	if orders == nil {
		orders = classOrders{}
		for class, all := range k.jobs {
			for _, jobs := range all {
				list := make([]uint64, 0, jobs.Len())
				for e := jobs.Front(); e != nil; e = e.Next() {
					list = append(list, e.Value.(*job).order)
				}
				orders[class] = append(orders[class], list)
			}
		}
		t.views.orders[k.key] = orders
	}
	for _, list := range orders[j.meta.Class()] {
		older, _ := slices.BinarySearch(list, j.order)
		n += older
	}
	return n
}

// rivals returns the organisations with queued jobs that a live worker can run.
func (t *term) rivals() map[string]rival {
	if t.views.orgs != nil {
		return t.views.orgs
	}
	t.views.orgs = map[string]rival{}
	for _, n := range t.queue.needSets {
		if !t.anyWorkerMeets(n.needs, n.memory) {
			continue
		}
		for _, f := range n.orgs.flows {
			if f.jobs > 0 {
				r := t.views.orgs[f.party.org]
				t.views.orgs[f.party.org] = rival{r.queued + f.jobs, f.party.weight}
			}
		}
	}
	return t.views.orgs
}

// slotsFor returns the slots of the workers that meet the needs.
func (t *term) slotsFor(n *needSet) (slots limit) {
	for _, w := range t.workers {
		if w.capabilities.meet(n.needs) {
			slots.all += min(len(w.free)+w.load.jobs.all, w.slots)
			slots.free += len(w.free)
		}
	}
	return slots
}

// View returns the queue of an API key.
func (q *Queue) View(ctx context.Context, req *proto.QueueRequest) (v proto.QueueView, err error) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	body, err := json.Marshal(req)
	if err == nil {
		err = q.request(ctx, &nats.Msg{Subject: store.QueueSubject, Data: body}, &v)
	}
	if err != nil {
		return proto.QueueView{}, fmt.Errorf("ask for the queue: %w", err)
	}
	return v, nil
}

// Orgs returns the queues of all organisations that have something queued or running, by name.
func (q *Queue) Orgs(ctx context.Context) (all []proto.OrgQueue, err error) {
	for after := ""; ; after = all[len(all)-1].Org {
		v, err := q.View(ctx, &proto.QueueRequest{Orgs: true, After: after})
		if err != nil {
			return nil, err
		}
		if all = append(all, v.Orgs...); len(v.Orgs) < proto.MaxQueueOrgs {
			return all, nil
		}
	}
}
