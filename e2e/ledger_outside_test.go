package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// outside observes the effects of executions from outside the deployment. Each program sends its id
// to a server on the machines' internet, over its own connection, and continues after the response.
// Webhooks go to another server. The only part of bullpen that this needs is the sandbox's network
// access.
type outside struct {
	log             *eventLog
	network         *os.File
	effectsListener net.Listener // listener for effects
	server          *http.Server // server for webhooks
	serving         sync.WaitGroup

	mu      sync.Mutex
	effects map[string]map[string][]effectTime // by submission name, then by execution id
	hooks   map[string][]hook                  // by the id of the execution, or of the batch
	// sessionHooks has the ids of webhooks by the names and the numbers of the events of agent sessions.
	sessionHooks map[sessionHook]string
	batchHooks   map[string]string             // the id of the webhook of a batch, which is the same each time
	impossible   []violation                   // impossible arrivals
	rejectHook   func(id string, nth int) bool // reports whether to answer an execution's nth webhook with an error
}

// sessionHook names an event of an agent session.
type sessionHook struct {
	event, session string
	sequence       int64
}

// effectTime is one effect of an execution outside the deployment.
type effectTime struct {
	at     time.Duration
	undone bool // it happened in a period that a restore undid
}

// hook is a webhook.
type hook struct {
	proto.Result
	effectTime
}

// effects counts how often an execution had its effect.
type effects struct {
	total   int
	certain int // those that were not lost
}

const (
	effectPort = "9001"
	hookPort   = "9002"
	hookURL    = "http://www.example.com:" + hookPort + "/"
)

func newOutside(t *testing.T, m *machine, log *eventLog) *outside {
	t.Helper()
	o := &outside{
		log: log, network: m.internet, effects: map[string]map[string][]effectTime{}, hooks: map[string][]hook{},
		batchHooks: map[string]string{}, sessionHooks: map[sessionHook]string{},
		rejectHook: func(id string, nth int) bool { // the first one of every other execution
			sum := fnv.New32()
			_, _ = io.WriteString(sum, id)
			return nth == 1 && sum.Sum32()%2 == 0
		},
	}
	o.open(t)
	t.Cleanup(func() { o.close(t) })
	return o
}

// open starts listening.
func (o *outside) open(t *testing.T) {
	t.Helper()
	var hooks net.Listener
	err := within(o.network, func() (err error) {
		if o.effectsListener, err = net.Listen("tcp", webAddr+":"+effectPort); err != nil {
			return err
		}
		hooks, err = net.Listen("tcp", webAddr+":"+hookPort)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	effects, server := o.effectsListener, &http.Server{Handler: http.HandlerFunc(o.hook)}
	o.server = server
	o.serving.Go(func() {
		for {
			conn, err := effects.Accept()
			if err != nil {
				return
			}
			o.serving.Go(func() { o.effect(conn) })
		}
	})
	o.serving.Go(func() { _ = server.Serve(hooks) })
}

// close stops listening and returns once everything received has been recorded.
func (o *outside) close(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	_ = o.effectsListener.Close()
	if err := o.server.Shutdown(ctx); err != nil {
		t.Errorf("receive the last webhooks: %v", err)
	}
	o.serving.Wait()
}

// undoSince marks effects since a time as lost, because the deployment may not know of them.
// Nothing arrives during the call.
func (o *outside) undoSince(since time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ids := range o.effects {
		for _, all := range ids {
			for i := range all {
				all[i].undone = all[i].undone || all[i].at >= since
			}
		}
	}
	for _, all := range o.hooks {
		for i := range all {
			all[i].undone = all[i].undone || all[i].at >= since
		}
	}
}

// effectCode is the first part of every program, in Bash. It has the effect and prints how many
// effects the execution has had.
func effectCode(submission string) string {
	return fmt.Sprintf(`exec 3<>/dev/tcp/%s/%s || exit 99
echo "$BULLPEN_TRACE_ID %s" >&3
read -r run <&3 || exit 98
exec 3>&-
echo "run $run"
`, webAddr, effectPort, submission)
}

// effect counts a program's effect and responds with the number of effects of its execution.
func (o *outside) effect(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return // it was killed before it sent the whole line
	}
	id, name, _ := strings.Cut(strings.TrimSpace(line), " ")
	o.mu.Lock()
	if name == "" {
		o.impossible = append(o.impossible, violation{id, "its program ran without an execution"})
	}
	if o.effects[name] == nil {
		o.effects[name] = map[string][]effectTime{}
	}
	o.effects[name][id] = append(o.effects[name][id], effectTime{at: o.log.now()})
	n := len(o.effects[name][id])
	o.mu.Unlock()
	o.log.note(name, "%s has effect %d", id, n)
	_, _ = fmt.Fprintln(conn, n)
}

// effectsOf returns how often each execution of a submission had its effect.
func (o *outside) effectsOf(name string) map[string]effects {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := map[string]effects{}
	for id, all := range o.effects[name] {
		e := effects{total: len(all)}
		for _, f := range all {
			if !f.undone {
				e.certain++
			}
		}
		out[id] = e
	}
	return out
}

// hook receives a webhook.
func (o *outside) hook(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return // its sender was killed
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
	var body struct {
		Event    string
		Session  string `json:"session_id"`
		Sequence int64
		TraceID  string `json:"trace_id"`
		BatchID  string `json:"batch_id"`
		Result   proto.Result
	}
	err = json.Unmarshal(raw, &body)
	id, want := r.Header.Get("webhook-id"), proto.DeliveryID(proto.TraceID(body.TraceID))
	o.mu.Lock()
	if event, ok := strings.CutPrefix(body.Event, proto.EventSessionPrefix); ok {
		of := sessionHook{event, body.Session, body.Sequence}
		if o.sessionHooks[of] == "" {
			o.sessionHooks[of] = id
		}
		name, body.TraceID, want = body.Session, fmt.Sprint(of), o.sessionHooks[of]
	}
	if body.Event == proto.EventBatch {
		if o.batchHooks[body.BatchID] == "" {
			o.batchHooks[body.BatchID] = id
		}
		name, body.TraceID, want = body.BatchID, body.BatchID, o.batchHooks[body.BatchID]
	}
	if err != nil || id != want {
		o.impossible = append(o.impossible, violation{name, fmt.Sprintf("webhook %s has the body %s, %v", id, raw, err)})
	}
	o.hooks[body.TraceID] = append(o.hooks[body.TraceID], hook{body.Result, effectTime{at: o.log.now()}})
	nth, refuse := len(o.hooks[body.TraceID]), o.rejectHook
	o.mu.Unlock()
	status := http.StatusOK
	if refuse(body.TraceID, nth) {
		status = http.StatusServiceUnavailable
	}
	o.log.note(name, "%s: webhook %d came, answered with %d: %s", body.TraceID, nth, status, raw)
	w.WriteHeader(status)
}

// rejectAll answers every webhook with an error until usual is called. It closes first at the first
// webhook.
func (o *outside) rejectAll() (first <-chan struct{}, usual func()) {
	refused := make(chan struct{})
	var once sync.Once
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.rejectHook
	o.rejectHook = func(string, int) bool {
		once.Do(func() { close(refused) })
		return true
	}
	return refused, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.rejectHook = before
	}
}

// hooksOf returns the webhooks of an execution.
func (o *outside) hooksOf(id string) []hook {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.hooks[id])
}
