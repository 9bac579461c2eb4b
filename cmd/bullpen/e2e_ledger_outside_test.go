package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// outside is what executions do to the world: each program tells its id to a server on the internet that machines have, over a connection of
// its own, and goes on when it was heard; and webhooks come to another one. That is how a program's doing is felt by others in earnest, and
// needs nothing of bullpen's but that the sandbox lets it out.
type outside struct {
	log *eventLog

	mu      sync.Mutex
	effects map[string]map[string]int     // by the name of the submission, how often each id was told
	hooks   map[string][]proto.Result     // by id
	strange []violation                   // what came and cannot be
	refuse  func(id string, nth int) bool // says whether the nth webhook of an execution is answered with an error
}

const (
	effectPort = "9001"
	hookPort   = "9002"
	hookURL    = "http://www.example.com:" + hookPort + "/"
)

func newOutside(t *testing.T, m *machine, log *eventLog) *outside {
	t.Helper()
	o := &outside{
		log: log, effects: map[string]map[string]int{}, hooks: map[string][]proto.Result{},
		refuse: func(id string, nth int) bool { // the first one of every other execution
			sum := fnv.New32()
			_, _ = io.WriteString(sum, id)
			return nth == 1 && sum.Sum32()%2 == 0
		},
	}
	var effects, hooks net.Listener
	err := within(m.world, func() (err error) {
		if effects, err = net.Listen("tcp", webAddr+":"+effectPort); err != nil {
			return err
		}
		hooks, err = net.Listen("tcp", webAddr+":"+hookPort)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := effects.Accept()
			if err != nil {
				return
			}
			go o.effect(conn)
		}
	}()
	server := &http.Server{Handler: http.HandlerFunc(o.hook)}
	go func() { _ = server.Serve(hooks) }()
	t.Cleanup(func() {
		_ = effects.Close()
		_ = server.Close()
	})
	return o
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

// effect counts a program's effect, and tells it how many of its execution there are now.
func (o *outside) effect(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return // it was killed before it could say all
	}
	id, name, _ := strings.Cut(strings.TrimSpace(line), " ")
	o.mu.Lock()
	if o.effects[name] == nil {
		o.effects[name] = map[string]int{}
	}
	o.effects[name][id]++
	n := o.effects[name][id]
	o.mu.Unlock()
	o.log.note(name, "%s has effect %d", id, n)
	_, _ = fmt.Fprintln(conn, n)
}

// effectsOf gives how often each execution of a submission had its effect.
func (o *outside) effectsOf(name string) map[string]int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.effects[name])
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
	o.hooks[body.TraceID] = append(o.hooks[body.TraceID], body.Result)
	nth, refuse := len(o.hooks[body.TraceID]), o.refuse
	o.mu.Unlock()
	status := http.StatusOK
	if refuse(body.TraceID, nth) {
		status = http.StatusServiceUnavailable
	}
	o.log.note(name, "%s: webhook %d came, answered with %d: %s", body.TraceID, nth, status, raw)
	w.WriteHeader(status)
}

// refuseAll has every webhook answered with an error until usual is called, and tells of the first.
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

// hooksOf gives what the webhooks of an execution told.
func (o *outside) hooksOf(id string) []proto.Result {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]proto.Result(nil), o.hooks[id]...)
}
