// Package prometheus has no code: its tests check the alert rules in rules/ and the dashboards in
// ../grafana with the rule engine and the parser of Prometheus. It is a module of its own because
// these need much.
package prometheus
