package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

var errChangesLost = errors.New("lost the server while following changes")

// Changes returns the events of changed objects, without keepalives. It reconnects after a broken
// connection. The event ready comes first, and again after each reconnect: changes before it may
// have been missed. A global administrator follows the organisation org, or all if it is empty.
// With other API keys, org is empty and the events are about the organisation of the key. An error
// is the last value.
func (c *Client) Changes(ctx context.Context, org string) iter.Seq2[*api.ChangesEvent, error] {
	return func(yield func(*api.ChangesEvent, error) bool) {
		path := "/v1/changes"
		if org != "" {
			path = withQuery(path, url.Values{"org": {org}})
		}
		next := call{method: http.MethodGet, path: path, resend: true, header: map[string]string{"Accept": eventStream}}
		retry := c.newRetry()
		for {
			began := time.Now()
			ready, done, err := c.changes(ctx, next, yield)
			switch {
			case done:
				return
			case err == nil && c.cfg.NoRetry:
				err = errChangesLost
			}
			if err != nil {
				yield(nil, err)
				return
			}
			again, err := retry.wait(ctx, ready, began, errBrokenOff)
			if err == nil && !again {
				err = fmt.Errorf("%w: %w", errChangesLost, errBreaks)
			}
			if err != nil {
				yield(nil, err)
				return
			}
			next.redial = true
		}
	}
}

// changes yields the events of one connection. ready reports whether there were any, done whether
// the caller wants no more. A broken connection is not an error.
func (c *Client) changes(
	ctx context.Context, next call, yield func(*api.ChangesEvent, error) bool,
) (ready, done bool, err error) {
	l, err := c.lines(ctx, next)
	if err != nil {
		return false, false, err
	}
	defer l.close()
	for {
		line, err := l.next()
		switch {
		case ctx.Err() != nil:
			return ready, false, context.Cause(ctx)
		case err != nil:
			return ready, false, nil
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		e := new(api.ChangesEvent)
		if err := json.Unmarshal(data, e); err != nil {
			return ready, false, fmt.Errorf("decode an event of changes: %w", err)
		}
		ready = true
		if e.Type != api.ChangesKeepalive && !yield(e, nil) {
			return ready, true, nil
		}
	}
}
