package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// agentServer is a process of sandbox-agent, and what a client of it knows.
type agentServer struct {
	*process
	base, token string
}

// startSandboxAgent starts a server as SandboxAgent.start() does: on a free port, with a token. It returns when the
// server is healthy.
func (p *programs) startSandboxAgent(t *testing.T, env ...string) *agentServer {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	s := &agentServer{base: "http://127.0.0.1:" + port, token: "a-token-for-tests"}
	env = append([]string{notPrewarmed, "BULLPEN_NSJAIL=" + p.nsjail, "BULLPEN_AGENT_MOCK_DELAY=0s"}, env...)
	s.process = p.startProcess(t, "sandbox-agent", env, p.sandboxAgent, "server", "--host", "127.0.0.1", "--port", port,
		"--token", s.token)
	eventually(t, "sandbox-agent is healthy", func() (bool, any) {
		if s.ended() {
			t.Fatalf("it ended with exit code %d:\n%s", s.exitCode(t), s.tail())
		}
		resp, err := http.Get(s.base + "/v1/health")
		if err != nil {
			return false, err
		}
		defer resp.Body.Close() //nolint:errcheck // only read
		return resp.StatusCode == http.StatusOK, resp.Status
	})
	return s
}

// request sends a request with an Authorization header, and returns the answer.
func (s *agentServer) request(t *testing.T, authorization, method, path, body string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, s.base+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", authorization)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() }) // only read
	return resp
}

// call sends a request with the token. The answer must have the status. It returns the body.
func (s *agentServer) call(t *testing.T, status int, method, path, body string) string {
	t.Helper()
	return s.callAs(t, "Bearer "+s.token, status, method, path, body)
}

func (s *agentServer) callAs(t *testing.T, authorization string, status int, method, path, body string) string {
	t.Helper()
	resp := s.request(t, authorization, method, path, body)
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != status {
		t.Fatalf("%s %s: %s %s", method, path, resp.Status, text)
	}
	return string(text)
}

// texts returns the texts that the assistant of a session has completed.
func (s *agentServer) texts(t *testing.T, session string) (texts []string) {
	t.Helper()
	var list struct {
		Events []struct {
			Type string
			Data struct {
				Item struct {
					Role    string
					Content []struct{ Text string }
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(s.call(t, 200, "GET", "/v1/sessions/"+session+"/events", "")), &list); err != nil {
		t.Fatal(err)
	}
	for _, e := range list.Events {
		if e.Type == "item.completed" && e.Data.Item.Role == "assistant" {
			texts = append(texts, e.Data.Item.Content[0].Text)
		}
	}
	return texts
}

// testSandboxAgent does with the program sandbox-agent what the original's clients do with theirs, on a machine that can
// run workers and on one that cannot.
func testSandboxAgent(t *testing.T, p *programs) {
	for name, env := range map[string]string{"worker": "BULLPEN_NSJAIL=" + p.nsjail, "no worker": "BULLPEN_NSJAIL=/none"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := p.startSandboxAgent(t, env)
			if banner := s.call(t, 200, "GET", "/", ""); !strings.Contains(banner, "Sandbox Agent API") {
				t.Errorf("the banner is %q", banner)
			}
			if agents := s.call(t, 200, "GET", "/v1/agents", ""); !strings.Contains(agents, `"id":"mock","installed":true`) {
				t.Errorf("the agents are %s", agents)
			}
			s.converse(t)
			if warned := strings.Contains(s.text(t), "no worker on this machine"); warned != (name == "no worker") {
				t.Errorf("the log has the warning about the worker: %t\n%s", warned, s.tail())
			}
			// A stream that is open ends in order, and so does the server.
			events := s.request(t, "Bearer "+s.token, "GET", "/v1/sessions/s1/events/sse", "")
			lines := bufio.NewScanner(events.Body)
			for ended := 0; ended < 2 && lines.Scan(); { // both turns
				ended += strings.Count(lines.Text(), `"turn.ended"`)
			}
			s.signal(syscall.SIGINT) // Ctrl-C reaches all programs of a terminal, and clients send another signal then
			s.signal(syscall.SIGTERM)
			for lines.Scan() {
			}
			if err := lines.Err(); err != nil {
				t.Errorf("the stream ended with %v", err)
			}
			if code := s.exitCode(t); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
	t.Run("tokens", func(t *testing.T) { t.Parallel(); testAgentTokens(t, p) })
	t.Run("api", func(t *testing.T) { t.Parallel(); testAgentAPI(t, p) })
	t.Run("data", func(t *testing.T) { t.Parallel(); testAgentData(t, p) })
}

// converse creates the session s1 and has a turn in it.
func (s *agentServer) converse(t *testing.T) {
	t.Helper()
	created := s.call(t, 200, "POST", "/v1/sessions/s1", `{"agent":"mock"}`)
	if created != `{"healthy":true,"nativeSessionId":"mock-s1"}` {
		t.Errorf("the session is %s", created)
	}
	s.call(t, 204, "POST", "/v1/sessions/s1/messages", `{"message":"Reply with exactly the single word OK."}`)
	eventually(t, "the agent answers", func() (bool, any) {
		texts := s.texts(t, "s1")
		return slices.Equal(texts, []string{"OK"}), texts
	})
	turn := s.call(t, 200, "POST", "/v1/sessions/s1/messages/stream", `{"message":"say hello"}`)
	if !strings.Contains(turn, `"delta":"hello"`) || !strings.Contains(turn, `"turn.ended"`) {
		t.Errorf("the turn is %s", turn)
	}
}

// testAgentTokens has requests with and without the token. None reaches a route of another API.
func testAgentTokens(t *testing.T, p *programs) {
	s := p.startSandboxAgent(t)
	for _, authorization := range []string{"Bearer " + s.token, "Token " + s.token, "Basic eDphLXRva2VuLWZvci10ZXN0cw=="} {
		s.callAs(t, authorization, 200, "GET", "/v1/agents", "")
	}
	for _, authorization := range []string{"", "Bearer invalid-token", "Bearer ", "Basic " + s.token} {
		answer := s.callAs(t, authorization, 401, "GET", "/v1/agents", "")
		const want = `{"type":"urn:sandbox-agent:error:token_invalid","title":"Token Invalid","status":401,` +
			`"detail":"token invalid","details":{"message":"missing or invalid token"}}`
		if answer != want {
			t.Errorf("the answer without a token is %s", answer)
		}
	}
	for _, path := range []string{
		"/v1/admin/keys", "/../v1/admin/keys", "/v1/../../v1/admin/keys", "/%2e%2e/v1/admin/keys", "//v1/admin/keys",
		"/sandbox-agent/v1/agents", "/metrics",
	} {
		s.call(t, 404, "GET", path, "")
	}
	for args, want := range map[string]string{
		"server":              "give either --token TOKEN or --no-token",
		"server --token t -n": "give either --token TOKEN or --no-token",
		"opencode --port 1":   "opencode is not a command",
		"daemon start":        "daemon is not a command",
	} {
		proc := p.startProcess(t, "sandbox-agent", nil, p.sandboxAgent, strings.Fields(args)...)
		if code := proc.exitCode(t); code != 1 || !strings.Contains(proc.text(t), want) {
			t.Errorf("%s: exit code %d: %s", args, code, proc.text(t))
		}
	}
}

// testAgentAPI calls a server with the commands of sandbox-agent.
func testAgentAPI(t *testing.T, p *programs) {
	s := p.startSandboxAgent(t)
	api := func(wantCode int, want string, args ...string) {
		t.Helper()
		proc := p.startProcess(t, "sandbox-agent", nil, p.sandboxAgent,
			append(append([]string{"api"}, args...), "-e", s.base, "-t", s.token)...)
		if code := proc.exitCode(t); code != wantCode || !strings.Contains(proc.text(t), want) {
			t.Fatalf("%s: exit code %d, want %d with %q:\n%s", strings.Join(args, " "), code, wantCode, want, proc.text(t))
		}
	}
	api(0, `"id": "mock"`, "agents", "list")
	api(0, "", "agents", "install", "mock", "--reinstall")
	api(1, "500 Internal Server Error", "agents", "install", "amp")
	api(0, `"name": "Plan"`, "agents", "modes", "mock")
	api(0, `"defaultModel": "mock"`, "agents", "models", "mock")
	api(0, `"healthy": true`, "sessions", "create", "a/b", "-a", "mock", "-g", "plan", "-p", "bypass")
	api(1, "session already exists: a/b", "sessions", "create", "a/b", "--agent", "mock")
	api(0, `"permissionMode": "bypass"`, "sessions", "list")
	api(0, "", "sessions", "send-message", "a/b", "-m", "say hello")
	api(0, `"delta":"again"`, "sessions", "send-message-stream", "a/b", "-m", "say again")
	api(0, `"hasMore": true`, "sessions", "events", "a/b", "-o", "1", "-l", "2")
	api(0, "permission.requested", "sessions", "send-message-stream", "a/b", "-m", "permission")
	api(0, "", "sessions", "reply-permission", "a/b", "mock_3_permission", "--reply", "once")
	api(0, "", "sessions", "reply-permission", "a/b", "mock_3_permission_denied", "--reply", "reject")
	api(0, "question.requested", "sessions", "send-message-stream", "a/b", "-m", "question")
	api(0, "", "sessions", "reply-question", "a/b", "mock_4_question", "--answers", `[["Red"]]`)
	api(0, "", "sessions", "reject-question", "a/b", "mock_4_question_reject")
	api(1, "unknown question id", "sessions", "reject-question", "a/b", "mock_4_question_reject")
	api(0, "", "sessions", "terminate", "a/b")
	api(0, `"reason": "terminated"`, "sessions", "get-messages", "a/b")

	follow := p.startProcess(t, "sandbox-agent", nil, p.sandboxAgent, "api", "sessions", "events-sse", "a/b",
		"-e", s.base, "-t", s.token)
	eventually(t, "the events come", func() (bool, any) {
		text := follow.text(t)
		return strings.Contains(text, `"session.ended"`), text
	})
}

// testAgentData restarts a server with the same data directory, once after it was killed, and checks that a server
// without one leaves nothing.
func testAgentData(t *testing.T, p *programs) {
	data := "SANDBOX_AGENT_DATA_DIR=" + filepath.Join(t.TempDir(), "data")
	s := p.startSandboxAgent(t, data)
	s.converse(t)
	s.kill()
	s = p.startSandboxAgent(t, data)
	s.call(t, 409, "POST", "/v1/sessions/s1", `{"agent":"mock"}`)
	turn := s.call(t, 200, "POST", "/v1/sessions/s1/messages/stream", `{"message":"say more"}`)
	if !strings.Contains(turn, `"delta":"more"`) {
		t.Errorf("the turn is %s", turn)
	}
	if texts := fmt.Sprint(s.texts(t, "s1")); texts != "[OK hello more]" {
		t.Errorf("the texts are %s", texts)
	}

	temporary := t.TempDir()
	s = p.startSandboxAgent(t, "TMPDIR="+temporary)
	s.converse(t)
	s.signal(syscall.SIGTERM)
	if code := s.exitCode(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
		t.Errorf("left in the temporary directory: %v, %v", left, err)
	}
}

// testAgentSession talks to an agent on the command line.
func testAgentSession(t *testing.T, p *programs) {
	const key = "sk-local-abcdefghijklmnopqrstuvwx"
	_, base := p.startServe(t, "serve", []string{"BULLPEN_BOOTSTRAP_KEY=" + key},
		"--data", filepath.Join(t.TempDir(), "data"), "--agent-mock-delay", "0s")
	session := func(wantCode int, want string, args ...string) {
		t.Helper()
		code, output := p.run(t, []string{"BULLPEN_URL=" + base, "BULLPEN_API_KEY=" + key, "TZ=UTC"},
			append([]string{"agent", "session"}, args...)...)
		if code != wantCode || !strings.Contains(output, want) {
			t.Fatalf("%s: exit code %d, want %d with %q:\n%s", strings.Join(args, " "), code, wantCode, want, output)
		}
	}
	session(0, "it's 1\n", "create", "it's 1", "--agent", "mock", "--title", "Demo")
	session(1, "session already exists: it's 1 (HTTP 409, session_already_exists", "create", "it's 1", "--agent", "mock")
	session(1, "unsupported agent: nobody", "create", "--agent", "nobody")
	session(0, `{"sessionId":"ses_`, "create", "--agent", "mock", "--json")
	session(0, "it's 1", "list")
	session(0, "hello there\n", "send", "it's 1", "say", "hello", "there")
	chat := func(wantCode int, want string, args ...string) {
		t.Helper()
		code, output := p.run(t, []string{"BULLPEN_URL=" + base, "BULLPEN_API_KEY=" + key},
			append([]string{"agent", "chat", "mock"}, args...)...)
		if code != wantCode || !strings.Contains(output, want) {
			t.Fatalf("%s: exit code %d, want %d with %q:\n%s", strings.Join(args, " "), code, wantCode, want, output)
		}
	}
	session(0, "it's 2\n", "create", "it's 2", "--agent", "mock")
	chat(0, "chat again\n", "--session", "it's 2", "say", "chat", "again")
	chat(0, `bullpen agent chat mock --session 'it'\''s 2'`, "--session", "it's 2", "tool")
	chat(1, "2 requests of the agent were rejected", "permission")
	session(0, `--- calls mock.search {"query":"example"}`, "send", "it's 1", "tool")
	session(1, "bullpen: the agent failed: Mock error event.", "send", "it's 1", "error")
	session(1, `"type":"turn.ended"`, "send", "it's 1", "error", "--json")

	const approve = `  bullpen agent session approve 'it'\''s 1' mock_5_permission`
	session(0, approve+" --always\n", "send", "it's 1", "permission")
	session(0, approve+" --reject\n", "show", "it's 1")
	session(0, "permission.requested  mock_5_permission requested: command_execution", "events", "it's 1", "--after", "30")
	session(0, "", "send", "--async", "it's 1", "question")
	session(0, "", "approve", "it's 1", "mock_5_permission")
	session(1, "unknown permission id: mock_5_permission", "approve", "it's 1", "mock_5_permission")
	session(0, "", "approve", "it's 1", "mock_5_permission_denied", "--reject")
	eventually(t, "the next turn asks", func() (bool, any) {
		_, output := p.run(t, []string{"BULLPEN_URL=" + base, "BULLPEN_API_KEY=" + key}, "agent", "session", "show", "it's 1")
		return strings.Contains(output, "mock_6_question_reject"), output
	})
	session(2, "give either an answer or --reject", "answer", "it's 1", "mock_6_question")
	session(0, "", "answer", "it's 1", "mock_6_question", "Red")
	session(0, "", "answer", "it's 1", "mock_6_question_reject", "--reject")
	session(0, "mock_6_question answered: Choose a color Red", "events", "it's 1")
	session(0, "", "end", "it's 1")
	session(0, "terminated", "events", "it's 1", "--follow")
	session(1, "session terminated", "send", "it's 1", "more")
	session(0, "it's 1 is removed\n", "rm", "it's 1")
	session(1, "session not found: it's 1", "show", "it's 1")
}
