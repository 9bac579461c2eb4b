package simulation

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/autoscale"
)

// shippedPolicy returns the policy in deploy/autoscale.
func shippedPolicy(t *testing.T) autoscale.Policy {
	t.Helper()
	data, err := os.ReadFile(strings.TrimSuffix(tracePath("policy"), ".csv") + ".json")
	if err != nil {
		t.Fatal(err)
	}
	p, err := autoscale.ParsePolicy(data)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func shippedTrace(t *testing.T, name string) []Job {
	t.Helper()
	data, err := os.ReadFile(tracePath(name))
	if err != nil {
		t.Fatal(err)
	}
	jobs, err := ReadTrace(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	return jobs
}

// TestShippedTraces checks what docs/guides/autoscaling.md says about the shipped traces.
func TestShippedTraces(t *testing.T) {
	for name, c := range map[string]struct {
		p99       float64 // seconds
		zeroHours float64
		share     float64 // of the worker hours of a fixed pool with the same p99
	}{
		"diurnal": {5, 6, 0.5},
		"burst":   {75, 0, 0.25},
		"batch":   {50 * 60, 16, 0.1},
	} {
		t.Run(name, func(t *testing.T) {
			s := Simulation{
				Jobs: shippedTrace(t, name), Policy: shippedPolicy(t), StartDelay: 30 * time.Second,
				Every: time.Second,
			}
			r, err := s.Report(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			a := r.Autoscaled
			if a.Waits.P99 > c.p99 || a.ZeroHours < c.zeroHours {
				t.Errorf("p99 wait %.1f s and %.1f hours without a worker, want at most %.1f s and at least %.1f hours",
					a.Waits.P99, a.ZeroHours, c.p99, c.zeroHours)
			}
			if r.SameWait == nil || a.WorkerHours > c.share*r.SameWait.WorkerHours {
				t.Errorf("%.1f worker hours, want less than %.2f of %+v", a.WorkerHours, c.share, r.SameWait)
			}
			if r.SameHours.Waits.P99 < 5*a.Waits.P99 {
				t.Errorf("p99 wait %.1f s with a fixed pool of %d workers, %.1f s with autoscaling", r.SameHours.Waits.P99,
					r.SameHours.Workers, a.Waits.P99)
			}
			again, err := s.Run(t.Context())
			if err != nil || !reflect.DeepEqual(again, &a) {
				t.Errorf("another run had another result: %v", err)
			}
			picture := s.Chart(name, &a)
			for d := xml.NewDecoder(strings.NewReader(string(picture))); ; {
				if _, err := d.Token(); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
			}
			if len(picture) > 100_000 || string(picture) != string(s.Chart(name, again)) {
				t.Errorf("a picture of %d bytes, or another one each time", len(picture))
			}
		})
	}
}

// TestHardTraces replays arrivals that are hard for an autoscaler.
func TestHardTraces(t *testing.T) {
	jobs := func(trace string) []Job {
		list, err := ReadTrace(strings.NewReader(trace))
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	// sawtooth returns peaks of 400 jobs of 5 s with a distance.
	sawtooth := func(distance time.Duration) (list []Job) {
		for at := time.Duration(0); at < 8*time.Hour; at += distance {
			for i := range 400 {
				list = append(list, Job{At: at + time.Duration(i)*100*time.Millisecond, Run: 5 * time.Second})
			}
		}
		return list
	}
	for name, c := range map[string]struct {
		jobs                 []Job
		peak                 int
		longest, workerHours float64
		scaleOuts            int
	}{
		"no longer than the cool-down between peaks": {
			jobs: sawtooth(5 * time.Minute), peak: 20, longest: 60, workerHours: 120, scaleOuts: 20,
		},
		"just longer than the cool-down between": {
			jobs: sawtooth(6 * time.Minute), peak: 20, longest: 60, workerHours: 120, scaleOuts: 160,
		},
		"one long job": {
			jobs: jobs("at,seconds\n0,36000\n"), peak: 1, longest: 31, workerHours: 10.2, scaleOuts: 1,
		},
		"long jobs, one after the other": {
			jobs: jobs("at,seconds\n0,3600\n1800,3600\n3600,3600\n5400,3600\n"), peak: 2, longest: 31, workerHours: 3.5,
			scaleOuts: 3,
		},
		"100,000 at once": {
			jobs: jobs("at,seconds,jobs\n0,1,100000\n"), peak: 20, longest: 1300,
			workerHours: 9, scaleOuts: 1,
		},
		"100,000 tiny ones at once": {
			jobs: jobs("at,seconds,jobs\n0,0.001,100000\n"), peak: 20, longest: 35,
			workerHours: 5, scaleOuts: 1,
		},
		"a job that takes no time": {
			jobs: jobs("at,seconds\n0,0\n"), peak: 1, longest: 31, workerHours: 0.5,
			scaleOuts: 1,
		},
		"a job each time it is at zero": {
			jobs: jobs("at,seconds\n0,1\n700,1\n1400,1\n2100,1\n"), peak: 1, longest: 31,
			workerHours: 1, scaleOuts: 4,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := Simulation{Jobs: c.jobs, Policy: shippedPolicy(t), StartDelay: 30 * time.Second, Every: time.Second}
			r, err := s.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if r.PeakWorkers > c.peak || r.Waits.Max > c.longest || r.WorkerHours > c.workerHours || r.ScaleOuts > c.scaleOuts {
				t.Errorf("%d workers, %.0f s of wait, %.1f worker hours, %d times grown; want at most %d, %.0f, %.1f, %d",
					r.PeakWorkers, r.Waits.Max, r.WorkerHours, r.ScaleOuts, c.peak, c.longest, c.workerHours, c.scaleOuts)
			}
		})
	}
}
