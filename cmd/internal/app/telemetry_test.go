package app

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
)

func TestTraceIDs(t *testing.T) {
	for name, exporter := range map[string]string{"no exporter": "", "an exporter": "console"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("OTEL_TRACES_EXPORTER", exporter)
			telemetry, err := StartTelemetry(t.Context(), "test", slog.New(slog.DiscardHandler), slog.LevelInfo)
			if err != nil {
				t.Fatal(err)
			}
			id := proto.NewTraceID()
			ctx, span := telemetry.Tracers.Tracer("test").Start(proto.ContextWithTraceID(t.Context(), id), "execute",
				trace.WithNewRoot())
			_, child := telemetry.Tracers.Tracer("test").Start(ctx, "run")
			for _, s := range []trace.Span{span, child} {
				if exporter == "" && s.SpanContext().IsValid() {
					t.Error("a span has an id")
				}
				if exporter == "" {
					continue
				}
				if got, ok := proto.TraceIDFromOTel(s.SpanContext().TraceID()); !ok || got != id {
					t.Errorf("trace id is %s (%v), want %s", got, ok, id)
				}
				if !s.IsRecording() {
					t.Error("it is not recording")
				}
				s.End()
			}
			_, other := telemetry.Tracers.Tracer("test").Start(t.Context(), "other")
			if exporter != "" && !other.SpanContext().IsValid() {
				t.Error("a span without an execution has no id")
			}
			other.End()
			if err := telemetry.Shutdown(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestUnknownExporter(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "nonsense")
	if _, err := StartTelemetry(t.Context(), "test", slog.New(slog.DiscardHandler), slog.LevelInfo); err == nil ||
		!strings.Contains(err.Error(), "nonsense") {
		t.Errorf("error is %v", err)
	}
}

// Log records go to the endpoint of logs, those below the level do not.
func TestLogsAreExported(t *testing.T) {
	bodies := make(chan []byte, 16)
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.URL.Path != "/v1/logs" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		bodies <- body
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", collector.URL+"/v1/logs")
	var local bytes.Buffer
	telemetry, err := StartTelemetry(t.Context(), "test", NewLogger(&local, slog.LevelWarn, LogText), slog.LevelWarn)
	if err != nil {
		t.Fatal(err)
	}
	telemetry.Log.With("org", "acme").Warn("a warning")
	telemetry.Log.Info("an information")
	if err := telemetry.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(bodies)
	var exported []byte
	for body := range bodies {
		exported = append(exported, body...)
	}
	for _, log := range []string{local.String(), string(exported)} {
		if !strings.Contains(log, "a warning") || !strings.Contains(log, "acme") || strings.Contains(log, "an information") {
			t.Errorf("the log is %q", log)
		}
	}
	if _, span := telemetry.Tracers.Tracer("test").Start(t.Context(), "none"); span.SpanContext().IsValid() {
		t.Error("spans are recorded, but only logs have an endpoint")
	}
}

func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func TestMetrics(t *testing.T) {
	fail := errors.New("no answer")
	var err error
	leads := false
	m := NewMetrics(false)
	m.Worker()
	m.Queue(func(ctx context.Context) (proto.QueueStats, error) {
		if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > statsTimeout {
			t.Error("the context of a scrape has no deadline")
		}
		return proto.QueueStats{Workers: 2, Slots: 16, FreeSlots: 15, Queued: 7, Running: 1, OldestQueue: 2.5}, err
	}, func() bool { return leads })
	created := time.Now()
	started := created.Add(6 * time.Millisecond)
	r := proto.Exited(1)
	r.Stdout, r.DurationMS = "12345", 40
	rec := proto.Record{
		Meta: proto.Meta{Language: proto.Bash, Mode: proto.ModeAsync, CreatedAt: created}, Status: proto.StatusRunning,
		Attempt: 1, StartedAt: &started,
	}
	m.ExecutionStarted(&rec)
	const one = `bullpen_queue_wait_seconds_count{class="background",started="true"} 1`
	if got := scrape(t, m); !strings.Contains(got, one) {
		t.Error("the start of an execution is not counted before its end")
	}
	rec.Attempt, rec.StartedAt = 2, new(started.Add(time.Hour))
	m.ExecutionStarted(&rec) // it has not waited for an hour
	rec.Status, rec.Result = proto.StatusFailed, &r
	m.ExecutionDone(&rec)
	cancelled, waited := proto.Cancelled(), created.Add(4*time.Second)
	m.ExecutionDone(&proto.Record{ // did not start
		Meta: proto.Meta{Language: proto.Node, Mode: proto.ModeInline, CreatedAt: created}, Status: proto.StatusCancelled,
		CompletedAt: &waited, Result: &cancelled,
	})
	m.HTTPDone("/v1/executions/{id}", "GET", 404, time.Millisecond)
	m.HTTPDone("", "BREW", 405, time.Millisecond)
	m.CgroupVersion(2)
	m.StoreFailed("put")
	m.DeadLettered(proto.DeadWorkersLost)
	m.Slots(8, func() int { return 3 })
	m.ImageCache(func() image.CacheStats { return image.CacheStats{Bytes: 1 << 20, Hits: 7, Misses: 2} })
	m.Disks(map[string]string{"data": t.TempDir(), "image-dir": filepath.Join(t.TempDir(), "none yet")})
	saved := rec
	saved.Steps = &proto.Steps{
		AssignedAt: started, Jail: proto.Interval{0, 30_000}, Save: proto.Interval{50_000, 200_000},
		Commit: proto.Interval{260_000, 1000},
	}
	unchanged := saved
	unchanged.Steps = &proto.Steps{AssignedAt: started, Save: proto.Interval{50_000, 1000}}
	failed := saved
	failed.Result = new(r.Unsaved("The thread was not changed."))
	for _, rec := range []*proto.Record{&saved, &unchanged, &failed} {
		m.worked(rec)
	}
	if got := scrape(t, m); !strings.Contains(got, "bullpen_queue_up 1\n") ||
		strings.Contains(got, "bullpen_queue_depth ") {
		t.Error("a process that does not lead reports the metrics of the queue")
	}
	leads = true
	got := scrape(t, m)
	for _, want := range []string{
		"bullpen_queue_up 1", "bullpen_queue_depth 7", "bullpen_queue_oldest_age_seconds 2.5", "bullpen_workers 2",
		"bullpen_slots 16",
		"bullpen_slots_free 15", "bullpen_executions_running 1", "bullpen_cgroup_version 2", "bullpen_output_bytes_total 5",
		`bullpen_executions_total{error_code="none",language="bash",status="failed"} 1`,
		`bullpen_executions_total{error_code="cancelled",language="node",status="cancelled"} 1`,
		`bullpen_queue_wait_seconds_bucket{class="background",started="true",le="0.01"} 1`,
		`bullpen_queue_wait_seconds_bucket{class="background",started="true",le="0.005"} 0`,
		`bullpen_queue_wait_seconds_bucket{class="interactive",started="false",le="10"} 1`,
		`bullpen_queue_wait_seconds_bucket{class="interactive",started="false",le="2.5"} 0`,
		`bullpen_execution_duration_seconds_bucket{language="bash",le="0.05"} 1`,
		`bullpen_http_requests_total{code="404",method="GET",route="/v1/executions/{id}"} 1`,
		`bullpen_http_requests_total{code="405",method="other",route=""} 1`,
		`bullpen_build_info{goversion="` + runtime.Version() + `",version="` + Version() + `"} 1`,
		`bullpen_store_errors_total{operation="put"} 1`, `bullpen_dead_letters_total{reason="workers_lost"} 1`,
		"bullpen_worker_slots 8", "bullpen_worker_slots_used 3",
		"bullpen_image_cache_bytes 1.048576e+06", "bullpen_image_cache_hits_total 7", "bullpen_image_cache_misses_total 2",
		`bullpen_disk_free_bytes{directory="data"}`, `bullpen_disk_size_bytes{directory="data"}`,
		`bullpen_thread_saves_total{result="saved"} 1`, `bullpen_thread_saves_total{result="unchanged"} 1`,
		`bullpen_thread_saves_total{result="failed"} 1`,
		`bullpen_worker_step_duration_seconds_bucket{step="save",le="0.25"} 3`,
		`bullpen_worker_step_duration_seconds_bucket{step="jail",le="0.05"} 2`,
		"go_goroutines", "process_open_fds",
	} {
		if !strings.Contains(got, want+"\n") && !strings.Contains(got, want+" ") {
			t.Errorf("no %s", want)
		}
	}
	if problems, err := testutil.GatherAndLint(m.registry); err != nil || len(problems) > 0 {
		t.Errorf("names and help that differ from the conventions: %+v, %v", problems, err)
	}
	byOrg := NewMetrics(true)
	byOrg.ExecutionDone(&proto.Record{
		Meta: proto.Meta{Language: proto.Bash, Org: "acme"}, Status: proto.StatusFailed,
		Result: &r,
	})
	if got := scrape(t, byOrg); !strings.Contains(
		got, `bullpen_executions_total{error_code="none",language="bash",org="acme",status="failed"} 1`+"\n") {
		t.Error("executions are not counted by organisation")
	}
	err = fail
	if got := scrape(t, m); !strings.Contains(got, "bullpen_queue_up 0\n") ||
		strings.Contains(got, "bullpen_queue_depth ") {
		t.Error("metrics of a queue that does not answer")
	}
}

func TestCgroups(t *testing.T) {
	const v2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
	const v1 = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n34 31 0:31 / /sys/fs/cgroup/cpu rw - " +
		"cgroup cgroup rw,cpu,cpuacct\n"
	const pids = "35 31 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
	for name, test := range map[string]struct {
		mounts, controllers string
		want                int
	}{
		"2":                {v2, "cpuset cpu io memory pids\n", 2},
		"1":                {v1 + pids, "", 1},
		"1 beside empty 2": {v1 + pids + v2, "", 1},
		"divided":          {v1 + v2, "pids\n", 0},
		"nothing":          {"1 2 0:3 / / rw - ext4 /dev/sda rw\n", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, text := range map[string]string{
				"proc/self/mountinfo": test.mounts, "sys/fs/cgroup/cgroup.controllers": test.controllers,
			} {
				path := filepath.Join(root, file)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			if got, _, err := cgroups(root); err != nil || got != test.want {
				t.Errorf("version is %d, %v; want %d", got, err, test.want)
			}
			if check := checkCgroups(root); check.OK != (test.want > 0) {
				t.Errorf("got %+v", check)
			}
		})
	}
}

func TestUserIDsOfAContainer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "uid_map")
	if err := os.WriteFile(path, []byte("         0     100000      65536\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if check := checkUIDs(path, UIDRange{1900000000, 8192}); check.OK {
		t.Errorf("got %+v", check)
	}
	if check := checkUIDs(path, UIDRange{50000, 15536}); !check.OK {
		t.Errorf("got %+v", check)
	}
}
