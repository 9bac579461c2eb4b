package app

import (
	"github.com/bullpen-run/bullpen/scheduler/admission"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/storage/thread"
)

// steps implements [pipelines.Executions].
type steps struct {
	*admission.Admission
	*queue.Queue
}

// stepThreads implements [pipelines.Threads].
type stepThreads struct {
	*thread.Versions
	*threads.Threads
}
