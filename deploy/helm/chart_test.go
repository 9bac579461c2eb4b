// Package helm checks the chart: it renders it with Helm's library.
package helm

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write rendered/")

// TestRendered checks that rendered/ is what the chart renders with each file of values/. Other
// tests, which do without Helm's library, read rendered/.
func TestRendered(t *testing.T) {
	files, err := filepath.Glob("values/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no values: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := render(t, string(text))
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("rendered", filepath.Base(file))
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s is not what the chart renders: go -C deploy/helm test -update", golden)
			}
		})
	}
}

// TestRejectedValues renders values that are wrong.
func TestRejectedValues(t *testing.T) {
	const minimal = "nats: {url: nats://n}\nstore: {url: s3://b}\n"
	if _, err := render(t, minimal); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct{ values, want string }{
		"no NATS":                   {"store: {url: s3://b}", "/nats/url"},
		"a store in a directory":    {"nats: {url: nats://n}\nstore: {url: file:///srv}", "/store/url"},
		"a misspelt value":          {minimal + "gateway: {replica: 3}", "replica"},
		"a setting by another name": {minimal + "settings: {RETENTION: 7d}", "RETENTION"},
		"two copies":                {"nats: {url: nats://n, replicas: 2}\nstore: {url: s3://b}", "/nats/replicas"},
		"networks without devices":  {minimal + "worker: {networks: true}", "worker.devices"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := render(t, test.values); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q in it", err, test.want)
			}
		})
	}
}

// render returns the manifests of the chart, sorted by their templates.
func render(t *testing.T, values string) (string, error) {
	t.Helper()
	chart, err := loader.Load("bullpen")
	if err != nil {
		t.Fatal(err)
	}
	var given map[string]any
	if err := yaml.Unmarshal([]byte(values), &given); err != nil {
		t.Fatal(err)
	}
	release := common.ReleaseOptions{Name: "bullpen", Namespace: "bullpen", Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(chart, given, release, common.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	manifests, err := engine.Render(chart, all)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(manifests)) {
		if text := strings.TrimSpace(manifests[name]); text != "" && strings.HasSuffix(name, ".yaml") {
			out.WriteString("---\n" + strings.TrimPrefix(text, "---\n") + "\n")
		}
	}
	return out.String(), nil
}
