package proto

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"
)

// HistoryChange is the state of an execution, for the index of executions. Its result has no
// output.
type HistoryChange struct {
	Record *Record
	Seq    uint64 // of the record in its stream; 0 if there is only a job
	JobSeq uint64 // of the job in its stream; 0 if the change came from a record
}

// HistoryPosition is how far the index of executions has read the streams.
type HistoryPosition struct {
	Streams string // identifies the two streams: others start a new index
	Jobs    uint64 // sequence number of the last job
	Records uint64 // sequence number of the last record
}

// HistoryFilter selects executions of an organisation. Empty fields select all.
type HistoryFilter struct {
	Org       string
	Status    Status
	Language  Language
	Mode      Mode
	Key       string
	ThreadID  string
	RequestID string
	Schedule  string
	Batch     string
	Pipeline  string
	Metadata  map[string]string
	From      time.Time // created at this time or later; zero for any
	Until     time.Time // created before; zero for any
	Before    int64     // the place of the last execution of the page before; 0 for the first page
	Limit     int
}

// Matches reports whether the filter selects an execution, whatever its place.
func (f *HistoryFilter) Matches(r *Record) bool {
	equal := func(want, got string) bool { return want == "" || want == got }
	for name, value := range f.Metadata {
		if got, ok := r.Metadata[name]; !ok || got != value {
			return false
		}
	}
	created := r.CreatedAt.Truncate(time.Millisecond) // as clients see it
	return r.Org == f.Org && equal(string(f.Status), string(r.Status)) && equal(string(f.Language), string(r.Language)) &&
		equal(string(f.Mode), string(r.Mode)) && equal(f.Key, r.Key) && equal(f.ThreadID, r.ThreadID) &&
		equal(f.RequestID, r.RequestID) && equal(f.Schedule, r.ScheduleID) && equal(f.Batch, r.Batch) &&
		equal(f.Pipeline, r.PipelineID) &&
		(f.From.IsZero() || !created.Before(f.From)) && (f.Until.IsZero() || created.Before(f.Until))
}

// HistoryTerm is an immutable field of an execution that filters can match.
type HistoryTerm struct{ Name, Value string }

// HistoryTerms returns the terms of an execution. To filter by another field of [Meta], add a row
// here, in [HistoryFilter.Terms] and in [HistoryFilter.Matches].
func HistoryTerms(m *Meta) []HistoryTerm {
	return historyTerms(m.Key, m.ThreadID, m.RequestID, m.ScheduleID, m.Batch, m.PipelineID, m.Metadata)
}

// Terms returns the terms of the filter, usually the rarest first.
func (f *HistoryFilter) Terms() []HistoryTerm {
	return historyTerms(f.Key, f.ThreadID, f.RequestID, f.Schedule, f.Batch, f.Pipeline, f.Metadata)
}

func historyTerms(
	key, thread, request, schedule, batch, pipeline string, metadata map[string]string,
) (terms []HistoryTerm) {
	for _, t := range []HistoryTerm{
		{"request_id", request},
		{"thread_id", thread},
		{"schedule", schedule},
		{"batch", batch},
		{"pipeline", pipeline},
		{"key", key},
	} {
		if t.Value != "" {
			terms = append(terms, t)
		}
	}
	for name := range maps.Keys(metadata) {
		terms = append(terms, HistoryTerm{"metadata." + name, metadata[name]})
	}
	return terms
}

// HistoryPage is a page of executions, the newest first. Results have no output.
type HistoryPage struct {
	Records []*Record
	Next    int64 // the place before which the next page starts; 0 on the last page
	// Complete is whether the page has everything stored at the time of the request. If not, the
	// index lags by Behind changes, or by an unknown number if that is 0.
	Complete bool
	Behind   uint64
}

// HistoryError means that the index of executions cannot be read or written. Executions do not need
// it.
type HistoryError struct {
	Reason string // for clients
	Err    error
}

func (e *HistoryError) Error() string {
	return fmt.Sprintf("index of executions: %s: %v", e.Reason, e.Err)
}

// Unwrap returns the cause.
func (e *HistoryError) Unwrap() error { return e.Err }

// SummarizeRecord returns the JSON form of the client-visible part of r, without outputs.
func SummarizeRecord(r *Record) ([]byte, error) {
	small := *r.Public()
	if small.Result != nil {
		result := small.Result.WithoutOutput()
		small.Result = &result
	}
	text, err := json.Marshal(&small)
	if err != nil {
		return nil, fmt.Errorf("encode the summary of %s: %w", r.TraceID, err)
	}
	return text, nil
}

// DecodeSummary decodes the summary of execution id.
func DecodeSummary(id TraceID, text []byte) (*Record, error) {
	var r Record
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("decode the summary of %s: %w", id, err)
	}
	if r.TraceID != id || r.Status == "" || r.Status.Terminal() != (r.Result != nil) {
		return nil, fmt.Errorf("decode the summary of %s: status %q of %q", id, r.Status, r.TraceID)
	}
	return &r, nil
}
