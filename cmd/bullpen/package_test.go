package main

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

// TestPackagedSettings parses the command and the settings of each unit of the packages, as they are
// shipped and with all that are commented out. Each setting must be one of bullpen.
func TestPackagedSettings(t *testing.T) {
	deploy := filepath.Join("..", "..", "deploy")
	units, err := filepath.Glob(filepath.Join(deploy, "systemd", "*.service"))
	if err != nil || len(units) != 1+len(app.Roles()) {
		t.Fatalf("%d units, want one for each role and one for all: %v", len(units), err)
	}
	known := map[string]bool{}
	for _, f := range docsParser(t, streams{}).Model.Children[0].Flags {
		for _, env := range f.Envs {
			known[env] = true
		}
	}
	for _, unit := range units {
		t.Run(filepath.Base(unit), func(t *testing.T) {
			all := filepath.Base(unit) == "bullpen.service" // it needs no setting
			var args []string
			examples := map[string]string{}
			set := func(line string) {
				name, value, _ := strings.Cut(line, "=")
				if strings.HasPrefix(name, "BULLPEN_") && !known[name] {
					t.Errorf("%s is no setting", name)
				}
				t.Setenv(name, value)
			}
			for line := range readLines(t, unit) {
				key, value, _ := strings.Cut(line, "=")
				switch key {
				case "ExecStart":
					command := strings.Fields(value)
					if len(command) < 2 || command[0] != "bullpen" || command[1] != "serve" {
						t.Fatalf("the unit starts %q", value)
					}
					args = command[2:]
				case "Environment":
					set(value)
				case "EnvironmentFile":
					file := strings.TrimPrefix(value, "-/etc/bullpen/")
					for line := range readLines(t, filepath.Join(deploy, "release", "deb", "etc", file)) {
						if example, ok := strings.CutPrefix(line, "#"); ok && strings.HasPrefix(example, "BULLPEN_") {
							name, value, _ := strings.Cut(example, "=")
							examples[name] = value
						} else if line != "" && !ok {
							set(line)
						}
					}
				}
			}
			if _, err := app.ParseConfig(args); (err == nil) != all || !all && !strings.Contains(err.Error(), "set --nats") {
				t.Errorf("as it is shipped: %v", err)
			}
			for name, value := range examples {
				set(name + "=" + value)
			}
			c, err := app.ParseConfig(args)
			if err != nil {
				t.Fatalf("with all settings of its files: %v", err)
			}
			if want := map[bool]int{true: len(app.Roles()), false: 1}[all]; len(c.Roles) != want {
				t.Errorf("it has the roles %v", c.Roles)
			}
			if !strings.HasPrefix(c.Data, "/var/lib/bullpen/") {
				t.Errorf("its data directory is %s", c.Data)
			}
		})
	}
}

func readLines(t *testing.T, file string) func(yield func(string) bool) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() }) // only read
	return func(yield func(string) bool) {
		for s := bufio.NewScanner(f); s.Scan() && yield(s.Text()); {
		}
	}
}
