package main

import (
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

// printer puts a program's output where a program's output belongs, or prints events as JSON.
type printer struct {
	io   streams
	json bool
	last int64 // number of the last event seen, or of the one that was asked to begin after
	gap  bool  // events were missing in between
}

func (p *printer) event(e *client.Event) error {
	if p.json {
		_, err := p.io.out.Write(e.Line)
		return err
	}
	if e.Type != proto.EventKeepalive {
		p.gap = p.gap || e.Seq > p.last+1
		p.last = e.Seq
	}
	switch e.Type {
	case proto.EventOutput:
		to := p.io.out
		if e.Stream == proto.Stderr {
			to = p.io.err
		}
		_, err := io.WriteString(to, e.Data)
		return err
	case proto.EventResult:
		if p.gap {
			_, _ = fmt.Fprintf(p.io.err, "bullpen: %s: some of the output is missing above; `bullpen get %[1]s` has what the result kept of it\n", e.TraceID)
		}
	}
	return nil
}

// whole prints a result that came without events.
func (p *printer) whole(id proto.TraceID, r *proto.Result) error {
	if p.json {
		return printJSON(p.io.out, struct {
			Type    proto.EventType `json:"type"`
			TraceID proto.TraceID   `json:"trace_id"`
			Status  proto.Status    `json:"status"`
			Result  *proto.Result   `json:"result"`
		}{proto.EventResult, id, r.Status().Stream(), r})
	}
	if _, err := io.WriteString(p.io.out, r.Stdout); err != nil {
		return err
	}
	_, err := io.WriteString(p.io.err, r.Stderr)
	return err
}
