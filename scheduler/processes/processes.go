// Package processes finds the running processes of bullpen. Each of them describes itself on request.
package processes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// maxProcesses limits how many answers Find reads: a worker that is hostile can send any number.
const maxProcesses = 10_000

// Serve answers requests of Find with describe's result, until stop is called.
func Serve(conn *nats.Conn, describe func() proto.Process) (stop func(), err error) {
	sub, err := conn.Subscribe(store.ProcessesSubject, func(*nats.Msg) {
		p := describe()
		text, err := json.Marshal(p)
		if err == nil {
			_ = conn.Publish(store.ProcessSubject, text) // there is no one to report to; Find returns one process less
		}
	})
	if err != nil {
		return nil, fmt.Errorf("answer requests about this process: %w", err)
	}
	return func() { _ = sub.Unsubscribe() }, nil
}

// Find returns the processes that answer within wait, ordered by their names. Those that are
// starting or cut off from NATS do not answer.
func Find(ctx context.Context, conn *nats.Conn, wait time.Duration) ([]proto.Process, error) {
	sub, err := conn.SubscribeSync(store.ProcessSubject)
	if err != nil {
		return nil, fmt.Errorf("find processes: %w", err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := conn.Publish(store.ProcessesSubject, nil); err != nil {
		return nil, fmt.Errorf("find processes: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	found := map[string]proto.Process{} // another request at the same time has answers too
	for range maxProcesses {
		m, err := sub.NextMsgWithContext(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("find processes: %w", err)
		}
		var p proto.Process
		if json.Unmarshal(m.Data, &p) == nil && p.Name != "" {
			found[p.Name] = p
		}
	}
	all := make([]proto.Process, 0, len(found))
	for _, p := range found {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b proto.Process) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}
