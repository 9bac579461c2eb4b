package work

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// resultsGroup is the number of records read concurrently before they are written.
	resultsGroup = 8
	// resultsPoll is how often a reader that follows looks for more results.
	resultsPoll = time.Second
	// resultsTime bounds a download that follows.
	resultsTime = 24 * time.Hour
)

func (s *BatchRoutes) getResults(w http.ResponseWriter, r *web.Request) error {
	after, err := web.QueryInt(r, "after", 0, proto.MaxBatchItems, -1)
	if err != nil {
		return err
	}
	follow, err := web.QueryBool(r, "follow", false)
	if err != nil {
		return err
	}
	found, err := s.inPath(r)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", web.TypeNDJSON)
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return web.ErrHeadOnly
	}
	ctx, cancel := s.Until(r.Context(), time.Now().Add(resultsTime))
	defer cancel()
	d := &resultsDownload{
		BatchRoutes: s, request: r.Info, w: w, control: http.NewResponseController(w), batch: &found.Batch,
		next: int(after) + 1, written: time.Now(),
	}
	return d.run(ctx, follow)
}

// resultsDownload writes the results of a batch.
type resultsDownload struct {
	*BatchRoutes
	request *web.Info
	w       http.ResponseWriter
	control *http.ResponseController
	batch   *proto.Batch
	next    int // index of the next line
	written time.Time
}

// run writes the results up to the first item that has not ended. If follow is set, it waits for
// that, until all items have ended.
func (d *resultsDownload) run(ctx context.Context, follow bool) error {
	for {
		items, err := d.Batches.Items(ctx, d.batch.Org, d.batch.ID)
		if err != nil {
			return fmt.Errorf("results of batch %s: %w", d.batch.ID, err)
		}
		begin, short := d.next, false
		for d.next < items.Len() && items.Status(d.next).Ended() && !short {
			err := d.write(ctx, items)
			if short = errors.Is(err, web.ErrOverloaded); err != nil && !short {
				return err
			}
		}
		if d.next > begin || time.Since(d.written) > web.Keepalive {
			if d.next == begin {
				if _, err := io.WriteString(d.w, "\n"); err != nil {
					return err
				}
			}
			d.written = time.Now()
			if err := d.control.Flush(); err != nil {
				return err
			}
		}
		if d.next >= items.Len() || !follow && !short {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(resultsPoll):
		}
	}
}

// write writes the lines of the next finished items. It returns web.ErrOverloaded if there is no
// memory for the first one now.
func (d *resultsDownload) write(ctx context.Context, items BatchItems) error {
	// Results may be large, so an organisation reads few at a time.
	done, err := d.Transfers.Begin(ctx, d.batch.Org)
	if err != nil {
		return err
	}
	defer done()
	defer d.ReleaseReads(d.request)
	var lines [resultsGroup]*api.BatchResult
	var short [resultsGroup]error // web.ErrOverloaded where there is no memory
	first, count := d.next, 0
	group, reading := errgroup.WithContext(ctx)
	for d.next < items.Len() && count < resultsGroup && items.Status(d.next).Ended() {
		index, place := d.next, count
		d.next, count = d.next+1, count+1
		group.Go(func() error {
			id := d.batch.ItemTrace(index, items.Round(index))
			record, err := d.Results.Lookup(reading, d.batch.Org, id)
			switch {
			case errors.Is(err, web.ErrOverloaded):
				short[place] = err
				return nil
			case err == nil || errors.Is(err, proto.ErrNotFound):
			case reading.Err() != nil || api.NewError(err).Code == api.CodeServiceUnavailable: // the client comes again
				return fmt.Errorf("result of item %d of batch %s: %w", index, d.batch.ID, err)
			default:
				d.Log.Error("result unreadable", "batch", d.batch.ID, "item", index, "trace_id", id, "error", err)
				lines[place] = api.NewUnreadableResult(index, items.Status(index), id)
				return nil
			}
			lines[place] = api.NewBatchResult(index, items.Status(index), record)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for place, line := range lines[:count] {
		if line == nil {
			d.next = first + place
			if place == 0 {
				return short[0]
			}
			return nil
		}
		if err := line.Write(d.w); err != nil {
			return err
		}
	}
	return nil
}
