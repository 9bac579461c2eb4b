// Package load measures a server under an open load: it sends executions at times that do not
// depend on the answers, and measures from when they were due. A stall therefore counts for
// everything due meanwhile, which a client waiting for each answer would omit.
package load

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/plot"
)

// Mode is how an execution is sent and its result received.
type Mode string

// The closed list of modes.
const (
	Inline Mode = "inline" // the answer is the result
	Stream Mode = "stream" // the answer is the events
	Async  Mode = "async"  // the answer is an id; the result is waited for
)

// Profile is a kind of executions.
type Profile struct {
	Name     string         `json:"name" yaml:"name"`
	Weight   float64        `json:"weight" yaml:"weight"` // its share, relative to the others; more than 0
	Mode     Mode           `json:"mode,omitempty" yaml:"mode,omitempty"`
	Language proto.Language `json:"language" yaml:"language"`
	Code     string         `json:"code" yaml:"code"`
	Stdin    string         `json:"stdin,omitempty" yaml:"stdin,omitempty"`
	Timeout  int            `json:"timeout,omitempty" yaml:"timeout,omitempty"` // seconds; 0 for the server's default
	// Threads, if not 0, is the number of threads that executions use in turn.
	Threads int `json:"threads,omitempty" yaml:"threads,omitempty"`
}

// Config is a load.
type Config struct {
	Profiles []Profile
	Rate     float64       // mean number of executions due per second, at random intervals
	Duration time.Duration // in which executions are due
	// InFlight limits the concurrent executions. Those due beyond it are not sent, but counted.
	InFlight int
	Seed     uint64 // of the times and the choice of profiles
}

// Sample is one execution.
type Sample struct {
	Profile int           // its index
	Due     time.Duration // since the start
	Took    time.Duration // since it was due
	Failure string        // empty for a program that exited with 0
}

// Result is what was measured.
type Result struct {
	Opened

	Config  Config
	Samples []Sample // in the order in which they were due
}

// notAnswered is the failure of executions without an answer.
const notAnswered = "no answer"

// Run sends executions until the duration has passed, and waits for their results. It returns early
// if ctx is done. The client must send each request once.
func Run(ctx context.Context, c *client.Client, cfg Config) *Result {
	var total float64
	for _, p := range cfg.Profiles {
		total += p.Weight
	}
	r := &Result{Config: cfg}
	var mu sync.Mutex
	r.Opened = Open(ctx, Random(cfg.Rate, cfg.Duration, cfg.Seed), cfg.InFlight, func(due Due) {
		random := rand.New(rand.NewPCG(cfg.Seed, uint64(due.N))) //nolint:gosec // a load that can be repeated
		profile := choose(cfg.Profiles, random.Float64()*total)
		failure := execute(ctx, c, &cfg.Profiles[profile], due.N)
		took := time.Since(due.At)
		mu.Lock()
		defer mu.Unlock()
		r.Samples = append(r.Samples, Sample{Profile: profile, Due: due.Since, Took: took, Failure: failure})
	})
	slices.SortFunc(r.Samples, func(a, b Sample) int { return cmp.Compare(a.Due, b.Due) })
	return r
}

// choose returns the index of the profile at a point of the sum of their weights.
func choose(profiles []Profile, at float64) int {
	for i, p := range profiles {
		if at -= p.Weight; at < 0 {
			return i
		}
	}
	return len(profiles) - 1
}

// execute runs the nth execution and returns its failure, or "".
func execute(ctx context.Context, c *client.Client, p *Profile, n int) string {
	request := api.ExecuteRequest{Language: p.Language, Code: p.Code, Stdin: p.Stdin, Timeout: p.Timeout}
	if p.Threads > 0 {
		request.ThreadID = "load-" + p.Name + "-" + strconv.Itoa(n%p.Threads)
	}
	var status proto.Status
	var err error
	switch p.Mode {
	case Stream:
		for e, failure := range c.Stream(ctx, request) {
			if err = failure; err == nil && e.Result != nil {
				status = e.Result.Status()
			}
		}
	case Async:
		var accepted *api.Accepted
		if accepted, err = c.Submit(ctx, request, ""); err == nil {
			var e *api.Execution
			if e, err = c.Wait(ctx, accepted.TraceID); err == nil {
				status = e.Status
			}
		}
	default:
		var result *client.Result
		if result, err = c.Execute(ctx, request); err == nil {
			status = result.Status()
		}
	}
	var refused *client.Error
	switch {
	case errors.As(err, &refused):
		return fmt.Sprintf("%d %s", refused.Status, cmp.Or(refused.Code, http.StatusText(refused.Status)))
	case err != nil:
		return notAnswered
	case status != proto.StatusSuccess:
		return string(status)
	default:
		return ""
	}
}

// Row summarises the executions of a profile, or all of them.
type Row struct {
	Name      string         `json:"name" yaml:"name"`
	Sent      int            `json:"sent"`
	Succeeded int            `json:"succeeded"`
	Failures  map[string]int `json:"failures,omitempty"` // how many failed, by what happened
	// The times of all that were answered, including failures, in milliseconds.
	P50 float64 `json:"p50_ms"`
	P90 float64 `json:"p90_ms"`
	P99 float64 `json:"p99_ms"`
	Max float64 `json:"max_ms"`
}

// Rows returns a row for each profile, and one for all if there are several.
func (r *Result) Rows() []Row {
	var rows []Row
	for i, p := range r.Config.Profiles {
		rows = append(rows, r.row(p.Name, func(s *Sample) bool { return s.Profile == i }))
	}
	if len(rows) > 1 {
		rows = append(rows, r.row("all", func(*Sample) bool { return true }))
	}
	return rows
}

func (r *Result) row(name string, belongs func(*Sample) bool) Row {
	row := Row{Name: name, Failures: map[string]int{}}
	var took []time.Duration
	for i := range r.Samples {
		s := &r.Samples[i]
		if !belongs(s) {
			continue
		}
		row.Sent++
		if s.Failure == "" {
			row.Succeeded++
		} else {
			row.Failures[s.Failure]++
		}
		if s.Failure != notAnswered {
			took = append(took, s.Took)
		}
	}
	slices.Sort(took)
	row.P50, row.P90 = millis(plot.Percentile(took, 50)), millis(plot.Percentile(took, 90))
	row.P99, row.Max = millis(plot.Percentile(took, 99)), millis(plot.Percentile(took, 100))
	return row
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
