package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	logWithin = 3 * time.Second // log lines may be written after the response is sent
	logPoll   = 100 * time.Millisecond
	maxLine   = 1 << 20
)

// overhead splits the time of inline requests of one caller into its parts.
type overhead struct {
	Language proto.Language `json:"language"`
	Unknown  int            `json:"runs_without_log_lines,omitempty"`
	Added    *summary       `json:"added"`         // everything but the next two; the target is about this
	Prepare  *summary       `json:"prepare"`       // making the jail
	Run      *summary       `json:"run"`           // running the program, from hand-over to its end
	Server   *summary       `json:"added_inside"`  // part of added inside the server's request log line
	Client   *summary       `json:"added_outside"` // the rest of added: this client and the connection
}

// logged has the times of an execution from the server's log. Missing values are nil.
type logged struct {
	prepare, run, request *float64 // milliseconds
}

// overheads splits the requests of one caller into their parts. The error is why that is not
// possible.
func overheads(ctx context.Context, t *target, cells []cell) ([]overhead, error) {
	if t.log == "" {
		return nil, errors.New("the log of a server that was not started here cannot be read")
	}
	want := map[string]bool{}
	for _, c := range cells {
		if c.Callers == 1 {
			for _, s := range c.samples {
				want[s.id] = true
			}
		}
	}
	lines, err := awaitLog(ctx, t.log, want)
	if err != nil {
		return nil, err
	}
	var all []overhead
	for _, c := range cells {
		if c.Callers != 1 || len(c.samples) == 0 {
			continue
		}
		o := splitProfile(c, lines)
		if o.Added.Runs == 0 {
			return nil, errors.New("the server's log has no prepare_ms and run_ms on its lines \"execution ended\": build it " +
				"anew with `make build`")
		}
		all = append(all, o)
	}
	return all, nil
}

func splitProfile(c cell, lines map[string]logged) overhead {
	o := overhead{Language: c.Language}
	var added, prepare, run, server, client []float64
	for _, s := range c.samples {
		l := lines[s.id]
		if l.prepare == nil || l.run == nil || l.request == nil {
			o.Unknown++
			continue
		}
		jail, took := *l.prepare+*l.run, millis(s.took)
		added = append(added, took-jail)
		prepare, run = append(prepare, *l.prepare), append(run, *l.run)
		server, client = append(server, *l.request-jail), append(client, took-*l.request)
	}
	o.Added, o.Prepare, o.Run = summarise(added), summarise(prepare), summarise(run)
	o.Server, o.Client = summarise(server), summarise(client)
	return o
}

// awaitLog reads the log until it contains all wanted executions, or until a deadline.
func awaitLog(ctx context.Context, path string, want map[string]bool) (map[string]logged, error) {
	ctx, cancel := context.WithTimeout(ctx, logWithin)
	defer cancel()
	for {
		lines, err := readLog(path, want)
		if err != nil {
			return nil, err
		}
		whole := 0
		for _, l := range lines {
			if l.run != nil && l.request != nil {
				whole++
			}
		}
		if whole == len(want) {
			return lines, nil
		}
		select {
		case <-ctx.Done():
			return lines, nil
		case <-time.After(logPoll):
		}
	}
}

func readLog(path string, want map[string]bool) (map[string]logged, error) {
	f, err := os.Open(path) //nolint:gosec // in our own directory
	if err != nil {
		return nil, fmt.Errorf("read the server's log: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	lines := map[string]logged{}
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, maxLine)
	for scan.Scan() {
		var line struct {
			Msg     string   `json:"msg"`
			Trace   string   `json:"trace_id"`
			Prepare *float64 `json:"prepare_ms"`
			Run     *float64 `json:"run_ms"`
			Took    *float64 `json:"duration_ms"`
		}
		if json.Unmarshal(scan.Bytes(), &line) != nil || !want[line.Trace] {
			continue // an incomplete line, or not about an execution
		}
		l := lines[line.Trace]
		switch line.Msg {
		case "execution ended":
			l.prepare, l.run = line.Prepare, line.Run
		case "request":
			l.request = line.Took
		}
		lines[line.Trace] = l
	}
	if err := scan.Err(); err != nil {
		return nil, fmt.Errorf("read the server's log: %w", err)
	}
	return lines, nil
}
