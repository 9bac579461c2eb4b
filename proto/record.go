package proto

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// storedRecord is the first line of a stored record. The outputs follow as raw bytes: JSON could
// make them six times as long, and would be decoded only to be encoded again.
type storedRecord struct {
	*Record
	StdoutBytes int      `json:"stdout_bytes,omitempty"`
	StderrBytes int      `json:"stderr_bytes,omitempty"`
	Request     *Request `json:"request,omitempty"` // in the object, where older versions ignore it
}

// EncodeRecord returns the stored form of r: a JSON object without the outputs. If there is any
// output, a newline and the bytes of stdout and stderr follow; stdout_bytes and stderr_bytes in the
// object are their lengths.
func EncodeRecord(r *Record) ([]byte, error) {
	rest := *r
	stdout, stderr := "", ""
	for _, result := range []**Result{&rest.Result, &rest.Pending} { // at most one is set
		if *result != nil {
			small := **result
			stdout, stderr, small.Stdout, small.Stderr = small.Stdout, small.Stderr, "", ""
			*result = &small
		}
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // results have much HTML, and their size is limited
	if err := enc.Encode(storedRecord{&rest, len(stdout), len(stderr), r.Request}); err != nil {
		return nil, fmt.Errorf("encode record of %s: %w", r.TraceID, err)
	}
	head := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	if len(stdout)+len(stderr) == 0 {
		return head, nil
	}
	body := make([]byte, 0, len(head)+1+len(stdout)+len(stderr))
	body = append(append(body, head...), '\n')
	return append(append(body, stdout...), stderr...), nil
}

// DecodeRecord decodes the stored record of execution id, the inverse of [EncodeRecord]. A
// contradictory record is an error.
func DecodeRecord(id TraceID, body []byte) (*Record, error) {
	head, outputs, _ := bytes.Cut(body, []byte{'\n'})
	r := storedRecord{Record: &Record{}}
	if err := json.Unmarshal(head, &r); err != nil {
		return nil, fmt.Errorf("decode record of %s: %w", id, err)
	}
	if r.TraceID != id || r.Status == "" || r.Status.Terminal() != (r.Result != nil) {
		return nil, fmt.Errorf("decode record of %s: status %q of %q", id, r.Status, r.TraceID)
	}
	result := r.Result
	if r.Pending != nil {
		result = r.Pending
	}
	commits := len(r.VolumeCommits)
	if r.Commit != nil {
		commits++
	}
	if (r.Pending != nil) != (commits > 0) || r.Pending != nil && r.Status != StatusRunning {
		return nil, fmt.Errorf("decode record of %s: status %q with a pending result %v, %d commits", id, r.Status,
			r.Pending != nil, commits)
	}
	if r.StdoutBytes < 0 || r.StderrBytes != len(outputs)-r.StdoutBytes || r.StderrBytes < 0 ||
		len(outputs) > 0 && result == nil {
		return nil, fmt.Errorf("decode record of %s: its header has %d and %d bytes of output, its body %d",
			id, r.StdoutBytes, r.StderrBytes, len(outputs))
	}
	r.Record.Request = r.Request
	if len(outputs) > 0 {
		text := string(outputs)
		result.Stdout, result.Stderr = text[:r.StdoutBytes], text[r.StdoutBytes:]
	}
	return r.Record, nil
}
