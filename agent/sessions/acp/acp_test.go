package acp_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func TestPrompts(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Minute).connect("s1")
	events := c.open("")
	want(t, events.until("1: result"), `
		0: result
		1: result`)
	for i, x := range []struct{ prompt, want string }{
		{"say hello", "agent_message_chunk hello\nN: end_turn"},
		{"say a b", "agent_message_chunk a\nagent_message_chunk b\nN: end_turn"},
		{"think hard", "agent_thought_chunk hard\nagent_message_chunk done\nN: end_turn"},
		{
			"tool", "tool_call call in_progress\ntool_call_update call in_progress\ntool_call_update call completed\n" +
				"tool_call open in_progress\ntool_call_update open in_progress\ntool_call_update open completed\nN: end_turn",
		},
		{"error too bad", "N: error -32603 too bad"},
		{"exit", "N: error -32603 the agent's program ended with code 3"},
		{"say again", "N: error -32603 agent process exited: test"},
	} {
		id := i + 2
		resp, text := c.prompt(id, x.prompt)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", x.prompt, resp.Status)
		}
		expected := strings.ReplaceAll(x.want, "N:", fmt.Sprint(id, ":"))
		want(t, events.until(fmt.Sprint(id, ":")), expected)
		want(t, decode(t, text).String(), expected[strings.LastIndexByte(expected, '\n')+1:])
	}
}

// A prompt that takes long is answered by the stream, of any gateway.
func TestLatePrompts(t *testing.T) {
	w := newWorld(t)
	first, second := w.gateway(time.Millisecond), w.gateway(time.Minute)
	c := first.connect("s1")
	if resp, text := c.prompt(2, "gate"); resp.StatusCode != http.StatusAccepted || text != "" {
		t.Fatalf("%s %q", resp.Status, text)
	}
	c.gateway = second
	events := c.open("2")
	w.agent.gate <- struct{}{}
	want(t, events.until("2:"), `
		agent_message_chunk opened
		2: end_turn`)
}

// A stream ends cleanly when its gateway shuts down, and so do waiting prompts. Clients continue at the next
// message.
func TestGatewayLeaves(t *testing.T) {
	t.Run("drains", func(t *testing.T) { testGatewayLeaves(t, func(g *gateway) { g.drain() }) })
	t.Run("leaves", func(t *testing.T) { testGatewayLeaves(t, func(g *gateway) { g.leave() }) })
}

func testGatewayLeaves(t *testing.T, end func(*gateway)) {
	w := newWorld(t)
	first, second := w.gateway(time.Minute), w.gateway(time.Minute)
	c := first.connect("s1")
	events := c.open("")
	want(t, events.until("1:"), "0: result\n1: result")
	c.call(2, "session/prompt", c.promptParams("say one"))
	answered := make(chan string, 1)
	var waiting sync.WaitGroup
	waiting.Go(func() {
		resp, text := c.prompt(3, "permission")
		answered <- resp.Status + text
	})
	asked := "session/request_permission allow_once=Allow once allow_always=Always allow reject_once=Reject"
	want(t, events.until("request_permission"), "agent_message_chunk one\n2: end_turn\n"+asked)
	end(first)
	want(t, events.rest(), "")
	waiting.Wait()
	if got := <-answered; got != "202 Accepted" {
		t.Errorf("a prompt that waited: %s", got)
	}

	c.gateway = second
	again := c.open(events.id)
	c.answerRequest(t, "request_1_1", "allow_always")
	want(t, again.until("3:"), "agent_message_chunk accept_for_session\n3: end_turn")
	// All is replayed for a client that has seen nothing.
	want(t, c.open("").until("3:"), "0: result\n1: result\nagent_message_chunk one\n2: end_turn\n"+asked+
		"\nagent_message_chunk accept_for_session\n3: end_turn")
	want(t, c.open("5").until("3:"), "agent_message_chunk accept_for_session\n3: end_turn")
}

// answerRequest answers a request for a permission.
func (c *client) answerRequest(t *testing.T, id, option string) {
	t.Helper()
	outcome := `{"outcome":"cancelled"}`
	if option != "" {
		outcome = fmt.Sprintf(`{"outcome":"selected","optionId":%q}`, option)
	}
	resp, text := c.do(http.MethodPost, c.path,
		fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"result":{"outcome":%s}}`, id, outcome))
	if resp.StatusCode != http.StatusAccepted {
		t.Fatalf("answer: %s %s", resp.Status, text)
	}
}

func TestAnswers(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	events := c.open("2")
	for i, x := range []struct{ prompt, option, asked, want string }{
		{"permission", "allow_once", "allow_always=Always allow", "accept"},
		{"permission", "reject_once", "allow_always=Always allow", "reject"},
		{"permission", "", "allow_always=Always allow", "reject"},
		{"permission", "unknown", "allow_always=Always allow", "reject"},
		{"question", "answer_1", "answer_0=Red answer_1=Blue reject_once=Do not answer", "answered[[Blue]]"},
		{"question", "reject_once", "answer_0=Red", "rejected[]"},
		{"question", "answer_2", "answer_0=Red", "rejected[]"},
	} {
		c.prompt(i+2, x.prompt)
		if asked := events.until("request_permission"); !strings.Contains(asked, x.asked) {
			t.Errorf("%s: %s", x.prompt, asked)
		}
		id := fmt.Sprintf("request_1_%d", i+1)
		c.answerRequest(t, id, x.option)
		want(t, events.until(fmt.Sprint(i+2, ":")), fmt.Sprintf("agent_message_chunk %s\n%d: end_turn", x.want, i+2))
		c.answerRequest(t, id, x.option) // once more
	}
}

// Several gateways translate the events of one server: each message is there once, in one order.
func TestSeveralGateways(t *testing.T) {
	w := newWorld(t)
	first := w.gateway(time.Millisecond).connect("s1")
	streams := []*stream{first.open("2")}
	gateways := []*client{first}
	for range 2 {
		c := *first
		c.gateway = w.gateway(time.Millisecond)
		gateways, streams = append(gateways, &c), append(streams, c.open("2"))
	}
	const prompts = 30
	var expected strings.Builder
	for i := range prompts {
		gateways[i%len(gateways)].prompt(i+2, "say a b c")
		fmt.Fprintf(&expected, "agent_message_chunk a\nagent_message_chunk b\nagent_message_chunk c\n%d: end_turn\n", i+2)
	}
	for _, s := range streams {
		want(t, s.until(fmt.Sprint(prompts+1, ": ")), expected.String())
	}
	want(t, first.open("2").until(fmt.Sprint(prompts+1, ": ")), expected.String())
}

// A permission for the session answers later requests, which the client does not see.
func TestAlways(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	events := c.open("2")
	c.prompt(2, "permission")
	events.until("request_permission")
	c.answerRequest(t, "request_1_1", "allow_always")
	events.until("2:")
	c.prompt(3, "permission")
	want(t, events.until("3:"), "agent_message_chunk accept_for_session\n3: end_turn")
}

// A cancellation ends the turn in progress and those of the prompts that wait for it.
func TestCancel(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	events := c.open("2")
	c.prompt(2, "permission")
	events.until("request_permission")
	c.prompt(3, "say never")
	c.do(http.MethodPost, c.path,
		fmt.Sprintf(`{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":%q}}`, c.session))
	want(t, events.until("3:"), "2: cancelled\n3: cancelled")
	c.prompt(4, "say more")
	want(t, events.until("4:"), "agent_message_chunk more\n4: end_turn")
}

// The events of several sessions of a server are in one stream.
func TestSessions(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	events := c.open("2")
	first := c.session
	c.prompt(2, "gate")
	c.newSession(3)
	c.prompt(4, "say hello")
	want(t, events.until("4:"), "3: result\nagent_message_chunk hello\n4: end_turn")
	c.session = first
	w.agent.gate <- struct{}{}
	want(t, events.until("2:"), "agent_message_chunk opened\n2: end_turn")
}

// Another runner continues a turn. A session that is removed answers its prompts.
func TestRunnerDies(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	events := c.open("2")
	c.prompt(2, "permission")
	events.until("request_permission")
	w.stop()
	c.answerRequest(t, "request_1_1", "allow_once")
	w.Lead()
	want(t, events.until("2:"), "agent_message_chunk accept\n2: end_turn")

	c.prompt(3, "permission")
	events.until("request_permission")
	if err := w.Remove(t.Context(), sessionstest.Org, c.session); err != nil {
		t.Fatal(err)
	}
	text := events.until("3:")
	if !strings.Contains(text, "3: cancelled") && !strings.Contains(text, "3: error -32002 session not found") {
		t.Error(text)
	}
}

// A request whose answer was lost is repeated without effect.
func TestRepeatedPrompts(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	events := c.open("2")
	c.prompt(2, "gate")
	c.prompt(2, "gate")
	w.agent.gate <- struct{}{}
	want(t, events.until("2:"), "agent_message_chunk opened\n2: end_turn")
	if resp, text := c.prompt(2, "gate"); resp.StatusCode != http.StatusOK || decode(t, text).String() != "2: end_turn" {
		t.Errorf("after the response: %s %s", resp.Status, text)
	}
	c.prompt(3, "say more")
	want(t, events.until("3:"), "agent_message_chunk more\n3: end_turn")
	if x, err := w.Get(t.Context(), sessionstest.Org, c.session); err != nil || x.Messages != 2 {
		t.Errorf("%d messages: %v", x.Messages, err)
	}
}

// Another client may use the id of a server again, without the messages of the earlier one.
func TestServersAreUsedAgain(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Millisecond)
	old := g.connect("s1")
	old.prompt(2, "permission")
	old.open("2").until("request_permission")
	c := g.connect("s1")
	events := c.open("")
	c.prompt(2, "say new")
	want(t, events.until("2:"), "0: result\n1: result\nagent_message_chunk new\n2: end_turn")
}

func TestLoad(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Millisecond)
	old := g.connect("s1")
	old.prompt(2, "say hello")
	old.prompt(3, "permission")
	old.open("2").until("request_permission")

	c := g.connect("s2")
	events := c.open("2")
	params := fmt.Sprintf(`{"sessionId":%q,"cwd":"/","mcpServers":[]}`, old.session)
	c.call(2, "session/load", params)
	want(t, events.until("2:"), `
		user_message_chunk say hello
		agent_message_chunk hello
		user_message_chunk permission
		session/request_permission allow_once=Allow once allow_always=Always allow reject_once=Reject
		2: result`)
	c.answerRequest(t, "request_1_1", "allow_once")
	want(t, events.until("accept"), "agent_message_chunk accept")
	c.session = old.session
	c.prompt(3, "say again")
	want(t, events.until("3:"), "agent_message_chunk again\n3: end_turn")
	c.call(4, "session/resume", params)
	want(t, events.until("4:"), "4: result")
	if list, _ := c.call(5, "session/list", `{}`).Result["sessions"].([]any); len(list) != 2 {
		t.Errorf("%d sessions", len(list))
	}
}

func TestSettings(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Minute).connect("s1")
	set := func(id int, option, value string) *rpc {
		return c.call(id, "session/set_config_option", fmt.Sprintf(`{"sessionId":%q,"configId":%q,"value":%q}`, c.session,
			option, value))
	}
	if m := c.call(2, "session/set_mode", fmt.Sprintf(`{"sessionId":%q,"modeId":"plan"}`, c.session)); m.Error != nil {
		t.Error(m)
	}
	for i, x := range []struct{ option, value, want string }{
		{"model", "large", "result"},
		{"thought_level", "high", "result"},
		{"permission_mode", "bypass", "result"},
		{"permission_mode", "wild", "error -32602 invalid request: invalid permission mode: wild"},
		{"mode", "wild", "error -32602 mode not supported: test wild"},
		{"model", strings.Repeat("x", 1025), "error -32602 invalid request: model: must not be longer than 1024 bytes"},
		{"color", "red", "error -32602 invalid request: unknown config option: color"},
	} {
		want(t, set(i+3, x.option, x.value).String(), fmt.Sprintf("%d: %s", i+3, x.want))
	}
	x, err := w.Get(t.Context(), sessionstest.Org, c.session)
	if err != nil || x.AgentMode != "plan" || x.Model != "large" || x.Variant != "high" || x.PermissionMode != "bypass" {
		t.Errorf("%+v %v", x, err)
	}
}

// A session stays small, because every gateway holds all sessions in memory.
func TestSessionsStaySmall(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Minute).connect("s1")
	long, large := strings.Repeat("x", 1025), strings.Repeat("x", 60<<10)
	for i := range 2 {
		path := fmt.Sprintf("/v1/config/mcp?directory=/x&mcpName=m%d", i)
		c.do(http.MethodPut, path, fmt.Sprintf(`{"type":"local","command":%q}`, large))
	}
	for i, x := range []struct{ params, want string }{
		{fmt.Sprintf(`{"cwd":%q}`, long), "directory: must not be longer than 1024 bytes"},
		{
			fmt.Sprintf(`{"cwd":"/w","mcpServers":[{"name":"m","command":%q}]}`, large+large),
			"mcp: must not be longer than 65536 bytes",
		},
		{`{"cwd":"/x"}`, "mcp: must not be longer than 65536 bytes"},
	} {
		want(t, c.call(i+2, "session/new", x.params).String(),
			fmt.Sprintf("%d: error -32602 invalid request: %s", i+2, x.want))
	}
}

// A wrong request is a response with an error, so that the client goes on.
func TestErrors(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	c := g.connect("s1")
	large := strings.Repeat("x", maxBody)
	for i, x := range []struct{ method, params, want string }{
		{
			"session/prompt", `{"sessionId":"none","prompt":[{"type":"text","text":"x"}]}`,
			"error -32002 session not found: none",
		},
		{
			"session/prompt", `{"sessionId":5}`,
			"error -32602 invalid request: the parameters of session/prompt are malformed",
		},
		{
			"session/prompt", fmt.Sprintf(`{"sessionId":%q,"prompt":[]}`, c.session),
			"error -32602 invalid request: prompt: must not be empty",
		},
		{
			"session/prompt", fmt.Sprintf(`{"sessionId":%q,"prompt":[{"type":"image","data":""}]}`, c.session),
			`error -32602 invalid request: prompt: blocks of the type "image" are not supported`,
		},
		{"session/prompt", c.promptParams(large), "error -32603 the body is too large"},
		{
			"session/prompt", c.promptParams(large[:proto.MaxAgentMessage+1]),
			"error -32602 invalid request: message: must not be longer",
		},
		{"_x/unknown", `{}`, "error -32601 the agent test has no method _x/unknown"},
	} {
		m := c.call(i+2, x.method, x.params)
		if got := m.String(); !strings.HasPrefix(got, fmt.Sprintf("%d: %s", i+2, x.want)) {
			t.Errorf("%s %.100s: %s", x.method, x.params, got)
		}
	}
	resp, text := g.do(http.MethodPost, "/v1/acp/s2?agent=none", `{"jsonrpc":"2.0","id":7,"method":"initialize"}`)
	if m := decode(t, text); resp.StatusCode != http.StatusOK || m.String() != "7: error -32602 unsupported agent: none" {
		t.Errorf("unknown agent: %s %s", resp.Status, text)
	}
	resp, text = g.do(http.MethodPost, "/v1/acp/s3", `{"jsonrpc":"2.0","id":7,"method":"session/prompt","params":{}}`)
	if m := decode(t, text); resp.StatusCode != http.StatusOK || m.Error == nil || m.Error.Code != -32002 {
		t.Errorf("a server that has expired: %s %s", resp.Status, text)
	}
	g.reject(&proto.QuotaError{What: "bytes", Limit: 1}, nil)
	if m := c.call(20, "session/prompt", c.promptParams("say x")); m.Error == nil || m.Error.Code != -32603 {
		t.Errorf("quota: %s", m)
	}
	g.reject(nil, api.Errorf(api.CodeRateLimited, "too many requests"))
	want(t, c.call(21, "session/prompt", c.promptParams(large)).String(), "21: error -32603 too many requests")
	resp, _ = c.do(http.MethodPost, c.path, `{"jsonrpc":"2.0","method":"session/cancel","params":{}}`)
	if resp.StatusCode != http.StatusAccepted {
		t.Errorf("a notification beyond the rate: %s", resp.Status)
	}
	g.reject(nil, api.Errorf(api.CodeUnauthorized, "wrong key"))
	if resp, _ := c.prompt(22, "say x"); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a key: %s", resp.Status)
	}
}

// Nothing is added to the log of a server while there is no room, and an organisation has a limit of servers.
func TestServersWithoutRoom(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	c := g.connect("s1")
	c.call(2, "session/prompt", c.promptParams("say x"))
	events := c.open("0")
	const seen = "0: result\n1: result\nagent_message_chunk x\n2: end_turn\n"
	want(t, events.until("2:"), seen)
	g.reject(&proto.QuotaError{What: "bytes", Limit: 1}, nil)
	session := fmt.Sprintf(`{"sessionId":%q}`, c.session)
	for i, method := range []string{
		"initialize", "session/list", "session/load", "session/new", "session/prompt", "session/set_mode", "_x/unknown",
	} {
		if m := c.call(i+3, method, session); m.Error == nil || m.Error.Code != -32603 {
			t.Errorf("%s: %s", method, m)
		}
	}
	if m := c.call(20, "session/cancel", session); m.Error != nil {
		t.Error(m)
	}
	want(t, c.call(2, "session/prompt", c.promptParams("say x")).String(), "2: end_turn")
	g.reject(nil, nil)
	c.call(21, "session/list", `{}`)
	want(t, events.until("21:"), "21: result")
}

func TestTooManyServers(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	for i := range proto.MaxAgentServers {
		id := fmt.Sprintf("a%032x", i)
		if _, err := w.Stored.Append(t.Context(), sessionstest.Org, id, 0, []byte(`{}`)); err != nil {
			t.Fatal(err)
		}
	}
	const initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize"}`
	_, text := g.do(http.MethodPost, "/v1/acp/more?agent=test", initialize)
	if m := decode(t, text); m.Error == nil || !strings.Contains(m.Error.Message, "agent servers") {
		t.Error(text)
	}
	if err := w.Stored.Logs.Remove(t.Context(), sessionstest.Org, fmt.Sprintf("a%032x", 0)); err != nil {
		t.Fatal(err)
	}
	g.connect("more")
}

// The prompts of a server without a response are in every entry of its log.
func TestTooManyPrompts(t *testing.T) {
	w := newWorld(t)
	c := w.gateway(time.Millisecond).connect("s1")
	for i := range 4 {
		c.newSession(1000 + i)
		for n := range 64 {
			if resp, text := c.prompt(i*64+n+2, "hang"); resp.StatusCode != http.StatusAccepted {
				t.Fatalf("prompt %d of session %d: %s %s", n, i, resp.Status, text)
			}
		}
	}
	c.newSession(2000)
	m := c.call(900, "session/prompt", c.promptParams("say x"))
	if m.Error == nil || !strings.Contains(m.Error.Message, "prompts without a response") {
		t.Error(m)
	}
}

// What no client of the protocol sends is refused as the original does.
func TestTransport(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	g.connect("s1")
	const initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"1.0"}}`
	for _, x := range []struct {
		method, path, body string
		headers            []string
		status             int
		want               string
	}{
		{"POST", "/v1/acp/new", initialize, nil, 400, "missing required 'agent' query parameter for first POST to"},
		{"POST", "/v1/acp/s1?agent=other", initialize, nil, 409, `"status":409`},
		{"POST", "/v1/acp/s1?agent=test", initialize, []string{"Content-Type", "text/plain"}, 415, `"status":415`},
		{"POST", "/v1/acp/s1?agent=test", initialize, []string{"Accept", "text/event-stream"}, 406, `"status":406`},
		{"POST", "/v1/acp/s1?agent=test", `[` + initialize + `]`, nil, 400, "one message of JSON-RPC"},
		{"POST", "/v1/acp/s1?agent=test", `{`, nil, 400, "one message of JSON-RPC"},
		{
			"POST", "/v1/acp/s1", `{"id":"` + strings.Repeat("x", 256) + `","method":"session/list"}`, nil, 400,
			"the id must not be longer than 256 bytes",
		},
		{"GET", "/v1/acp/s1", "", []string{"Accept", "application/json"}, 406, `"status":406`},
		{"GET", "/v1/acp/s1", "", []string{"Last-Event-ID", "x"}, 400, "Last-Event-ID must be a positive integer"},
		{"DELETE", "/v1/acp/none", "", nil, 204, ""},
		{"GET", "/v1/desktop/status", "", nil, 501, "desktop"},
		{"POST", "/v1/processes", "{}", nil, 501, "processes"},
		{"GET", "/v1/config/mcp", "", nil, 400, "directory"},
		{"GET", "/v1/config/mcp?directory=/x&mcpName=a", "", nil, 404, `"status":404`},
		{"PUT", "/v1/config/mcp?directory=/x", `{}`, nil, 400, "mcpName"},
		{"PUT", "/v1/config/mcp?directory=/x&mcpName=a", `[]`, nil, 400, "object"},
		{"PUT", "/v1/config/mcp?directory=/x&mcpName=a", `{"type":"local", "n":1.50}`, nil, 204, ""},
		{"GET", "/v1/config/mcp?directory=/x&mcpName=a", "", nil, 200, `{"type":"local", "n":1.50}`},
		{"GET", "/v1/config/skills?directory=/x&skillName=a", "", nil, 404, ""},
		{"DELETE", "/v1/config/mcp?directory=/x&mcpName=a", "", nil, 204, ""},
		{"DELETE", "/v1/config/mcp?directory=/x&mcpName=a", "", nil, 204, ""},
		{"GET", "/v1/config/mcp?directory=/x&mcpName=a", "", nil, 404, ""},
		{"PUT", "/v1/config/skills?directory=/x&skillName=a", `{"sources":[]}`, nil, 204, ""},
		{"GET", "/v1/config/skills?directory=/x&skillName=a", "", nil, 200, `{"sources":[]}`},
	} {
		resp, text := g.do(x.method, x.path, x.body, x.headers...)
		if resp.StatusCode != x.status || !strings.Contains(text, x.want) {
			t.Errorf("%s %s %s: %s %s", x.method, x.path, x.body, resp.Status, text)
		}
	}
}

// A stream may begin before its server, whose id is any text. A removed server leaves no sessions.
func TestServers(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	c := &client{gateway: g, path: "/v1/acp/a%2Fb%20%25%C3%A9"}
	events := c.open("7")
	g.connect("a%2Fb%20%25%C3%A9")
	want(t, events.until("1:"), "0: result\n1: result")
	other := g.connect("s2")
	_, list := g.do(http.MethodGet, "/v1/acp", "")
	if !strings.HasPrefix(list, `{"servers":[{"serverId":"a/b %é","agent":"test","createdAtMs":`) ||
		!strings.Contains(list, `"s2"`) {
		t.Error(list)
	}
	waiting := other.open("2")
	for range 2 {
		if resp, _ := g.do(http.MethodDelete, other.path, ""); resp.StatusCode != http.StatusNoContent {
			t.Errorf("delete: %s", resp.Status)
		}
	}
	_ = waiting
	_, list = g.do(http.MethodGet, "/v1/acp", "")
	if strings.Contains(list, `"s2"`) {
		t.Error(list)
	}
	all, err := w.List(t.Context(), sessionstest.Org)
	if err != nil || len(all) != 1 {
		t.Errorf("%d sessions: %v", len(all), err)
	}
	again := g.connect("s2")
	again.call(2, "session/prompt", again.promptParams("say again"))
	want(t, again.open("").until("2:"), "0: result\n1: result\nagent_message_chunk again\n2: end_turn")
}

// What is read from the store is released once it was sent, also by streams that go on and by what outlives the
// request that began it.
func TestReadsAreReleased(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	c := g.connect("s1")
	first, second := c.open("2"), c.open("2")
	text := "say " + strings.Repeat("x", 100<<10)
	c.call(2, "session/prompt", c.promptParams(text))
	first.until("2:")
	first.cancel()
	const prompts = 10
	for i := range prompts {
		c.call(i+3, "session/prompt", c.promptParams(text))
	}
	second.until(fmt.Sprint(prompts+2, ":"))
	c.call(20, "session/load", fmt.Sprintf(`{"sessionId":%q}`, c.session))
	second.until("20:")
	if n := g.reads.Load(); n > 2<<20 {
		t.Errorf("%d bytes are reserved", n)
	}
	second.cancel()
	g.drain()
	g.leave()
	g.Close()
	if n := g.reads.Load(); n != 0 {
		t.Errorf("%d bytes are reserved after all requests", n)
	}
}

// The tools of a directory are those of its sessions.
func TestTools(t *testing.T) {
	w := newWorld(t)
	g := w.gateway(time.Minute)
	c := g.connect("s1")
	g.do(http.MethodPut, "/v1/config/mcp?directory=/x&mcpName=a", `{"type":"local","command":"a"}`)
	g.do(http.MethodPut, "/v1/config/mcp?directory=/y&mcpName=b", `{"type":"local","command":"b"}`)
	g.do(http.MethodPut, "/v1/config/skills?directory=/x&skillName=s", `{"sources":[{"type":"local","source":"/s"}]}`)
	m := c.call(2, "session/new", `{"cwd":"/x","mcpServers":[
		{"name":"c","command":"c","args":["1"],"env":[{"name":"E","value":"e"}]},
		{"type":"http","name":"d","url":"http://d","headers":[]}]}`)
	id, _ := m.Result["sessionId"].(string)
	x, err := w.Get(t.Context(), sessionstest.Org, id)
	if err != nil {
		t.Fatal(err)
	}
	want(t, string(x.MCP), `{"a":{"type":"local","command":"a"},`+
		`"c":{"args":["1"],"command":"c","env":{"E":"e"},"type":"local"},`+
		`"d":{"headers":{},"transport":"http","type":"remote","url":"http://d"}}`)
	want(t, string(x.Skills), `{"sources":[{"type":"local","source":"/s"}]}`)
}
