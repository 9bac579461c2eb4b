package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
	"github.com/bullpen-run/bullpen/proto"
)

// Parameters for measuring batches.
const (
	batchItems   = 100_000
	batchSmall   = 2000
	batchCallers = 8
	batchPoll    = 500 * time.Millisecond
	batchRate    = 10 // interactive requests per second
	batchSides   = 5  // multiple of the time for one side of a cell
)

// batches compares batches with single requests, on a server of their own.
type batches struct {
	Items      int      `json:"items"`
	AcceptedS  float64  `json:"accepted_s"`  // seconds until a batch of that many items was accepted
	AcceptedMB float64  `json:"accepted_mb"` // largest resident memory of the server meanwhile
	Small      int      `json:"small"`
	SmallS     float64  `json:"small_s"`   // seconds for that many programs as a batch, results included
	CallersS   float64  `json:"callers_s"` // by 8 callers, inline
	Requests   int      `json:"requests"`  // of the batch
	Alone      *summary `json:"alone_ms"`  // interactive programs without a batch
	Beside     *summary `json:"beside_ms"` // beside a batch of the same key
}

func measureBatches(ctx context.Context, program, dir string, quick bool, d time.Duration) (m *batches, err error) {
	m = &batches{Items: batchItems, Small: batchSmall}
	if quick {
		m.Items, m.Small = m.Items/quickDivides, m.Small/quickDivides
	}
	dir = filepath.Join(dir, "batches")
	t, err := startServer(ctx, program, dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if err := t.ready(ctx); err != nil {
		return nil, err
	}
	if err := m.small(ctx, t); err != nil {
		return nil, err
	}
	m.Alone = t.interactive(ctx, d)
	lines := batchLines(m.Items)
	memory := watchMemory(t.pid)
	began := time.Now()
	id, err := t.sendBatch(ctx, lines)
	m.AcceptedS = time.Since(began).Seconds()
	_, m.AcceptedMB = memory()
	if err != nil {
		return nil, err
	}
	m.Beside = t.interactive(ctx, d)
	resp, err := t.do(ctx, http.MethodPost, "/v1/batches/"+id+"/cancel", "application/json", nil)
	if err != nil {
		return nil, err
	}
	return m, resp.Body.Close()
}

// small runs programs as a batch and by callers that wait for each.
func (m *batches) small(ctx context.Context, t *target) error {
	body := request(proto.Bash, "echo $((6 * 7))", programTimeout)
	began := time.Now()
	var s series
	left := make(chan struct{}, m.Small)
	for range m.Small {
		left <- struct{}{}
	}
	close(left)
	s.block(ctx, 0, batchCallers, func(ctx context.Context) (sample, error) {
		for range left {
			if result, id, err := t.inline(ctx, body); err != nil || !result.Success {
				return sample{}, errors.Join(fmt.Errorf("execution %s did not succeed", id), err)
			}
		}
		return sample{}, nil
	})
	m.CallersS = time.Since(began).Seconds()
	if s.firstErr != nil {
		return s.firstErr
	}
	began = time.Now()
	id, err := t.sendBatch(ctx, batchLines(m.Small))
	if err != nil {
		return err
	}
	m.Requests = 2
	for ended := false; !ended; m.Requests++ {
		time.Sleep(batchPoll)
		text, err := t.get(ctx, "/v1/batches/"+id)
		var state struct {
			CompletedAt *time.Time `json:"completed_at"`
		}
		if err := errors.Join(err, json.Unmarshal(text, &state)); err != nil {
			return err
		}
		ended = state.CompletedAt != nil
	}
	text, err := t.get(ctx, "/v1/batches/"+id+"/results")
	m.SmallS = time.Since(began).Seconds()
	lines := bufio.NewScanner(bytes.NewReader(text))
	n := 0
	for ; lines.Scan(); n++ {
		if !bytes.Contains(lines.Bytes(), []byte(`"stdout":"42\n"`)) {
			return fmt.Errorf("result %s", lines.Bytes())
		}
	}
	if n != m.Small {
		return fmt.Errorf("%d results of %d items", n, m.Small)
	}
	return err
}

// batchLines returns the JSONL of a batch of small programs.
func batchLines(items int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"batch":{"request":{"language":"bash"}}}` + "\n")
	for i := range items {
		_, _ = fmt.Fprintf(&b, `{"code":"echo $((6 * 7))","args":["%d"],"metadata":{"row":"%d"}}`+"\n", i, i)
	}
	return b.Bytes()
}

// sendBatch creates a batch and returns its id.
func (t *target) sendBatch(ctx context.Context, lines []byte) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url+"/v1/batches", bytes.NewReader(lines))
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+t.key)
	req.Header.Set("Content-Type", "application/jsonl")
	resp, err := t.http.Do(req)
	if err != nil {
		return "", err
	}
	var created struct{ ID string }
	err = json.NewDecoder(resp.Body).Decode(&created)
	if err = errors.Join(err, resp.Body.Close()); err == nil && resp.StatusCode != http.StatusCreated {
		err = fmt.Errorf("create a batch: HTTP %d", resp.StatusCode)
	}
	return created.ID, err
}

// interactive runs small programs inline at fixed times.
func (t *target) interactive(ctx context.Context, d time.Duration) *summary {
	body := request(proto.Bash, "echo $((6 * 7))", programTimeout)
	var s series
	s.open(ctx, load.Steady(batchRate, d), func(ctx context.Context) (sample, error) {
		result, id, err := t.inline(ctx, body)
		if err == nil && !result.Success {
			err = fmt.Errorf("execution %s did not succeed", id)
		}
		return sample{id: id}, err
	})
	return s.summary()
}

// figures returns the figures of batches. m is nil if they were not measured.
func (m *batches) figures() []figure {
	accepted := below("a batch of 100,000 accepted", targetBatchS, "s")
	memory := below("memory while it is accepted", targetBatchMB, "MB")
	small := atMost("2,000 small programs as a batch, relative to 8 callers", 1, "")
	requests := atMost("requests of that, relative to one for each", 0.1, "")
	beside := atMost("interactive p99 beside a batch of the same key, relative to none", targetBesideBatch, "")
	if m == nil {
		const why = "needs a server that is started here"
		return []figure{
			accepted.unknown(why), memory.unknown(why), small.unknown(why), requests.unknown(why),
			beside.unknown(why),
		}
	}
	ratio, share := m.SmallS/m.CallersS, float64(m.Requests)/float64(m.Small)
	all := []figure{
		accepted.is(m.AcceptedS, m.AcceptedS < targetBatchS, fmt.Sprintf("%d items as JSONL", m.Items)),
		memory.is(m.AcceptedMB, m.AcceptedMB < targetBatchMB, "resident memory of the server, garbage included"),
		small.is(ratio, ratio <= 1, fmt.Sprintf("%.1f s with the results, %.1f s", m.SmallS, m.CallersS)),
		requests.is(share, share <= 0.1, fmt.Sprintf("%d requests for %d programs", m.Requests, m.Small)),
	}
	if m.Alone.Runs == 0 || m.Beside.Runs == 0 {
		return append(all, beside.none(m.Beside))
	}
	slower := m.Beside.P99 / m.Alone.P99
	note := fmt.Sprintf("p50 %.1f ms, p99 %.1f ms; without %.1f ms and %.1f ms", m.Beside.P50, m.Beside.P99, m.Alone.P50,
		m.Alone.P99)
	return append(all, beside.is(slower, slower <= targetBesideBatch && m.Beside.Errors == 0, withErrors(note, m.Beside)))
}
