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

// outside is what executions do to the world: each program tells its id to a server on the internet that machines have, over a connection of
// its own, and goes on when it was heard; and webhooks come to another one. That is how a program's doing is felt by others in earnest, and
// needs nothing of bullpen's but that the sandbox lets it out.
type outside struct {
	log     *eventLog
	world   *os.File
	told    net.Listener // of effects
	server  *http.Server // of webhooks
	serving sync.WaitGroup

	mu      sync.Mutex
	effects map[string]map[string][]felt  // by the name of the submission, those of each id
	hooks   map[string][]hook             // by id
	strange []violation                   // what came and cannot be
	refuse  func(id string, nth int) bool // reports whether the nth webhook of an execution is answered with an error
}

// felt is something that an execution did to the world.
type felt struct {
	at   time.Duration
	lost bool // in a time after which the deployment was set back
}

// hook is a webhook.
type hook struct {
	proto.Result
	felt
}

// effects is how often an execution had its effect.
type effects struct {
	all  int
	sure int // those that were not lost
}

const (
	effectPort = "9001"
	hookPort   = "9002"
	hookURL    = "http://www.example.com:" + hookPort + "/"
)

func newOutside(t *testing.T, m *machine, log *eventLog) *outside {
	t.Helper()
	o := &outside{
		log: log, world: m.world, effects: map[string]map[string][]felt{}, hooks: map[string][]hook{},
		refuse: func(id string, nth int) bool { // the first one of every other execution
			sum := fnv.New32()
			_, _ = io.WriteString(sum, id)
			return nth == 1 && sum.Sum32()%2 == 0
		},
	}
	o.open(t)
	t.Cleanup(func() { o.close(t) })
	return o
}

// open begins to listen.
func (o *outside) open(t *testing.T) {
	t.Helper()
	var hooks net.Listener
	err := within(o.world, func() (err error) {
		if o.told, err = net.Listen("tcp", webAddr+":"+effectPort); err != nil {
			return err
		}
		hooks, err = net.Listen("tcp", webAddr+":"+hookPort)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	effects, server := o.told, &http.Server{Handler: http.HandlerFunc(o.hook)}
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

// close listens no more, and returns when all that came is taken in.
func (o *outside) close(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	_ = o.told.Close()
	if err := o.server.Shutdown(ctx); err != nil {
		t.Errorf("take in the last webhooks: %v", err)
	}
	o.serving.Wait()
}

// setBack takes in that the deployment does not know for sure of what was felt since a moment. Nothing comes meanwhile.
func (o *outside) setBack(since time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ids := range o.effects {
		for _, all := range ids {
			for i := range all {
				all[i].lost = all[i].lost || all[i].at >= since
			}
		}
	}
	for _, all := range o.hooks {
		for i := range all {
			all[i].lost = all[i].lost || all[i].at >= since
		}
	}
}

// effectCode is what programs begin with, in Bash: it has the effect, and prints the how-manieth of the execution that was.
func effectCode(submission string) string {
	return fmt.Sprintf(`exec 3<>/dev/tcp/%s/%s || exit 99
echo "$BULLPEN_TRACE_ID %s" >&3
read -r run <&3 || exit 98
exec 3>&-
echo "run $run"
`, webAddr, effectPort, submission)
}

// effect counts a program's effect, and responds with the number of effects of its execution.
func (o *outside) effect(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(patience))
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return // it was killed before it could say all
	}
	id, name, _ := strings.Cut(strings.TrimSpace(line), " ")
	o.mu.Lock()
	if o.effects[name] == nil {
		o.effects[name] = map[string][]felt{}
	}
	o.effects[name][id] = append(o.effects[name][id], felt{at: o.log.now()})
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
		e := effects{all: len(all)}
		for _, f := range all {
			if !f.lost {
				e.sure++
			}
		}
		out[id] = e
	}
	return out
}

// hook takes a webhook.
func (o *outside) hook(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return // its sender was killed
	}
	name := strings.TrimPrefix(r.URL.Path, "/")
	var body struct {
		Event   string
		TraceID string `json:"trace_id"`
		Result  proto.Result
	}
	err = json.Unmarshal(raw, &body)
	id := r.Header.Get("webhook-id")
	o.mu.Lock()
	if err != nil || id != proto.DeliveryID(proto.TraceID(body.TraceID)) {
		o.strange = append(o.strange, violation{name, fmt.Sprintf("webhook %s has the body %s, %v", id, raw, err)})
	}
	o.hooks[body.TraceID] = append(o.hooks[body.TraceID], hook{body.Result, felt{at: o.log.now()}})
	nth, refuse := len(o.hooks[body.TraceID]), o.refuse
	o.mu.Unlock()
	status := http.StatusOK
	if refuse(body.TraceID, nth) {
		status = http.StatusServiceUnavailable
	}
	o.log.note(name, "%s: webhook %d came, answered with %d: %s", body.TraceID, nth, status, raw)
	w.WriteHeader(status)
}

// refuseAll answers every webhook with an error until usual is called. The channel is closed at the first one.
func (o *outside) refuseAll() (first <-chan struct{}, usual func()) {
	refused := make(chan struct{})
	var once sync.Once
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.refuse
	o.refuse = func(string, int) bool {
		once.Do(func() { close(refused) })
		return true
	}
	return refused, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.refuse = before
	}
}

// hooksOf returns the webhooks of an execution.
func (o *outside) hooksOf(id string) []hook {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.hooks[id])
}
