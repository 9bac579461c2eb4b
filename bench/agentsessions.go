package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Parameters for measuring agent sessions. The mock agent makes an event every sessionEvery.
const (
	sessionEvery      = "50ms"
	streamingSessions = 100
	sessionFor        = 10 * time.Second
	quickSessionFor   = time.Second
	queuedMessages    = 3 // per session, so that one turn follows another at once
	sessionsPath      = "/sandbox-agent/v1/sessions/"
)

// agentSessions holds the figures of agent sessions.
type agentSessions struct {
	// Alone and Many are the latencies from an event to a subscriber, with one session and with
	// streamingSessions.
	Alone     *summary `json:"event_ms"`
	Many      *summary `json:"event_of_many_ms"`
	PerSecond float64  `json:"events_per_second"` // with streamingSessions
	MemoryMB  float64  `json:"memory_mb"`         // the server's peak memory, with streamingSessions
}

// measureAgentSessions measures sessions of the mock agent. dir holds the data of their server.
func measureAgentSessions(ctx context.Context, program, dir string, quick bool) (_ *agentSessions, err error) {
	t, err := startServer(ctx, program, filepath.Join(dir, "sessions"), "BULLPEN_AGENT_MOCK_DELAY="+sessionEvery)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if err := t.ready(ctx); err != nil {
		return nil, err
	}
	during := sessionFor
	if quick {
		during = quickSessionFor
	}
	m := new(agentSessions)
	one, _, err := stream(ctx, t.api, 1, during)
	if err != nil {
		return nil, fmt.Errorf("measure an agent session: %w", err)
	}
	peak := watchMemory(t.pid)
	many, seconds, err := stream(ctx, t.api, streamingSessions, during)
	_, m.MemoryMB = peak()
	if err != nil {
		return nil, fmt.Errorf("measure %d agent sessions: %w", streamingSessions, err)
	}
	m.Alone, m.Many, m.PerSecond = summarise(one), summarise(many), float64(len(many))/seconds
	return m, nil
}

// stream follows sessions with back-to-back turns. It returns the latency of each event in milliseconds
// and the measured time in seconds.
func stream(
	ctx context.Context, a *api, sessions int, during time.Duration,
) (latencies []float64, seconds float64, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	through := *a
	through.http = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: sessions}}
	var mu sync.Mutex
	var running sync.WaitGroup
	var began time.Time
	done := false
	for i := range sessions {
		s := session{api: &through, path: fmt.Sprintf("%sbench-%d-%d", sessionsPath, sessions, i)}
		if err := s.post(ctx, "", map[string]string{"agent": "mock"}); err != nil {
			return nil, 0, err
		}
		for range queuedMessages {
			if err := s.send(ctx); err != nil {
				return nil, 0, err
			}
		}
		running.Go(func() {
			err := s.follow(ctx, func(at time.Time) {
				mu.Lock()
				defer mu.Unlock()
				if !began.IsZero() && at.After(began) && !done { // skip events from before the measurement
					latencies = append(latencies, millis(time.Since(at)))
				}
			})
			if err != nil {
				cancel(err)
			}
		})
	}
	mu.Lock()
	began = time.Now()
	mu.Unlock()
	if err := wait(ctx, during); err != nil {
		return nil, 0, context.Cause(ctx)
	}
	mu.Lock()
	done, seconds = true, time.Since(began).Seconds()
	mu.Unlock()
	cancel(nil)
	running.Wait()
	return latencies, seconds, nil
}

// session is a session of the mock agent.
type session struct {
	*api
	path string
}

// post sends a request about the session.
func (s *session) post(ctx context.Context, path string, body any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	resp, err := s.do(ctx, http.MethodPost, s.path+path, "application/json", text)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// send sends a message with a long response.
func (s *session) send(ctx context.Context) error {
	return s.post(ctx, "/messages", map[string]string{"message": "markdown"})
}

// follow calls onEvent with the time of each event and sends a message at the end of each turn. It
// returns when ctx is done.
func (s *session) follow(ctx context.Context, onEvent func(at time.Time)) error {
	resp, err := s.do(ctx, http.MethodGet, s.path+"/events/sse", "text/event-stream", nil)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		text, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		var e struct {
			Time time.Time
			Type string
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			return err
		}
		onEvent(e.Time)
		if e.Type == "turn.ended" {
			if err := s.send(ctx); err != nil && ctx.Err() == nil {
				return err
			}
		}
	}
	if ctx.Err() == nil {
		return errors.New("the stream of a session ended")
	}
	return nil
}

// figures returns the figures of agent sessions; unknown ones if m is nil.
func (m *agentSessions) figures() []figure {
	alone := below("event of an agent session to a subscriber, p50", targetEventMS, "ms")
	stored := figure{
		Name:   fmt.Sprintf("events of %d agent sessions stored and streamed", streamingSessions),
		Target: fmt.Sprintf("%d a second or more", targetEventsPerSec), Unit: "a second",
	}
	memory := below(fmt.Sprintf("server's memory with %d agent sessions streaming", streamingSessions), targetSessionsMB,
		"MB")
	if m == nil {
		const why = "needs a server that is started here"
		return []figure{alone.unknown(why), stored.unknown(why), memory.unknown(why)}
	}
	note := fmt.Sprintf("%d events; p99 %.1f ms; with %d sessions %.1f ms, p99 %.1f ms", m.Alone.Runs, m.Alone.P99,
		streamingSessions, m.Many.P50, m.Many.P99)
	return []figure{
		alone.is(m.Alone.P50, m.Alone.P50 < targetEventMS, note),
		stored.is(m.PerSecond, m.PerSecond >= targetEventsPerSec, "the mock agent's maximum rate"),
		memory.is(m.MemoryMB, m.MemoryMB < targetSessionsMB, ""),
	}
}
