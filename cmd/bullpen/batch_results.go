package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
)

type batchResultsCommand struct {
	remote   `embed:""`
	batchArg `embed:""`
	Output   string `short:"o" placeholder:"FILE" help:"Write to this file instead of standard output. If it has results of this batch, continue after the last one."`
	Follow   bool   `short:"f" help:"Wait for the items that have not ended."`
	After    int    `default:"-1" placeholder:"INDEX" help:"Leave out the items up to this index."`
}

func (*batchResultsCommand) Help() string {
	return `Prints a line of JSON for each item, in the order of the items. Without --follow, they end before the first
item that has not ended. A retry of the batch changes results: download them to a new file then.

Exit codes: 0 if the results could be read, whatever they are; 1 otherwise.

Examples:

  bullpen batch results bat_abcdefghijklmnopqrstuvwxyz | jq -r 'select(.status != "success") | .error_message'
  bullpen batch results --follow -o results.jsonl bat_abcdefghijklmnopqrstuvwxyz`
}

func (c *batchResultsCommand) Run(ctx context.Context, s streams) (err error) {
	if c.After >= 0 && c.Output != "" {
		return usagef("-o goes on after the last result in the file: leave out --after")
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	out, after := s.out, c.After
	if c.Output != "" && c.Output != "-" {
		f, last, err := c.resume(ctx, cl)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		out, after = f, last
	}
	return writeResults(out, cl.BatchResults(ctx, c.ID, after, c.Follow))
}

// writeResults writes the results of a batch as JSONL. It returns an error at the end if the server
// could not read some of them.
func writeResults(w io.Writer, results iter.Seq2[client.BatchLine, error]) error {
	unreadable, first := 0, 0
	err := each(results, func(result client.BatchLine) error {
		var line struct{ Unreadable bool }
		if err := json.Unmarshal(result.Line, &line); err == nil && line.Unreadable {
			if unreadable++; unreadable == 1 {
				first = result.Index
			}
		}
		_, err := w.Write(result.Line)
		return err
	})
	if err == nil && unreadable > 0 {
		err = fmt.Errorf("the server could not read %d results, the first of item %d: their lines say so", unreadable, first)
	}
	return err
}

// resume opens the file of results, cuts off an incomplete line at its end, and returns the index
// of its last line, -1 if there is none.
func (c *batchResultsCommand) resume(ctx context.Context, cl *client.Client) (f *os.File, after int, err error) {
	f, err = os.OpenFile(c.Output, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, 0, err
	}
	defer func() {
		if err != nil {
			_ = f.Close() // nothing was written
		}
	}()
	last, end, err := lastLine(f)
	if err != nil {
		return nil, 0, fmt.Errorf("read %s: %w", c.Output, err)
	}
	if after, err = c.indexOf(ctx, cl, last); err != nil {
		return nil, 0, err
	}
	if err := f.Truncate(end); err != nil {
		return nil, 0, err
	}
	_, err = f.Seek(end, io.SeekStart)
	return f, after, err
}

// indexOf returns the index in a line of results, and checks that the line belongs to the batch. It
// returns -1 for an empty line.
func (c *batchResultsCommand) indexOf(ctx context.Context, cl *client.Client, line []byte) (int, error) {
	if len(line) == 0 {
		return -1, nil
	}
	var result struct {
		Index   *int           `json:"index"`
		TraceID *proto.TraceID `json:"trace_id"`
	}
	if err := json.Unmarshal(line, &result); err != nil || result.Index == nil {
		return 0, fmt.Errorf("%s is not a file of results: give another one", c.Output)
	}
	if result.TraceID == nil { // it was never submitted
		return *result.Index, nil
	}
	e, err := cl.Get(ctx, *result.TraceID)
	if refused, ok := errors.AsType[*client.Error](err); ok && refused.Status == http.StatusNotFound { // not kept any more
		return *result.Index, nil
	}
	if err == nil && (e.Batch == nil || e.Batch.ID != c.ID) {
		err = fmt.Errorf("%s has the results of another batch: give another file", c.Output)
	}
	return *result.Index, err
}

// lastLine returns the last complete line of a file, and the offset of its end.
func lastLine(f io.Reader) (last []byte, end int64, err error) {
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF):
			return last, end, nil
		case err != nil:
			return nil, 0, err
		}
		end += int64(len(line))
		if line = bytes.TrimSpace(line); len(line) > 0 {
			last = line
		}
	}
}

// newResults creates the file of results, nil for standard output or none. It refuses a file that
// has something.
func newResults(name string) (*os.File, error) {
	if name == "" || name == "-" {
		return nil, nil //nolint:nilnil // documented
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		err = usagef("-o %s: the file is not empty", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
