package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	stubKey   = "sk-local-abcdefghijklmnopqrstuvwx"
	stubTrace = proto.TraceID("trc_aaaaaaaaaaaaaaaaaaaa")
	// stubRunning is the id of an execution that never ends.
	stubRunning = proto.TraceID("trc_rrrrrrrrrrrrrrrrrrrr")
	// stubLost is the id of an execution whose worker was lost.
	stubLost = proto.TraceID("trc_llllllllllllllllllll")
	// stubHooked is the id of an execution with a webhook whose worker was lost.
	stubHooked = proto.TraceID("trc_hhhhhhhhhhhhhhhhhhhh")
	// stubFails is the id of an execution with exit code 3.
	stubFails = proto.TraceID("trc_ffffffffffffffffffff")
	// stubSoon is the id of an execution that ends during the second request that waits for it.
	stubSoon = proto.TraceID("trc_wwwwwwwwwwwwwwwwwwww")
)

// stub answers as a server does. What a program "does" is the last word of its first line. Every
// request is appended to the file log.
type stub struct {
	log string

	free chan struct{} // closed when there is a slot for the programs that wait

	mu        sync.Mutex
	cancelled chan struct{}
	webhook   bool // the key has webhook settings

	polls      atomic.Int32 // requests for stubSoon
	batchPolls atomic.Int32 // requests for a batch
	orgPolls   atomic.Int32 // requests for the data of the organisation after its deletion
}

func stubWorker(draining string) string {
	return `{"name":"node-1","pool":"gpu","version":"v1","started_at":"2026-01-02T03:04:05.000Z","slots":8,"running":3,` +
		`"draining":` + draining +
		`,"capabilities":["architecture:arm64","disk"],"architecture":"arm64","languages":{"python":"3.11","bash":"5.2"},` +
		`"cached_images":2,"cached_threads":40,` +
		`"machine":{"cpus":4,"cpus_busy":2.46,"memory":34359738368,"memory_available":25769803776}}`
}

const stubScheduleID = "sch_abcdefghijklmnopqrstuvwxyz"

func stubSchedule(runs string) string {
	return `{"id":"` + stubScheduleID + `","name":"report","cron":"0 3 * * *","time_zone":"Europe/Berlin","every":null,` +
		`"jitter":90,"overlap":"skip","missed":"last",` +
		`"paused":false,"key_id":"key_1","created_at":"2026-01-01T00:00:00.000Z","updated_at":"2026-01-01T00:00:00.000Z",` +
		`"next":["2026-01-03T03:00:00.000Z"],` +
		`"request":{"code":"print(1)","language":"python"},"waiting":2,"runs":[` + runs + `]}`
}

func (s *stub) schedule(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	const runs = `{"tick":"2026-01-02T03:00:00.000Z","at":"2026-01-02T03:00:00.250Z","outcome":"started","trace_id":"` +
		string(stubTrace) + `","reason":null},` +
		`{"tick":"2026-01-01T03:00:00.000Z","at":"2026-01-01T03:00:00.250Z","outcome":"failed","trace_id":null,` +
		`"reason":"queued execution limit reached"}`
	answer := stubSchedule(runs)
	switch {
	case r.Method == http.MethodDelete:
		w.WriteHeader(http.StatusNoContent)
		return
	case strings.HasSuffix(r.URL.Path, "/run"):
		w.WriteHeader(http.StatusAccepted)
		answer = `{"trace_id":"` + string(stubTrace) + `","status":"running"}`
	case r.PathValue("id") == "preview":
		answer = `{"ticks":["2027-03-28T01:30:00.000Z","2027-03-29T00:30:00.000Z"]}`
	case r.Method == http.MethodGet && r.PathValue("id") == "":
		answer = `{"schedules":[` + stubSchedule("") + `],"next_cursor":null}`
	}
	_, _ = io.WriteString(w, answer)
}

// Sandboxes of the stub: one that runs, and one that is paused.
const (
	stubSandboxID = "iaaaaaaaaaaaaaaaaaaaaaaaaaa"
	stubPausedID  = "ipppppppppppppppppppppppppp"
)

func stubSandbox(id string) string {
	state := `"state":"running","reason":null,"message":null,"stopped_at":null,"idle_timeout":600,"thread_id":"notebook-1"`
	if id == stubPausedID {
		state = `"state":"paused","reason":"worker_drained","message":"The worker of the sandbox was shut down.",` +
			`"stopped_at":"2026-01-02T03:30:00.000Z","idle_timeout":null,"thread_id":null`
	}
	return `{"id":"` + id + `","name":"build",` + state + `,"profile":"","key_id":"key_1",` +
		`"metadata":{"team":"blue"},"on_timeout":"pause","starts":1,"trace_id":"` + string(stubTrace) + `",` +
		`"created_at":"2026-01-02T03:04:05.000Z","started_at":"2026-01-02T03:04:05.000Z",` +
		`"expires_at":"2026-01-02T04:04:05.000Z"}`
}

func (s *stub) sandbox(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	id := r.PathValue("id")
	switch {
	case id == stubPausedID && r.Method == http.MethodPost && !strings.HasSuffix(r.URL.Path, "/resume"):
		refuse(w, http.StatusConflict, "conflict", "the sandbox is paused, and only a running one can be used", "")
	case strings.HasSuffix(r.URL.Path, "/save"):
		_, _ = io.WriteString(w, `{"version":4}`)
	case r.URL.Query().Get("path") == "missing":
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"code":404,"message":"no such file \u001b[2J"}`)
	case strings.HasSuffix(r.URL.Path, "/guest/files") && r.Method == http.MethodGet:
		_, _ = io.WriteString(w, "content\n")
	case strings.HasSuffix(r.URL.Path, "/guest/files"):
		_, _ = io.WriteString(w, "[]")
	case r.Method == http.MethodGet && id == "":
		_, _ = io.WriteString(w, `{"sandboxes":[`+stubSandbox(stubSandboxID)+`,`+stubSandbox(stubPausedID)+
			`],"next_cursor":null}`)
	case id == "":
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, stubSandbox(stubSandboxID))
	default:
		_, _ = io.WriteString(w, stubSandbox(id))
	}
}

func newStub(log string) http.Handler { return (&stub{log: log}).handler() }

func (s *stub) handler() http.Handler {
	s.cancelled = make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sandbox/execute", s.execute)
	mux.HandleFunc("GET /v1/executions", func(w http.ResponseWriter, r *http.Request) {
		s.record(r, nil)
		_, _ = io.WriteString(w, `{"executions":[],"next_cursor":null,"complete":true}`)
	})
	mux.HandleFunc("GET /v1/executions/{id}", s.get)
	mux.HandleFunc("GET /v1/executions/{id}/output", s.output)
	mux.HandleFunc("POST /v1/executions/{id}/cancel", s.cancel)
	mux.HandleFunc("POST /v1/admin/keys", s.createKey)
	const secret = `{"org":"acme","name":"TOKEN","bytes":5,"variable":true,"created_at":"2026-01-02T03:04:05Z",` +
		`"updated_at":"2026-01-02T03:04:05Z"}`
	for _, method := range []string{"PUT", "GET"} {
		mux.HandleFunc(method+" /v1/admin/secrets/{name}", func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			s.record(r, body)
			answer := strings.Replace(secret, "TOKEN", r.PathValue("name"), 1)
			if _, injection, ok := strings.Cut(string(body), `,"injection":`); ok {
				answer = strings.TrimSuffix(answer, "}") + `,"injection":` + injection
			}
			_, _ = io.WriteString(w, answer)
		})
	}
	mux.HandleFunc("GET /v1/admin/secrets", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"secrets":[`+secret+`]}`)
	})
	mux.HandleFunc("DELETE /v1/admin/secrets/{name}", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST /v1/admin/secrets/rotate-key", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"wrapped_for":"age1new"}`)
	})
	for _, route := range []string{
		"POST ", "GET ", "GET /{slug}", "PUT /{slug}", "DELETE /{slug}", "POST /{slug}/test",
		"GET /{slug}/volume", "GET /{slug}/archive", "POST /{slug}/fork",
	} {
		method, path, _ := strings.Cut(route, " ")
		mux.HandleFunc(method+" /v1/admin/connections"+path, s.connection)
	}
	mux.HandleFunc("GET /v1/admin/keys", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"keys":[`+stubKeyJSON("null", "")+`,`+unlimited(stubKeyJSON("null", ""))+`]}`)
	})
	s.object(mux, "orgs/acme",
		`{"name":"acme","title":"Acme Inc.","plan":"pro","suspended":false,"created_at":"2026-01-02T03:04:05.000Z"}`,
		"there is no organisation of that name")
	mux.HandleFunc("GET /v1/admin/orgs/acme/data", func(w http.ResponseWriter, _ *http.Request) {
		log, _ := os.ReadFile(s.log)
		switch deleted := strings.Contains(string(log), "DELETE /v1/admin/orgs/acme"); {
		case !deleted || s.orgPolls.Add(1) == 1:
			_, _ = io.WriteString(w, `{"org":"acme","total":3,"data":[{"kind":"threads","count":1},{"kind":"files of `+
				`threads","count":2,"bytes":4096}]}`)
		default:
			_, _ = io.WriteString(w, `{"org":"acme","total":0,"data":[{"kind":"threads","count":0},{"kind":"files of `+
				`threads","count":0}]}`)
		}
	})
	s.object(mux, "plans/gold",
		`{"name":"gold","title":"Gold","max_timeout":60,"concurrent":7,"weight":1,"streaming":true,"async":false,`+
			`"next":"enterprise"}`, "there is no stored plan silver")
	s.object(mux, "members/mem_1",
		`{"id":"mem_1","org":"acme","email":"a@example.com","subject":null,"issuer":null,"role":"viewer","global":false,`+
			`"created_at":"2026-01-02T03:04:05.000Z"}`, "there is no member of that id")
	s.object(mux, "sessions/ses_1",
		`{"id":"ses_1","org":"acme","key_id":"mem_1","name":"a@example.com","user_agent":"Mozilla/5.0",`+
			`"created_at":"2026-01-02T03:04:05.000Z","used_at":"2026-01-02T04:04:05.000Z",`+
			`"expires_at":"2026-01-02T16:04:05.000Z"}`, "there is no session of that id")
	s.object(mux, "keys/key_1", stubKeyJSON("null", ""), "there is no such key")
	mux.HandleFunc("POST /v1/admin/keys/key_1/rotate", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.record(r, body)
		_, _ = io.WriteString(w, stubKeyJSON("null", `,"key":"sk-local-theverynewkeyitself01"`))
	})
	mux.HandleFunc("DELETE /v1/admin/keys/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") != "key_1" {
			refuse(w, http.StatusNotFound, "not_found", "there is no such key", "")
			return
		}
		_, _ = io.WriteString(w, stubKeyJSON(`"2026-01-03T00:00:00.000Z"`, ""))
	})
	for _, path := range []string{"/v1/usage", "/v1/admin/usage"} {
		mux.HandleFunc("GET "+path, s.usage)
	}
	s.webhookRoutes(mux)
	s.threadRoutes(mux)
	s.deadLetterRoutes(mux)
	s.auditRoutes(mux)
	s.batchRoutes(mux)
	s.pipelineRoutes(mux)
	mux.HandleFunc("GET /v1/admin/images", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"images":[`+stubImage+`]}`)
	})
	mux.HandleFunc("DELETE /v1/admin/images/{name}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, stubImage)
	})
	mux.HandleFunc("GET /v1/admin/backup", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100") // breaks off
		_, _ = io.WriteString(w, "\x28\xb5\x2f\xfd")
	})
	mux.HandleFunc("GET /v1/queue", func(w http.ResponseWriter, r *http.Request) {
		const counts = `"running":{"interactive":1,"background":`
		place := func(id proto.TraceID, rest string) string {
			return fmt.Sprintf(`{"trace_id":%q,"class":"background","created_at":"2026-01-02T03:04:05.678Z",%s}`, id, rest)
		}
		asked := ""
		if id := r.URL.Query().Get("trace_id"); id != "" {
			asked = place(proto.TraceID(id), `"position":13,"estimated_wait":null`)
		}
		_, _ = io.WriteString(w, `{"key":{"queued":{"interactive":0,"background":3},`+counts+
			`2},"concurrent":null},"organisation":{"queued":{"interactive":0,"background":40},`+
			counts+`6},"concurrent":100,"max_queued":1000},"oldest":`+place(stubTrace, `"position":12,"estimated_wait":65`)+
			`,"executions":[`+asked+`]}`)
	})
	mux.HandleFunc("GET /v1/admin/workers", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"workers":[`+stubWorker("false")+`]}`)
	})
	mux.HandleFunc("GET /v1/admin/autoscale", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"pools":[{"name":"default","capabilities":[],"architecture":null,"worker_slots":0,`+
			`"workers":0,"slots":0,"queued":0,"running":0,`+
			`"mean_seconds":0,"oldest_wait_seconds":0,"desired":null},{"name":"gpu","capabilities":["architecture:arm64",`+
			`"disk"],"architecture":"arm64","worker_slots":8,"workers":1,"slots":8,`+
			`"queued":40,"running":8,"mean_seconds":2.5,"oldest_wait_seconds":12.34,"desired":{"workers":2,"slots":16,`+
			`"reason":"demand"}}]}`)
	})
	mux.HandleFunc("POST /v1/admin/workers/node-1/drain", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, stubWorker("true"))
	})
	mux.HandleFunc("POST /v1/admin/workers/node-1/undrain", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, stubWorker("false"))
	})
	mux.HandleFunc("POST /v1/admin/workers/{name}/drain", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, "not_found", "there is no such worker", "")
	})
	for _, route := range []string{"GET ", "POST ", "GET {id}", "PATCH {id}", "DELETE {id}", "POST {id}/run"} {
		method, path, _ := strings.Cut(route, " ")
		mux.HandleFunc(strings.TrimSuffix(method+" /v1/schedules/"+path, "/"), s.schedule)
	}
	for _, route := range []string{
		"GET ", "POST ", "GET /{id}", "DELETE /{id}", "POST /{id}/extend", "POST /{id}/pause", "POST /{id}/resume",
		"POST /{id}/save",
		"GET /{id}/guest/files", "POST /{id}/guest/files", "POST /{id}/guest/process.Process/Start",
	} {
		method, path, _ := strings.Cut(route, " ")
		mux.HandleFunc(method+" /v1/sandboxes"+path, s.sandbox)
	}
	mux.HandleFunc("POST /v1/admin/profiles", s.profile)
	mux.HandleFunc("PUT /v1/admin/profiles/{name}", s.profile)
	mux.HandleFunc("GET /v1/admin/profiles/{name}", s.profile)
	mux.HandleFunc("DELETE /v1/admin/profiles/{name}", s.profile)
	mux.HandleFunc("GET /v1/admin/profiles/{name}/preload", s.profilePreload)
	mux.HandleFunc("GET /v1/admin/profiles", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"profiles":[`+stubProfile+`]}`)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/signed" {
			s.signed(w, r)
			return
		}
		if r.Header.Get("Authorization") != "Bearer "+stubKey {
			refuse(w, http.StatusUnauthorized, "unauthorized", "the API key is not valid", "")
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// object serves an object at a path below /v1/admin, and the list of all such objects, which has no
// other one.
func (s *stub) object(mux *http.ServeMux, path, object, missing string) {
	kind, _, _ := strings.Cut(path, "/")
	answer := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			s.record(r, body)
			w.Header().Set("ETag", `"tag"`)
			w.WriteHeader(status)
			_, _ = io.WriteString(w, object)
		}
	}
	mux.HandleFunc("GET /v1/admin/"+path, answer(http.StatusOK))
	mux.HandleFunc("PUT /v1/admin/"+path, answer(http.StatusOK))
	mux.HandleFunc("GET /v1/admin/"+kind+"/{name}", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusNotFound, "not_found", missing, "")
	})
	if kind == "keys" {
		return // the test of keys serves the rest
	}
	mux.HandleFunc("DELETE /v1/admin/"+path, answer(http.StatusOK))
	mux.HandleFunc("POST /v1/admin/"+kind, answer(http.StatusCreated))
	mux.HandleFunc("GET /v1/admin/"+kind, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{%q:[%s]}`, kind, object)
	})
}

// usage answers with two days or keys; with nothing before 2026.
func (s *stub) usage(w http.ResponseWriter, r *http.Request) {
	s.record(r, nil)
	query := r.URL.Query()
	row := func(day, key, language string, executions int, rest string) string {
		return fmt.Sprintf(`{"org":null,"day":%s,"key":%s,"language":%s,"executions":{"total":%[4]d,"success":%[5]d,`+
			`"failed":0,"timeout":0,"oom":0,"seccomp":0,"cancelled":0},%[6]s}`,
			day, key, language, executions, max(0, executions-1), rest)
	}
	const used = `"cpu_seconds":30.25,"memory_mib_seconds":2400,"bytes_in":8388608,"bytes_out":1048576,` +
		`"output_bytes":10,"stored_byte_days":0,"webhook_attempts":3`
	const stored = `"cpu_seconds":0,"memory_mib_seconds":0,"bytes_in":0,"bytes_out":0,"output_bytes":0,` +
		`"stored_byte_days":5242880,"webhook_attempts":0`
	rows, complete := row(`"2026-01-02"`, "null", "null", 120, used)+","+
		row(`"2026-01-03"`, "null", "null", 2, stored), true
	switch {
	case query.Get("from") == "yesterday":
		refuse(w, http.StatusBadRequest, "validation_error", "from must be a day such as 2026-11-25", "")
		return
	case r.Header.Get("Accept") == "text/csv":
		_, _ = io.WriteString(w, "org,day,executions\nacme,2026-01-02,120\n")
		return
	case query.Get("to") == "2025-01-01":
		rows, complete = "", false
	case query.Get("group_by") == "key,language":
		rows = row("null", "null", "null", 0, stored) + "," + row("null", `"key_1"`, `"python"`, 120, used)
	}
	quotas := ""
	if query.Get("org") != "" {
		quotas = `{"name":"cpu_seconds","used":812.5,"soft":800,"hard":1000,"ends":"2026-02-01T00:00:00.000Z"},` +
			`{"name":"stored_bytes","used":5,"soft":null,"hard":10,"ends":"2026-02-01T00:00:00.000Z"}`
	}
	groups, _ := json.Marshal(strings.Split(query.Get("group_by"), ","))
	_, _ = fmt.Fprintf(w, `{"from":"2026-01-01","to":"2026-01-03","group_by":%s,"complete":%t,"quotas":[%s],"rows":[%s]}`,
		groups, complete, quotas, rows)
}

func refuse(w http.ResponseWriter, status int, code, message, retryAfter string) {
	if retryAfter != "" {
		w.Header().Set("Retry-After", retryAfter)
	}
	w.Header().Set("X-Request-Id", "req-1")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": code, "message": message})
}

func (s *stub) record(r *http.Request, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	match := ""
	if tag := r.Header.Get("If-Match"); tag != "" {
		match = " If-Match=" + tag
	}
	_, _ = fmt.Fprintf(f, "%s %s%s %s\n", r.Method, r.URL, match, body)
	if key := r.Header.Get("Idempotency-Key"); key != "" && !strings.HasPrefix(key, "go-") {
		_, _ = fmt.Fprintf(f, "Idempotency-Key: %s\n", key)
	}
	_ = f.Close()
}

// result returns the result of a program by what it does.
func result(does string) proto.Result {
	r := proto.Exited(0)
	switch does {
	case "fails":
		r = proto.Exited(3)
	case "killed":
		r = proto.Signaled(9)
	case "sleeps":
		r = proto.TimedOut(1)
	case "eats":
		r = proto.Failure(proto.CodeMemory, "The program used more than its 1073741824 bytes of memory.")
	case "attacks":
		r = proto.Failure(proto.CodeSeccomp, "The program made a system call that is not allowed.")
	case "lost":
		r = proto.Failure(proto.CodeWorkerLost, "The worker was lost.")
	case "runs":
		r = proto.Cancelled()
	}
	r.Stdout, r.Stderr = "one\nthree\n", "two\n"
	if does == "shows" {
		large := strings.Repeat(stubPicture[:4], 100_000) // not in its event
		r.ResultsTruncated = true
		r.Results = []proto.Display{
			{Data: map[string]json.RawMessage{"image/png": quoted(stubPicture), "text/plain": quoted("<Figure>")}},
			{Data: map[string]json.RawMessage{"image/jpeg": quoted(large), "text/plain": quoted("<Figure>")}},
			{Data: map[string]json.RawMessage{"text/plain": quoted("42")}, Result: true},
		}
	}
	return r
}

// stubPicture is a PNG of one pixel.
const stubPicture = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

func quoted(s string) json.RawMessage { return proto.AppendJSONString(nil, s) }

// events returns the events after number after of a program whose result is r.
func events(r proto.Result, after int64) []byte {
	var all [][]byte
	all = append(all,
		proto.AppendStatusEvent(nil, stubTrace),
		proto.AppendOutputEvent(nil, proto.Stdout, []byte("one\n"), 2),
		proto.AppendOutputEvent(nil, proto.Stderr, []byte("two\n"), 3),
		proto.AppendOutputEvent(nil, proto.Stdout, []byte("three\n"), 4))
	for i := range r.Results {
		all = append(all, proto.AppendDisplayEvent(nil, i, &r.Results[i], int64(len(all)+1)))
	}
	var last bytes.Buffer
	err := proto.WriteResultEvent(&last, &proto.Record{
		Meta: proto.Meta{TraceID: stubTrace}, Status: r.Status(), Result: &r, ResultSeq: int64(len(all) + 1),
	})
	if err != nil {
		panic(err)
	}
	var out []byte
	for i, e := range append(all, last.Bytes()) {
		if int64(i+1) > after {
			out = append(out, e...)
		}
	}
	return out
}

func (s *stub) execute(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	var req struct {
		Code     string `json:"code"`
		ThreadID string `json:"thread_id"`
	}
	streaming := r.Header.Get("Accept") == "application/x-ndjson"
	resends := streaming || r.Header.Get("Prefer") != "" // unlike bench load, which waits for results
	if err := json.Unmarshal(body, &req); err != nil || resends && r.Header.Get("Idempotency-Key") == "" {
		refuse(w, http.StatusBadRequest, "validation_error", "the stub wants JSON and an Idempotency-Key", "")
		return
	}
	line, _, _ := strings.Cut(req.Code, "\n")
	words := strings.Fields(line)
	does := words[len(words)-1]
	if req.ThreadID == "full" {
		does = "fails"
	}
	w.Header().Set("X-Trace-Id", string(stubTrace))
	switch {
	case strings.Contains(req.ThreadID, "busy"):
		refuse(w, http.StatusConflict, "conflict", "thread busy is in use by execution trc_rrrrrrrrrrrrrrrrrrrr", "")
	case does == "invalid":
		refuse(w, http.StatusBadRequest, "validation_error", "code must be nicer", "")
	case r.Header.Get("Prefer") == "respond-async":
		w.WriteHeader(http.StatusAccepted)
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"running"}`, stubTrace)
	case does == "inline" && streaming:
		refuse(w, http.StatusTooManyRequests, "rate_limited", "Streaming execution requires a Pro or Enterprise plan.", "")
	case does == "drops":
		all, rest := events(result(does), 0), events(result(does), 2)
		_, _ = w.Write(all[:len(all)-len(rest)+10]) // in the middle of the third event
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	case does == "waits":
		<-s.free
		_, _ = w.Write(events(result(does), 0))
	case does == "runs":
		_, _ = w.Write(proto.AppendStatusEvent(nil, stubTrace))
		_, _ = w.Write(proto.AppendOutputEvent(nil, proto.Stdout, []byte("one\n"), 2))
		_ = http.NewResponseController(w).Flush()
		<-s.cancelled
		_, _ = w.Write(events(result(does), 4))
	case streaming:
		_, _ = w.Write(events(result(does), 0))
	default:
		var out bytes.Buffer
		if err := proto.WriteResult(&out, new(result(does))); err != nil {
			panic(err)
		}
		_, _ = w.Write(out.Bytes())
	}
}

func (s *stub) get(w http.ResponseWriter, r *http.Request) {
	s.record(r, nil)
	switch proto.TraceID(r.PathValue("id")) {
	case stubTrace:
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"failed","exit_code":3,"stdout":"one\n","stderr":"two\n",`+
			`"error":null,`+
			`"duration_ms":1234,"delivery_mode":"streaming","created_at":"2026-01-02T03:04:05.678Z",`+
			`"completed_at":"2026-01-02T03:04:06.912Z",`+
			`"language":"python","timeout":60,"metadata":{"team":"blue"},"attempt":1,"queued_ms":2,"stderr_truncated":true,`+
			`"output_truncated":false,"profile":"web",`+
			`"steps":[{"name":"queue","after_ms":0,"duration_ms":2.125},{"name":"jail","after_ms":2.5,"duration_ms":40,`+
			`"start":"cold"},`+
			`{"name":"home","within":"jail","after_ms":3,"duration_ms":10.5},{"name":"program","after_ms":50,`+
			`"duration_ms":1150}],`+
			`"network":{"bytes_in":1000,"bytes_out":20,"blocked_total":7,"blocked_connections":[`+
			`{"host":"a.example\u001b[2J","address":"203.0.113.7","port":443,"protocol":"tcp","reason":"not_allowed",`+
			`"at":"2026-01-02T03:04:06.000Z"},`+
			`{"host":"b.example","protocol":"dns","reason":"name","at":"2026-01-02T03:04:06.000Z"},`+
			`{"address":"10.0.0.1","protocol":"icmp","reason":"protocol","at":"2026-01-02T03:04:06.000Z"}]}}`, stubTrace)
	case stubRunning:
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"running","exit_code":null,"stdout":null,"stderr":null,"error":null,`+
			`"duration_ms":10,"delivery_mode":"webhook","created_at":"2026-01-02T03:04:05.678Z","completed_at":null,`+
			`"webhook_url":"https://example.com/hook","webhook_delivery_status":"pending",`+
			`"language":"bash","timeout":60,"thread_id":"notebook","metadata":{},"attempt":1,"queued_ms":2,`+
			`"output_truncated":false}`, stubRunning)
	case stubHooked:
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"failed","error_code":"worker_lost","duration_ms":998,`+
			`"created_at":"2026-01-02T03:04:04.000Z",`+
			`"completed_at":"2026-01-02T03:04:05.000Z","webhook_url":"https://example.com/hook","attempt":1,"queued_ms":2}`,
			stubHooked)
	case stubItem:
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"success","batch":{"id":%q,"index":1}}`, stubItem, stubBatchID)
	case stubSoon:
		if s.polls.Add(1) == 1 {
			_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"running","completed_at":null}`, stubSoon)
			return
		}
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"success","exit_code":0,"completed_at":"2026-01-02T03:04:06.912Z"}`,
			stubSoon)
	case stubLost:
		_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"failed","exit_code":-1,"error_code":"worker_lost",`+
			`"error_message":"The worker was lost.",`+
			`"completed_at":"2026-01-02T03:04:06.912Z"}`, stubLost)
	default:
		refuse(w, http.StatusNotFound, "not_found", "there is no such execution", "")
	}
}

func (s *stub) output(w http.ResponseWriter, r *http.Request) {
	s.record(r, nil)
	after, err := strconv.ParseInt(r.URL.Query().Get("after_seq"), 10, 64)
	if err != nil {
		refuse(w, http.StatusBadRequest, "validation_error", "after_seq must be a number", "")
		return
	}
	if proto.TraceID(r.PathValue("id")) == stubRunning {
		_, _ = w.Write(proto.AppendStatusEvent(nil, stubRunning))
		_, _ = w.Write(proto.AppendOutputEvent(nil, proto.Stdout, []byte("one\n"), 2))
		if r.URL.Query().Get("follow") == "false" {
			return
		}
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return
	}
	switch proto.TraceID(r.PathValue("id")) {
	case stubLost:
		_, _ = w.Write(events(result("lost"), after))
	case stubFails:
		_, _ = w.Write(events(result("fails"), after))
	case stubTrace:
		_, _ = w.Write(events(result(""), after))
	default:
		refuse(w, http.StatusNotFound, "not_found", "there is no such execution", "")
	}
}

func (s *stub) cancel(w http.ResponseWriter, r *http.Request) {
	s.record(r, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.cancelled:
	default:
		close(s.cancelled)
	}
	w.WriteHeader(http.StatusAccepted)
	_, _ = fmt.Fprintf(w, `{"trace_id":%q,"status":"cancelling"}`, r.PathValue("id"))
}

func (s *stub) createKey(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	if strings.Contains(string(body), "Acme") {
		refuse(w, http.StatusBadRequest, "validation_error", "org must be of a-z", "")
		return
	}
	w.WriteHeader(http.StatusCreated)
	made := stubKeyJSON("null", `,"key":"sk-local-theverynewkeyitself01"`)
	if !strings.Contains(string(body), "concurrent") {
		made = unlimited(made)
	}
	_, _ = io.WriteString(w, made)
}

const (
	stubConnection = `{"org":"acme","slug":"data","kind":"s3","endpoint":"https://s3.example.com","region":"us-east-1",` +
		`"bucket":"acme","path_style":true,` +
		`"credential":"DATA_KEY","prefix":"shared","read_only":false,"tested_at":"2026-01-02T03:04:05Z",` +
		`"created_at":"2026-01-02T03:04:05Z","updated_at":"2026-01-02T03:04:05Z"}`
	stubDirectory = `{"org":"other","slug":"files","kind":"directory","directory":"/srv/files","read_only":true,` +
		`"description":"old","tested_at":null,` +
		`"created_at":"2026-01-02T03:04:05Z","updated_at":"2026-01-02T03:04:05Z"}`
	stubVolume = `{"org":"acme","slug":"work","kind":"volume","bytes":"2GiB","read_only":false,"tested_at":null,` +
		`"created_at":"2026-01-02T03:04:05Z","updated_at":"2026-01-02T03:04:05Z"}`
)

func (s *stub) connection(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	slug := r.PathValue("slug")
	switch {
	case slug == "" && r.Method == http.MethodGet:
		_, _ = io.WriteString(w, `{"connections":[`+stubConnection+`,`+stubDirectory+`,`+stubVolume+`]}`)
	case slug != "" && strings.HasSuffix(r.URL.Path, "/volume"):
		if slug == "data" {
			refuse(w, http.StatusConflict, "conflict", "the storage connection data is no volume", "")
			return
		}
		_, _ = io.WriteString(w, `{"slug":"work","quota":"2GiB","version":2,"bytes":1048576,"files":3,`+
			`"used_at":"2026-01-02T03:04:05Z","holder":"`+string(stubTrace)+
			`","versions":[{"number":2,"created_at":"2026-01-02T03:04:05Z","trace_id":null,"bytes":1048576,"files":3}]}`)
	case strings.HasSuffix(r.URL.Path, "/archive"):
		_, _ = io.WriteString(w, "a tar")
	case slug == "work", slug == "" && strings.Contains(string(body), `"volume"`):
		w.Header().Set("ETag", `"tag"`)
		_, _ = io.WriteString(w, stubVolume)
	case strings.Contains(string(body), "broken"), slug == "files":
		refuse(w, http.StatusConflict, "conflict",
			"the test of the storage connection failed: it could not write an object: status 403", "")
	default:
		w.Header().Set("ETag", `"tag"`)
		_, _ = io.WriteString(w, stubConnection)
	}
}

// stubProfile has strings that YAML would read as other types.
const stubProfile = `{"name":"web","image":"","cpu":0.5,"memory":"512MiB","pids":256,"disk":{"home":"256MiB",` +
	`"tmp":"1000001","inodes":65536},` +
	`"network":{"policy":"allowlist","allow":["*.example.com:80,443"]},"env":{"A":"1.10","B":"true","C":"x: y\n",` +
	`"D":""},"output":"16MiB",` +
	`"preload":["numpy","matplotlib.pyplot"]}`

func (s *stub) profile(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	if name := r.PathValue("name"); name != "" && name != "web" {
		refuse(w, http.StatusNotFound, "not_found", "there is no such profile", "")
		return
	}
	if r.Method == http.MethodPost {
		w.WriteHeader(http.StatusCreated)
	}
	_, _ = io.WriteString(w, stubProfile)
}

// sandboxPreload has an error with a line break and what a terminal would act on.
func (s *stub) profilePreload(w http.ResponseWriter, r *http.Request) {
	s.record(r, nil)
	_, _ = io.WriteString(w, `{"error":"Traceback:\nNo module named 'numpy'\u001b[2J\n","worker":"w1",`+
		`"at":"2026-01-02T03:04:05.000Z"}`)
}

const stubImage = `{"name":"tiny",` +
	`"digest":"sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","size":1048576,` +
	`"unpacked_size":1572864,` +
	`"architecture":"amd64","languages":{"bash":"/bin/bash"},"env":{},"created_at":"2026-01-02T03:04:05.000Z"}`

func stubKeyJSON(revokedAt, key string) string {
	return `{"id":"key_1","name":"ci","org":"acme","plan":"pro","scopes":["execute","read","files"],"global":false,` +
		`"profile":"default","concurrent":2,"hint":"sk-local-the…lf01",` +
		`"created_at":"2026-01-02T03:04:05.000Z","revoked_at":` + revokedAt + key + `}`
}

// unlimited removes the concurrency limit from a key in JSON.
func unlimited(key string) string {
	return strings.Replace(key, `"concurrent":2`, `"concurrent":null`, 1)
}
