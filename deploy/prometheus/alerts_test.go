package prometheus

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

const (
	rulesFile = "rules/bullpen.yaml"
	step      = time.Minute // between samples, and between evaluations
)

// healthy are series of a deployment in which no alert fires. "+" increases with each minute.
var healthy = map[string]string{
	`up{job="bullpen", instance="a"}`:                                                      "1x600",
	`bullpen_queue_up{job="bullpen", instance="a"}`:                                        "1x600",
	`bullpen_queue_depth{job="bullpen", instance="a"}`:                                     "3x600",
	`bullpen_queue_oldest_age_seconds{job="bullpen", instance="a"}`:                        "20x600",
	`bullpen_workers{job="bullpen", instance="a"}`:                                         "2x600",
	`bullpen_slots_free{job="bullpen", instance="a"}`:                                      "4x600",
	`bullpen_worker_healthy{job="bullpen", instance="w"}`:                                  "1x600",
	`bullpen_http_requests_total{code="200", route="/v1/queue"}`:                           "0+600x600",
	`bullpen_http_requests_total{code="503", route="/v1/queue"}`:                           "0+6x600",
	`bullpen_http_requests_total{code="502", route="(sandbox)"}`:                           "0+600x600",
	`bullpen_queue_wait_seconds_bucket{class="interactive", started="true", le="1"}`:       "0+60x600",
	`bullpen_queue_wait_seconds_bucket{class="interactive", started="true", le="60"}`:      "0+60x600",
	`bullpen_queue_wait_seconds_bucket{class="interactive", started="true", le="+Inf"}`:    "0+60x600",
	`bullpen_executions_total{language="bash", status="success", error_code="none"}`:       "0+600x600",
	`bullpen_executions_total{language="bash", status="timeout", error_code="timeout"}`:    "0+600x600",
	`bullpen_executions_total{language="bash", status="failed", error_code="worker_lost"}`: "0+1x600",
	`bullpen_dead_letters_total{reason="workers_lost"}`:                                    "7x600",
	`bullpen_worker_zygotes_total{instance="w", result="failed"}`:                          "0x600",
	`bullpen_autoscale_failures_total{pool="default"}`:                                     "2x600",
	`bullpen_webhook_delay_seconds_bucket{le="1"}`:                                         "0+60x600",
	`bullpen_webhook_delay_seconds_bucket{le="600"}`:                                       "0+60x600",
	`bullpen_webhook_delay_seconds_bucket{le="+Inf"}`:                                      "0+60x600",
	`bullpen_webhook_pending_deliveries{instance="a"}`:                                     "10x600",
	`bullpen_webhook_deliveries_total{status="delivered"}`:                                 "0+60x600",
	`bullpen_webhook_deliveries_total{status="failed"}`:                                    "0+1x600",
	`bullpen_disk_free_bytes{job="bullpen", instance="a", directory="data"}`:               "50000000000x600",
	`bullpen_disk_size_bytes{job="bullpen", instance="a", directory="data"}`:               "100000000000x600",
	`bullpen_disk_reserve_bytes{job="bullpen", instance="a"}`:                              "2000000000x600",
	`bullpen_store_errors_total{operation="put"}`:                                          "0+1x600",
	`bullpen_thread_saves_total{result="saved"}`:                                           "0+600x600",
	`bullpen_thread_saves_total{result="failed"}`:                                          "0+1x600",
}

// TestAlerts loads series that differ from healthy ones, with "" for those that are missing, and
// checks which alerts fire in the end, and that none did until the time that the alert waits for.
func TestAlerts(t *testing.T) {
	tests := map[string]struct {
		series map[string]string
		fires  []string // alerts, in the order of their names
		after  time.Duration
	}{
		"BullpenProcessDown": {map[string]string{`up{job="bullpen", instance="a"}`: "0x600"}, nil, 5 * time.Minute},
		"BullpenNoDispatcher": {
			map[string]string{`bullpen_queue_depth{job="bullpen", instance="a"}`: ""},
			nil,
			2 * time.Minute,
		},
		"BullpenQueueUnreachable": {
			map[string]string{`bullpen_queue_up{job="bullpen", instance="a"}`: "0x600"},
			nil,
			5 * time.Minute,
		},
		"BullpenServerErrors": {
			map[string]string{`bullpen_http_requests_total{code="503", route="/v1/queue"}`: "0+60x600"}, nil, 10 * time.Minute,
		},
		"BullpenNoWorkers": {
			map[string]string{`bullpen_workers{job="bullpen", instance="a"}`: "0x600"},
			nil,
			2 * time.Minute,
		},
		"BullpenNoFreeSlots": {
			map[string]string{`bullpen_slots_free{job="bullpen", instance="a"}`: "0x600"},
			nil,
			15 * time.Minute,
		},
		"BullpenInteractiveWait": {map[string]string{
			`bullpen_queue_wait_seconds_bucket{class="interactive", started="true", le="1"}`: "0+30x600",
		}, nil, 10 * time.Minute},
		"BullpenQueueNotServed": {
			map[string]string{`bullpen_queue_oldest_age_seconds{job="bullpen", instance="a"}`: "1000x600"},
			nil,
			15 * time.Minute,
		},
		"BullpenExecutionsFail": {map[string]string{
			`bullpen_executions_total{language="bash", status="failed", error_code="worker_lost"}`: "0+60x600",
		}, nil, 10 * time.Minute},
		"BullpenDeadLetters": {
			map[string]string{`bullpen_dead_letters_total{reason="workers_lost"}`: "0x570 1x30"},
			nil,
			571 * time.Minute,
		},
		"BullpenWorkerUnhealthy": {
			map[string]string{`bullpen_worker_healthy{job="bullpen", instance="w"}`: "0x600"},
			nil,
			5 * time.Minute,
		},
		"BullpenZygotesFail": {
			map[string]string{`bullpen_worker_zygotes_total{instance="w", result="failed"}`: "0+1x600"}, nil, 30 * time.Minute,
		},
		"BullpenAutoscalingFails": {
			map[string]string{`bullpen_autoscale_failures_total{pool="default"}`: "0+1x600"},
			nil,
			15 * time.Minute,
		},
		"BullpenWebhooksLate": {
			map[string]string{`bullpen_webhook_delay_seconds_bucket{le="1"}`: "0+30x600"},
			nil,
			15 * time.Minute,
		},
		"BullpenWebhooksPending": {
			map[string]string{`bullpen_webhook_pending_deliveries{instance="a"}`: "2000x600"},
			nil,
			30 * time.Minute,
		},
		"BullpenWebhooksFail": {
			map[string]string{`bullpen_webhook_deliveries_total{status="failed"}`: "0+60x600"},
			nil, time.Hour,
		},
		"BullpenDiskFull": {map[string]string{
			`bullpen_disk_free_bytes{job="bullpen", instance="a", directory="data"}`: "1000000000x600",
		}, nil, time.Minute},
		"BullpenDiskFillsUp": {map[string]string{
			`bullpen_disk_free_bytes{job="bullpen", instance="a", directory="data"}`: "29000000000-30000000x600",
		}, nil, time.Hour},
		"BullpenStoreErrors": {
			map[string]string{`bullpen_store_errors_total{operation="put"}`: "0+12x600"},
			nil,
			10 * time.Minute,
		},
		"BullpenThreadSavesFail": {
			map[string]string{`bullpen_thread_saves_total{result="failed"}`: "0+60x600"},
			nil,
			10 * time.Minute,
		},

		"healthy":               {nil, []string{}, 0},
		"no scrape of anything": {all(""), []string{"BullpenNoDispatcher"}, 2 * time.Minute},
		"nothing runs": {map[string]string{
			`bullpen_queue_depth{job="bullpen", instance="a"}`: "0x600", `bullpen_workers{job="bullpen", instance="a"}`: "0x600",
			`bullpen_slots_free{job="bullpen", instance="a"}`: "0x600",
		}, []string{}, 0},
		"another process leads for a minute": {map[string]string{
			`bullpen_queue_depth{job="bullpen", instance="a"}`: "3x300 _x1 stale _x600",
			`bullpen_queue_depth{job="bullpen", instance="b"}`: "_x302 3x298",
		}, []string{}, 0},
		"a full disk of images": {map[string]string{
			`bullpen_disk_free_bytes{job="bullpen", instance="a", directory="image-dir"}`: "1000000000x600",
			`bullpen_disk_size_bytes{job="bullpen", instance="a", directory="image-dir"}`: "100000000000x600",
		}, []string{}, 0},
	}
	for _, alert := range alertNames(t) {
		if _, ok := tests[alert]; !ok {
			t.Errorf("no test of %s", alert)
		}
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.fires == nil {
				test.fires = []string{name}
			}
			early, end := firing(t, test.series, test.after)
			if !slices.Equal(end, test.fires) {
				t.Errorf("in the end %v fire, want %v", end, test.fires)
			}
			for _, alert := range test.fires {
				if slices.Contains(early, alert) {
					t.Errorf("%s fires before %s", alert, test.after)
				}
			}
		})
	}
}

// all returns every series of healthy with other values.
func all(values string) map[string]string {
	series := map[string]string{}
	for name := range healthy {
		series[name] = values
	}
	return series
}

func loadRules(t *testing.T, o *rules.ManagerOptions) map[string]*rules.Group {
	t.Helper()
	o.Context, o.Logger, o.Parser = t.Context(), slog.New(slog.DiscardHandler), parser.NewParser(parser.Options{})
	o.NotifyFunc = func(context.Context, string, ...*rules.Alert) {}
	groups, errs := rules.NewManager(o).LoadGroups(step, labels.EmptyLabels(), "", nil, false, rulesFile)
	if errs != nil {
		t.Fatal(errs)
	}
	return groups
}

func alertNames(t *testing.T) (names []string) {
	t.Helper()
	for _, group := range loadRules(t, &rules.ManagerOptions{}) {
		for _, rule := range group.AlertingRules() {
			names = append(names, rule.Name())
		}
	}
	return names
}

// firing evaluates the rules over ten hours, and returns the alerts that fired at any time before
// the given one, and in the end.
func firing(t *testing.T, changed map[string]string, before time.Duration) (early, end []string) {
	t.Helper()
	series := maps.Clone(healthy)
	maps.Copy(series, changed)
	var input strings.Builder
	_, _ = fmt.Fprintf(&input, "load %s\n", step)
	for _, name := range slices.Sorted(maps.Keys(series)) {
		if series[name] != "" {
			_, _ = fmt.Fprintf(&input, "  %s %s\n", name, series[name])
		}
	}
	storage := promqltest.LoadedStorage(t, input.String())
	engine := promqltest.NewTestEngine(t, false, 0, 1_000_000)
	groups := loadRules(t, &rules.ManagerOptions{
		QueryFunc: rules.EngineQueryFunc(engine, storage), AppendableV2: storage,
		Queryable: storage,
	})
	start := time.Unix(0, 0)
	for at := time.Duration(0); at <= 10*time.Hour; at += step {
		if at == before {
			early = fired(groups)
		}
		for _, group := range groups {
			group.Eval(t.Context(), start.Add(at))
		}
	}
	return early, fired(groups)
}

// fired returns the names of the alerts that fire.
func fired(groups map[string]*rules.Group) []string {
	names := []string{}
	for _, group := range groups {
		for _, rule := range group.AlertingRules() {
			if rule.LastError() != nil {
				names = append(names, rule.Name()+": "+rule.LastError().Error())
			}
			if rule.State() == rules.StateFiring {
				names = append(names, rule.Name())
			}
		}
	}
	slices.Sort(names)
	return names
}
