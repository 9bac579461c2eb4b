package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Sandbox is a sandbox profile to store, as a YAML file has it. The server fills in the fields that
// are nil and checks all others, so their values keep their YAML types.
type Sandbox struct {
	Name        string          `json:"name,omitempty" yaml:"name"`
	Image       any             `json:"image,omitempty" yaml:"image"`
	CPU         any             `json:"cpu,omitempty" yaml:"cpu"`
	Memory      any             `json:"memory,omitempty" yaml:"memory"`
	Pids        any             `json:"pids,omitempty" yaml:"pids"`
	OpenFiles   any             `json:"open_files,omitempty" yaml:"open_files"`
	Disk        *SandboxDisk    `json:"disk,omitempty" yaml:"disk"`
	Network     *SandboxNetwork `json:"network,omitempty" yaml:"network"`
	Env         any             `json:"env,omitempty" yaml:"env"`
	Secrets     any             `json:"secrets,omitempty" yaml:"secrets"`
	Output      any             `json:"output,omitempty" yaml:"output"`
	Isolation   any             `json:"isolation,omitempty" yaml:"isolation"`
	Preload     any             `json:"preload,omitempty" yaml:"preload"`
	SystemCalls any             `json:"system_calls,omitempty" yaml:"system_calls"`
}

// SandboxDisk is the disk of a [Sandbox].
type SandboxDisk struct {
	Home   any `json:"home,omitempty" yaml:"home"`
	Tmp    any `json:"tmp,omitempty" yaml:"tmp"`
	Inodes any `json:"inodes,omitempty" yaml:"inodes"`
}

// SandboxNetwork is the network of a [Sandbox].
type SandboxNetwork struct {
	Policy any `json:"policy,omitempty" yaml:"policy"`
	Allow  any `json:"allow,omitempty" yaml:"allow"`
}

// CreateSandbox stores a new profile and returns it complete.
func (c *Client) CreateSandbox(ctx context.Context, s *Sandbox) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodPost, path: SandboxesPath, body: s})
}

// ReplaceSandbox replaces a profile and returns it complete.
func (c *Client) ReplaceSandbox(ctx context.Context, s *Sandbox) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodPut, path: sandboxPath(s.Name), body: s, resend: true})
}

// Sandbox returns a profile.
func (c *Client) Sandbox(ctx context.Context, name string) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodGet, path: sandboxPath(name), resend: true})
}

// SandboxPreload returns whether the modules of a profile can be preloaded.
func (c *Client) SandboxPreload(ctx context.Context, name string) (*api.SandboxPreload, error) {
	p, _, err := get[api.SandboxPreload](ctx, c, call{method: http.MethodGet, path: sandboxPath(name) + "/preload", resend: true})
	return p, err
}

// RemoveSandbox removes a profile and returns it.
func (c *Client) RemoveSandbox(ctx context.Context, name string) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodDelete, path: sandboxPath(name)})
}

// Sandboxes lists all profiles.
func (c *Client) Sandboxes(ctx context.Context) ([]proto.Profile, error) {
	list, _, err := get[api.Sandboxes](ctx, c, call{method: http.MethodGet, path: SandboxesPath, resend: true})
	return list.Sandboxes, err
}

func (c *Client) sandbox(ctx context.Context, call call) (*proto.Profile, error) {
	p, _, err := get[proto.Profile](ctx, c, call)
	return p, err
}

func sandboxPath(name string) string { return SandboxesPath + "/" + url.PathEscape(name) }
