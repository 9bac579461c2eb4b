package proto

import (
	"encoding/json"
	"fmt"
)

// EncodeRecord gives the JSON form of r as it is stored. It differs from what encoding/json makes of r in not copying outputs of many
// MiB over and over.
func EncodeRecord(r *Record) ([]byte, error) {
	rest := *r
	rest.Result = nil
	body, err := json.Marshal(&rest)
	if err != nil {
		return nil, fmt.Errorf("encode record of %s: %w", r.TraceID, err)
	}
	if r.Result == nil {
		return body, nil
	}
	body = append(body[:len(body)-1], `,"result":`...)
	if body, err = AppendResult(body, r.Result); err != nil {
		return nil, fmt.Errorf("encode record of %s: %w", r.TraceID, err)
	}
	return append(body, '}'), nil
}

// DecodeRecord is the inverse of [EncodeRecord] for the record of id. What cannot be that, or contradicts itself, is an error.
func DecodeRecord(id TraceID, body []byte) (*Record, error) {
	var r Record
	if err := json.Unmarshal(body, &r); err != nil {
		return nil, fmt.Errorf("decode record of %s: %w", id, err)
	}
	if r.TraceID != id || r.Status == "" || r.Status.Terminal() != (r.Result != nil) {
		return nil, fmt.Errorf("decode record of %s: it says %q of %q", id, r.Status, r.TraceID)
	}
	return &r, nil
}
