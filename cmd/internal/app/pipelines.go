package app

import (
	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/scheduler/queue"
)

// steps implements [pipelines.Executions].
type steps struct {
	*gateway.Server
	*queue.Queue
}
