package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The parts of a soak, as shares of its duration: in an hour, a process is stopped every 3 minutes
// and one is killed every 10.
const (
	sampleEvery  = 10 * time.Second
	stopShare    = 20
	killShare    = 6
	leastStop    = 20 * time.Second
	reportEvery  = time.Minute
	blockSize    = 512 // of stat
	leastJudged  = 30 * time.Minute
	unknownStart = -1
)

// errSoak means that a soak found something.
var errSoak = errors.New("something was lost, wrong or not flat: see above")

// Processes that are stopped, and killed, in turn. After its death in the beginning the second
// gateway runs to the end, as NATS and the second worker do all the time. Whatever a process keeps
// in memory for long shows in these.
var (
	stopped = []string{"gateway-1", "worker-1", "scheduler", "webhook"}
	killed  = []string{"gateway-2", "worker-1", "scheduler", "gateway-1", "webhook"}
)

// sampler collects samples of the processes of a deployment.
type sampler struct {
	d     *deployment
	began time.Time

	mu     sync.Mutex
	points []point
	errs   []error
}

// soakMixed sends mixed load to a deployment while its processes are restarted, and judges what
// they use.
func soakMixed(ctx context.Context, o options, dir string, out, progress io.Writer) (err error) {
	m, settings, err := newMixed(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = m.receiver.Close() }()
	d, err := startDeployment(ctx, o, dir, settings)
	if err != nil {
		return err
	}
	admin := apiOf(d.gateway(0), d.key, m.http)
	key, err := admin.newKey(ctx, "soak", "soak")
	if err != nil {
		return errors.Join(err, d.close())
	}
	m.d, m.key = d, key.key
	s := &sampler{d: d, began: time.Now()}
	background, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() { s.run(background) })
	all.Go(func() { s.disrupt(background, o.soakFor, progress) })
	all.Go(func() { m.report(background, progress) })
	err = m.run(ctx, o.soakFor)
	stop()
	all.Wait()
	instances := d.instances()
	err = errors.Join(err, d.close())
	left, leftErr := leftCgroups(instances)
	err = errors.Join(err, leftErr, errors.Join(s.errs...))
	for _, path := range left {
		m.failures = append(m.failures, "left behind: "+path)
	}
	trends := judge(s.points, o.soakFor)
	err = errors.Join(err, m.print(out, o.soakFor), printTrends(out, trends))
	if o.csv != "" {
		err = errors.Join(err, os.WriteFile(o.csv, csvOf(s.points), 0o600))
	}
	if o.svg != "" {
		drawing := plotSoak(s.points, o.soakFor)
		err = errors.Join(err, os.WriteFile(o.svg, drawing, 0o644)) //nolint:gosec // a drawing for everybody
	}
	if err == nil && (len(m.failures) > 0 || slices.ContainsFunc(trends, func(t trend) bool { return t.grows() })) {
		err = errSoak
	}
	return err
}

// disrupt stops and kills processes in turn.
func (s *sampler) disrupt(ctx context.Context, d time.Duration, progress io.Writer) {
	stop, kill := time.NewTicker(max(d/stopShare, leastStop)), time.NewTicker(max(d/killShare, leastStop))
	defer stop.Stop()
	defer kill.Stop()
	for stops, kills := 0, 0; ; {
		n, signal := s.d.node(stopped[stops%len(stopped)]), syscall.SIGTERM
		select {
		case <-ctx.Done():
			return
		case <-stop.C:
			stops++
		case <-kill.C:
			n, signal = s.d.node(killed[kills%len(killed)]), syscall.SIGKILL
			kills++
		}
		_, _ = fmt.Fprintf(progress, "%s %s: %s\n", time.Since(s.began).Round(time.Second), n.name, signal)
		if err := s.d.restart(context.WithoutCancel(ctx), n, signal); err != nil {
			s.mu.Lock()
			s.errs = append(s.errs, err)
			s.mu.Unlock()
		}
	}
}

// run samples until ctx is done.
func (s *sampler) run(ctx context.Context) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for _, n := range s.d.nodes {
				s.sample(ctx, n)
			}
			s.disk("store", s.d.s3.Path(""))
		}
	}
}

// sample records what a process uses. A process that is being restarted uses nothing.
func (s *sampler) sample(ctx context.Context, n *node) {
	s.d.mu.Lock()
	t, start, started, down := n.target, n.starts, n.started, n.down
	s.d.mu.Unlock()
	s.disk(n.name, t.data)
	if down {
		return
	}
	figures, err := s.figures(ctx, n, t)
	s.d.mu.Lock()
	down = n.down || n.target != t
	s.d.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if !down && ctx.Err() == nil {
			s.errs = append(s.errs, fmt.Errorf("after %s, sample %s: %w", time.Since(s.began).Round(time.Second), n.name, err))
		}
		return
	}
	for metric, value := range figures {
		s.points = append(s.points, point{
			at: time.Since(s.began), age: time.Since(started), series: seriesName{n.name, metric}, start: start, value: value,
		})
	}
}

// figures returns what a process uses, by metric.
func (s *sampler) figures(ctx context.Context, n *node, t *target) (map[string]float64, error) {
	rss, err := residentMB(t.pid)
	if err != nil {
		return nil, err
	}
	figures := map[string]float64{metricRSS: rss}
	if n.name == natsName {
		l := &look{kinds: map[string][]string{}}
		if err := l.descriptors(t); err != nil {
			return nil, err
		}
		figures[metricFiles] = float64(len(l.kinds[kindFile]))
		// The collection frees the pools of NATS. They hold buffers of its largest messages, and grow for
		// hours without it, because a server with little to do collects garbage once in minutes.
		profile, err := apiOf(t.profileURL, "", t.http).get(ctx, "/debug/pprof/heap?gc=1&debug=1")
		if err != nil {
			return nil, err
		}
		_, rest, _ := strings.Cut(string(profile), "# NextGC = ")
		text, _, _ := strings.Cut(rest, "\n")
		next, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("read the heap of NATS: %w", err)
		}
		figures[metricHeap] = next / mb
		return figures, s.streams(ctx, t, figures)
	}
	l, err := lookAt(ctx, t)
	if err != nil {
		return nil, err
	}
	metrics, err := t.metrics(ctx)
	if err != nil {
		return nil, err
	}
	figures[metricHeap] = metrics["go_memstats_next_gc_bytes"] / mb
	figures[metricGoroutines], figures[metricFiles] = float64(l.goroutines), float64(len(l.kinds[kindFile]))
	if n.worker() {
		figures[metricMounts], figures[metricCgroups] = float64(len(l.kinds[kindMount])), float64(len(l.kinds[kindCgroup]))
		figures[metricProcesses] = float64(len(l.kinds[kindProcess]))
	}
	return figures, nil
}

// streams adds the sizes of the streams of NATS.
func (s *sampler) streams(ctx context.Context, t *target, figures map[string]float64) error {
	var state struct {
		Consumers float64
		Accounts  []struct {
			Streams []struct {
				Name  string `json:"name"`
				State struct{ Messages, Bytes float64 }
			} `json:"stream_detail"`
		} `json:"account_details"`
	}
	body, err := t.get(ctx, "/jsz?streams=true")
	if err == nil {
		err = json.Unmarshal(body, &state)
	}
	figures[metricConsumers] = state.Consumers
	for _, a := range state.Accounts {
		for _, stream := range a.Streams {
			figures[metricStream+stream.Name] = stream.State.Bytes / mb
			figures[metricMessages+stream.Name] = stream.State.Messages
		}
	}
	return err
}

// disk records the size of the files below a directory, excluding the stream of bodies.
func (s *sampler) disk(name, dir string) {
	total := 0.0
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && e.Name() == bodiesStream {
			return fs.SkipDir
		}
		if err == nil && e.Type().IsRegular() {
			if info, err := e.Info(); err == nil {
				total += float64(info.Sys().(*syscall.Stat_t).Blocks) * blockSize
			}
		}
		return nil // files may have gone meanwhile
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.points = append(s.points,
		point{at: time.Since(s.began), series: seriesName{name, metricDisk}, start: unknownStart, value: total / mb})
}

// instances returns the names of all workers that have run.
func (d *deployment) instances() (names []string) {
	for _, n := range d.nodes {
		for start := 1; n.worker() && start <= n.starts; start++ {
			names = append(names, n.instance(start))
		}
	}
	return names
}

// leftCgroups returns the control groups that workers have left behind.
func leftCgroups(instances []string) (left []string, err error) {
	for _, root := range cgroupRoots("") {
		err = errors.Join(err, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() && slices.Contains(instances, filepath.Base(path)) {
				left = append(left, path)
			}
			return nil // a group may have gone meanwhile
		}))
	}
	return left, err
}

// report prints the progress.
func (m *mixed) report(ctx context.Context, progress io.Writer) {
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for shown := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			m.mu.Lock()
			_, _ = fmt.Fprintf(progress, "%d executions, %d requests sent again, %d lost with their worker, %d failures\n",
				m.executions, m.retries, m.lost, len(m.failures))
			for ; shown < min(len(m.failures), shownFailures); shown++ {
				_, _ = fmt.Fprintln(progress, m.failures[shown])
			}
			m.mu.Unlock()
		}
	}
}

// print prints what came of the load.
func (m *mixed) print(out io.Writer, d time.Duration) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var b strings.Builder
	_, _ = fmt.Fprintf(&b, "%d executions in %s; %d requests sent again; %d executions lost with a worker that "+
		"was killed\n", m.executions, d, m.retries, m.lost)
	again := 0
	for _, n := range m.hooks {
		again += n - 1
	}
	_, _ = fmt.Fprintf(&b, "%d webhooks arrived, %d of them again after they were accepted; actions by kind: %v\n",
		len(m.expected), again, m.counts)
	for i, f := range m.failures {
		if i == shownFailures {
			_, _ = fmt.Fprintf(&b, "and %d more failures\n", len(m.failures)-i)
			break
		}
		_, _ = fmt.Fprintln(&b, "FAILURE", f)
	}
	_, err := io.WriteString(out, b.String())
	return err
}
