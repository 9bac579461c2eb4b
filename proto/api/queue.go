package api

import (
	"math"
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// Queue is the queue of an API key and its organisation.
type Queue struct {
	Key          KeyQueue          `json:"key"`
	Organisation OrganisationQueue `json:"organisation"`
	Oldest       *QueuedExecution  `json:"oldest" doc:"The execution of the key that is queued for the longest time; null if none is."`
	Executions   []QueuedExecution `json:"executions" doc:"Those of the request that are queued."`
}

// KeyQueue counts the executions of an API key.
type KeyQueue struct {
	_ struct{} `doc:"Executions of the API key."`

	proto.QueueCounts
	Concurrent *int `json:"concurrent" doc:"How many may run at once; null if only the plan's limit applies."`
}

// OrganisationQueue counts the executions of an organisation.
type OrganisationQueue struct {
	_ struct{} `doc:"Executions of all API keys of the organisation."`

	proto.QueueCounts
	Concurrent *int `json:"concurrent" doc:"How many may run at once; null for no limit. Queued interactive ones count too."`
	MaxQueued  *int `json:"max_queued" doc:"How many async ones may be queued; null for no limit."`
}

// QueuedExecution is the place of an execution in the queue.
type QueuedExecution struct {
	TraceID       proto.TraceID  `json:"trace_id"`
	Class         proto.Class    `json:"class"`
	CreatedAt     Time           `json:"created_at"`
	Position      int            `json:"position" minimum:"0" doc:"Estimate of how many executions, including others', start before it if no more are submitted."`
	EstimatedWait *int64         `json:"estimated_wait" minimum:"0" doc:"Seconds until it starts, estimated from the mean duration of recent executions; null if no worker can run it, or if none like it has ended recently."`
	WaitingFor    *proto.Missing `json:"waiting_for,omitempty"`
}

// NewQueue returns the form of a queue.
// keyConcurrent is the limit of the key, 0 for none.
func NewQueue(v *proto.QueueView, keyConcurrent int, plan *proto.Plan) Queue {
	q := Queue{
		Key: KeyQueue{QueueCounts: v.Key, Concurrent: optional(keyConcurrent)},
		Organisation: OrganisationQueue{
			QueueCounts: v.Org, Concurrent: optional(plan.Concurrent), MaxQueued: optional(plan.MaxQueued),
		},
		Executions: make([]QueuedExecution, len(v.Places)),
	}
	if v.Oldest != nil {
		oldest := newQueuedExecution(v.Oldest)
		q.Oldest = &oldest
	}
	for i := range v.Places {
		q.Executions[i] = newQueuedExecution(&v.Places[i])
	}
	return q
}

func newQueuedExecution(p *proto.QueuePlace) QueuedExecution {
	e := QueuedExecution{
		TraceID: p.TraceID, Class: p.Class, CreatedAt: Time{p.CreatedAt}, Position: p.Position,
		WaitingFor: p.WaitingFor,
	}
	if p.Wait != nil {
		wait := int64(math.Ceil(*p.Wait))
		e.EstimatedWait = &wait
	}
	return e
}

// OrgQueue is the queue of an organisation.
type OrgQueue struct {
	Org string `json:"org"`
	proto.QueueCounts
	Concurrent *int `json:"concurrent" doc:"How many may run at once, by the organisation's plan; null for no limit, and if the organisation or its plan is gone."`
	MaxQueued  *int `json:"max_queued" doc:"How many async ones may be queued; null for no limit, and if the organisation or its plan is gone."`
}

// OrgQueues are the queues of organisations.
type OrgQueues struct {
	Orgs []OrgQueue `json:"orgs"`
}

// NewOrgQueue returns the form of the queue of an organisation with a plan.
func NewOrgQueue(q *proto.OrgQueue, plan *proto.Plan) OrgQueue {
	return OrgQueue{
		Org: q.Org, QueueCounts: q.QueueCounts, Concurrent: optional(plan.Concurrent), MaxQueued: optional(plan.MaxQueued),
	}
}

func orgQueueRoutes() []Route {
	return []Route{{
		Method: http.MethodGet, Path: "/v1/admin/queue", ID: "getOrgQueues", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Global: true, Summary: "Show the queues of organisations",
		Doc: "The queued and running executions of each organisation that has any, and the limits of its plan. Live " +
			"sandboxes and waiting items of batches are not counted.",
		Responses: ok("The queues, by organisation.", OrgQueues{[]OrgQueue{NewOrgQueue(&proto.OrgQueue{
			Org: "acme", QueueCounts: proto.QueueCounts{
				Queued:  proto.ClassCounts{Background: 40},
				Running: proto.ClassCounts{Interactive: 1, Background: 6},
			},
		}, &proto.Plan{Concurrent: 100, MaxQueued: 1000})}}),
	}}
}
