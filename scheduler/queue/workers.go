package queue

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// maxWorkers limits the workers in one answer, which must fit into a message.
const maxWorkers = 200

// drainTimeout limits how long a worker may take to confirm that it drains.
const drainTimeout = 4 * time.Second

// The messages on [store.DrainSubject].
const (
	drainOn  = "on"
	drainOff = "off"
)

// LiveWorker returns the name under which a worker announces its slots for live sandboxes.
func LiveWorker(worker string) string { return worker + "-live" }

// answerWorkers answers with the next workers by name.
func (t *term) answerWorkers(m *nats.Msg) {
	if !t.stillLeader() {
		return
	}
	after := string(m.Data)
	list := []proto.Worker{}
	for _, name := range slices.Sorted(maps.Keys(t.workers)) {
		if name <= after {
			continue
		}
		w := t.workers[name]
		if w.live {
			continue
		}
		info := w.info
		if live := t.workers[LiveWorker(name)]; live != nil {
			info.Sandboxes, info.RunningSandboxes = live.slots, len(live.held)+len(live.used)
			info.SandboxMemory, info.SandboxMemoryFree = live.memory, max(0, live.freeMemory)
		}
		info.Name, info.Pool, info.Slots, info.Running = name, w.pool, w.slots, len(w.held)+len(w.used)
		info.Capabilities = slices.Sorted(maps.Keys(w.capabilities))
		info.Architecture = architectureOf(info.Capabilities)
		if list = append(list, info); len(list) == maxWorkers {
			break
		}
	}
	go t.reply(m, list)
}

// Workers returns all live workers by name.
func (q *Queue) Workers(ctx context.Context) ([]proto.Worker, error) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	all := []proto.Worker{}
	for after := ""; ; {
		var next []proto.Worker
		if err := q.request(ctx, &nats.Msg{Subject: store.WorkersSubject, Data: []byte(after)}, &next); err != nil {
			return nil, fmt.Errorf("list workers: %w", err)
		}
		all = append(all, next...)
		if len(next) < maxWorkers {
			return all, nil
		}
		after = next[len(next)-1].Name
	}
}

// Drain makes a worker stop or resume taking jobs, and returns the worker once it has. Running
// programs are not affected. A restarted worker takes jobs. Drain returns [proto.ErrNotFound] if no
// live worker has the name.
func (q *Queue) Drain(ctx context.Context, name string, drain bool) (proto.Worker, error) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	message := drainOff
	if drain {
		message = drainOn
	}
	tick := time.NewTicker(requestPause)
	defer tick.Stop()
	for {
		all, err := q.Workers(ctx)
		if err != nil {
			return proto.Worker{}, err
		}
		i := slices.IndexFunc(all, func(w proto.Worker) bool { return w.Name == name })
		if i < 0 {
			return proto.Worker{}, fmt.Errorf("drain worker %s: %w", name, proto.ErrNotFound)
		}
		if all[i].Draining == drain {
			return all[i], nil
		}
		// Repeated, because a message may be lost.
		for _, slots := range []string{name, LiveWorker(name)} {
			if err := q.Store.Conn.Publish(store.DrainSubject(slots), []byte(message)); err != nil {
				return proto.Worker{}, fmt.Errorf("drain worker %s: %w", name, err)
			}
		}
		select {
		case <-ctx.Done():
			return proto.Worker{}, fmt.Errorf("drain worker %s: %w", name, context.Cause(ctx))
		case <-tick.C:
		}
	}
}
