package app

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/bullpen-run/bullpen/cmd/internal/scaler/externalscaler"
)

// Every mistake in the settings of autoscaling is refused at the start, with its setting.
func TestInvalidAutoscaleSettings(t *testing.T) {
	policy := func(text string) []string { return []string{"--autoscale-policy", writeFile(t, text)} }
	scheduler := []string{"--roles", "scheduler", "--nats", "nats://x"}
	large := strings.Repeat(" ", 1<<20+1)
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"driver": {
			[]string{"--autoscale", "docker"},
			[]string{"--autoscale: ", `"docker"`, "none process exec kubernetes"},
		},
		"of a worker": {[]string{
			"--roles", "worker", "--nats", "nats://x", "--store", "s3://b", "--autoscale", "exec",
			"--autoscale-command", "f",
		}, []string{"--autoscale: ", "only a gateway or scheduler"}},
		"exec alone":    {[]string{"--autoscale", "exec"}, []string{"--autoscale-command: ", "--autoscale exec"}},
		"command alone": {[]string{"--autoscale-command", "f"}, []string{"--autoscale-command: ", "--autoscale exec"}},
		"command, process": {
			[]string{"--autoscale", "process", "--autoscale-command", "f"},
			[]string{"--autoscale-command: "},
		},
		"kubernetes alone": {
			append([]string{"--autoscale", "kubernetes"}, scheduler...),
			[]string{"--keda-listen: ", "--autoscale kubernetes"},
		},
		"KEDA alone": {[]string{"--keda-listen", ":9077"}, []string{"--keda-listen: ", "--autoscale kubernetes"}},
		"KEDA, exec": {
			[]string{"--autoscale", "exec", "--autoscale-command", "f", "--keda-listen", ":9077"},
			[]string{"--keda-listen: "},
		},
		"KEDA address": {
			[]string{"--autoscale", "kubernetes", "--keda-listen", "9077"},
			[]string{"--keda-listen: ", `"9077"`, ":9077"},
		},
		"KEDA port": {
			[]string{"--autoscale", "kubernetes", "--keda-listen", ":grpc"},
			[]string{"--keda-listen: ", `":grpc"`},
		},
		"KEDA port too high": {[]string{"--autoscale", "kubernetes", "--keda-listen", ":65536"}, []string{"--keda-listen: "}},
		"no policy": {
			[]string{"--autoscale-policy", "/nonexistent/policy"},
			[]string{"--autoscale-policy: ", "/nonexistent/policy"},
		},
		"policy, directory": {[]string{"--autoscale-policy", t.TempDir()}, []string{"--autoscale-policy: ", "directory"}},
		"policy, size":      {policy(large), []string{"--autoscale-policy: ", "more than 1048576 bytes"}},
		"policy, empty":     {policy(""), []string{"--autoscale-policy: "}},
		"policy, null":      {policy("null"), []string{"--autoscale-policy: ", "null"}},
		"policy, list":      {policy("[]"), []string{"--autoscale-policy: "}},
		"policy, two":       {policy("{} {}"), []string{"--autoscale-policy: ", "more than one"}},
		"policy, unknown":   {policy(`{"max_worker": 3}`), []string{"--autoscale-policy: ", `"max_worker"`}},
		"policy, type":      {policy(`{"max_workers": "3"}`), []string{"--autoscale-policy: ", "max_workers"}},
		"max_workers": {
			policy(`{"max_workers": 0}`),
			[]string{"--autoscale-policy: ", "max_workers must be between 1 and 100000"},
		},
		"min_workers": {
			policy(`{"min_workers": 11}`),
			[]string{"--autoscale-policy: ", "min_workers must be between 0 and max_workers"},
		},
		"slots_per_worker": {policy(`{"slots_per_worker": 10001}`), []string{"--autoscale-policy: ", "slots_per_worker"}},
		"target_wait": {
			policy(`{"target_wait": 0}`),
			[]string{"--autoscale-policy: ", "target_wait must be between 1ms and 24h"},
		},
		"scale_down_after": {
			policy(`{"scale_down_after": -1}`),
			[]string{"--autoscale-policy: ", "scale_down_after must be between"},
		},
		"to zero too early": {
			policy(`{"scale_to_zero_after": 299}`),
			[]string{"--autoscale-policy: ", "scale_to_zero_after must be at least scale_down_after"},
		},
		"to zero too late": {
			policy(`{"scale_to_zero_after": 604801}`),
			[]string{"--autoscale-policy: ", "scale_to_zero_after must be between"},
		},
		"tolerance":   {policy(`{"tolerance": 1}`), []string{"--autoscale-policy: ", "tolerance must be"}},
		"several":     {policy(`{"max_workers": 0, "tolerance": -1}`), []string{"max_workers", "tolerance"}},
		"pools, type": {policy(`{"pools": []}`), []string{"--autoscale-policy: ", "pools must be an object"}},
		"pool, name": {
			policy(`{"pools": {"a b": {}}}`),
			[]string{"--autoscale-policy: ", `"a b" cannot be the name`},
		},
		"pool, bound": {
			policy(`{"pools": {"gpu": {"max_workers": 0}}}`),
			[]string{"--autoscale-policy: ", "pool gpu: ", "max_workers"},
		},
		"pool in a pool": {
			policy(`{"pools": {"gpu": {"pools": {}}}}`),
			[]string{"--autoscale-policy: ", "pool gpu: ", `"pools"`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseConfig(test.args)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not contain %q", err, want)
				}
			}
		})
	}
}

func TestStartedWorkersGetTheSettingsOfWorkers(t *testing.T) {
	c := config(t, "--mount-roots", "/srv/a,/srv/b", "--mount-allow-cidrs", "10.0.0.0/8,fd00::/8", "--mount-allow-ports",
		"9000,9001-9100", "--save-timeout", "1m")
	for name, value := range workerSettings(reflect.ValueOf(c).Elem()) {
		t.Setenv(name, value)
	}
	got := config(t)
	if !slices.Equal(got.MountRoots, c.MountRoots) || !slices.Equal(got.MountAllowCIDRs, c.MountAllowCIDRs) ||
		!slices.Equal(got.MountAllowPorts, c.MountAllowPorts) ||
		got.SaveTimeout != c.SaveTimeout {
		t.Errorf("a worker has %+v", got)
	}
}

// serveGateway runs a gateway without workers, with an execution that waits for one, until the test
// ends. It returns its URL.
func serveGateway(ctx context.Context, t *testing.T, args ...string) (base string) {
	t.Helper()
	const key = "sk-local-abcdefghijklmnopqrstuvwx"
	t.Setenv("BULLPEN_BOOTSTRAP_KEY", key)
	nats, web := freeAddress(t), freeAddress(t)
	startNATS(t, nats, "")
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	c := config(t, append(args, "--roles", "gateway", "--secrets-plain", "--store", "file://"+t.TempDir(), "--nats",
		"nats://"+nats.String(), "--listen", web.String())...)
	go func() { ended <- Run(running, c) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	base = "http://" + web.String()
	waitFor(ctx, t, base+"/metrics", http.StatusOK, "bullpen_autoscale_workers") // the dispatcher answers
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/sandbox/execute",
		strings.NewReader(`{"code": "1"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+key)
	r.Header.Set("Prefer", "respond-async")
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = a.Body.Close() }()
	if a.StatusCode != http.StatusAccepted {
		t.Fatalf("got %s", a.Status)
	}
	return base
}

// Without a driver, the metrics of a gateway show what another scaler needs.
func TestFiguresWithoutADriver(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	policy := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(policy, []byte(`{"slots_per_worker": 3}`), 0o600); err != nil {
		t.Fatal(err)
	}
	metrics := serveGateway(ctx, t, "--autoscale-policy", policy) + "/metrics"
	for _, line := range []string{
		"bullpen_autoscale_desired_workers{pool=\"default\"} 1\n", "bullpen_autoscale_desired_slots{pool=\"default\"} 3\n",
		"bullpen_autoscale_queued{pool=\"default\"} 1\n", "bullpen_autoscale_running{pool=\"default\"} 0\n",
		"bullpen_autoscale_workers{pool=\"default\"} 0\n", "bullpen_autoscale_slots{pool=\"default\"} 0\n",
		"bullpen_autoscale_mean_execution_seconds{pool=\"default\"} 0\n",
		"bullpen_autoscale_oldest_wait_seconds{pool=\"default\"} ",
	} {
		waitFor(ctx, t, metrics, http.StatusOK, line)
	}
}

// A client of KEDA gets the recommendation of the leading dispatcher at --keda-listen.
func TestKedaListen(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	keda := freeAddress(t).String()
	serveGateway(ctx, t, "--autoscale", "kubernetes", "--keda-listen", keda)
	conn, err := grpc.NewClient(keda, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	client := externalscaler.NewExternalScalerClient(conn)
	trigger := &externalscaler.ScaledObjectRef{
		Name: "worker", Namespace: "bullpen", ScalerMetadata: map[string]string{"scalerAddress": keda},
	}
	activity, err := client.StreamIsActive(ctx, trigger)
	if err != nil {
		t.Fatal(err)
	}
	for active := false; !active; { // the first evaluation may be older than the execution
		got, err := activity.Recv()
		if err != nil {
			t.Fatal(err)
		}
		active = got.Result
	}
	spec, err := client.GetMetricSpec(ctx, trigger)
	if err != nil || len(spec.MetricSpecs) != 1 {
		t.Fatalf("got %v, %v", spec, err)
	}
	values, err := client.GetMetrics(
		ctx, &externalscaler.GetMetricsRequest{ScaledObjectRef: trigger, MetricName: spec.MetricSpecs[0].MetricName})
	if err != nil || len(values.MetricValues) != 1 || values.MetricValues[0].MetricValue != 1 {
		t.Errorf("got %v, %v", values, err)
	}
}

func TestKedaAddressInUse(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	nats, web := freeAddress(t), freeAddress(t)
	startNATS(t, nats, "")
	c := config(t, "--roles", "gateway", "--secrets-plain", "--store", "file://"+t.TempDir(), "--nats",
		"nats://"+nats.String(), "--listen", web.String(),
		"--autoscale", "kubernetes", "--keda-listen", nats.String())
	if err := Run(ctx, c); err == nil || errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "choose another --keda-listen") {
		t.Errorf("got %v", err)
	}
}
