package sandboxes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Events reads the output of executions.
type Events interface {
	// Follow reads the events of an execution with sequence numbers above after, and always the
	// result event.
	Follow(ctx context.Context, org string, id proto.TraceID, after int64) (web.Tail, error)
	// Last returns the sequence number of the current last event of an attempt, without the result;
	// 0 if there is none.
	Last(ctx context.Context, org string, id proto.TraceID, attempt int) (int64, error)
}

// Logs returns what the processes of a sandbox have printed since its last start. The guest writes it as
// its own output.
func (s *Service) Logs(ctx context.Context, x *proto.LiveSandbox) (*api.SandboxLogs, error) {
	logs := &api.SandboxLogs{Entries: []api.SandboxLogEntry{}, TraceID: x.Execution}
	rec, err := s.Jobs.Lookup(ctx, x.Org, x.Execution)
	switch {
	case errors.Is(err, proto.ErrNotFound) && x.State.Active():
		return logs, nil // it has not been submitted yet
	case errors.Is(err, proto.ErrNotFound):
		return nil, api.Errorf(api.CodeNotFound, "the logs of the sandbox are no longer kept")
	case err != nil:
		return nil, err
	case rec.Result != nil && rec.Result.Stdout != "": // of which there is more than of the events
		for line := range strings.Lines(rec.Result.Stdout) {
			addEntry(logs, line)
		}
		logs.Truncated = logs.Truncated || rec.Result.StdoutTruncated
		return logs, nil
	}
	tail, err := s.Events.Follow(ctx, x.Org, x.Execution, 0)
	if err != nil {
		return nil, fmt.Errorf("read the logs of sandbox %s: %w", x.ID, err)
	}
	defer tail.Close()
	last, ended := int64(0), rec.Status.Terminal()
	if !ended {
		if last, err = s.Events.Last(ctx, x.Org, x.Execution, rec.Attempt); err != nil {
			return nil, fmt.Errorf("read the logs of sandbox %s: %w", x.ID, err)
		}
	}
	for read := int64(0); ended || read < last; {
		batch, err := tail.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read the logs of sandbox %s: %w", x.ID, err)
		}
		addEntries(logs, batch.Lines)
		if batch.Result != nil {
			logs.Truncated = logs.Truncated || batch.Result.OutputTruncated
			break
		}
		read = batch.Last
	}
	return logs, nil
}

// addEntries adds the entries in encoded events.
func addEntries(logs *api.SandboxLogs, events []byte) {
	for line := range bytes.Lines(events) {
		var event struct {
			Type    proto.EventType `json:"type"`
			Stream  proto.Stream    `json:"stream"`
			Data    string          `json:"data"`
			Missing json.RawMessage `json:"missing"`
		}
		if err := json.Unmarshal(line, &event); err != nil {
			continue
		}
		logs.Truncated = logs.Truncated || event.Missing != nil
		if event.Type == proto.EventOutput && event.Stream == proto.Stdout {
			addEntry(logs, event.Data)
		}
	}
}

// addEntry adds the entry in a line of a guest's output, unless the guest was killed while it wrote.
func addEntry(logs *api.SandboxLogs, line string) {
	var entry api.SandboxLogEntry
	if json.Unmarshal([]byte(line), &entry) != nil {
		return
	}
	logs.Truncated = logs.Truncated || entry.Type == "truncated" || entry.Type == "dropped"
	logs.Entries = append(logs.Entries, entry)
}

func (s *Routes) logs(w http.ResponseWriter, r *web.Request) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	x, err := s.Store.Get(r.Context(), r.Key.Org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	logs, err := s.Logs(r.Context(), x)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, logs)
}
