package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	batchesPath = "/v1/batches"
	jsonl       = "application/jsonl"
)

// CreateBatch sends a new batch as JSONL: one [api.ExecuteRequest] per line, after an optional
// first line {"batch": …} with settings. open opens the text for each attempt, and size is its
// length in bytes.
func (c *Client) CreateBatch(ctx context.Context, size int64, open func() io.Reader) (*api.Batch, error) {
	return get[api.Batch](ctx, c, call{
		method: http.MethodPost, path: batchesPath, upload: open, size: size, resend: true,
		header: c.idempotent(map[string]string{"Content-Type": jsonl}),
	})
}

// Batches returns the batches of the key's organisation, the newest first.
func (c *Client) Batches(ctx context.Context) iter.Seq2[api.Batch, error] {
	return pages[api.Batch](ctx, c, batchesPath, "batches", largestPages())
}

// Batch returns the state of a batch.
func (c *Client) Batch(ctx context.Context, id string) (*api.Batch, error) {
	return get[api.Batch](ctx, c, call{method: http.MethodGet, path: batchPath(id), resend: true, redial: true})
}

// RemoveBatch removes a batch that has ended. The records of its executions stay.
func (c *Client) RemoveBatch(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: batchPath(id)})
}

// PauseBatch makes a batch submit no more items.
func (c *Client) PauseBatch(ctx context.Context, id string) (*api.Batch, error) {
	return c.changeBatch(ctx, id, "/pause")
}

// ResumeBatch lets a paused batch submit items again.
func (c *Client) ResumeBatch(ctx context.Context, id string) (*api.Batch, error) {
	return c.changeBatch(ctx, id, "/resume")
}

// CancelBatch cancels the items of a batch that have not ended.
func (c *Client) CancelBatch(ctx context.Context, id string) (*api.Batch, error) {
	return c.changeBatch(ctx, id, "/cancel")
}

func (c *Client) changeBatch(ctx context.Context, id, verb string) (*api.Batch, error) {
	return get[api.Batch](ctx, c, call{method: http.MethodPost, path: batchPath(id) + verb, resend: true})
}

// RetryBatch runs the failed items of a batch again, and the cancelled ones if cancelled is true.
// It is not resent when the connection breaks, because that could retry twice.
func (c *Client) RetryBatch(ctx context.Context, id string, cancelled bool) (*api.Batch, error) {
	body := api.BatchRetryRequest{Cancelled: cancelled}
	return get[api.Batch](ctx, c, call{method: http.MethodPost, path: batchPath(id) + "/retry", body: body})
}

func batchPath(id string) string { return batchesPath + "/" + url.PathEscape(id) }

// BatchLine is the result of an item as a line of JSON.
type BatchLine struct {
	Index int    // of the item
	Line  []byte // with its line break
}

// Result decodes the line.
func (l *BatchLine) Result() (*api.BatchResult, error) {
	result := new(api.BatchResult)
	if err := json.Unmarshal(l.Line, result); err != nil {
		return nil, fmt.Errorf("decode the result of item %d: %w", l.Index, err)
	}
	return result, nil
}

// BatchResults returns the results of a batch in the order of its items: those whose index is above
// after, or all if after is -1. Without follow it ends before the first unfinished item; with
// follow it waits. It resumes after a broken connection. An error is the last value.
func (c *Client) BatchResults(ctx context.Context, id string, after int, follow bool) iter.Seq2[BatchLine, error] {
	return func(yield func(BatchLine, error) bool) {
		r := &batchResults{client: c, id: id, after: after, follow: follow, yield: yield}
		if err := r.run(ctx); err != nil {
			yield(BatchLine{}, err)
		}
	}
}

// batchResults is a sequence of connections that carry the results of a batch.
type batchResults struct {
	client *Client
	id     string
	after  int // index of the last result that was returned
	follow bool
	yield  func(BatchLine, error) bool
}

// brokenError is returned if a connection broke off.
type brokenError struct{ error }

// run reconnects until all results have come, or the caller wants no more.
func (r *batchResults) run(ctx context.Context) error {
	retry := r.client.newRetry()
	for redial := false; ; redial = true {
		last, began := r.after, time.Now()
		err := r.connect(ctx, redial)
		broken, isBroken := errors.AsType[*brokenError](err)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !isBroken || r.client.cfg.NoRetry:
			return err
		}
		again, err := retry.wait(ctx, r.after > last, began, broken)
		switch {
		case err != nil:
			return err
		case !again:
			return broken
		}
	}
}

// connect returns the results of one connection. It returns nil if these were all, or if the caller wants
// no more.
func (r *batchResults) connect(ctx context.Context, redial bool) error {
	query := url.Values{"follow": {strconv.FormatBool(r.follow)}}
	if r.after >= 0 {
		query.Set("after", strconv.Itoa(r.after))
	}
	l, err := r.client.lines(ctx, call{
		method: http.MethodGet, path: withQuery(batchPath(r.id)+"/results", query),
		header: map[string]string{"Accept": ndjson}, resend: true, redial: redial,
	})
	if err != nil {
		return err
	}
	defer l.close()
	for {
		line, err := l.next()
		switch {
		case errors.Is(err, io.EOF) && len(line) == 0:
			return nil
		case err != nil:
			return &brokenError{fmt.Errorf("the results of %s broke off after item %d: %w", r.id, r.after, err)}
		case len(bytes.TrimSpace(line)) == 0:
			continue // sent to keep the connection open
		}
		var at struct {
			Index *int `json:"index"`
		}
		if err := json.Unmarshal(line, &at); err != nil || at.Index == nil {
			return fmt.Errorf("decode a result of %s: %w", r.id, errors.Join(err, errors.New("a line without an index")))
		}
		r.after = *at.Index
		if !r.yield(BatchLine{*at.Index, line}, nil) {
			return nil
		}
	}
}
