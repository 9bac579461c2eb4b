package app

import (
	"net"
	"strings"

	"github.com/bullpen-run/bullpen/gateway"
	"github.com/bullpen-run/bullpen/gateway/e2b"
	gatewaysandboxes "github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/scheduler/registry"
)

// PortAccess is what requests to the ports of sandboxes need.
type PortAccess string

// The accesses.
const (
	PortsToken  PortAccess = "token"
	PortsPublic PortAccess = "public" // nothing but the sandbox's id
)

func (c *Config) validateSandboxDomain() error {
	host := c.SandboxDomain
	if strings.Contains(host, ":") {
		name, port, err := net.SplitHostPort(host)
		if err != nil || port == "" {
			name = ""
		}
		host = name
	}
	ok := host != "" && strings.Trim(host, "abcdefghijklmnopqrstuvwxyz0123456789-.") == "" &&
		!strings.HasPrefix(host, ".") && !strings.HasSuffix(host, ".")
	return setting("sandbox-domain", c.SandboxDomain == "" || ok, "%q must be a domain in lower case such as "+
		"sandboxes.example.com, without a * and with :PORT unless that is the scheme's", c.SandboxDomain)
}

// serveE2B adds what E2B's clients need to server.
func (s *system) serveE2B(server *gateway.Server, live *gatewaysandboxes.Service, keys *registry.Keys) {
	tokens := e2b.Tokens{Key: keys.Derived("tokens of sandboxes for E2B's clients")}
	routes := &e2b.Server{
		Core: &server.Core, Sandboxes: live, Guests: live, Store: s.sandboxes, Profiles: s.admission,
		Tokens: tokens, Domain: s.cfg.SandboxDomain, PublicPorts: s.cfg.SandboxPorts == PortsPublic,
	}
	plane := &e2b.DataPlane{
		Core: &server.Core, Guests: live, Directory: s.sandboxes, Tokens: tokens, Domain: s.cfg.SandboxDomain,
	}
	server.Surfaces = append(server.Surfaces, routes.Surface())
	server.Around = plane.Around
}
