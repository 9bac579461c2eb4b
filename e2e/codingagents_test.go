package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// codingAgents are the agents whose programs `make agents` has fetched.
func codingAgents() []string { return []string{"claude", "codex", "opencode"} }

// agentPrograms returns the directory with the programs of coding agents.
func agentPrograms(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../bin/agents")
	if err == nil {
		_, err = os.Stat(dir)
	}
	if err != nil {
		t.Fatalf("%v: run make agents", err)
	}
	return dir
}

// newCodingAgents deploys bullpen with workers that have the programs of coding agents, and a scripted model.
func newCodingAgents(t *testing.T, p *programs, args ...string) *system {
	t.Helper()
	args = append(args, "--agents", agentPrograms(t))
	args = append(args, p.newBucket(t).flags()...)
	sys := newAgentsIn(t, p, topology{separate: true}, "codingagents", args...)
	sys.awaitAgents(t)
	return sys
}

// awaitAgents waits until a worker has announced the agents.
func (sys *system) awaitAgents(t *testing.T) {
	t.Helper()
	eventually(t, "the agents are installed", func() (bool, any) {
		r := sys.in(t).get("/sandbox-agent/v1/agents")
		return strings.Count(string(r.body), `"installed":true`) == len(codingAgents())+1, r // and the mock
	})
}

// jsonBody is the header of requests to the API of agent sessions.
var jsonBody = []string{"Content-Type", "application/json"} // read only

// agentSession is a session of a coding agent.
type agentSession struct {
	*api
	id   string
	seen int64 // sequence number of the last event that was read
}

// codingEvent is an event of a session.
type codingEvent struct {
	Sequence int64
	Time     time.Time
	Type     string
	Data     struct {
		Permission string `json:"permission_id"`
		Question   string `json:"question_id"`
		Status     string
		Code       string
		Message    string
		Delta      string
		Item       struct {
			Kind, Role, Status string
			Content            []struct {
				Type, Text, Output, Path, Action, Diff string
			}
		}
	}
}

func (e *codingEvent) String() string {
	text, _ := json.Marshal(e.Data)
	return fmt.Sprintf("%d %s %s", e.Sequence, e.Type, text)
}

// newCodingSession creates a session of an agent.
func (a *api) newCodingSession(id, agent string, more ...any) *agentSession {
	a.t.Helper()
	r := a.do(http.MethodPost, sandboxAgent+id, request{"agent": agent}.and(more...), jsonBody...)
	if r.status != http.StatusOK {
		a.t.Fatalf("create a session of %s: %s", agent, r)
	}
	return &agentSession{api: a, id: id}
}

func (s *agentSession) post(path string, body any) {
	s.t.Helper()
	if r := s.do(http.MethodPost, sandboxAgent+s.id+path, body, jsonBody...); r.status != http.StatusNoContent {
		s.t.Fatalf("POST %s: %s", path, r)
	}
}

// send sends a message.
func (s *agentSession) send(text string) { s.t.Helper(); s.post("/messages", request{"message": text}) }

// run sends a message that makes the model call its tool for commands.
func (s *agentSession) run(command string) { s.t.Helper(); s.send("run: " + command + " :end") }

// agentPatience is how long an event may take. The loss of a worker is noticed after a minute.
const agentPatience = 4 * time.Minute

// until returns the events up to the next one for which last is true, as they come.
func (s *agentSession) until(last func(*codingEvent) bool) (events []codingEvent) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), agentPatience)
	defer cancel()
	stream, err := s.open(ctx, http.MethodGet, fmt.Sprintf("%s%s/events/sse?offset=%d", sandboxAgent, s.id, s.seen), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	defer stream.Body.Close() //nolint:errcheck // only read
	lines := bufio.NewScanner(stream.Body)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var e codingEvent
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			s.t.Fatalf("%v: %s", err, data)
		}
		s.seen = e.Sequence
		if events = append(events, e); last(&e) {
			return events
		}
	}
	s.t.Fatalf("session %s: the event does not come: %v: %s", s.id, lines.Err(), describeEvents(events))
	return nil
}

func describeEvents(events []codingEvent) string {
	var lines []string
	for i := range events {
		lines = append(lines, events[i].String())
	}
	return strings.Join(lines, "\n")
}

// answer answers the permissions and ends with the turn. It returns the events, and the number of permissions.
func (s *agentSession) answer(reply string) (events []codingEvent, asked int) {
	s.t.Helper()
	for {
		events = append(events, s.until(func(e *codingEvent) bool {
			return e.Type == "permission.requested" || e.Type == "turn.ended"
		})...)
		e := events[len(events)-1]
		if e.Type == "turn.ended" {
			return events, asked
		}
		asked++
		s.post("/permissions/"+e.Data.Permission+"/reply", request{"reply": reply})
	}
}

// textOf returns what the assistant has said and tools have printed in events.
func textOf(events []codingEvent) (said, printed string) {
	for i := range events {
		e := &events[i]
		if e.Type != "item.completed" {
			continue
		}
		for _, p := range e.Data.Item.Content {
			if e.Data.Item.Role == "assistant" {
				said += p.Text
			}
			printed += p.Output
		}
	}
	return said, printed
}

// file returns a file of the session's home.
func (s *agentSession) file(name string) string {
	s.t.Helper()
	r := s.get("/sandbox-agent/v1/fs/file?session_id=" + s.id + "&path=" + name)
	if r.status != http.StatusOK {
		s.t.Errorf("file %s: %s", name, r)
	}
	return string(r.body)
}

// testCodingAgents has each real agent use a tool with a user's permission, loses its worker, and goes on.
func testCodingAgents(t *testing.T, p *programs) {
	sys := newCodingAgents(t, p, "--sandboxes", "8")
	restart := func() { sys.worker.kill(); sys.startWorker(t); sys.awaitAgents(t) }
	for _, agent := range codingAgents() {
		t.Run(agent, func(t *testing.T) {
			s := sys.in(t).newCodingSession("work-"+agent, agent)
			s.run("echo needle-4711 > made.txt; echo found: $(cat made.txt)")
			events, asked := s.answer("once")
			said, _ := textOf(events)
			if asked != 1 || !strings.Contains(said, "I see: needle-4711") {
				t.Errorf("%d permissions:\n%s", asked, describeEvents(events))
			}
			made := func(e codingEvent) bool { return e.changed("/home/user/made.txt", "+needle-4711") }
			if !slices.ContainsFunc(events, made) {
				t.Errorf("no diff of the file:\n%s", describeEvents(events))
			}
			if got := s.file("made.txt"); got != "needle-4711\n" {
				t.Errorf("the file has %q", got)
			}
			s.run("echo needle-2 > refused.txt")
			events, asked = s.answer("reject")
			if r := s.get("/sandbox-agent/v1/fs/stat?session_id=" + s.id + "&path=refused.txt"); asked != 1 ||
				r.status != http.StatusBadRequest {
				t.Errorf("%d permissions, and the file is %s:\n%s", asked, r, describeEvents(events))
			}

			// kill -9, and the next turn is on another worker.
			restart()
			s.run("echo found: $(cat made.txt)")
			events, _ = s.answer("once")
			if said, _ = textOf(events); !strings.Contains(said, "I see: needle-4711") {
				t.Errorf("after the loss of the worker:\n%s", describeEvents(events))
			}
			if r := s.do(http.MethodDelete, sandboxAgent+s.id, nil); r.status != http.StatusNoContent {
				t.Errorf("delete: %s", r)
			}
		})
	}
	t.Run("nothing is left", func(t *testing.T) {
		eventually(t, "no agent runs", func() (bool, any) {
			r := sys.in(t).get("/v1/sandboxes?state=running")
			return strings.Contains(string(r.body), `"sandboxes":[]`), r
		})
		checkNoAgents(t)
	})
}

// testCodingAgentsACP is testCodingAgents with the npm client of the Sandbox Agent API 0.4.
func testCodingAgentsACP(t *testing.T, p *programs) {
	sys := newCodingAgents(t, p, "--sandboxes", "8")
	npm := installACPClient(t.Context(), t)
	restart := func() { sys.worker.kill(); sys.startWorker(t); sys.awaitAgents(t) }
	for _, agent := range codingAgents() {
		t.Run(agent, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), clientsTime)
			defer cancel()
			client := startACPClient(ctx, t, npm, "agents.mjs", "ACP_URL="+sys.base+"/sandbox-agent",
				"BULLPEN_API_KEY="+sys.key, "AGENT="+agent)
			if client.lines.Scan() && client.lines.Text() == "lose the worker" {
				restart()
				_, _ = fmt.Fprintln(client.in) // if the client has ended, its error says why
				client.lines.Scan()
			}
			last := client.lines.Text()
			if err := client.Wait(); err != nil || last != "done" {
				t.Errorf("%v after %q\n%s", err, last, client.failed.String())
			}
			checkNoAgents(t)
		})
	}
}

// testCodingAgentsNetwork has real agents clone a repository and install packages from the hosts that their profile
// lists, and reach no other.
func testCodingAgentsNetwork(t *testing.T, p *programs) {
	with := *p
	with.machine = newMachine(t)
	startMirror(t, with.machine)
	sys := newAgentsIn(t, &with, topology{}, "codingagents", "--sandboxes", "4", "--agents", agentPrograms(t))
	sys.awaitAgents(t)
	inside := sys.sandboxed("inside", insideProfile())
	for _, agent := range codingAgents() {
		t.Run(agent, func(t *testing.T) {
			b := *inside
			b.t = t
			s := b.newCodingSession("network-"+agent, agent)
			s.run("git clone -q " + mirrorURL + "/repository.git && cat repository/README.md")
			events, _ := s.answer("once")
			if _, printed := textOf(events); !strings.Contains(printed, "hello from the repository") {
				t.Errorf("git: %s", describeEvents(events))
			}
			s.run("(" + strings.ReplaceAll(strings.TrimSpace(installPackages), "\n", "; ") + ") 2>&1")
			events, _ = s.answer("once")
			if _, printed := textOf(events); !strings.Contains(printed, strings.TrimSpace(installedPackages)) {
				t.Errorf("packages: %s", describeEvents(events))
			}
			s.run("exec 3<>/dev/tcp/" + privateAddr + "/80 || echo refused")
			events, _ = s.answer("once")
			if _, printed := textOf(events); !strings.Contains(printed, "refused") {
				t.Errorf("another port: %s", describeEvents(events))
			}
		})
	}
}

// changed reports whether an event says that a file was changed, with a part of the diff.
func (e *codingEvent) changed(path, diff string) bool {
	for _, p := range e.Data.Item.Content {
		if p.Type == "file_ref" && p.Path == path && strings.Contains(p.Diff, diff) {
			return true
		}
	}
	return false
}

// checkNoAgents checks that no process of an agent is left on this machine.
func checkNoAgents(t *testing.T) {
	t.Helper()
	eventually(t, "no processes of agents", func() (bool, any) {
		out, err := exec.CommandContext(t.Context(), "ps", "-eo", "pid,args").Output()
		if err != nil {
			return false, err
		}
		var left []string
		for line := range strings.Lines(string(out)) {
			for _, part := range []string{"/cli.js -p", "codex app-server", "opencode serve"} {
				if strings.Contains(line, part) {
					left = append(left, line)
				}
			}
		}
		return len(left) == 0, left
	})
}

// testHostileRepository has agents in a mode without permissions do what a hostile repository tells them.
func testHostileRepository(t *testing.T, p *programs) {
	sys := newCodingAgents(t, p, "--sandboxes", "8")
	victim := sys.in(t).newCodingSession("victim", "claude", "permissionMode", "bypass")
	victim.run("echo secret-of-the-victim > secret.txt; echo found: ok")
	victim.answer("once")
	for _, agent := range []string{"claude", "codex"} {
		t.Run(agent, func(t *testing.T) {
			s := sys.in(t).newCodingSession("hostile-"+agent, agent, "permissionMode", "bypass")
			ask := func(command string) string {
				s.run(command)
				events, asked := s.answer("reject")
				if asked > 0 {
					t.Errorf("%s: %d permissions", command, asked)
				}
				_, printed := textOf(events)
				return printed
			}
			for what, c := range map[string]struct{ command, never string }{
				"the operator's key": {"env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; cat /proc/*/cmdline", agentKey},
				"the caller's key":   {"env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'", sys.key},
				"another session's file": {
					"grep -r secret-of-the / --include=secret.txt 2>/dev/null; echo x", "secret-of-the-victim",
				},
			} {
				if printed := ask(c.command); printed == "" || strings.Contains(printed, c.never) {
					t.Errorf("%s: %q", what, printed)
				}
			}
			// There is no network but the model APIs.
			probe := `python3 - <<'EOF'
import os, re, socket, urllib.request, urllib.error
for host in ("1.1.1.1", "169.254.169.254", "10.0.0.1"):
    try: socket.create_connection((host, 80), 2); print("reached", host)
    except OSError: print("unreachable")
text = open("/proc/net/tcp").read()
port = next(int(l.split()[1].split(":")[1], 16) for l in text.splitlines()[1:] if l.split()[3] == "0A")
def get(path, key, method="GET", body=None):
    r = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, data=body,
        headers={"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    try: return urllib.request.urlopen(r, timeout=10).status
    except urllib.error.HTTPError as e: return e.code
key = next((v for k, v in os.environ.items() if v.startswith("sandbox-")), "sandbox-unknown")
print("models", get("/anthropic/v1/models", key))
print("without", get("/anthropic/v1/models", "wrong"))
for path in ("/v1/executions", "/v1/sandboxes", "/anthropic/v1/files", "/sandbox-agent/v1/sessions", "/v1/admin/keys",
             "/anthropic/v1/../../v1/executions", "//v1/executions", "/openai/v1/containers"):
    print(path, get(path, key))
EOF`
			printed := ask(probe)
			if strings.Contains(printed, "reached ") || !strings.Contains(printed, "unreachable") {
				t.Errorf("the network: %s", printed)
			}
			for line := range strings.Lines(printed) {
				name, status, _ := strings.Cut(strings.TrimSpace(line), " ")
				if strings.HasPrefix(name, "/") && status != "404" && status != "401" {
					t.Errorf("%s has status %s", name, status)
				}
				if name == "without" && status != "401" {
					t.Errorf("a wrong key has status %s", status)
				}
			}
		})
	}
}

// testManyAgents runs 50 sessions at once on a machine that has room for few: nothing is lost.
func testManyAgents(t *testing.T, p *programs) {
	sys := newCodingAgents(t, p, "--sandboxes", "12", "--agent-idle", "1s")
	const sessions = 50
	var all sync.WaitGroup
	var mu sync.Mutex
	memory := map[string][]int{} // KiB by agent
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			mu.Lock()
			for agent, resident := range residentAgents(ctx) {
				memory[agent] = append(memory[agent], resident...)
			}
			mu.Unlock()
		}
	}()
	for n := range sessions {
		agent := codingAgents()[n%2] // OpenCode needs more memory than this machine has for it
		all.Go(func() {
			s := sys.in(t).newCodingSession(fmt.Sprintf("many-%d", n), agent)
			s.send(fmt.Sprintf("slowly %d", n))
			events, _ := s.answer("once")
			if said, _ := textOf(events); said != fmt.Sprintf("It took a while, %d.", n) {
				t.Errorf("session %d of %s: %s", n, agent, describeEvents(events))
			}
		})
	}
	all.Wait()
	cancel()
	mu.Lock()
	defer mu.Unlock()
	for agent, resident := range memory {
		slices.Sort(resident)
		t.Logf("%s: %d samples, median %d MiB, largest %d MiB", agent, len(resident), resident[len(resident)/2]>>10,
			resident[len(resident)-1]>>10)
	}
}

// residentAgents returns the resident memory of the agents' processes in KiB, as the host counts it.
func residentAgents(ctx context.Context) map[string][]int {
	out, err := exec.CommandContext(ctx, "ps", "-eo", "rss,args").Output()
	if err != nil {
		return nil
	}
	found := map[string][]int{}
	for line := range strings.Lines(string(out)) {
		var rss int
		if _, err := fmt.Sscan(line, &rss); err != nil {
			continue
		}
		for agent, part := range map[string]string{"claude": "/cli.js -p", "codex": "codex app-server"} {
			if strings.Contains(line, part) {
				found[agent] = append(found[agent], rss)
			}
		}
	}
	return found
}
