package e2e

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/bullpen-run/bullpen/proto"
)

// appended is an execution in a thread. It prints the list of names in the thread's home and
// appends its own name.
type appended struct {
	thread, name string
}

// found is the outcome of an appended execution.
type found struct {
	list  string // the names that it found, each with a leading space
	known bool   // whether list is known
	saved saved
}

// saved is whether an execution's home was saved.
type saved int

const (
	savedMaybe saved = iota
	savedNot
	savedYes
)

// threadModel models one thread whose executions take effect one at a time. Each takes effect
// between the time it was sent and the time its end was known.
func threadModel() porcupine.Model {
	model := porcupine.NondeterministicModel{
		Init: func() []any { return []any{""} },
		Step: func(state, input, output any) []any {
			list, in, out := state.(string), input.(appended), output.(found)
			if out.known && out.list != list {
				return nil
			}
			with := list + " " + in.name
			switch out.saved {
			case savedYes:
				return []any{with}
			case savedNot:
				return []any{list}
			default:
				return []any{list, with}
			}
		},
	}
	return model.ToModel()
}

// checkThreads searches for an order of each thread's executions that explains what they found and
// what is there now.
func (l *ledger) checkThreads() {
	histories, now := map[string][]porcupine.Operation{}, int64(l.log.now())
	for _, s := range l.all {
		if s.thread == "" || len(s.ids) == 0 {
			continue
		}
		for _, x := range s.ids {
			out, ran := l.threadFoundBy(s, x)
			if !ran {
				continue
			}
			op := porcupine.Operation{Input: appended{s.thread, s.name}, Output: out, Call: int64(s.call), Return: int64(s.back)}
			switch {
			case len(x.outcomes) == 0:
				op.Return = math.MaxInt64
			case s.unknown: // it may have ended after its client left
				op.Return = now
			}
			histories[s.thread] = append(histories[s.thread], op)
		}
	}
	for thread, history := range histories {
		last := l.readThread(thread)
		history = append(history, porcupine.Operation{
			Input: appended{thread, ""}, Output: found{last, true, savedNot}, Call: now + 1, Return: now + 1,
		})
		switch result := porcupine.CheckOperationsTimeout(threadModel(), history, patience); result {
		case porcupine.Ok:
		default:
			l.violate(thread, "no order of its executions explains what they found (%s): %s", result, describe(history))
		}
	}
}

// threadFoundBy returns what an execution found in its thread, and whether it ran in one.
func (l *ledger) threadFoundBy(s *submission, x *observation) (found, bool) {
	if len(x.outcomes) == 0 {
		return found{}, l.effectsOf(s.name)[x.id].certain > 0
	}
	out := found{saved: savedYes}
	e := x.outcomes[0].end
	if _, rest, is := strings.Cut(e.Stdout, "\nfound"); is {
		out.list, _, out.known = strings.Cut(rest, "\n")
	}
	switch proto.ErrorCode(e.Code) {
	case proto.CodeExpiredInQueue, proto.CodeThreadMount:
		return out, false
	case proto.CodeWorkerLost, proto.CodeThreadSave:
		out.saved = savedNot
	}
	return out, true
}

// readThread returns the content of a thread. A lock for a submission that was never stored expires
// after a while.
func (l *ledger) readThread(thread string) string {
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	gateway := l.clientOf(l.gateways(rand.New(rand.NewPCG(l.seed, 998)))[0])
	for {
		r := gateway.execute(bash("echo found $(cat log)").and("thread_id", thread))
		if r.status == http.StatusConflict {
			if ctx.Err() != nil {
				l.violate(thread, "it is held when all executions have ended: %s", r)
				return ""
			}
			sleep(ctx, 250*time.Millisecond)
			continue
		}
		res := r.result(l.t)
		list, is := strings.CutPrefix(strings.TrimSuffix(res.Stdout, "\n"), "found")
		if !is || !res.Success {
			l.violate(thread, "cannot be read: %+v", res)
		}
		return list
	}
}

// describe formats a history.
func describe(history []porcupine.Operation) string {
	var b strings.Builder
	for _, op := range history {
		in, out := op.Input.(appended), op.Output.(found)
		fmt.Fprintf(&b, "\n\t%9.3fs to %9.3fs %s found (%v)%s, saved %d", float64(op.Call)/1e9, float64(op.Return)/1e9,
			in.name, out.known, out.list, out.saved)
	}
	return b.String()
}
