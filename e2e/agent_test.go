package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	messagesPath = "/anthropic/v1/messages"
	agentFiles   = "/anthropic/v1/files"
	// agentKey is the key of the scripted model. No answer, log or sandbox may have it.
	agentKey = "sk-upstream-0123456789"
)

var listening = regexp.MustCompile(`http://127\.0\.0\.1:\d+`)

// newAgents deploys bullpen in one process with a model that has the script of a directory.
func newAgents(t *testing.T, p *programs, dir string) *system {
	t.Helper()
	return newAgentsIn(t, p, topologies()[0], dir)
}

// newAgentsIn is newAgents on a topology, with more settings.
func newAgentsIn(t *testing.T, p *programs, in topology, dir string, args ...string) *system {
	t.Helper()
	script, err := filepath.Abs(filepath.Join("testdata", dir, "script.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	model := p.startProcess(t, "model", nil, p.bullpen, "agent", "upstream", "--script", script, "--listen", "127.0.0.1:0")
	var url string
	eventually(t, "the model listens", func() (bool, any) {
		url = listening.FindString(model.text(t))
		return url != "", "nothing printed"
	})
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte(agentKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	args = append(args, "--agent-upstream", url+"/v1", "--agent-key-file", key, "--agent-retries", "0",
		"--agent-models", "*=small")
	sys := newSystem(t, p, in, manySlots, args...)
	t.Cleanup(func() {
		if strings.Contains(sys.front.text(t), agentKey) {
			t.Error("the log has the model's key")
		}
	})
	return sys
}

// message is a message of the API.
type agentMessage struct {
	ID        string `json:"id"`
	Content   []agentBlock
	Reason    string                         `json:"stop_reason"`
	Container struct{ ID string }            `json:"container"`
	Error     struct{ Type, Message string } `json:"error"`
}

type agentBlock struct {
	Type    string
	Text    string
	ID      string
	Content struct {
		Stdout     string
		Stderr     string
		ReturnCode int    `json:"return_code"`
		ErrorCode  string `json:"error_code"`
		// Of the text editor.
		IsFileUpdate bool `json:"is_file_update"`
		Lines        []string
		Content      []struct {
			FileID string `json:"file_id"`
		}
	}
}

// result returns the first result of a message.
func (m *agentMessage) result(t testing.TB) *agentBlock {
	t.Helper()
	for i := range m.Content {
		if strings.HasSuffix(m.Content[i].Type, "_tool_result") {
			return &m.Content[i]
		}
	}
	t.Fatalf("the message has no result: %+v", m)
	return nil
}

func agentRequest(revision string, content any) request {
	return request{
		"model": "any", "max_tokens": 1000, "messages": []request{{"role": "user", "content": content}},
		"tools": []request{{"type": "code_execution_" + revision, "name": "code_execution"}},
	}
}

// testAgentAnthropic runs programs through the messages of a model, over plain HTTP.
func testAgentAnthropic(t *testing.T, p *programs) {
	sys := newAgents(t, p, "anthropic")
	ask := func(t *testing.T, body any) *agentMessage {
		t.Helper()
		r := sys.in(t).do(http.MethodPost, messagesPath, body)
		if r.status != http.StatusOK || r.header.Get("Request-Id") == "" {
			t.Fatalf("%s", r)
		}
		var m agentMessage
		r.into(t, &m)
		return &m
	}
	testMessageBatches(t, sys)
	t.Run("executions are recorded", func(t *testing.T) {
		t.Parallel()
		m := ask(t, agentRequest("20250825", "mean and standard deviation"))
		if result := m.result(t); result.Content.Stdout != "5.5 2.8723\n" || m.Reason != "end_turn" {
			t.Fatalf("%+v", m)
		}
		var list struct{ Executions []record }
		eventually(t, "the index has the execution", func() (bool, any) {
			r := sys.in(t).get("/v1/executions?metadata.agent_run=" + m.ID)
			r.into(t, &list)
			return len(list.Executions) == 1, r
		})
		x := list.Executions[0]
		if x.Status != string(proto.StatusSuccess) || x.Language != "bash" || x.Metadata["agent_call"] != m.Content[1].ID {
			t.Errorf("%+v", x)
		}
	})
	t.Run("files go in and come out", func(t *testing.T) {
		t.Parallel()
		a := sys.in(t)
		var form bytes.Buffer
		w := multipart.NewWriter(&form)
		part, err := w.CreateFormFile("file", "../data.csv")
		if err == nil {
			_, err = part.Write([]byte("a,40\nb,2\n"))
		}
		if err != nil || w.Close() != nil {
			t.Fatal(err)
		}
		var file struct {
			ID, Filename string
		}
		a.do(http.MethodPost, agentFiles, form.Bytes(), "Content-Type", w.FormDataContentType()).into(t, &file)
		m := ask(t, agentRequest("20250825",
			[]request{{"type": "text", "text": "Analyze this CSV"}, {"type": "container_upload", "file_id": file.ID}}))
		if m.result(t).Content.Stdout != "total 42\n" || file.Filename != "data.csv" {
			t.Errorf("%+v", m)
		}
		if r := a.get(agentFiles + "/" + file.ID + "/content"); r.status != http.StatusBadRequest {
			t.Errorf("the content of an uploaded file: %s", r)
		}
		m = ask(t, agentRequest("20250825", "save it as a chart"))
		files := m.result(t).Content.Content
		if len(files) != 1 { // neither the link nor the directory
			t.Fatalf("%+v", m)
		}
		if r := a.get(agentFiles + "/" + files[0].FileID + "/content"); string(r.body) != "\x89PNG chart" ||
			!strings.Contains(r.header.Get("Content-Disposition"), "chart.png") {
			t.Errorf("%s", r)
		}
	})
	t.Run("an interpreter keeps its variables", func(t *testing.T) {
		t.Parallel()
		container := ""
		call := func(text string) *agentBlock {
			t.Helper()
			body := agentRequest("20260120", text)
			if container != "" {
				body = body.and("container", container)
			}
			m := ask(t, body)
			container = m.Container.ID
			return m.result(t)
		}
		call("Cell x = 41")
		if r := call("Cell print(x + 1)"); r.Type != "code_execution_tool_result" || r.Content.Stdout != "42\n" {
			t.Errorf("%+v", r)
		}
		// Commands, edits and cells have the same files.
		call("Command echo one > shared.txt")
		r := call("Cell print(open('shared.txt').read()); open('made.txt', 'w').write('two')")
		if len(r.Content.Content) != 1 ||
			r.Content.Stdout != "one\n\n3" {
			t.Errorf("%+v", r)
		}
		if r := call("Command cat made.txt"); r.Content.Stdout != "two" {
			t.Errorf("%+v", r)
		}
		r = call("Cell type('P', (), {'_repr_png_': lambda self: b'\\x89PNG'})()")
		if len(r.Content.Content) != 1 {
			t.Fatalf("%+v", r)
		}
		picture := sys.in(t).get(agentFiles + "/" + r.Content.Content[0].FileID + "/content")
		if string(picture.body) != "\x89PNG" ||
			!strings.Contains(picture.header.Get("Content-Disposition"), "picture-1.png") {
			t.Errorf("%s", picture)
		}
		call("Cell import os; os.kill(os.getpid(), 9)")
		if r := call("Cell print('x' in globals(), os.path.exists('made.txt')) if 'os' in globals() else print('new')"); r.
			Content.Stdout != "new\n" || !strings.Contains(r.Content.Stderr, "variables of earlier calls are gone") {
			t.Errorf("%+v", r)
		}
	})
	t.Run("containers are the organisation's", func(t *testing.T) {
		t.Parallel()
		m := ask(t, agentRequest("20250825", "Write a file with a random number"))
		body := agentRequest("20250825", "Read the number").and("container", m.Container.ID)
		if again := ask(t, body); again.result(t).Content.Stdout != "square 22193521\n" {
			t.Errorf("%+v", again)
		}
		secret, _ := sys.in(t).newKey("strangers", "enterprise")
		other := sys.in(t).with(secret)
		if r := other.do(http.MethodPost, messagesPath, body); r.status != http.StatusNotFound {
			t.Errorf("a container of another organisation: %s", r)
		}
	})
	t.Run("models at the root", func(t *testing.T) {
		t.Parallel()
		for _, c := range []struct {
			headers []string
			status  int
			begins  string
		}{
			{
				[]string{"Authorization", "Bearer " + sys.key},
				http.StatusOK,
				`{"object":"list","data":[{"id":"small","object":"model"`,
			},
			{[]string{"X-Api-Key", sys.key}, http.StatusOK, `{"data":[{"id":"small","type":"model"`},
			{
				[]string{"Authorization", "Bearer " + sys.key, "Anthropic-Version", "2023-06-01"},
				http.StatusOK,
				`{"data":[{"id":"small","type":"model"`,
			},
			{[]string{"Authorization", "Bearer sk-other"}, http.StatusUnauthorized, `{"error":{`},
			{[]string{"X-Api-Key", "sk-other"}, http.StatusUnauthorized, `{"type":"error"`},
		} {
			if r := sys.in(t).with("").do(http.MethodGet, "/v1/models", nil, c.headers...); r.status != c.status ||
				!strings.HasPrefix(string(r.body), c.begins) {
				t.Errorf("%v: %s", c.headers[0], r)
			}
		}
	})
	t.Run("nothing of the model's server is in a sandbox", func(t *testing.T) {
		t.Parallel()
		m := ask(t, agentRequest("20250825", "Show the environment"))
		if out := m.result(t).Content.Stdout; !strings.Contains(out, "OUTPUT_DIR=") || strings.Contains(out, agentKey) ||
			strings.Contains(out, "BULLPEN_AGENT") {
			t.Errorf("the environment: %s", out)
		}
	})
	t.Run("a client that leaves ends its execution", func(t *testing.T) {
		t.Parallel()
		a := sys.in(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resp, err := a.open(ctx, http.MethodPost, messagesPath, agentRequest("20250825", "Sleep").and("stream", true))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		var run, call string
		for in := bufio.NewScanner(resp.Body); call == "" && in.Scan(); {
			for name, to := range map[string]*string{`"id":"msg_`: &run, `"id":"srvtoolu_`: &call} {
				if _, rest, ok := strings.Cut(in.Text(), name); ok {
					id, _, _ := strings.Cut(rest, `"`)
					*to = strings.TrimPrefix(name, `"id":"`) + id
				}
			}
		}
		var list struct{ Executions []record }
		eventually(t, "the execution runs", func() (bool, any) {
			r := a.get("/v1/executions?metadata.agent_run=" + run)
			r.into(t, &list)
			return len(list.Executions) == 1 && list.Executions[0].Status == string(proto.StatusRunning), r
		})
		cancel()
		if x := a.ended(list.Executions[0].TraceID); x.Status != string(proto.StatusCancelled) {
			t.Errorf("%+v", x)
		}
	})
	t.Run("errors have the form of the API", func(t *testing.T) {
		t.Parallel()
		for _, c := range []struct {
			key    string
			body   any
			status int
			kind   string
		}{
			{"sk-ant-other", agentRequest("20250825", "x"), http.StatusUnauthorized, "authentication_error"},
			{sys.key, request{"model": "m"}, http.StatusBadRequest, "invalid_request_error"},
			{sys.key, []byte("{"), http.StatusBadRequest, "invalid_request_error"},
			{sys.key, agentRequest("20250825", "Overload"), 529, "overloaded_error"},
			{sys.key, agentRequest("20250825", "Break"), http.StatusInternalServerError, "api_error"},
			{sys.key, agentRequest("20990101", "x"), http.StatusBadRequest, "invalid_request_error"},
		} {
			r := sys.in(t).with("").do(http.MethodPost, messagesPath, c.body, "X-Api-Key", c.key)
			var m agentMessage
			r.into(t, &m)
			if r.status != c.status || m.Error.Type != c.kind || r.header.Get("Request-Id") == "" {
				t.Errorf("%v: %s", c.body, r)
			}
		}
		r := sys.in(t).do(http.MethodPost, "/anthropic/v1/complete", request{"model": "m"})
		var m agentMessage
		if r.into(t, &m); r.status != http.StatusNotFound || m.Error.Type != "not_found_error" {
			t.Errorf("a route that is not here: %s", r)
		}
	})
}

// agentClientsTime is how long the programs of one SDK may take, its installation included.
const agentClientsTime = 10 * time.Minute

// testAgentClients runs programs that use the vendors' SDKs, from PyPI, npm and the Go module proxy.
// The versions are in the files with the dependencies of the programs.
func testAgentClients(t *testing.T, p *programs) {
	python := func(programs ...string) (commands []string) {
		commands = []string{"python3 -m venv venv", "venv/bin/pip install --quiet --requirement requirements.txt"}
		for _, program := range programs {
			commands = append(commands, "venv/bin/python "+program)
		}
		return commands
	}
	typescript := func(programs ...string) (commands []string) {
		commands = []string{"npm install --no-audit --no-fund --silent", "npx tsc"}
		for _, program := range programs {
			commands = append(commands, "node "+program)
		}
		return commands
	}
	golang := []string{"go -C go run ."}
	for _, c := range []struct {
		name, dir string
		commands  []string
	}{
		{"anthropic python", "anthropic", python("examples.py")},
		{"anthropic typescript", "anthropic", typescript("examples.js")},
		{"anthropic go", "anthropic", golang},
		{"openai and perplexity python", "responses", python("openai_examples.py", "perplexity_examples.py")},
		{"openai and perplexity typescript", "responses", typescript("openai_examples.js", "perplexity_examples.js")},
		{"openai go", "responses", golang},
		{"ai sdk", "aisdk", []string{"npm install --no-audit --no-fund --silent", "node --test examples.mjs"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), agentClientsTime)
			defer cancel()
			hooks, dir := startReceiver(t), t.TempDir()
			sys := newAgentsIn(t, p, topologies()[0], c.dir, hooks.flags...)
			secret := sys.in(t).settings(http.MethodPut, "/v1/webhook", request{"url": hooks.url + "/200"})
			webhooks := hooks.forward(t)
			var limited struct{ Key string }
			sys.in(t).do(http.MethodPost, "/v1/admin/keys",
				request{"name": "limited", "org": "limited", "plan": "enterprise", "request_rate": 1}).into(t, &limited)
			if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", c.dir))); err != nil {
				t.Fatal(err)
			}
			for _, command := range c.commands {
				words := strings.Fields(command)
				cmd := exec.CommandContext(ctx, words[0], words[1:]...)
				cmd.Dir = dir
				cmd.Env = append(os.Environ(), "LIMITED_API_KEY="+limited.Key, "ANTHROPIC_BASE_URL="+sys.base+"/anthropic",
					"ANTHROPIC_API_KEY="+sys.key,
					"OPENAI_BASE_URL="+sys.base+"/openai/v1", "OPENAI_API_KEY="+sys.key, "PERPLEXITY_BASE_URL="+sys.base+"/perplexity",
					"PERPLEXITY_API_KEY="+sys.key,
					"OPENAI_WEBHOOK_SECRET="+secret, "WEBHOOKS_URL="+webhooks)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v\n%s", command, err, out)
				}
			}
		})
	}
}

// agentStreams is how many streams testAgentLoad opens at once, agentMemory the most memory that the
// server may use for them, in bytes.
const (
	agentStreams = 500
	agentMemory  = 400 << 20
)

// testAgentLoad streams many answers at once.
func testAgentLoad(t *testing.T, p *programs) {
	sys := newAgents(t, p, "anthropic")
	errs := make(chan error, agentStreams)
	for range agentStreams {
		go func() {
			resp, err := sys.open(t.Context(), http.MethodPost, messagesPath,
				agentRequest("20250825", "Talk slowly").and("stream", true))
			if err == nil {
				var body []byte
				body, err = io.ReadAll(resp.Body)
				_ = resp.Body.Close() // it was read
				if err == nil && !bytes.Contains(body, []byte("event: message_stop")) {
					err = fmt.Errorf("the answer is %s: %.300s", resp.Status, body)
				}
			}
			errs <- err
		}()
	}
	for range agentStreams {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if peak := sys.front.status(t, "VmHWM"); peak > agentMemory {
		t.Errorf("the server used %s", peak)
	} else {
		t.Logf("peak memory %s", peak)
	}
}
