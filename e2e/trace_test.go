package e2e

import (
	"encoding/hex"
	"encoding/json"
	"maps"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/proto"
)

// exportedSpan is a span as the exporter of the console writes it.
type exportedSpan struct {
	Name        string
	SpanKind    int
	SpanContext struct{ TraceID, SpanID string }
	Parent      struct{ TraceID, SpanID string }
	Links       []struct {
		SpanContext struct{ TraceID, SpanID string }
	}
	Attributes []struct {
		Key   string
		Value struct{ Value any }
	}
	Status struct{ Code string }
}

func (s *exportedSpan) attributes() map[string]any {
	all := map[string]any{}
	for _, a := range s.Attributes {
		all[a.Key] = a.Value.Value
	}
	return all
}

// spansOf waits until processes have exported spans of all these names for a trace, and returns
// them by name.
func spansOf(t *testing.T, traceID string, names []string, from ...*process) map[string]exportedSpan {
	t.Helper()
	spans := map[string]exportedSpan{}
	eventually(t, "the spans are exported", func() (bool, any) {
		for _, proc := range from {
			for line := range strings.Lines(proc.text(t)) {
				var s exportedSpan
				if json.Unmarshal([]byte(line), &s) == nil && s.SpanContext.TraceID == traceID {
					spans[s.Name] = s
				}
			}
		}
		for _, name := range names {
			if _, ok := spans[name]; !ok {
				return false, "no span " + name
			}
		}
		return true, nil
	})
	return spans
}

func otelID(t *testing.T, id string) string {
	t.Helper()
	otel, err := proto.TraceID(id).OTel()
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(otel[:])
}

// checkTree checks the name of each span's parent. It returns the root.
func checkTree(t *testing.T, spans map[string]exportedSpan, want map[string]string) exportedSpan {
	t.Helper()
	names, parents, root := map[string]string{}, map[string]string{}, exportedSpan{}
	for name, s := range spans {
		names[s.SpanContext.SpanID] = name
	}
	for name, s := range spans {
		parents[name] = names[s.Parent.SpanID]
		if parents[name] == "" {
			root = s
		}
	}
	if diff := cmp.Diff(want, parents); diff != "" {
		t.Errorf("parents of spans (-want +got):\n%s", diff)
	}
	return root
}

// testTracing traces executions of two gateways, of which one trusts the traces of clients.
func testTracing(t *testing.T, p *programs) {
	const clientTrace, clientSpan, canary = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "canary-of-spans"
	hooks := startReceiver(t)
	sys := newSystem(t, p.exportingSpans(), topology{separate: true}, 2, hooks.flags...)
	trusting, base := sys.programs.startServe(t, "trusting", sys.env, append([]string{
		"--data", filepath.Join(t.TempDir(), "trusting"), "--roles", "gateway", "--trust-traceparent",
	}, sys.args...)...)
	header := []string{"Traceparent", "00-" + clientTrace + "-" + clientSpan + "-01"}
	inline := map[string]string{
		"POST /v1/sandbox/execute": "", "submit jobs": "POST /v1/sandbox/execute", "queue": "submit jobs",
		"process jobs": "submit jobs",
		"jail":         "process jobs", "program": "process jobs", "result": "process jobs",
	}
	async := maps.Clone(inline)
	maps.Copy(async, map[string]string{
		"home": "jail", "save": "process jobs", "commit": "process jobs",
		"POST": "submit jobs",
	})
	names := func(tree map[string]string) (names []string) {
		for name := range tree {
			names = append(names, name)
		}
		return names
	}

	program := bash("echo "+canary+" | tee file; exit 3").and("thread_id", "traced", "env_vars", request{"CANARY": canary},
		"webhook_url", hooks.url+"/500?"+canary)
	id := sys.submit(program, header...)
	spans := spansOf(t, otelID(t, id), names(async), sys.front, sys.worker)
	root := checkTree(t, spans, async)
	if len(root.Links) != 1 || root.Links[0].SpanContext.TraceID != clientTrace ||
		root.Links[0].SpanContext.SpanID != clientSpan {
		t.Errorf("links of the root: %+v", root.Links)
	}
	for name, want := range map[string]map[string]any{
		"POST /v1/sandbox/execute": {
			"http.request.method": "POST", "http.route": "/v1/sandbox/execute",
			"http.response.status_code": 202.0, "bullpen.trace_id": id,
		},
		"submit jobs": {
			"messaging.system": "nats", "messaging.operation.type": "send",
			"messaging.destination.name": "jobs", "messaging.message.id": id,
		},
		"process jobs": {
			"messaging.operation.type": "process", "bullpen.language": "bash",
			"bullpen.status": "failed", "bullpen.attempt": 1.0,
		},
		"jail":    {"bullpen.jail.start": "cold"},
		"program": {"process.exit.code": 3.0, "error.type": "failed"},
		"POST": {
			"http.request.method": "POST", "http.response.status_code": 500.0, "error.type": "500",
			"server.address": "127.0.0.1",
		},
	} {
		s := spans[name]
		got := s.attributes()
		for key, value := range want {
			if got[key] != value {
				t.Errorf("%s of %q is %v, want %v", key, name, got[key], value)
			}
		}
	}
	for name, s := range spans {
		if failed := s.Status.Code == "Error"; failed != (name == "program" || name == "POST") {
			t.Errorf("the status of %q is %s", name, s.Status.Code)
		}
		if text := display(&s); strings.Contains(text, canary) {
			t.Errorf("%q has what a program printed or was given: %s", name, text)
		}
	}

	exit, output := p.run(t, []string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + sys.key}, "trace", id)
	for _, step := range []string{"queue", "jail (cold)", "  home", "program", "save", "commit", "webhook 1 (500)"} {
		if !strings.Contains(output, "\n"+step+" ") || exit != 0 {
			t.Errorf("bullpen trace ended with %d and without %s:\n%s", exit, step, output)
		}
	}

	r := sys.do(http.MethodPost, executePath, bash("true"), header...)
	root = checkTree(t, spansOf(t, otelID(t, r.trace(t)), names(inline), sys.front, sys.worker), inline)
	if got := root.attributes()["http.response.status_code"]; got != 200.0 {
		t.Errorf("the status of an inline execution is %v", got)
	}

	trust := &api{t, base, sys.key, sys.http}
	if got := trust.inline(bash("echo hi"), header...); got.Stdout != "hi\n" {
		t.Errorf("%+v", got)
	}
	root = checkTree(t, spansOf(t, clientTrace, names(inline), trusting, sys.worker), inline)
	if root.Parent.SpanID != clientSpan || len(root.Links) != 0 {
		t.Errorf("the parent of a trusted client's execution is %+v, its links are %+v", root.Parent, root.Links)
	}
}
