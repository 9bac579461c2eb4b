package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto/api"
)

// Batch is the state of a batch.
type Batch = api.Batch

const (
	batchesPath = "/v1/batches"
	jsonl       = "application/jsonl"
)

// CreateBatch sends a new batch as JSONL, which open opens for each attempt. size is its length.
func (c *Client) CreateBatch(ctx context.Context, size int64, open func() io.Reader) (*Batch, error) {
	b, _, err := get[Batch](ctx, c, call{
		method: http.MethodPost, path: batchesPath, upload: open, size: size, resend: true,
		header: map[string]string{"Content-Type": jsonl, "Idempotency-Key": newIdempotencyKey()},
	})
	return b, err
}

// Batches lists all batches of the key's organisation, the newest first.
func (c *Client) Batches(ctx context.Context) ([]Batch, error) {
	return pages(ctx, c, batchesPath, func(p *api.Batches) ([]Batch, *string) { return p.Batches, p.NextCursor })
}

// Batch returns the state of a batch, and the answer's bytes.
func (c *Client) Batch(ctx context.Context, id string) (*Batch, json.RawMessage, error) {
	return get[Batch](ctx, c, call{method: http.MethodGet, path: batchPath(id), resend: true, redial: true})
}

// RemoveBatch removes a batch that has ended.
func (c *Client) RemoveBatch(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: batchPath(id)})
}

// PauseBatch makes a batch submit no more items.
func (c *Client) PauseBatch(ctx context.Context, id string) (*Batch, json.RawMessage, error) {
	return c.changeBatch(ctx, id, "/pause")
}

// ResumeBatch goes on with a paused batch.
func (c *Client) ResumeBatch(ctx context.Context, id string) (*Batch, json.RawMessage, error) {
	return c.changeBatch(ctx, id, "/resume")
}

// CancelBatch cancels the items of a batch that have not ended.
func (c *Client) CancelBatch(ctx context.Context, id string) (*Batch, json.RawMessage, error) {
	return c.changeBatch(ctx, id, "/cancel")
}

func (c *Client) changeBatch(ctx context.Context, id, verb string) (*Batch, json.RawMessage, error) {
	return get[Batch](ctx, c, call{method: http.MethodPost, path: batchPath(id) + verb, resend: true})
}

// RetryBatch runs the failed items of a batch again, and the cancelled ones if that is asked for.
// It is not sent again when the connection breaks, because that could retry twice.
func (c *Client) RetryBatch(ctx context.Context, id string, cancelled bool) (*Batch, json.RawMessage, error) {
	return get[Batch](ctx, c, call{method: http.MethodPost, path: batchPath(id) + "/retry", body: api.BatchRetryRequest{Cancelled: cancelled}})
}

func batchPath(id string) string { return batchesPath + "/" + url.PathEscape(id) }

// BatchResults calls sink with the lines of the results of a batch whose index is above after, each
// with its line break. With follow it waits for items that have not ended. It resumes after a
// broken connection.
func (c *Client) BatchResults(ctx context.Context, id string, after int, follow bool, sink func(index int, line []byte) error) error {
	wait := c.newBackOff()
	for redial := false; ; redial = true {
		last, began := after, time.Now()
		err := c.batchResults(ctx, id, &after, follow, redial, sink)
		var broken *brokenError
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !errors.As(err, &broken):
			return err
		case after > last || time.Since(began) > longestPause:
			wait.Reset()
		}
		pause := wait.NextBackOff()
		if pause == backoff.Stop {
			return err
		}
		c.retrying(err)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// brokenError is returned if a connection broke off.
type brokenError struct{ error }

// batchResults reads lines from one connection, and sets after to the index of the last one.
func (c *Client) batchResults(
	ctx context.Context, id string, after *int, follow, redial bool, sink func(index int, line []byte) error,
) error {
	query := url.Values{"follow": {strconv.FormatBool(follow)}}
	if *after >= 0 {
		query.Set("after", strconv.Itoa(*after))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp, err := c.do(ctx, call{
		method: http.MethodGet, path: batchPath(id) + "/results?" + query.Encode(), header: map[string]string{"Accept": ndjson}, resend: true, redial: redial,
	})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // the rest is not needed
	watchdog := time.AfterFunc(silence, cancel)
	defer watchdog.Stop()
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF) && len(line) == 0:
			return nil
		case err != nil:
			return &brokenError{fmt.Errorf("the results of %s broke off after item %d: %w", id, *after, err)}
		}
		watchdog.Reset(silence)
		if len(bytes.TrimSpace(line)) == 0 {
			continue // sent to keep the connection open
		}
		var at struct {
			Index *int `json:"index"`
		}
		if err := json.Unmarshal(line, &at); err != nil || at.Index == nil {
			return fmt.Errorf("decode a result of %s: %w", id, errors.Join(err, errors.New("a line without an index")))
		}
		if err := sink(*at.Index, line); err != nil {
			return err
		}
		*after = *at.Index
	}
}
