package main

import (
	"io"
	"net/http"
	"strings"
)

// deadLetterRoutes answers about dead letters: a job, and a malformed message. There is no other.
func (s *stub) deadLetterRoutes(mux *http.ServeMux) {
	const job = `"id":"trc_aaaaaaaaaaaaaaaaaaaa","reason":"workers_lost","message":"3 workers were lost with this job.",` +
		`"set_aside_at":"2026-01-02T03:04:05.000Z","org":"acme","key_id":"key_1","attempt":1,"workers":["w1",` +
		`"w2\u001b[2J","w3"],`
	const fresh, requeued = `"requeued_as":null,"requeued_at":null`,
		`"requeued_as":"trc_rrrrrrrrrrrrrrrrrrrr","requeued_at":"2026-01-03T03:04:05.000Z"`
	const malformed = `"id":"dead_7","reason":"malformed","message":"This message is no job: x.",` +
		`"set_aside_at":"2026-01-01T03:04:05.000Z","org":null,"key_id":null,"attempt":null,"workers":[],` + fresh
	handle := func(pattern string, f func(w http.ResponseWriter, r *http.Request)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			s.record(r, nil)
			if id := r.PathValue("id"); id != "" && id != "dead_7" && id != string(stubTrace) {
				refuse(w, http.StatusNotFound, "not_found", "there is no dead letter of that id", "")
				return
			}
			f(w, r)
		})
	}
	handle("GET /v1/admin/dead-letters", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("cursor") == "" {
			_, _ = io.WriteString(w, `{"dead_letters":[{`+job+requeued+`}],"next_cursor":"1.dead_7"}`)
			return
		}
		_, _ = io.WriteString(w, `{"dead_letters":[{`+malformed+`}],"next_cursor":null}`)
	})
	handle("GET /v1/admin/dead-letters/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") == "dead_7" {
			_, _ = io.WriteString(w, `{`+malformed+`,"execution":null,"malformed":{"subject":"bullpen.job.x",`+
				`"headers":{"Bullpen-Meta":["{"],"A":["1","2"]},"data":"no\u001b[31m\nJSON","bytes":9000}}`)
			return
		}
		_, _ = io.WriteString(w, `{`+job+requeued+
			`,"execution":{"language":"python","timeout":90,"delivery_mode":"webhook","max_attempts":2,`+
			`"thread_id":"notebook","metadata":{"team":"blue","a":"b"},"webhook_url":"https://example.com/hook",`+
			`"profile":"web","request_id":null,`+
			`"created_at":"2026-01-02T03:00:00.000Z","code_bytes":12},"malformed":null}`)
	})
	handle("DELETE /v1/admin/dead-letters/{id}", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})
	handle("POST /v1/admin/dead-letters/{id}/requeue", func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.PathValue("id"), "dead_") {
			refuse(w, http.StatusConflict, "conflict", "this dead letter is a message that is no job", "")
			return
		}
		w.WriteHeader(http.StatusAccepted)
		_, _ = io.WriteString(w, `{`+job+requeued+`}`)
	})
}
