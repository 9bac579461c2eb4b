package main

import (
	"context"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// timeoutProgram never ends on its own and ignores SIGTERM. It leaves a child that does the same.
const timeoutProgram = "trap '' TERM; (trap '' TERM; while :; do :; done) & while :; do sleep 1; done"

// measureTimeouts runs programs with a timeout of one second. It returns how much later they had
// ended, in milliseconds.
func measureTimeouts(ctx context.Context, a *api, runs int) *summary {
	var late []float64
	sum := &summary{}
	for range runs {
		result, id, err := a.execute(ctx, proto.Bash, timeoutProgram, 1)
		if err == nil && (result.ErrorCode == nil || *result.ErrorCode != string(proto.CodeTimeout)) {
			err = fmt.Errorf("execution %s did not time out", id)
		}
		if err != nil {
			sum.Errors++
			sum.FirstError = err.Error()
			continue
		}
		late = append(late, float64(result.DurationMS)-float64(time.Second.Milliseconds()))
	}
	s := summarise(late)
	s.Errors, s.FirstError = sum.Errors, sum.FirstError
	return s
}
