package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type queueCommand struct {
	remote `embed:""`
	Traces []traceID `arg:"" optional:"" name:"trace" help:"Ids of executions whose places to show: trc_…"`
}

func (*queueCommand) Help() string {
	return `Shows how many executions are queued and running, of the API key and of its organisation, with their limits. Then come the places in
the queue of the key's oldest queued execution and of those that are named, if they are queued. Position is how many executions start
before it, and wait the time until it starts; both are estimates. Waiting items of batches are not in the queue yet.

Examples:

  bullpen queue
  bullpen queue trc_Dh--7j-V0wlyHpZI_3sX`
}

func (c *queueCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) (*client.Queue, json.RawMessage, error) {
		var ids []proto.TraceID
		for _, id := range c.Traces {
			ids = append(ids, proto.TraceID(id))
		}
		return api.Queue(ctx, ids)
	}, printQueue)
}

func printQueue(p *page, q *client.Queue) {
	p.row("", "QUEUED", "ASYNC", "INTERACTIVE", "RUNNING", "ASYNC", "INTERACTIVE", "AT ONCE")
	row := func(name string, c *proto.QueueCounts, limit any) {
		p.row(name, c.Queued.Batch+c.Queued.Interactive, c.Queued.Batch, c.Queued.Interactive,
			c.Running.Batch+c.Running.Interactive, c.Running.Batch, c.Running.Interactive, limit)
	}
	row("key", &q.Key.QueueCounts, q.Key.Concurrent)
	row("organisation", &q.Organisation.QueueCounts, q.Organisation.Concurrent)
	if q.Oldest == nil && len(q.Executions) == 0 {
		return
	}
	p.textf("\n")
	p.row("EXECUTION", "CLASS", "POSITION", "WAIT", "CREATED")
	place := func(name string, e *client.QueuedExecution) {
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
}
