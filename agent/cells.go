package agent

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxSeen is the number of pictures of one call that a model sees.
const maxSeen = 8

const (
	noInterpreter = "This server has no interpreter for this container now: the code has run as a program of its own, " +
		"without the variables of earlier calls, and its own are gone."
	unknownOutcome = "The sandbox of this call is gone, with all variables, and what the call has done is not known. " +
		"Files are as they were saved last. "
)

// Placed returns a tool of programs whose calls run in the container's live sandbox while it has one, and else as
// executions. With cells, its calls are cells of the container's interpreter. The place of a call is logged before the
// call runs there: a run that is continued runs no call twice.
func (c *Container) Placed(t Tool, cells bool) Tool {
	execute := t.Execute
	t.Execute = func(ctx context.Context, call *Call) (*Outcome, error) {
		c.place, c.errPlace = c.Host.Place(ctx, c.ID, cells)
		if cells {
			c.Used = true
		}
		if c.errPlace != nil {
			return execute(ctx, call)
		}
		return &Outcome{Change: &Change{Place: c.place}}, nil
	}
	t.Apply = func(ctx context.Context, call *Call, planned *Outcome) (*Outcome, error) {
		c.place, c.errPlace = planned.Change.Place, nil
		return execute(ctx, call)
	}
	return t
}

// Cell runs Python code in the interpreter of the container, or as a program if this server has none now. Its output
// is that of the code and the values that it shows. Files created or changed directly in the home are passed to the
// client.
func (c *Container) Cell(ctx context.Context, call, code string) (*Output, error) {
	if c.place == nil {
		out, err := c.Python(ctx, call, code)
		if err == nil {
			out.addNote(noInterpreter)
		}
		return out, err
	}
	began := time.Now()
	r, err := c.Host.RunCell(ctx, c.ID, c.place, c.executionID(call), code)
	if gone, err := lost(err); gone != nil || err != nil {
		return gone, err
	}
	pictures := r.CutForModel()
	result := proto.Exited(0)
	switch r.Status {
	case "ok":
	case "timeout":
		result = proto.Failure(proto.CodeTimeout, "The code was interrupted at its timeout. Variables are kept.")
	default:
		result = proto.Exited(1)
	}
	shown := api.CellResult{Results: r.Results, Dropped: r.Dropped}
	failure := api.CellResult{Error: r.Error, Message: r.Message, Status: r.Status}
	if result.ErrorCode != nil {
		failure.Status = "" // its message says so
	}
	result.Stdout, result.StdoutTruncated = joined(r.Stdout, shown.Text()), r.StdoutTruncated
	result.Stderr, result.StderrTruncated = joined(r.Stderr, failure.Text()), r.StderrTruncated
	result.DurationMS = time.Since(began).Milliseconds()
	out := &Output{Record: &proto.Record{Status: result.Status(), StartedAt: &began, Result: &result}}
	for i, p := range pictures {
		if i == maxSeen {
			out.addNote(fmt.Sprintf("%d more pictures are not shown to you.", len(pictures)-i))
			break
		}
		out.Pictures = append(out.Pictures, Image{p.Type, p.Base64})
	}
	out.addNote(c.place.Note)
	var paths []string
	for _, f := range r.Files {
		paths = append(paths, f.Path)
	}
	return out, c.leaveAll(ctx, out, paths, nil)
}

// LeavePictures leaves the pictures of a call as files for the client.
func (c *Container) LeavePictures(ctx context.Context, call string, out *Output) error {
	for i, p := range out.Pictures {
		content, err := base64.StdEncoding.DecodeString(p.Base64)
		if err != nil {
			continue // a program has made it up
		}
		org, _ := c.Host.Caller()
		name := fmt.Sprintf("%s/picture-%d.%s", call, i+1, strings.TrimPrefix(p.MediaType, "image/"))
		f := proto.NewContainerFile(org, c.ID, name, int64(len(content)))
		f.ExpiresAt = new(c.Expires(f.CreatedAt).UTC())
		if err := c.Host.SaveFile(ctx, f, bytes.NewReader(content)); err != nil {
			return err
		}
		out.Files = append(out.Files, f)
	}
	return nil
}

// joined returns two texts with a line break between them, if both are not empty.
func joined(a, b string) string {
	if a == "" || b == "" || strings.HasSuffix(a, "\n") {
		return a + b
	}
	return a + "\n" + b
}

// addNote adds a note for the model to the standard error.
func (o *Output) addNote(note string) {
	if note == "" {
		return
	}
	record, result := *o.Record, *o.Record.Result
	result.Stderr = joined(result.Stderr, "["+note+"]")
	record.Result, o.Record = &result, &record
}

// lost returns the output of a call whose place is gone, for an error that says so. Otherwise it returns the error.
func lost(err error) (*Output, error) {
	known, ok := errors.AsType[*api.Error](err)
	if !ok || known.Code != api.CodeContextLost {
		return nil, err
	}
	result := proto.Exited(1)
	result.Stderr = unknownOutcome + "(" + known.Message + ")"
	return &Output{Record: &proto.Record{Status: result.Status(), Result: &result}}, nil
}
