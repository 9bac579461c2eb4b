package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Parameters for measuring a server under pressure. Its only slot is in use, so submissions are
// stored and stay queued.
const (
	submitters      = 32
	idleStreams     = 1000
	submitSides     = 2 // multiple of the time for one side of a cell
	holdSeconds     = 3600
	typeNDJSON      = "application/x-ndjson"
	streamsWatched  = 20 * time.Second // the server writes to idle streams every 15 s
	quickStreamWait = 2 * time.Second
)

// pressure is the measurement of a server with more work than slots.
type pressure struct {
	// Time until asynchronous submissions were accepted, with this many callers.
	Submissions *summary `json:"submissions_ms"`
	PerSecond   float64  `json:"accepted_per_second"`
	Streams     int      `json:"idle_streams"`
	StreamsMB   float64  `json:"idle_streams_mb"` // memory that they added to the server
}

// measurePressure measures on its own server, with its data in dir.
func measurePressure(ctx context.Context, program, dir string, quick bool, d time.Duration) (*pressure, error) {
	here := filepath.Join(dir, "pressure")
	t, err := startServer(ctx, program, here, "BULLPEN_SLOTS=1", "BULLPEN_MEMORY=2GiB", "BULLPEN_DRAIN=100ms")
	if err != nil {
		return nil, err
	}
	m := &pressure{Streams: idleStreams}
	err = func() error {
		if err := t.ready(ctx); err != nil {
			return err
		}
		body := request(proto.Bash, fmt.Sprintf("sleep %d", holdSeconds), holdSeconds)
		id, err := t.submit(ctx, body)
		if err != nil {
			return err
		}
		wait := streamsWatched
		if quick {
			wait = quickStreamWait
		}
		if m.StreamsMB, err = t.idle(ctx, id, wait); err != nil {
			return err
		}
		var s series
		s.block(ctx, d, submitters, func(ctx context.Context) (sample, error) {
			id, err := t.submit(ctx, body)
			return sample{id: id}, err
		})
		m.Submissions = s.summary()
		m.PerSecond = float64(len(s.samples)) / s.elapsed.Seconds()
		return nil
	}()
	if err = errors.Join(err, t.close()); err != nil {
		return nil, fmt.Errorf("measure a server under pressure: %w", err)
	}
	return m, nil
}

// idle opens streams of an execution that prints nothing. It returns the largest growth of the
// server's memory during wait, in MB.
func (t *target) idle(ctx context.Context, id string, wait time.Duration) (float64, error) {
	ctx, stop := context.WithCancel(ctx)
	memory := watchMemory(t.pid)
	err := each(idleStreams, func(int) error {
		resp, err := t.do(ctx, http.MethodGet, "/v1/executions/"+id+"/output", typeNDJSON, nil)
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = resp.Body.Close() })
		line, err := bufio.NewReader(resp.Body).ReadString('\n')
		if err != nil || !strings.Contains(line, `"status"`) {
			return fmt.Errorf("a stream begins with %q: %w", line, err)
		}
		return nil
	})
	if err == nil {
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
	before, peak := memory()
	stop()
	return peak - before, err
}

// figures returns the figures of a server under pressure. m is nil if they were not measured.
func (m *pressure) figures() []figure {
	rate := figure{
		Name:   "async submissions, each durable before its answer",
		Target: fmt.Sprintf("%d/s or more", targetSubmitsPerSec), Unit: "/s",
	}
	streams := below(fmt.Sprintf("memory of %d idle streams", idleStreams), targetStreamsMB, "MB")
	if m == nil {
		const why = "needs a server that is started here"
		return []figure{rate.unknown(why), streams.unknown(why)}
	}
	note := fmt.Sprintf("%d by %d callers, p50 %.1f ms, p99 %.1f ms", m.Submissions.Runs, submitters, m.Submissions.P50,
		m.Submissions.P99)
	met := m.PerSecond >= targetSubmitsPerSec && m.Submissions.Errors == 0
	return []figure{
		rate.is(m.PerSecond, met, withErrors(note, m.Submissions)),
		streams.is(m.StreamsMB, m.StreamsMB < targetStreamsMB, "resident memory of the server, garbage included"),
	}
}
