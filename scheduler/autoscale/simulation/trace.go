package simulation

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Bounds of a trace.
const (
	maxJobs  = 2_000_000
	maxTime  = 31 * 24 * time.Hour
	maxRun   = 24 * time.Hour
	maxLines = maxJobs
)

// Job is a job of a trace.
type Job struct {
	At  time.Duration // when it arrives, since the start of the trace
	Run time.Duration // how long it runs
}

// traceColumns are the columns of a trace, of which the last two may be missing.
var traceColumns = []string{"at", "seconds", "jobs", "over"}

// ReadTrace reads a trace in CSV, with the columns at, seconds, jobs and over, all in seconds
// besides jobs. Each line stands for jobs (1 if missing) that run for seconds. They arrive at the
// time at, or at random times during the following over seconds. The times are the same for the
// same trace. Lines need not be in order. Empty lines and lines that start with # are ignored. The
// jobs that ReadTrace returns are in the order of their arrival.
func ReadTrace(r io.Reader) ([]Job, error) {
	var jobs []Job
	lines := bufio.NewScanner(r)
	columns := 0
	random := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // the times must be the same each time
	number := 0
	for lines.Scan() {
		if number++; number > maxLines {
			return nil, fmt.Errorf("read trace: there are more than %d lines", maxLines)
		}
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Split(line, ",")
		if columns == 0 {
			if columns = len(fields); columns < 2 || columns > len(traceColumns) ||
				!slices.Equal(fields, traceColumns[:columns]) {
				return nil, fmt.Errorf("read trace: line %d must name the columns: at,seconds or at,seconds,jobs or "+
					"at,seconds,jobs,over", number)
			}
			continue
		}
		batch, err := parseLine(fields, columns)
		if err == nil && batch.jobs > maxJobs-len(jobs) {
			err = fmt.Errorf("there are more than %d jobs", maxJobs)
		}
		if err != nil {
			return nil, fmt.Errorf("read trace: line %d: %w", number, err)
		}
		for range batch.jobs {
			at := batch.at
			if batch.over > 0 {
				at += time.Duration(random.Int64N(int64(batch.over)))
			}
			jobs = append(jobs, Job{At: at, Run: batch.run})
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: line %d: %w", number+1, err)
	}
	if len(jobs) == 0 {
		return nil, errors.New("read trace: there is no job")
	}
	slices.SortStableFunc(jobs, func(a, b Job) int { return int(a.At - b.At) })
	return jobs, nil
}

// batch is a line of a trace.
type batch struct {
	at, run, over time.Duration
	jobs          int
}

func parseLine(fields []string, columns int) (batch, error) {
	b := batch{jobs: 1}
	if len(fields) != columns {
		return b, fmt.Errorf("there are %d fields and not %d", len(fields), columns)
	}
	for i, field := range fields {
		field = strings.TrimSpace(field)
		var err error
		switch traceColumns[i] {
		case "at":
			b.at, err = parseSeconds(field, maxTime)
		case "seconds":
			b.run, err = parseSeconds(field, maxRun)
		case "jobs":
			if b.jobs, err = strconv.Atoi(field); err != nil || b.jobs < 0 {
				err = fmt.Errorf("%q is not a number of jobs", field)
			}
		case "over":
			b.over, err = parseSeconds(field, maxTime)
		}
		if err != nil {
			return b, fmt.Errorf("%s: %w", traceColumns[i], err)
		}
	}
	return b, nil
}

func parseSeconds(field string, most time.Duration) (time.Duration, error) {
	f, err := strconv.ParseFloat(field, 64)
	if err != nil || math.IsNaN(f) || f < 0 || f > most.Seconds() {
		return 0, fmt.Errorf("%q is not a number of seconds between 0 and %.0f", field, most.Seconds())
	}
	return time.Duration(math.Round(f * float64(time.Second))), nil
}
