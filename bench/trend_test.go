package main

import (
	"encoding/xml"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

// samplesOf returns samples of a metric every 10 s for an hour. Its process is restarted at the
// given times.
func samplesOf(
	node, metric string, value func(at, age time.Duration) float64, restarts ...time.Duration,
) (points []point) {
	start, began := 1, time.Duration(0)
	for at := sampleEvery; at < time.Hour; at += sampleEvery {
		if len(restarts) > 0 && at >= restarts[0] {
			start, began, restarts = start+1, restarts[0], restarts[1:]
		}
		points = append(points, point{
			series: seriesName{node, metric}, at: at, age: at - began, start: start,
			value: value(at, at-began),
		})
	}
	return points
}

func TestTrends(t *testing.T) {
	restarts := []time.Duration{12 * time.Minute, 24 * time.Minute, 36 * time.Minute, 48 * time.Minute}
	flat := func(at, _ time.Duration) float64 { return 50 + 5*math.Sin(at.Seconds()) }
	for name, of := range map[string]struct {
		points []point
		grows  bool
	}{
		"flat": {samplesOf("gateway-2", metricRSS, flat), false},
		"a leak": {samplesOf("gateway-2", metricRSS, func(at, age time.Duration) float64 {
			return flat(at, age) + 30*at.Hours()
		}), true},
		"filling at first": {samplesOf("gateway-2", metricRSS, func(at, _ time.Duration) float64 {
			return 50 - 40*math.Exp(-at.Minutes()/5)
		}), false},
		"a step in between": {samplesOf("gateway-2", metricGoroutines, func(at, _ time.Duration) float64 {
			return 100 + 10*math.Floor(at.Hours()*10)
		}), true},
		"growing to the same after each start": {
			samplesOf("gateway-1", metricRSS, func(_, age time.Duration) float64 { return 40 + 2*age.Minutes() },
				restarts...), false,
		},
		"starting with more each time": {
			samplesOf("gateway-1", metricRSS, func(at, age time.Duration) float64 {
				return 40 + 2*age.Minutes() + (at - age).Minutes()
			}, restarts...), true,
		},
		"fewer": {samplesOf("worker-2", metricMounts, func(at, _ time.Duration) float64 {
			return 100 - at.Minutes()
		}), false},
	} {
		if trends := judge(of.points, time.Hour); len(trends) != 1 || !trends[0].judged() || trends[0].grows() != of.grows {
			t.Errorf("%s: %+v, want growth %t", name, trends, of.grows)
		}
	}
	if trends := judge(samplesOf("gateway-2", metricRSS, flat), time.Minute); trends[0].judged() {
		t.Error("a minute was judged")
	}
	if trends := judge(samplesOf("store", metricDisk, func(at, _ time.Duration) float64 { return at.Seconds() }),
		time.Hour); trends[0].grows() {
		t.Error("what is kept for a day was judged after an hour")
	}
}

func TestOutcomeOfStream(t *testing.T) {
	output := `{"type":"output","stream":"stdout","data":"ab\n","seq":1}` + "\n"
	ended := func(result string) string { return `{"type":"result","result":` + result + `,"seq":2}` + "\n" }
	complete := ended(`{"stdout":"ab\n","exit_code":0,"error":null,"error_code":null,"error_message":null}`)
	if o, err := streamOutcome([]byte(output + complete)); err != nil || !o.equal(outcome{Stdout: "ab\n"}) {
		t.Errorf("%s, %v", o, err)
	}
	if o, err := streamOutcome(
		[]byte(ended(`{"exit_code":-1,"error_code":"worker_lost","error_message":"lost"}`))); err != nil ||
		o.code() != "worker_lost" {
		t.Errorf("%s, %v", o, err)
	}
	for name, body := range map[string]string{
		"a lost event": complete, "an event twice": output + output + complete,
		"no result": output,
	} {
		if o, err := streamOutcome([]byte(body)); err == nil && o.equal(outcome{Stdout: "ab\n"}) {
			t.Errorf("%s was not noticed", name)
		}
	}
}

func TestEverySeriesHasATolerance(t *testing.T) {
	for _, metric := range append(slices.Clone(panels), metricConsumers, metricStream, metricMessages) {
		if _, ok := tolerances[metric]; !ok {
			t.Errorf("%s has no tolerance, so that any growth fails", metric)
		}
	}
}

func TestPlotOfSoak(t *testing.T) {
	points := samplesOf("gateway-1", metricRSS, func(at, _ time.Duration) float64 { return at.Minutes() }, 30*time.Minute)
	drawing := plotSoak(append(
		points, samplesOf(natsName, metricDisk, func(time.Duration, time.Duration) float64 { return 1 })...), time.Hour)
	if err := xml.Unmarshal(drawing, new(struct{})); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(drawing), "<path stroke="); lines != 3 {
		t.Errorf("%d lines for two starts of a process and one of another", lines)
	}
}
