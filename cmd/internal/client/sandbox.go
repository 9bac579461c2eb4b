package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/bullpen-run/bullpen/proto"
)

const sandboxesPath = "/v1/admin/sandboxes"

// Sandbox is a sandbox profile to store. What is nil is left to the server, which also checks the rest: values are as the API takes
// them, and keep their YAML types until they are there.
type Sandbox struct {
	Name      string          `json:"name,omitempty" yaml:"name"`
	Image     any             `json:"image,omitempty" yaml:"image"`
	CPU       any             `json:"cpu,omitempty" yaml:"cpu"`
	Memory    any             `json:"memory,omitempty" yaml:"memory"`
	Pids      any             `json:"pids,omitempty" yaml:"pids"`
	Disk      *SandboxDisk    `json:"disk,omitempty" yaml:"disk"`
	Network   *SandboxNetwork `json:"network,omitempty" yaml:"network"`
	Env       any             `json:"env,omitempty" yaml:"env"`
	Output    any             `json:"output,omitempty" yaml:"output"`
	Isolation any             `json:"isolation,omitempty" yaml:"isolation"`
	Preload   any             `json:"preload,omitempty" yaml:"preload"`
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

// CreateSandbox stores a new profile and gives it complete.
func (c *Client) CreateSandbox(ctx context.Context, s *Sandbox) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodPost, path: sandboxesPath, body: s})
}

// ReplaceSandbox stores a profile in place of the one of the same name, and gives it complete.
func (c *Client) ReplaceSandbox(ctx context.Context, s *Sandbox) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodPut, path: sandboxPath(s.Name), body: s, resend: true})
}

// Sandbox gives a profile.
func (c *Client) Sandbox(ctx context.Context, name string) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodGet, path: sandboxPath(name), resend: true})
}

// RemoveSandbox removes a profile and gives it as it was.
func (c *Client) RemoveSandbox(ctx context.Context, name string) (*proto.Profile, error) {
	return c.sandbox(ctx, call{method: http.MethodDelete, path: sandboxPath(name)})
}

// Sandboxes lists all profiles.
func (c *Client) Sandboxes(ctx context.Context) ([]proto.Profile, error) {
	var list struct {
		Sandboxes []proto.Profile `json:"sandboxes"`
	}
	_, _, err := c.getJSON(ctx, call{method: http.MethodGet, path: sandboxesPath, resend: true}, &list)
	return list.Sandboxes, err
}

func (c *Client) sandbox(ctx context.Context, call call) (*proto.Profile, error) {
	p := new(proto.Profile)
	_, _, err := c.getJSON(ctx, call, p)
	return p, err
}

func sandboxPath(name string) string { return sandboxesPath + "/" + url.PathEscape(name) }
