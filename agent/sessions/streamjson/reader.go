package streamjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent/sessions"
)

// Line is a line of output. Decode returns the fields that depend on its type.
type Line struct {
	Type    string `json:"type"`
	Subtype string `json:"subtype"`
	text    []byte
}

// Decode decodes all of the line.
func (l *Line) Decode(v any) error { return json.Unmarshal(l.text, v) }

// Reader reports what a program writes. It is not safe for concurrent use.
type Reader struct {
	Process sessions.Process
	Program string // its name in messages to users
	Report  func(sessions.Native) error
	// ID is the program's own id of the session, once Session has reported it.
	ID string

	raw    json.RawMessage // the line that was read last
	cursor string          // after that line

	message string // id of the assistant's message in progress
	text    string // native id of the text in progress; empty for none
	last    string // native id of the last complete text of the message; empty for none
	blocks  int    // number of texts and thoughts so far
}

// Next returns the next line. It reports lines that are not JSON objects and skips them. The error is
// [io.EOF] when the program has ended.
func (r *Reader) Next() (*Line, error) {
	for {
		text, cursor, err := r.Process.ReadLine()
		if err != nil {
			r.raw = nil
			return nil, err
		}
		l := &Line{text: text}
		if err := json.Unmarshal(text, l); err == nil {
			r.raw, r.cursor = slices.Clone(text), cursor
			return l, nil
		}
		r.raw, r.cursor = nil, cursor
		if err := r.Unparsed("a line is not a JSON object"); err != nil {
			return nil, err
		}
	}
}

// Unparsed reports that the last line cannot be understood.
func (r *Reader) Unparsed(reason string) error {
	return r.Emit(sessions.Unparsed, sessions.UnparsedOutput{Error: reason, Location: r.Program + " stdout"})
}

// Emit reports data together with the last line.
func (r *Reader) Emit(kind sessions.EventType, data any) error {
	return r.Report(sessions.Native{Type: kind, Data: data, Raw: r.raw, Cursor: r.cursor})
}

// Session reports the program's own id of the session.
func (r *Reader) Session(l *Line) error {
	var init struct {
		SessionID string `json:"session_id"`
	}
	if err := l.Decode(&init); err != nil {
		return r.Unparsed(err.Error())
	}
	r.ID = init.SessionID
	return r.Report(sessions.Native{Type: sessions.SessionStarted, NativeSession: init.SessionID, Cursor: r.cursor})
}

// Ended reports the end of the program after Next has returned err. inTurn reports whether a turn was in
// progress. Between turns, the end of the program does not end the session.
func (r *Reader) Ended(err error, inTurn bool) error {
	ended := sessions.Ended{Reason: sessions.EndCompleted, TerminatedBy: sessions.FromAgent, Message: r.Program + " ended"}
	if inTurn {
		ended.Reason = sessions.EndError
	}
	if !errors.Is(err, io.EOF) {
		ended.TerminatedBy, ended.Message = sessions.FromDaemon, "the connection to the agent was lost"
		return r.Emit(sessions.SessionEnded, ended)
	}
	exit := r.Process.Exit()
	if ended.ExitCode = &exit.Code; exit.Stderr.Head != "" {
		ended.Stderr = &exit.Stderr
	}
	return r.Emit(sessions.SessionEnded, ended)
}

// Failure reports the error in a line of the type result, if there is one. Claude Code reports a failed
// request to its model as a success with is_error.
func (r *Reader) Failure(l *Line) error {
	var result struct {
		IsError bool     `json:"is_error"`
		Status  *int     `json:"api_error_status"`
		Result  string   `json:"result"`
		Error   string   `json:"error"`
		Errors  []string `json:"errors"`
	}
	if err := l.Decode(&result); err != nil {
		return r.Unparsed(err.Error())
	}
	if !result.IsError && l.Subtype == "success" {
		return nil
	}
	failure := sessions.Failure{Code: &l.Subtype}
	if l.Subtype == "success" {
		failure.Code = new("api_error")
	}
	for _, text := range []string{
		result.Result, result.Error, strings.Join(result.Errors, "\n"), "the turn ended with " + l.Subtype,
	} {
		if failure.Message == "" {
			failure.Message = text
		}
	}
	if result.Status != nil {
		failure.Details = json.RawMessage(fmt.Sprintf(`{"status":%d}`, *result.Status))
	}
	return r.Emit(sessions.ErrorEvent, failure)
}
