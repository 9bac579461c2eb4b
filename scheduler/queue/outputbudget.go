package queue

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

// budgetPeriod is the time after which an organisation's output budget is full again.
const budgetPeriod = time.Hour

// outputRequest reserves bytes of an organisation's output budget, or corrects its use.
type outputRequest struct {
	Org  string `json:"org"`
	Need int64  `json:"need,omitempty"` // bytes; nothing is reserved if fewer are left
	Want int64  `json:"want,omitempty"` // bytes, at least Need
	// Settle is added to the bytes used. Such a request is not answered.
	Settle int64 `json:"settle,omitempty"`
}

type outputReply struct {
	Reserved int64 `json:"reserved"` // bytes
}

// ReserveOutput reserves want bytes of an organisation's output budget, or fewer but at least need.
// It returns the number of bytes reserved: 0 if need bytes are not left, [math.MaxInt64] without a
// budget. It blocks while no dispatcher answers.
func (q *Queue) ReserveOutput(ctx context.Context, org string, need, want int64) (int64, error) {
	body, err := json.Marshal(outputRequest{Org: org, Need: need, Want: want})
	if err != nil {
		return 0, fmt.Errorf("reserve output of %s: %w", org, err)
	}
	var reply outputReply
	err = q.request(ctx, &nats.Msg{Subject: store.OutputBudgetSubject, Data: body}, &reply)
	return reply.Reserved, err
}

// SettleOutput adds n to an organisation's use of its output budget: bytes stored without a
// reservation or, if negative, the unused part of one. The message may be lost.
func (q *Queue) SettleOutput(org string, n int64) error {
	body, err := json.Marshal(outputRequest{Org: org, Settle: n})
	if err != nil {
		return fmt.Errorf("settle output of %s: %w", org, err)
	}
	return q.Store.Conn.Publish(store.OutputBudgetSubject, body)
}

// outputBudget counts the bytes of output that each organisation stores. What is used is forgotten
// evenly, limit bytes in a budgetPeriod. A new leader begins with unused budgets.
type outputBudget struct {
	limit int64 // bytes; 0 for no limit
	used  map[string]*outputUse
}

type outputUse struct {
	bytes float64
	at    time.Time // of bytes
}

// usedBy returns an organisation's use at the time now.
func (b *outputBudget) usedBy(org string, now time.Time) *outputUse {
	u := b.used[org]
	if u == nil {
		u = &outputUse{at: now}
		b.used[org] = u
	}
	forgotten := float64(b.limit) * now.Sub(u.at).Seconds() / budgetPeriod.Seconds()
	u.bytes, u.at = max(0, u.bytes-max(0, forgotten)), now
	return u
}

// reserve returns the bytes that it reserved, see [Queue.ReserveOutput].
func (b *outputBudget) reserve(org string, need, want int64, now time.Time) int64 {
	if b.limit == 0 {
		return math.MaxInt64
	}
	u := b.usedBy(org, now)
	n := min(want, b.limit-int64(u.bytes))
	if n < need {
		return 0
	}
	u.bytes += float64(n)
	return n
}

func (b *outputBudget) settle(org string, n int64, now time.Time) {
	if b.limit > 0 {
		u := b.usedBy(org, now)
		u.bytes = max(0, u.bytes+float64(n))
	}
}

// forget removes the organisations that have used nothing lately.
func (b *outputBudget) forget(now time.Time) {
	maps.DeleteFunc(b.used, func(org string, _ *outputUse) bool { return b.usedBy(org, now).bytes == 0 })
}

// onOutputRequest handles a request of a worker in the loop. A leader in doubt does not answer.
func (t *term) onOutputRequest(ctx context.Context, m *nats.Msg) {
	var r outputRequest
	if err := json.Unmarshal(m.Data, &r); err != nil || r.Org == "" || r.Need < 0 || r.Want < r.Need {
		t.Log.Error("malformed output request ignored", "error", err)
		return
	}
	t.post(ctx, func() {
		switch now := time.Now(); {
		case m.Reply == "":
			t.output.settle(r.Org, r.Settle, now)
		case !t.stillLeader():
		case t.DiskFull != nil && t.DiskFull():
			t.reply(m, outputReply{})
		default:
			t.reply(m, outputReply{t.output.reserve(r.Org, r.Need, r.Want, now)})
		}
	})
}
