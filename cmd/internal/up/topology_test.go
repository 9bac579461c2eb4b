package up_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/cmd/internal/up"
	topologies "github.com/bullpen-run/bullpen/deploy/up"
)

// TestShippedTopologies reads the topologies that are in the tree.
func TestShippedTopologies(t *testing.T) {
	if _, err := up.Read("default", topologies.Default); err != nil {
		t.Error(err)
	}
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "deploy", "up", "*.yaml"))
	if err != nil || len(files) != 2 {
		t.Fatalf("%v: %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := up.Read(file, text); err != nil {
			t.Error(err)
		}
	}
}

func TestErrorsNameTheLine(t *testing.T) {
	const nats = "services:\n  nats: {server: nats}\n"
	for name, test := range map[string]struct{ text, want string }{
		"empty":                  {"", "f.yaml has no services"},
		"no YAML":                {"services: {\n", "f.yaml:1: "},
		"not a mapping":          {"services: 3\n", "f.yaml:1: "},
		"two documents":          {nats + "---\n" + nats, "f.yaml must have one YAML document, not 2"},
		"unknown key":            {nats + "volumes: {}\n", `f.yaml:3: unknown field "volumes"`},
		"unknown key of service": {nats + "  a:\n    roles: [worker]\n    image: x\n", `f.yaml:5: unknown field "image"`},
		"key twice":              {nats + "  nats: {server: redis}\n", "f.yaml:3: "},
		"no NATS": {
			"services:\n  a: {roles: [gateway]}\n", "f.yaml has 0 services with server: nats, but must have one",
		},
		"two NATS clusters": {nats + "  other: {server: nats}\n", "f.yaml has 2 services with server: nats"},
		"two Redis servers": {
			nats + "  a: {server: redis}\n  b: {server: redis}\n", "f.yaml has 2 services with server: redis",
		},
		"too many": {
			nats + "  a: {roles: [worker], replicas: 200}\n", "f.yaml has 201 processes, but may have 200",
		},
		"bad name": {nats + "  A_b: {roles: [worker]}\n", "f.yaml:3: services.A_b: the name must be"},
		"no kind": {
			nats + "  a: {replicas: 2}\n", "f.yaml:3: services.a: a service has one of roles, server and command",
		},
		"nothing": {nats + "  a:\n", "f.yaml:3: services.a: a service has one of roles, server and command"},
		"two kinds": {
			nats + "  a: {roles: [worker], server: redis}\n", "f.yaml:3: services.a: a service has one of",
		},
		"unknown role": {nats + "  a:\n    roles: [wroker]\n", `f.yaml:4: services.a.roles: unknown role "wroker"`},
		"unknown server": {
			nats + "  a: {server: mysql}\n", `f.yaml:3: services.a.server: "mysql" must be nats or redis`,
		},
		"no replicas": {
			nats + "  a:\n    roles: [worker]\n    replicas: 0\n", "f.yaml:5: services.a.replicas: 0 must be at least 1",
		},
		"two NATS servers": {
			"services:\n  nats: {server: nats, replicas: 2}\n", "f.yaml:2: services.nats.replicas: 2 NATS servers",
		},
		"two Redis replicas": {
			nats + "  a: {server: redis, replicas: 2}\n", "f.yaml:3: services.a.replicas: 2 Redis servers",
		},
		"published server": {
			"services:\n  nats: {server: nats, publish: 4222}\n", "f.yaml:2: services.nats.publish: only services with roles",
		},
		"port too high": {
			nats + "  a: {roles: [gateway], replicas: 2, publish: 65535}\n",
			"f.yaml:3: services.a.publish: 65535 must be a port",
		},
		"env of a server": {
			"services:\n  nats: {server: nats, env: {A: b}}\n",
			"f.yaml:2: services.nats.env: the servers in this program have no settings",
		},
		"no setting": {
			nats + "  a:\n    roles: [worker]\n    env:\n      BULLPEN_SLOT: 2\n",
			"f.yaml:6: services.a.env.BULLPEN_SLOT: no setting",
		},
		"no setting of all": {"env:\n  BULLPEN_SLOT: 2\n" + nats, "f.yaml:2: env.BULLPEN_SLOT: no setting"},
		"own setting": {
			nats + "  a: {roles: [worker], env: {BULLPEN_DATA: /tmp}}\n",
			"f.yaml:3: services.a.env.BULLPEN_DATA: bullpen up sets it",
		},
		"unknown variable": {
			nats + "  a: {command: [a], env: {A: '$$1 $B'}}\n", `f.yaml:3: services.a.env.A: no process is named "B"`,
		},
		"unknown process": {
			nats + "  a: {command: [a], replicas: 2, env: {A: '${a}'}}\n",
			`f.yaml:3: services.a.env.A: no process is named "a": choose from a-1, a-2, nats`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := up.Read("f.yaml", []byte(test.text))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v\nwant %s", err, test.want)
			}
		})
	}
}

// TestNumbersAreValuesOfVariables checks that values need no quotes.
func TestNumbersAreValuesOfVariables(t *testing.T) {
	const text = "services:\n  nats: {server: nats}\n  worker: {roles: [worker], env: {BULLPEN_SLOTS: 2, " +
		"BULLPEN_MOUNT_ALLOW_HTTP: true}}\n"
	topology, err := up.Read("f.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if env := topology.Services["worker"].Env; env["BULLPEN_SLOTS"] != "2" || env["BULLPEN_MOUNT_ALLOW_HTTP"] != "true" {
		t.Errorf("got %v", env)
	}
}
