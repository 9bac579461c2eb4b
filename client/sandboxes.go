package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const sandboxesPath = "/v1/sandboxes"

func sandboxPath(id string) string { return sandboxesPath + "/" + url.PathEscape(id) }

// CreateSandbox creates a live sandbox and returns it when processes can be started in it. It is not
// resent when the connection breaks, because that could create two.
func (c *Client) CreateSandbox(ctx context.Context, r *api.SandboxRequest) (*api.LiveSandbox, error) {
	return get[api.LiveSandbox](ctx, c, call{method: http.MethodPost, path: sandboxesPath, body: r})
}

// SandboxFilter selects live sandboxes. Empty fields select all.
type SandboxFilter struct {
	State proto.SandboxState
	Name  string
}

// Sandboxes returns the live sandboxes of the key's organisation, the newest first.
func (c *Client) Sandboxes(ctx context.Context, filter SandboxFilter) iter.Seq2[api.LiveSandbox, error] {
	query := largestPages()
	query.Set("state", string(filter.State))
	query.Set("name", filter.Name)
	return pages[api.LiveSandbox](ctx, c, sandboxesPath, "sandboxes", query)
}

// Sandbox returns a live sandbox.
func (c *Client) Sandbox(ctx context.Context, id string) (*api.LiveSandbox, error) {
	return read[api.LiveSandbox](ctx, c, sandboxPath(id))
}

// ExtendSandbox makes a running sandbox expire in a number of seconds from now, or in as many as its
// last start had if timeout is 0.
func (c *Client) ExtendSandbox(ctx context.Context, id string, timeout int) (*api.LiveSandbox, error) {
	return c.changeSandbox(ctx, id, "/extend", api.SandboxTimeout{Timeout: timeout})
}

// PauseSandbox stops a running sandbox, saves its home, and returns it when it is paused.
func (c *Client) PauseSandbox(ctx context.Context, id string) (*api.LiveSandbox, error) {
	return c.changeSandbox(ctx, id, "/pause", nil)
}

// SaveSandbox saves the home of a running sandbox, which runs on. Files alone are saved, no processes. If
// its worker is lost, the sandbox resumes with them.
func (c *Client) SaveSandbox(ctx context.Context, id string) (*api.SandboxSave, error) {
	return get[api.SandboxSave](ctx, c, call{method: http.MethodPost, path: sandboxPath(id) + "/save", resend: true})
}

// ResumeSandbox starts a paused sandbox with a timeout in seconds, or with that of its last start if
// timeout is 0. It returns the sandbox when processes can be started in it.
func (c *Client) ResumeSandbox(ctx context.Context, id string, timeout int) (*api.LiveSandbox, error) {
	return c.changeSandbox(ctx, id, "/resume", api.SandboxTimeout{Timeout: timeout})
}

// SandboxLogs returns what the processes of a sandbox have printed since its last start.
func (c *Client) SandboxLogs(ctx context.Context, id string) (*api.SandboxLogs, error) {
	return read[api.SandboxLogs](ctx, c, sandboxPath(id)+"/logs")
}

// DeleteSandbox ends a sandbox for good and returns it when it has stopped. Deleting one that has
// ended changes nothing.
func (c *Client) DeleteSandbox(ctx context.Context, id string) (*api.LiveSandbox, error) {
	return get[api.LiveSandbox](ctx, c, call{method: http.MethodDelete, path: sandboxPath(id), resend: true})
}

// changeSandbox sends a request to a path below that of a sandbox. It is not resent when the
// connection breaks.
func (c *Client) changeSandbox(ctx context.Context, id, path string, body any) (*api.LiveSandbox, error) {
	return get[api.LiveSandbox](ctx, c, call{method: http.MethodPost, path: sandboxPath(id) + path, body: body})
}
