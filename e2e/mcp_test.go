package e2e

import (
	"context"
	"errors"
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
