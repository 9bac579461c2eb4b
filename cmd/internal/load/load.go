// Package load sends executions to a server at times that do not depend on its answers, and measures
// how long they take from the time at which they were due. So a server that stalls is charged with
// all that waits meanwhile, which a client that waits for each answer would leave out.
package load

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
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
	// Threads, if not 0, is the number of threads that executions take by turns.
	Threads int `json:"threads,omitempty" yaml:"threads,omitempty"`
}

// Config is a load.
type Config struct {
	Profiles []Profile
	Rate     float64       // mean number of executions that are due each second; the times between them are random
	Duration time.Duration // in which executions are due
	// InFlight is the largest number of executions at a time. Those that are due beyond it are not sent,
	// and counted.
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
	Config  Config
	Start   time.Time
	Samples []Sample // in the order in which they were due
	Unsent  int      // that were due beyond InFlight
	// Late is by how much the latest request was sent after it was due, because this machine was busy.
	Late time.Duration
}

// notAnswered is the failure of executions whose answer did not come.
const notAnswered = "no answer"

// Run sends executions until the duration has passed, and waits for their results. It returns early
// if ctx is done. The client must send each request once.
func Run(ctx context.Context, c *client.Client, cfg Config) *Result {
	random := rand.New(rand.NewPCG(cfg.Seed, cfg.Seed)) //nolint:gosec // a load that can be repeated
	var total float64
	for _, p := range cfg.Profiles {
		total += p.Weight
	}
	r := &Result{Config: cfg, Start: time.Now()}
	var mu sync.Mutex
	var all sync.WaitGroup
	slots := make(chan struct{}, cfg.InFlight)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n, due := 0, time.Duration(0); ; n++ {
		due += time.Duration(random.ExpFloat64() / cfg.Rate * float64(time.Second))
		profile := choose(cfg.Profiles, random.Float64()*total)
		if due >= cfg.Duration {
			break
		}
		timer.Reset(time.Until(r.Start.Add(due)))
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		if ctx.Err() != nil {
			break
		}
		select {
		case slots <- struct{}{}:
		default:
			r.Unsent++
			continue
		}
		r.Late = max(r.Late, time.Since(r.Start)-due)
		all.Go(func() {
			failure := execute(ctx, c, &cfg.Profiles[profile], n)
			took := time.Since(r.Start) - due
			<-slots
			mu.Lock()
			defer mu.Unlock()
			r.Samples = append(r.Samples, Sample{Profile: profile, Due: due, Took: took, Failure: failure})
		})
	}
	all.Wait()
	slices.SortFunc(r.Samples, func(a, b Sample) int { return int(a.Due - b.Due) })
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

// execute runs the nth execution and returns its failure, empty if there is none.
func execute(ctx context.Context, c *client.Client, p *Profile, n int) string {
	request := client.Request{Language: p.Language, Code: p.Code, Stdin: p.Stdin, Timeout: p.Timeout}
	if p.Threads > 0 {
		request.ThreadID = "load-" + p.Name + "-" + strconv.Itoa(n%p.Threads)
	}
	var status proto.Status
	var err error
	switch p.Mode {
	case Stream:
		err = c.Stream(ctx, request, func(e *client.Event) error {
			if e.Result != nil {
				status = e.Result.Status()
			}
			return nil
		})
	case Async:
		var accepted *client.Accepted
		if accepted, err = c.Submit(ctx, request, ""); err == nil {
			var e *client.Execution
			if e, _, err = c.Wait(ctx, accepted.TraceID); err == nil {
				status = e.Status
			}
		}
	default:
		var result *proto.Result
		if result, _, err = c.Execute(ctx, request); err == nil {
			status = result.Status()
		}
	}
	var refused *client.Error
	switch {
	case errors.As(err, &refused):
		return fmt.Sprintf("%d %s", refused.Status, orText(refused.Code, http.StatusText(refused.Status)))
	case err != nil:
		return notAnswered
	case status != proto.StatusSuccess:
		return string(status)
	default:
		return ""
	}
}

func orText(text, other string) string {
	if text == "" {
		return other
	}
	return text
}

// Row summarises the executions of a profile, or all of them.
type Row struct {
	Name      string         `json:"name" yaml:"name"`
	Sent      int            `json:"sent"`
	Succeeded int            `json:"succeeded"`
	Failures  map[string]int `json:"failures,omitempty"` // how many failed, by what happened
	// The times of all of them that were answered, also of those that failed, in milliseconds.
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
	row.P50, row.P90, row.P99, row.Max = millis(quantile(took, 0.5)), millis(quantile(took, 0.9)), millis(quantile(took, 0.99)), millis(quantile(took, 1))
	return row
}

// quantile returns the smallest time that a share of the sorted times does not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, max(0, int(float64(len(sorted))*q+0.999999)-1))]
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
