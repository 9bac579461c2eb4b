package api

import (
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Overview has the figures of the last hour's executions, and the present state.
type Overview struct {
	Org       *string                    `json:"org" doc:"The organisation; null for all."`
	From      Time                       `json:"from" doc:"The figures are complete from this time on: the start of the hour, or of the server that answers."`
	Minutes   []OverviewMinute           `json:"minutes" doc:"60 minutes, the oldest first. The last one has not ended."`
	Total     OverviewFigures            `json:"total" doc:"The figures of all these minutes."`
	Queue     *proto.QueueCounts         `json:"queue" doc:"Queued and running executions now; null while no dispatcher answers."`
	Sandboxes map[proto.SandboxState]int `json:"sandboxes" doc:"Live sandboxes now, by state. States without any are left out."`
	Server    *OverviewServer            `json:"server" doc:"The deployment, in a global administrator's overview of all organisations; null in others."`
}

// OverviewMinute has the figures of a minute.
type OverviewMinute struct {
	At Time `json:"at" doc:"The start of the minute."`
	OverviewFigures
}

// OverviewFigures are the figures of executions in a period. Live sandboxes are not counted.
type OverviewFigures struct {
	Arrivals int                  `json:"arrivals" minimum:"0" doc:"Accepted executions."`
	Ends     map[proto.Status]int `json:"ends" doc:"Executions that ended, by status. Statuses without any are left out."`
	Wait     Quantiles            `json:"wait" doc:"How long the executions that ended had waited for a slot, without those that never started."`
	Duration Quantiles            `json:"duration" doc:"How long the programs of the executions that ended had run."`
}

// Quantiles describe times in milliseconds, within 5 %.
type Quantiles struct {
	P50 *float64 `json:"p50_ms" minimum:"0" doc:"The median; null without any."`
	P99 *float64 `json:"p99_ms" minimum:"0" doc:"The 99th percentile; null without any."`
}

// OverviewServer is the state of the deployment.
type OverviewServer struct {
	Workers  *OverviewWorkers `json:"workers" doc:"The live workers; null while no dispatcher answers."`
	Problems []Problem        `json:"problems" doc:"What the process that answers needs and does not have. Those of others are in the list of processes."`
}

// OverviewWorkers counts the live workers.
type OverviewWorkers struct {
	Count     int `json:"count" minimum:"0"`
	Slots     int `json:"slots" minimum:"0" doc:"How many executions they run at once."`
	FreeSlots int `json:"free_slots" minimum:"0"`
}

func overviewRoutes() []Route {
	ms := func(v float64) *float64 { return &v }
	at := exampleTime().Truncate(time.Minute)
	figures := OverviewFigures{
		Arrivals: 120, Ends: map[proto.Status]int{proto.StatusSuccess: 117, proto.StatusFailed: 2},
		Wait: Quantiles{ms(1), ms(140)}, Duration: Quantiles{ms(52), ms(2100)},
	}
	return []Route{{
		Method: http.MethodGet, Path: "/v1/overview", ID: "getOverview", Tag: tagActivity, Scope: proto.ScopeRead,
		Summary: "Show the last hour",
		Doc: "Arrivals, ends and times of the organisation's executions in each minute of the last hour, and what is " +
			"queued, running and live now. Each server counts from its own start: the figures before `from` are " +
			"incomplete.",
		Params: []Param{query("org", "The organisation, for a global administrator. By default all for a global "+
			"administrator, otherwise that of the API key.", text())},
		Responses: ok("The overview.", Overview{
			From: Time{at.Add(-59 * time.Minute)}, Minutes: []OverviewMinute{{Time{at}, figures}}, Total: figures,
			Queue:     &proto.QueueCounts{Running: proto.ClassCounts{Interactive: 1}},
			Sandboxes: map[proto.SandboxState]int{proto.SandboxRunning: 3},
			Server:    &OverviewServer{Workers: &OverviewWorkers{2, 16, 15}, Problems: []Problem{}},
		}),
		Errors: []int{http.StatusNotFound},
	}}
}
