package up

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/parser"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

// Topology describes a deployment on one machine.
type Topology struct {
	// Env has settings and other variables of all processes with roles.
	Env map[string]string `yaml:"env"`
	// Services has the services by name. Exactly one is a NATS server.
	Services map[string]Service `yaml:"services"`

	file  string
	lines map[string]int // of the keys, joined with dots
}

// Service is one or several processes that are alike. It has exactly one of Roles, Server and
// Command.
type Service struct {
	Roles   []app.Role `yaml:"roles"`   // of `bullpen serve`
	Server  string     `yaml:"server"`  // nats or redis, which are in this program
	Command []string   `yaml:"command"` // another program, which is started in its data directory
	// Replicas is the number of processes, nil for one process without a number in its name.
	Replicas *int `yaml:"replicas"`
	// Publish is a loopback port of this machine that reaches the first process, 0 for a free one.
	// Further processes have the following ports. Processes without it can be reached from their
	// own network only.
	Publish *int `yaml:"publish"`
	// Env has variables of its processes, which override the topology's.
	Env map[string]string `yaml:"env"`
}

// The kinds of [Service.Server].
const (
	serverNATS  = "nats"
	serverRedis = "redis"
)

// maxProcesses is how many processes have an address in [network].
const maxProcesses = 200

var servicePattern = regexp.MustCompile(`^[a-z][a-z0-9-]{0,30}$`)

// ownSettings are the settings that Up sets for each process.
var ownSettings = []string{
	"BULLPEN_BOOTSTRAP_KEY", "BULLPEN_CONFIG", "BULLPEN_DATA", "BULLPEN_INSTANCE",
	"BULLPEN_LISTEN", "BULLPEN_ROLES",
}

// Read reads a topology from the text of a file. Its errors name the file and the line.
func Read(file string, text []byte) (*Topology, error) {
	t := &Topology{}
	parsed, err := parser.ParseBytes(text, 0)
	if err == nil {
		t.lines = app.KeyLines(parsed)
		if len(parsed.Docs) > 1 {
			return nil, fmt.Errorf("%s must have one YAML document, not %d", file, len(parsed.Docs))
		}
		err = yaml.UnmarshalWithOptions(text, t, yaml.DisallowUnknownField())
	}
	var at yaml.Error
	if errors.As(err, &at) && at.GetToken() != nil {
		return nil, fmt.Errorf("%s:%d: %s", file, at.GetToken().Position.Line, at.GetMessage())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	t.file = file
	return t, t.validate()
}

// errorf returns an error about the value of a key.
func (t *Topology) errorf(key, format string, args ...any) error {
	return fmt.Errorf("%s:%d: %s: %w", t.file, t.lines[key], key, fmt.Errorf(format, args...))
}

func (t *Topology) validate() error {
	if len(t.Services) == 0 {
		return fmt.Errorf("%s has no services", t.file)
	}
	errs := []error{t.validateEnv("env", t.Env, true)}
	servers, processes := map[string]int{}, 0
	for _, name := range slices.Sorted(maps.Keys(t.Services)) {
		s := t.Services[name]
		errs = append(errs, t.validateService("services."+name, name, s))
		servers[s.Server]++
		processes += s.count()
	}
	if servers[serverNATS] != 1 {
		errs = append(errs, fmt.Errorf("%s has %d services with server: nats, but must have one", t.file,
			servers[serverNATS]))
	}
	if servers[serverRedis] > 1 {
		errs = append(errs, fmt.Errorf("%s has %d services with server: redis, but may have one", t.file,
			servers[serverRedis]))
	}
	if processes > maxProcesses {
		errs = append(errs, fmt.Errorf("%s has %d processes, but may have %d", t.file, processes, maxProcesses))
	}
	return errors.Join(errs...)
}

func (t *Topology) validateService(key, name string, s Service) (err error) {
	fail := func(key, format string, args ...any) { err = errors.Join(err, t.errorf(key, format, args...)) }
	if !servicePattern.MatchString(name) {
		fail(key, "the name must be 1 to 31 of a-z, 0-9 and -, the first a letter")
	}
	kinds := 0
	for _, set := range []bool{len(s.Roles) > 0, s.Server != "", len(s.Command) > 0} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		fail(key, "a service has one of roles, server and command")
	}
	for _, role := range s.Roles {
		if !slices.Contains(app.Roles(), role) {
			fail(key+".roles", "unknown role %q: choose from %v", role, app.Roles())
		}
	}
	if s.Server != "" && s.Server != serverNATS && s.Server != serverRedis {
		fail(key+".server", "%q must be nats or redis", s.Server)
	}
	if s.Replicas != nil {
		switch n := *s.Replicas; {
		case n < 1:
			fail(key+".replicas", "%d must be at least 1", n)
		case s.Server == serverNATS && n != 1 && n != 3 && n != 5:
			fail(key+".replicas", "%d NATS servers: choose 1, 3 or 5", n)
		case s.Server == serverRedis && n != 1:
			fail(key+".replicas", "%d Redis servers would not know each other: choose 1", n)
		}
	}
	if s.Publish != nil {
		if len(s.Roles) == 0 {
			fail(key+".publish", "only services with roles are published")
		}
		if first := *s.Publish; first < 0 || first+s.count()-1 > 65535 {
			fail(key+".publish", "%d must be a port, or 0 for free ones", first)
		}
	}
	if s.Server != "" && len(s.Env) > 0 {
		fail(key+".env", "the servers in this program have no settings")
	}
	return errors.Join(err, t.validateEnv(key+".env", s.Env, len(s.Roles) > 0))
}

// validateEnv checks the names of variables and what is substituted in their values.
func (t *Topology) validateEnv(key string, env map[string]string, settings bool) (err error) {
	known, addresses := app.Variables(), t.addresses()
	for _, name := range slices.Sorted(maps.Keys(env)) {
		at := key + "." + name
		if settings && strings.HasPrefix(name, "BULLPEN_") {
			if !slices.Contains(known, name) {
				err = errors.Join(err, t.errorf(at, "no setting: docs/reference/configuration.md has all"))
			}
			if slices.Contains(ownSettings, name) {
				err = errors.Join(err, t.errorf(at, "bullpen up sets it"))
			}
		}
		expand(env[name], func(process string) string {
			if _, ok := addresses[process]; !ok {
				err = errors.Join(err, t.errorf(at, "no process is named %q: choose from %s", process,
					strings.Join(slices.Sorted(maps.Keys(addresses)), ", ")))
			}
			return ""
		})
	}
	return err
}

// count returns the number of processes.
func (s Service) count() int {
	if s.Replicas == nil {
		return 1
	}
	return *s.Replicas
}

// stage orders processes: lower stages start earlier and stop later. Gateways drain while workers run,
// and workers drain while the others run.
func (s Service) stage() int {
	switch {
	case slices.Contains(s.Roles, app.RoleGateway):
		return 3
	case slices.Contains(s.Roles, app.RoleWorker):
		return 2
	case len(s.Roles) > 0:
		return 1
	default:
		return 0
	}
}

// spec describes a process before it starts.
type spec struct {
	name    string // of the service, with a number if that has replicas
	service Service
	number  int // among the service's processes, from 0
	addr    netip.Addr
}

// specs returns all processes in the order in which they start.
func (t *Topology) specs() (all []spec) {
	names := slices.Collect(maps.Keys(t.Services))
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(t.Services[a].stage(), t.Services[b].stage()), strings.Compare(a, b))
	})
	addr := firstAddr
	for _, name := range names {
		s := t.Services[name]
		for i := range s.count() {
			process := name
			if s.Replicas != nil {
				process += "-" + strconv.Itoa(i+1)
			}
			all = append(all, spec{process, s, i, addr})
			addr = addr.Next()
		}
	}
	return all
}

// addresses returns the addresses of all processes by name.
func (t *Topology) addresses() map[string]string {
	found := map[string]string{}
	for _, p := range t.specs() {
		found[p.name] = p.addr.String()
	}
	return found
}

// hosts returns the process addresses of the only service with a server of this kind.
func (t *Topology) hosts(server string) (addrs []string) {
	for _, p := range t.specs() {
		if p.service.Server == server {
			addrs = append(addrs, p.addr.String())
		}
	}
	return addrs
}

// settings returns the variables of a process with roles. Files are below data; password is the servers' password.
func (t *Topology) settings(p spec, data, password, key string) map[string]string {
	roles := make([]string, len(p.service.Roles))
	for i, r := range p.service.Roles {
		roles[i] = string(r)
	}
	var nats []string
	for _, host := range t.hosts(serverNATS) {
		nats = append(nats, natsURL(host))
	}
	env := map[string]string{
		"BULLPEN_ROLES": strings.Join(roles, ","), "BULLPEN_DATA": filepath.Join(data, p.name),
		"BULLPEN_LISTEN": ":" + strconv.Itoa(servePort),
		"BULLPEN_NATS":   strings.Join(nats, ","), "BULLPEN_NATS_USER": natsUser, "BULLPEN_NATS_PASSWORD": password,
		"BULLPEN_REPLICAS":    strconv.Itoa(len(nats)),
		"BULLPEN_STORE":       "file://" + filepath.Join(data, "store"),
		"BULLPEN_SECRETS_KEY": filepath.Join(data, "secrets.key"),
	}
	for _, host := range t.hosts(serverRedis) {
		env["BULLPEN_REDIS"] = redisURL(host, password)
	}
	if slices.Contains(p.service.Roles, app.RoleGateway) {
		env["BULLPEN_BOOTSTRAP_KEY"] = key
	}
	t.add(env, t.Env)
	t.add(env, p.service.Env)
	return env
}

// add adds variables, replacing process names in their values by addresses.
func (t *Topology) add(env, more map[string]string) {
	addresses := t.addresses()
	for name, value := range more {
		env[name] = expand(value, func(process string) string { return addresses[process] })
	}
}

// expand replaces the names of processes in a value: ${NAME}. A $ is written $$.
func expand(value string, address func(process string) string) string {
	return os.Expand(value, func(name string) string {
		if name == "$" {
			return name
		}
		return address(name)
	})
}
