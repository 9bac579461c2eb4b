package e2b

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto/api"
)

const maxLogs = 1000 // entries of an answer

// logEntry is an entry of a log as E2B has it.
type logEntry struct {
	Timestamp api.Time          `json:"timestamp"`
	Message   string            `json:"message"`
	Level     string            `json:"level"`
	Fields    map[string]string `json:"fields"`
}

// logLine is the older form of an entry.
type logLine struct {
	Timestamp api.Time `json:"timestamp"`
	Line      string   `json:"line"`
}

// logs answers with the log of a sandbox, which may have ended.
func (s *Server) logs(w http.ResponseWriter, r *web.Request) error {
	entries, err := s.readLogs(r, "cursor")
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, map[string]any{"logs": entries})
}

// logsV1 answers with the log in its older form, too.
func (s *Server) logsV1(w http.ResponseWriter, r *web.Request) error {
	entries, err := s.readLogs(r, "start")
	if err != nil {
		return err
	}
	lines := make([]logLine, len(entries))
	for i, e := range entries {
		lines[i] = logLine{e.Timestamp, e.Message}
	}
	return web.WriteValue(w, http.StatusOK, map[string]any{"logs": lines, "logEntries": entries})
}

// readLogs returns the entries that a request asks for. The parameter start has the time of the first one,
// in milliseconds.
func (s *Server) readLogs(r *web.Request, start string) ([]logEntry, error) {
	from, err := web.QueryInt(r, start, 0, api.MaxWhole, 0)
	if err != nil {
		return nil, err
	}
	limit, err := web.QueryInt(r, "limit", 0, maxLogs, 0)
	if err != nil {
		return nil, err
	}
	x, err := s.stored(r)
	if err != nil {
		return nil, err
	}
	logs, err := s.Sandboxes.Logs(r.Context(), x)
	if err != nil {
		return nil, err
	}
	entries := []logEntry{}
	for i := range logs.Entries {
		e := &logs.Entries[i]
		if e.Time.UnixMilli() < from {
			continue
		}
		if len(entries) == int(cmp.Or(limit, maxLogs)) {
			break
		}
		entries = append(entries, newLogEntry(e))
	}
	return entries, nil
}

func newLogEntry(e *api.SandboxLogEntry) logEntry {
	form := logEntry{e.Time, e.Text, "info", map[string]string{"type": e.Type}}
	if e.PID != 0 {
		form.Fields["pid"] = strconv.Itoa(e.PID)
	}
	if e.Stream != "" {
		form.Fields["stream"] = e.Stream
	}
	switch e.Type {
	case "start":
		form.Message = e.Command
	case "end":
		form.Message = fmt.Sprintf("exit code %d", *e.ExitCode)
	case "dropped":
		form.Message = fmt.Sprintf("%d entries are missing", e.Count)
	case "truncated":
		form.Message = "the log has reached its limit"
	}
	return form
}
