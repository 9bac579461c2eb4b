package main

import (
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
)

// The exit codes of `bullpen run`, `logs --follow` and `wait` besides the exit codes of programs.
// Shells and container tools use the same.
const (
	exitTimeout = 124
	exitUnknown = 125
	exitMemory  = 137
	exitSeccomp = 159
)

// exitCodesHelp documents them in --help.
const exitCodesHelp = `the program's own, 128+N if signal N ended it, or

  124  the program exceeded its timeout
  125  the program could not run, or its outcome is unknown
  130  the program was cancelled, or the command was interrupted
  137  the program exceeded its memory limit
  159  the program made a forbidden system call
  2    wrong usage`

// unknownOutcome makes the command exit with the code for an unknown outcome, unless err is a usage
// error.
func unknownOutcome(err error) error {
	if err == nil {
		return nil
	}
	return exitError{exitUnknown, err}
}

// outcome returns the error with a result's exit code, nil for 0. If the platform ended the
// program, the error has the reason.
func outcome(id proto.TraceID, exitCode *int, code, message *string) error {
	switch {
	case code != nil:
		return exitError{platformExitCode(proto.ErrorCode(*code)), platformError(id, *code, message)}
	case exitCode == nil:
		return exitError{code: exitUnknown}
	case *exitCode != 0:
		return exitError{code: *exitCode}
	default:
		return nil
	}
}

func resultOutcome(id proto.TraceID, r *proto.Result) error {
	return outcome(id, &r.ExitCode, r.ErrorCode, r.ErrorMessage)
}

func platformExitCode(code proto.ErrorCode) int {
	switch code {
	case proto.CodeTimeout:
		return exitTimeout
	case proto.CodeCancelled:
		return exitInterrupted
	case proto.CodeMemory:
		return exitMemory
	case proto.CodeSeccomp:
		return exitSeccomp
	default:
		return exitUnknown
	}
}

func platformError(id proto.TraceID, code string, message *string) error {
	if message == nil {
		return fmt.Errorf("%s: %s", id, code)
	}
	return fmt.Errorf("%s: %s: %s", id, code, *message)
}

// eventPrinter prints the events of an execution: its output on the same streams here, or each
// event as JSON.
type eventPrinter struct {
	streams
	json    bool
	lastSeq int64 // of the last event, or of the event to start after
	missing bool  // some events were missing
	// results prints the results of a program that is run with --rich; nil to print only their texts.
	results *resultPrinter
}

func (p *eventPrinter) event(e *client.Event) error {
	if p.json {
		_, err := p.out.Write(e.Line)
		return err
	}
	if e.Type != proto.EventKeepalive {
		p.missing = p.missing || e.Seq > p.lastSeq+1
		p.lastSeq = e.Seq
	}
	switch e.Type {
	case proto.EventOutput:
		to := p.out
		if e.Stream == proto.Stderr {
			to = p.err
		}
		if e.Base64 != nil {
			_, err := to.Write(e.Base64)
			return err
		}
		_, err := io.WriteString(to, e.Data)
		return err
	case proto.EventDisplay:
		if p.results != nil {
			return p.results.display(e.Index, e.Display, e.Omitted)
		}
		return printText(p.out, e.Display)
	case proto.EventResult:
		if p.results != nil {
			if err := p.results.rest(e.Result); err != nil {
				return err
			}
		}
		if p.missing {
			p.errorf("%s: some of the output above is missing; `bullpen get %[1]s` prints what the result kept", e.TraceID)
		}
	}
	return nil
}

// result prints a result that came without events.
func (p *eventPrinter) result(id proto.TraceID, r *proto.Result) error {
	if p.json {
		return printJSON(p.out, struct {
			Type    proto.EventType `json:"type"`
			TraceID proto.TraceID   `json:"trace_id"`
			Status  proto.Status    `json:"status"`
			Result  *proto.Result   `json:"result"`
		}{proto.EventResult, id, r.Status().Stream(), r})
	}
	if _, err := io.WriteString(p.out, r.Stdout); err != nil {
		return err
	}
	if _, err := io.WriteString(p.err, r.Stderr); err != nil || p.results == nil {
		return err
	}
	return p.results.rest(r)
}
