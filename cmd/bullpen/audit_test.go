package main

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
)

// auditRoutes answers with a log of three acts: one that was done, one that was refused, and one
// whose outcome is unknown.
func (s *stub) auditRoutes(mux *http.ServeMux) {
	at := api.Time{Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	act := func(stage api.AuditStage, action, name string) api.AuditRecord {
		return api.AuditRecord{
			Time: at, Stage: stage, Action: action, Actor: api.AuditActor{Type: "key", ID: "key_1", Name: "ci", Org: "acme"},
			Object: api.AuditObject{Kind: "secret", Name: name}, SourceIP: "203.0.113.7", UserAgent: "curl\x1b[2J",
		}
	}
	records := []api.AuditRecord{
		act(api.AuditIntent, "secret.put", "TOKEN"), act(api.AuditOutcome, "secret.put", "TOKEN"),
		act(api.AuditOutcome, "profile.create", ""), act(api.AuditIntent, "secret.delete", "TOKEN"),
	}
	records[1].Intent, records[1].Status, records[1].Object.Org = new(int64(1)), new(http.StatusOK), new("other")
	records[2].Status, records[2].Error = new(http.StatusForbidden), new(api.CodeForbidden)
	var lines [][]byte
	for i := range records {
		var previous *api.AuditRecord
		if i > 0 {
			previous = &records[i-1]
		}
		line, err := records[i].Seal(previous)
		if err != nil {
			panic(err)
		}
		lines = append(lines, append(line, '\n'))
	}
	mux.HandleFunc("GET /v1/admin/audit", func(w http.ResponseWriter, r *http.Request) {
		s.record(r, nil)
		if r.Header.Get("Accept") != "application/x-ndjson" {
			first, answer := slices.Clone(records[2:]), api.AuditRecords{}
			slices.Reverse(first)
			if answer.Records, answer.NextCursor = first, new("3"); r.URL.Query().Get("cursor") != "" {
				answer = api.AuditRecords{Records: []api.AuditRecord{records[1], records[0]}}
			}
			_ = json.NewEncoder(w).Encode(answer)
			return
		}
		for _, line := range lines {
			_, _ = w.Write(line)
		}
	})
}
