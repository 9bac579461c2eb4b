package main

import (
	"context"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type queueCommand struct {
	remote `embed:""`
	Traces []traceID `arg:"" optional:"" name:"trace" help:"Ids of executions whose places to show: trc_…"`
}

func (*queueCommand) Help() string {
	return `Shows the queued and running executions of the API key and of its organisation, with their limits, and the
positions of the key's oldest queued execution and of the named ones. Position counts the executions that start before
it, and wait is the time until it starts; both are estimates. If no worker can run an execution, a line says what is
missing. Waiting items of batches are not in the queue yet.

Examples:

  bullpen queue
  bullpen queue trc_Dh--7j-V0wlyHpZI_3sX`
}

func (c *queueCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Queue, error) {
		var ids []proto.TraceID
		for _, id := range c.Traces {
			ids = append(ids, proto.TraceID(id))
		}
		return cl.Queue(ctx, ids...)
	}, printQueue)
}

func printQueue(p *page, q *api.Queue) {
	p.row("", "QUEUED", "BACKGROUND", "INTERACTIVE", "RUNNING", "BACKGROUND", "INTERACTIVE", "AT ONCE")
	row := func(name string, c *proto.QueueCounts, limit any) {
		p.row(name, c.Queued.Background+c.Queued.Interactive, c.Queued.Background, c.Queued.Interactive,
			c.Running.Background+c.Running.Interactive, c.Running.Background, c.Running.Interactive, limit)
	}
	row("key", &q.Key.QueueCounts, q.Key.Concurrent)
	row("organisation", &q.Organisation.QueueCounts, q.Organisation.Concurrent)
	if q.Oldest == nil && len(q.Executions) == 0 {
		return
	}
	p.textf("\n")
	p.row("EXECUTION", "CLASS", "POSITION", "WAIT", "CREATED")
	place := func(name string, e *api.QueuedExecution) {
		wait := "-"
		if e.EstimatedWait != nil {
			wait = fmt.Sprint(time.Duration(*e.EstimatedWait) * time.Second)
		}
		p.row(name, e.Class, e.Position, wait, e.CreatedAt)
	}
	if q.Oldest != nil {
		place("oldest: "+string(q.Oldest.TraceID), q.Oldest)
	}
	for i := range q.Executions {
		place(string(q.Executions[i].TraceID), &q.Executions[i])
	}
	explained := map[string]bool{}
	explain := func(e *api.QueuedExecution) {
		if e == nil || e.WaitingFor == nil || explained[string(e.TraceID)] {
			return
		}
		explained[string(e.TraceID)] = true
		p.textf("\n%s waits: %s\n", e.TraceID, e.WaitingFor.Message)
	}
	explain(q.Oldest)
	for i := range q.Executions {
		explain(&q.Executions[i])
	}
}
