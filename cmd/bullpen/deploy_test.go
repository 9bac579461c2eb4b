package main

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	natsserver "github.com/nats-io/nats-server/v2/server"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

// deployed is a process of bullpen as a manifest starts it.
type deployed struct {
	args  []string
	env   map[string]string
	files map[string]string // those mounted read-only, and their content, which is empty if the manifest does not have it
	data  []string          // mounted writable
	stop  time.Duration     // from SIGTERM to SIGKILL
}

// TestChartSettings parses the commands and the settings of the chart, as deploy/helm/rendered has it.
func TestChartSettings(t *testing.T) {
	files, err := filepath.Glob("../../deploy/helm/rendered/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no rendered charts: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var workloads []workload
			configs := map[string]map[string]string{}
			for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
				var w workload
				if err := d.Decode(&w); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				switch w.Kind {
				case "Deployment":
					workloads = append(workloads, w)
				case "ConfigMap":
					configs[w.Metadata.Name] = w.Data
				}
			}
			processes := map[string]deployed{}
			for _, w := range workloads {
				processes[w.Metadata.Name] = w.process(t, configs)
			}
			checkDeployed(t, processes)
		})
	}
}

// workload has the members of a Deployment or a ConfigMap that matter to the program in it.
type workload struct {
	Kind     string
	Metadata struct{ Name string }
	Data     map[string]string
	Spec     struct {
		Template struct {
			Spec struct {
				TerminationGracePeriodSeconds int `yaml:"terminationGracePeriodSeconds"`
				Containers                    []struct {
					Command, Args []string
					Env           []struct {
						Name, Value string
						ValueFrom   map[string]any `yaml:"valueFrom"`
					}
					Lifecycle struct {
						PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
					}
					VolumeMounts []struct {
						Name      string
						MountPath string `yaml:"mountPath"`
						ReadOnly  bool   `yaml:"readOnly"`
					} `yaml:"volumeMounts"`
				}
				Volumes []struct {
					Name      string
					ConfigMap struct{ Name string } `yaml:"configMap"`
					Secret    struct {
						Items []struct{ Path string }
					}
				}
			}
		}
	}
}

func (w *workload) process(t *testing.T, configs map[string]map[string]string) deployed {
	t.Helper()
	pod := w.Spec.Template.Spec
	if len(pod.Containers) != 1 || len(pod.Containers[0].Command) != 0 {
		t.Fatalf("%s does not have one container with the command of its image", w.Metadata.Name)
	}
	c := pod.Containers[0]
	p := deployed{
		args: c.Args, env: map[string]string{}, files: map[string]string{},
		stop: time.Duration(pod.TerminationGracePeriodSeconds-c.Lifecycle.PreStop.Sleep.Seconds) * time.Second,
	}
	for _, env := range c.Env {
		p.env[env.Name] = env.Value
		if env.ValueFrom != nil {
			p.env[env.Name] = fromSecret[env.Name]
		}
	}
	for _, mount := range c.VolumeMounts {
		if !mount.ReadOnly {
			p.data = append(p.data, mount.MountPath)
			continue
		}
		for _, v := range pod.Volumes {
			if v.Name != mount.Name {
				continue
			}
			for _, item := range v.Secret.Items {
				p.files[path.Join(mount.MountPath, item.Path)] = ""
			}
			for name, text := range configs[v.ConfigMap.Name] {
				p.files[path.Join(mount.MountPath, name)] = text
			}
		}
	}
	return p
}

// fromSecret has examples of settings whose values are in a Secret.
var fromSecret = map[string]string{
	"BULLPEN_BOOTSTRAP_KEY": "sk-local-0123456789012345678901234567890",
	"BULLPEN_REDIS":         "redis://:password@redis:6379/0",
	"AWS_ACCESS_KEY_ID":     "id",
	"AWS_SECRET_ACCESS_KEY": "secret",
}

// TestComposeSettings does the same with deploy/compose, and has NATS read its configuration.
func TestComposeSettings(t *testing.T) {
	dir := filepath.Join("..", "..", "deploy", "compose")
	text, err := os.ReadFile(filepath.Join(dir, "compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct {
			Image       string
			Command     []string
			Environment map[string]string
			Volumes     []string
			Secrets     []string
			Stop        string `yaml:"stop_grace_period"`
		}
	}
	substituted := os.Expand(string(text), func(name string) string {
		name, value, _ := strings.Cut(name, ":")
		if example, ok := strings.CutPrefix(value, "-"); ok {
			return example
		}
		return "sk-local-0123456789012345678901234567890" + strings.ToLower(name)
	})
	if err := yaml.Unmarshal([]byte(substituted), &compose); err != nil {
		t.Fatal(err)
	}
	processes := map[string]deployed{}
	for name, s := range compose.Services {
		if !strings.HasPrefix(s.Image, "bullpen/") {
			continue
		}
		stop, err := time.ParseDuration(s.Stop)
		if err != nil {
			t.Fatal(err)
		}
		p := deployed{args: s.Command, env: s.Environment, files: map[string]string{}, stop: stop}
		for _, secret := range s.Secrets {
			p.files["/run/secrets/"+secret] = ""
		}
		for _, volume := range s.Volumes {
			_, at, _ := strings.Cut(volume, ":")
			p.data = append(p.data, at)
		}
		processes[name] = p
	}
	checkDeployed(t, processes)

	t.Setenv("NATS_PASSWORD", "p0123")
	nats, err := natsserver.ProcessConfigFile(filepath.Join(dir, "nats.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if !nats.JetStream || !nats.SyncAlways || nats.Cluster.Name == "" {
		t.Errorf("NATS has JetStream %t, sync_interval always %t, cluster %q", nats.JetStream, nats.SyncAlways,
			nats.Cluster.Name)
	}
}

// checkDeployed has the program parse what processes are started with.
func checkDeployed(t *testing.T, processes map[string]deployed) {
	t.Helper()
	known := map[string]bool{}
	for _, f := range docsParser(t, streams{}).Model.Children[0].Flags {
		for _, env := range f.Envs {
			known[env] = true
		}
	}
	roles := map[app.Role]bool{}
	for _, name := range slices.Sorted(maps.Keys(processes)) {
		p := processes[name]
		t.Run(name, func(t *testing.T) {
			if len(p.args) == 0 || p.args[0] != "serve" {
				t.Fatalf("it starts %q", p.args)
			}
			for name, value := range p.env {
				if strings.HasPrefix(name, "BULLPEN_") && !known[name] {
					t.Errorf("%s is no setting", name)
				}
				if text := p.files[value]; text != "" {
					value = filepath.Join(t.TempDir(), "file")
					if err := os.WriteFile(value, []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
					p.files[value] = text
				}
				t.Setenv(name, value)
			}
			c, err := app.ParseConfig(p.args[1:])
			if err != nil {
				t.Fatal(err)
			}
			if len(c.Roles) != 1 {
				t.Fatalf("it has the roles %v", c.Roles)
			}
			roles[c.Roles[0]] = true
			if !slices.Contains(p.data, c.Data) {
				t.Errorf("its data directory is %s, but only %v can be written", c.Data, p.data)
			}
			if c.Has(app.RoleWorker) && !slices.Contains(p.data, c.ImageDir) {
				t.Errorf("images are unpacked in %s, but only %v can be written", c.ImageDir, p.data)
			}
			if want := c.Drain + 15*time.Second; p.stop < want {
				t.Errorf("it is killed after %s, and drains for %s", p.stop, want)
			}
			if c.Address() != ":8080" {
				t.Errorf("it listens on %q", c.Address())
			}
			if c.Embedded() || !c.Has(app.RoleWorker) && c.SecretsKey == "" {
				t.Error("it shares no NATS or no key of secrets with the others")
			}
			for _, file := range []string{c.SecretsKey, c.Creds, c.StoreKey, c.AutoscalePolicy} {
				if _, ok := p.files[file]; file != "" && !ok {
					t.Errorf("%s is not mounted", file)
				}
			}
		})
	}
	for _, role := range app.Roles() {
		if !roles[role] {
			t.Errorf("no process has the role %s", role)
		}
	}
}
