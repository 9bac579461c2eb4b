package main

import (
	"io"
	"net/http"
)

// stubRun has a cell that failed, one whose execution is gone, and one that was skipped.
const stubRun = `{"id":"run_abcdefghijklmnopqrstuvwxyz","name":"build","status":"failed","cancelling":false,` +
	`"reason":null,"commit":"4f2a91c","branch":"main",` +
	`"created_at":"2026-01-02T03:04:05.000Z","ended_at":"2026-01-02T03:04:08.000Z","cells":[` +
	`{"step":"test","cell":"python=3.12","needs":[],"status":"failed","trace_id":"trc_aaaaaaaaaaaaaaaaaaaa",` +
	`"exit_code":3,"reason":"the program exited with code 3",` +
	`"started_at":"2026-01-02T03:04:05.500Z","ended_at":"2026-01-02T03:04:07.500Z","warnings":[],"artifacts":[],` +
	`"artifacts_kept":false},` +
	`{"step":"test","cell":"python=3.13","needs":[],"status":"success","trace_id":"trc_bbbbbbbbbbbbbbbbbbbb",` +
	`"exit_code":0,"reason":null,` +
	`"started_at":"2026-01-02T03:04:05.500Z","ended_at":"2026-01-02T03:04:06.000Z","warnings":[],"artifacts":[],` +
	`"artifacts_kept":false},` +
	`{"step":"publish","cell":null,"needs":["test"],"status":"skipped","trace_id":null,"exit_code":null,"reason":"a ` +
	`step that it needs did not succeed",` +
	`"started_at":null,"ended_at":"2026-01-02T03:04:08.000Z","warnings":[],"artifacts":[],"artifacts_kept":false}]}`

func (*stub) pipelineRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/pipelines/{id}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, stubRun)
	})
}
