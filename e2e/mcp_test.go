package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/proto"
)

// keyed adds an API key to requests.
type keyed struct {
	key string
	http.RoundTripper
}

func (k keyed) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer "+k.key)
	return k.RoundTripper.RoundTrip(r)
}

// testMCP runs programs through the tools, over HTTP in both versions of the protocol and through
// the bridge.
func testMCP(t *testing.T, bullpen string, a *api) {
	overHTTP := func(*testing.T) mcp.Transport {
		return &mcp.StreamableClientTransport{
			Endpoint: a.base + "/mcp", HTTPClient: &http.Client{Transport: keyed{a.key, a.http.Transport}},
		}
	}
	bridged := func(t *testing.T) mcp.Transport {
		cmd := exec.CommandContext(t.Context(), bullpen, "mcp")
		cmd.Env = append(os.Environ(), "BULLPEN_URL="+a.base, "BULLPEN_API_KEY="+a.key)
		cmd.Stderr = t.Output()
		return &mcp.CommandTransport{Command: cmd}
	}
	for name, way := range map[string]struct {
		transport func(*testing.T) mcp.Transport
		version   string
	}{
		"newest": {overHTTP, ""}, "with sessions": {overHTTP, "2025-11-25"}, "bridge": {bridged, ""},
		"old bridge": {bridged, "2025-06-18"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			progress := make(chan string, 100)
			client := mcp.NewClient(&mcp.Implementation{Name: "e2e", Version: "1"}, &mcp.ClientOptions{
				ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
					progress <- r.Params.Message
				},
			})
			session, err := client.Connect(t.Context(), way.transport(t),
				&mcp.ClientSessionOptions{ProtocolVersion: way.version})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = session.Close() }()
			execute := func(ctx context.Context, arguments request) (map[string]any, *mcp.CallToolResult, error) {
				params := &mcp.CallToolParams{Name: "sandbox_execute", Arguments: arguments}
				params.SetProgressToken(name)
				result, err := session.CallTool(ctx, params)
				if err != nil {
					return nil, nil, err
				}
				out, _ := result.StructuredContent.(map[string]any)
				return out, result, nil
			}

			out, result, err := execute(t.Context(), request{"code": "echo one; echo two >&2; exit 3", "language": "bash"})
			if err != nil || result.IsError || out["stdout"] != "one\n" || out["stderr"] != "two\n" || out["exit_code"] != 3.0 {
				t.Fatalf("%v %v: %v", out, result, err)
			}
			if id, _ := out["trace_id"].(string); a.in(t).record(id).Status != string(proto.StatusFailed) {
				t.Errorf("%s is recorded as %s", id, a.in(t).record(id).Status)
			}
			if name == "newest" {
				testMCPCells(t, a.in(t), session)
			}
			_, result, err = execute(t.Context(), request{"code": "1", "webhook_url": "https://example.com"})
			if err != nil || !result.IsError || !strings.Contains(result.Content[0].(*mcp.TextContent).Text, "webhook_url") {
				t.Errorf("%v: %v", result, err)
			}
			for len(progress) > 0 {
				<-progress
			}

			// The program ends when its call is cancelled.
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, _, err := execute(ctx,
					request{"code": "import os, time; print(os.environ['BULLPEN_TRACE_ID']); time.sleep(3600)", "timeout": 3600})
				ended <- err
			}()
			id := strings.TrimSpace(<-progress)
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("a cancelled call: %v", err)
			}
			if r := a.in(t).ended(id); r.Status != string(proto.StatusCancelled) {
				t.Errorf("a cancelled call's execution: %s", r.Status)
			}
		})
	}
}

// testMCPCells checks that variables live between calls, that pictures are seen, that the files are those of the thread,
// and that a lost interpreter is reported before anything runs.
func testMCPCells(t *testing.T, a *api, session *mcp.ClientSession) {
	thread := ""
	call := func(arguments request) (text string, result *mcp.CallToolResult) {
		t.Helper()
		if thread != "" {
			arguments["thread_id"] = thread
		}
		result, err := session.CallTool(t.Context(), &mcp.CallToolParams{Name: "context_execute", Arguments: arguments})
		if err != nil {
			t.Fatal(err)
		}
		if out, ok := result.StructuredContent.(map[string]any); ok {
			thread, _ = out["thread_id"].(string)
		}
		return result.Content[0].(*mcp.TextContent).Text, result
	}
	if text, result := call(request{"code": "x = 41; open('note.txt', 'w').close()"}); result.IsError || thread == "" {
		t.Fatalf("%s", text)
	}
	if text, _ := call(request{"code": "print(x + 1)"}); !strings.HasPrefix(text, "42\n") {
		t.Errorf("print(x + 1): %s", text)
	}
	text, result := call(request{"code": "class P:\n def _repr_png_(self): return b'\\x89PNG picture'\nP()"})
	if image, ok := result.Content[len(result.Content)-1].(*mcp.ImageContent); !ok || image.MIMEType != "image/png" ||
		string(image.Data) != "\x89PNG picture" {
		t.Errorf("a picture: %s %v", text, result.Content)
	}
	if text, result = call(request{"code": "1 / 0"}); result.IsError || !strings.Contains(text, "ZeroDivisionError") {
		t.Errorf("a cell that fails: %s", text)
	}
	var files struct{ Files []struct{ Name string } }
	a.do(http.MethodPost, "/v1/files/list", request{"source": "thread", "id": thread}).into(t, &files)
	if !strings.Contains(fmt.Sprint(files), "note.txt") {
		t.Errorf("files of the thread: %v", files)
	}
	for what, lose := range map[string]func(){
		"killed": func() { call(request{"code": "import os; os.kill(os.getpid(), 9)"}) },
		"stopped": func() {
			var list struct {
				Sandboxes []struct{ ID, ThreadID string }
			}
			a.get("/v1/sandboxes?state=running&name=interpreters").into(t, &list)
			for _, x := range list.Sandboxes {
				a.do(http.MethodDelete, "/v1/sandboxes/"+x.ID, nil)
			}
		},
	} {
		lose()
		if text, result = call(request{"code": "open('ran', 'w')"}); !result.IsError || !strings.Contains(text, what) ||
			result.Meta["bullpen.run/error"] != "context_lost" {
			t.Errorf("after the interpreter was %s: %s", what, text)
		}
		again := request{"code": "import os; 'x' in globals(), os.listdir()", "restart": true}
		if text, result = call(again); result.IsError || !strings.Contains(text, "(False, ") ||
			!strings.Contains(text, "'note.txt'") || strings.Contains(text, "'ran'") {
			t.Errorf("a restart: %s", text)
		}
	}
}
