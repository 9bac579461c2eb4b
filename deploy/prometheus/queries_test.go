package prometheus

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

// metric is a row of docs/reference/metrics.md, which a test of the server keeps current.
type metric struct {
	kind   string // counter, gauge or histogram
	labels []string
}

var (
	rowPattern = regexp.MustCompile("(?m)^\\| `(bullpen_\\w+)` \\| (\\w+) \\| ([^|]*) \\|")
	codeName   = regexp.MustCompile("`(\\w+)`")
	// targetLabels are added by Prometheus.
	targetLabels = []string{"job", "instance"}
)

// knownMetrics returns the metrics that queries may use: those of bullpen, and some of others.
func knownMetrics(t *testing.T) map[string]metric {
	t.Helper()
	page, err := os.ReadFile("../../docs/reference/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]metric{
		"up": {kind: "gauge"}, "ALERTS": {kind: "gauge", labels: []string{"alertname", "alertstate"}},
		"process_resident_memory_bytes": {kind: "gauge"}, "process_cpu_seconds_total": {kind: "counter"},
	}
	for _, row := range rowPattern.FindAllStringSubmatch(string(page), -1) {
		m := metric{kind: row[2]}
		for _, label := range codeName.FindAllStringSubmatch(row[3], -1) {
			m.labels = append(m.labels, label[1])
		}
		if row[1] == "bullpen_executions_total" {
			m.labels = append(m.labels, "org") // with --metrics-org
		}
		if m.kind != "histogram" {
			known[row[1]] = m
			continue
		}
		m.kind = "counter"
		known[row[1]+"_sum"], known[row[1]+"_count"] = m, m
		m.labels = append(slices.Clone(m.labels), "le")
		known[row[1]+"_bucket"] = m
	}
	if len(known) < 40 {
		t.Fatalf("docs/reference/metrics.md has %d metrics", len(known))
	}
	return known
}

// checkQuery parses a query and checks that its metrics exist, with the labels that it uses, and
// that rates are of counters.
func checkQuery(t *testing.T, known map[string]metric, where, query string) {
	t.Helper()
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	var used []string // labels of all metrics of the query
	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		m, ok := known[selector.Name]
		if !ok {
			t.Errorf("%s: there is no metric %s", where, selector.Name)
			return nil
		}
		has := append(slices.Clone(m.labels), targetLabels...)
		used = append(used, has...)
		for _, matcher := range selector.LabelMatchers {
			if matcher.Name != labels.MetricName && !slices.Contains(has, matcher.Name) {
				t.Errorf("%s: %s has no label %s", where, selector.Name, matcher.Name)
			}
		}
		rated := false
		for _, parent := range path {
			if call, ok := parent.(*parser.Call); ok && (call.Func.Name == "rate" || call.Func.Name == "increase") {
				rated = true
			}
		}
		if rated != (m.kind == "counter") {
			t.Errorf("%s: %s is a %s, and a rate of it is used: %v", where, selector.Name, m.kind, rated)
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		var grouping []string
		switch node := node.(type) {
		case *parser.AggregateExpr:
			grouping = node.Grouping
		case *parser.BinaryExpr:
			if node.VectorMatching != nil {
				grouping = node.VectorMatching.MatchingLabels
			}
		}
		for _, label := range grouping {
			if !slices.Contains(used, label) {
				t.Errorf("%s: no metric of the query has the label %s", where, label)
			}
		}
		return nil
	})
}

// grafanaVariable is a variable that Grafana replaces.
var grafanaVariable = regexp.MustCompile(`\$__(rate_interval|range)`)

// TestDashboards checks the queries of all dashboards, and that no panel overlaps another.
func TestDashboards(t *testing.T) {
	known := knownMetrics(t)
	files, err := filepath.Glob("../grafana/*.json")
	if err != nil || len(files) != 5 {
		t.Fatalf("%d dashboards, %v", len(files), err)
	}
	uids := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var dashboard struct {
			UID, Title string
			Panels     []struct {
				ID      int
				Title   string
				GridPos struct{ X, Y, W, H int }
				Targets []struct{ Expr, RefID string }
			}
		}
		if err := json.Unmarshal(text, &dashboard); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if other := uids[dashboard.UID]; other != "" || dashboard.UID == "" || dashboard.Title == "" {
			t.Errorf("%s has the uid %q, as %q", file, dashboard.UID, other)
		}
		uids[dashboard.UID] = file
		taken := map[[2]int]string{}
		for _, p := range dashboard.Panels {
			if len(p.Targets) == 0 {
				t.Errorf("%s: %s has no query", file, p.Title)
			}
			for _, target := range p.Targets {
				checkQuery(t, known, file+": "+p.Title, grafanaVariable.ReplaceAllString(target.Expr, "5m"))
			}
			for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
				for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
					if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
						t.Fatalf("%s: %s is where %s is, or too far right", file, p.Title, other)
					}
					taken[[2]int{x, y}] = p.Title
				}
			}
		}
	}
}

// TestRules checks the queries of all rules, and that each has a section of the runbook.
func TestRules(t *testing.T) {
	known := knownMetrics(t)
	page, err := os.ReadFile("../../docs/guides/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	groups, errs := rulefmt.ParseFile(rulesFile, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		slog.New(slog.DiscardHandler))
	if errs != nil {
		t.Fatal(errs)
	}
	sections := regexp.MustCompile(`(?m)^## (Bullpen\w+)$`).FindAllStringSubmatch(string(page), -1)
	var alerts []string
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			alerts = append(alerts, rule.Alert)
			checkQuery(t, known, rule.Alert, rule.Expr)
			if !strings.HasSuffix(rule.Annotations["runbook_url"], "/docs/guides/runbook.md#"+strings.ToLower(rule.Alert)) {
				t.Errorf("%s has the runbook_url %q", rule.Alert, rule.Annotations["runbook_url"])
			}
			if severity := rule.Labels["severity"]; severity != "critical" && severity != "warning" {
				t.Errorf("%s has the severity %q", rule.Alert, severity)
			}
			if rule.Annotations["summary"] == "" || rule.Annotations["description"] == "" {
				t.Errorf("%s has no summary or no description", rule.Alert)
			}
		}
	}
	for _, alert := range alerts {
		if !slices.ContainsFunc(sections, func(s []string) bool { return s[1] == alert }) {
			t.Errorf("docs/guides/runbook.md has no section %s", alert)
		}
	}
	for _, section := range sections {
		if !slices.Contains(alerts, section[1]) {
			t.Errorf("docs/guides/runbook.md has a section %s, and there is no such alert", section[1])
		}
	}
}
