// Package check has Compose's library load the compose file.
package check

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

func TestCompose(t *testing.T) {
	options, err := cli.NewProjectOptions([]string{"../compose/compose.yaml"}, cli.WithInterpolation(true),
		cli.WithEnv([]string{
			"BOOTSTRAP_KEY=sk-local-0", "NATS_PASSWORD=p", "REDIS_PASSWORD=p", "S3_SECRET=s", "GRAFANA_PASSWORD=p",
		}))
	if err != nil {
		t.Fatal(err)
	}
	project, err := options.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, service := range project.Services {
		for _, v := range service.Volumes {
			if v.Type != types.VolumeTypeBind {
				continue
			}
			if _, err := os.Stat(v.Source); err != nil {
				t.Errorf("%s mounts %v", name, err)
			}
		}
		for _, option := range service.SecurityOpt {
			if file, ok := strings.CutPrefix(option, "seccomp="); ok {
				if _, err := os.Stat(filepath.Join("../compose", file)); err != nil {
					t.Errorf("%s has a filter: %v", name, err)
				}
			}
		}
	}
	for _, name := range []string{
		"nats1", "nats2", "nats3", "redis", "s3", "gateway1", "gateway2", "worker1", "worker2",
		"scheduler", "webhook", "prometheus", "grafana",
	} {
		if _, err := project.GetService(name); err != nil {
			t.Error(err)
		}
	}
}
