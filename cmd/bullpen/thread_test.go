package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api"
)

// threadRoutes serves the thread notebook, and the thread busy, which is in use.
func (s *stub) threadRoutes(mux *http.ServeMux) {
	const notebook = `"id":"notebook","version":2,"bytes":1572864,"files":12,"created_at":"2026-01-02T03:04:05.000Z",` +
		`"used_at":"2026-01-03T03:04:05.000Z"`
	const whole = `{` + notebook + `,"holder":null,"versions":[` +
		`{"number":2,"created_at":"2026-01-03T03:04:05.000Z","trace_id":"trc_aaaaaaaaaaaaaaaaaaaa","bytes":1572864,` +
		`"files":12},` +
		`{"number":1,"created_at":"2026-01-02T03:04:05.000Z","trace_id":null,"bytes":100,"files":1}],` +
		`"staged":[{"path":"data/in\u001b[2J.csv","size":9,"at":"2026-01-03T03:04:05.000Z"}]}`
	handle := func(pattern string, f func(w http.ResponseWriter, r *http.Request, body string)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			s.record(r, body)
			if id := r.PathValue("id"); id != "" && id != "notebook" && id != "busy" {
				refuse(w, http.StatusNotFound, "not_found", "there is no thread of that id", "")
				return
			}
			f(w, r, string(body))
		})
	}
	text := func(answer string) func(http.ResponseWriter, *http.Request, string) {
		return func(w http.ResponseWriter, _ *http.Request, _ string) { _, _ = io.WriteString(w, answer) }
	}
	handle("GET /v1/threads", func(w http.ResponseWriter, r *http.Request, _ string) {
		if r.URL.Query().Get("cursor") == "" {
			_, _ = io.WriteString(w, `{"threads":[{`+notebook+`,"holder":"trc_rrrrrrrrrrrrrrrrrrrr"}],"next_cursor":"notebook"}`)
			return
		}
		_, _ = io.WriteString(w, `{"threads":[{"id":"other","version":0,"bytes":0,"files":0,`+
			`"created_at":"2026-01-02T03:04:05.000Z",`+
			`"used_at":"2026-01-02T03:04:05.000Z","holder":null}],"next_cursor":null}`)
	})
	handle("GET /v1/threads/{id}", func(w http.ResponseWriter, r *http.Request, _ string) {
		if r.PathValue("id") == "busy" {
			_, _ = io.WriteString(w, strings.Replace(whole, `"holder":null`, `"holder":"trc_rrrrrrrrrrrrrrrrrrrr"`, 1))
			return
		}
		_, _ = io.WriteString(w, whole)
	})
	handle("DELETE /v1/threads/{id}", func(w http.ResponseWriter, r *http.Request, _ string) {
		if r.PathValue("id") == "busy" {
			refuse(w, http.StatusConflict, "conflict", "thread busy is in use", "")
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	handle("POST /v1/threads/{id}/fork", func(w http.ResponseWriter, _ *http.Request, _ string) {
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, whole)
	})
	handle("GET /v1/threads/{id}/archive", func(w http.ResponseWriter, r *http.Request, _ string) {
		if r.URL.Query().Get("version") == "1" { // breaks off
			w.Header().Set("Content-Length", "100")
		}
		_, _ = io.WriteString(w, "the tar\n")
	})
	mux.HandleFunc("PUT /v1/threads/{id}/archive", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") == "busy" {
			refuse(w, http.StatusConflict, "conflict", "thread busy is in use", "")
			return
		}
		var names []string
		for in := tar.NewReader(r.Body); ; {
			h, err := in.Next()
			if err != nil {
				break
			}
			names = append(names, h.Name)
		}
		s.record(r, []byte(strings.Join(names, " ")))
		_, _ = io.WriteString(w, `{"path":"data/x","version":3}`)
	})
	handle("POST /v1/admin/threads/gc",
		text(`{"layers":{"blobs":3,"bytes":4194304},"objects":{"blobs":0,"bytes":0},"manifests":{"blobs":3,"bytes":100},`+
			`"uploads":{"blobs":1,"bytes":1048576}}`))
	handle("POST /v1/admin/threads/rebuild", text(`{"made":11,"kept":2,"lost":1}`))
	listed := func(path, dir string) string {
		return `{"name":"x","path":"` + path + `","size":9,"modified":"2026-01-02T03:04:05.000Z","is_directory":` + dir +
			`,"type":"` + map[string]string{"true": "directory", "false": "file"}[dir] + `"}`
	}
	list := func(w http.ResponseWriter, body string) bool {
		var answer string
		switch {
		case strings.Contains(body, `"tree"`):
			answer = listed("tree/sub", "true") + "," + listed("tree/sub/two", "false") + "," + listed("tree/one", "false")
		case strings.Contains(body, `"evil"`):
			answer = listed("evil/../x", "false")
		default:
			return false
		}
		_, _ = io.WriteString(w, `{"files":[`+answer+`]}`)
		return true
	}
	handle("POST /v1/files/list", func(w http.ResponseWriter, _ *http.Request, body string) {
		if list(w, body) {
			return
		}
		_, _ = io.WriteString(w, `{"files":[{"name":"data","path":"data","size":0,"modified":"2026-01-02T03:04:05.000Z",`+
			`"is_directory":true,"type":"directory"},`+
			`{"name":"x","path":"x\u001b[31m","size":2048,"modified":"2026-01-02T03:04:05.000Z","is_directory":false,`+
			`"type":"file"}]}`)
	})
	change := func(w http.ResponseWriter, _ *http.Request, body string) {
		if strings.Contains(body, "missing") {
			refuse(w, http.StatusNotFound, "not_found", "there is nothing at this path", "")
			return
		}
		_, _ = io.WriteString(w, `{"path":"data/x","version":3}`)
	}
	handle("POST /v1/files/delete", change)
	handle("POST /v1/files/rename", change)
	sign := func(method string) func(http.ResponseWriter, *http.Request, string) {
		return func(w http.ResponseWriter, r *http.Request, body string) {
			if strings.Contains(body, "missing") {
				refuse(w, http.StatusNotFound, "not_found", "there is nothing at this path", "")
				return
			}
			_, _ = fmt.Fprintf(w, `{"url":"http://%s/signed","method":%q,"headers":[{"name":"X-Sign","value":"1"}],`+
				`"expires_at":"2026-01-02T03:04:05.000Z"}`, r.Host, method)
		}
	}
	handle("POST /v1/files/upload_url", sign("PUT"))
	handle("POST /v1/files/download_url", sign("GET"))
}

// signed serves signed URLs, which need no key.
func (s *stub) signed(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.record(r, body)
	if r.Header.Get("Authorization") != "" || r.Header.Get("X-Sign") != "1" || r.Method == http.MethodPut &&
		r.ContentLength != int64(len(body)) {
		refuse(w, http.StatusForbidden, "forbidden", "the stub needs a length and no key", "")
		return
	}
	if r.Method == http.MethodGet {
		_, _ = io.WriteString(w, "the file\n")
	}
}

func TestUnpackProgram(t *testing.T) {
	const name = ".bullpen-import-X.tar"
	run := func(home string) error {
		program := exec.CommandContext(t.Context(), "bash", "-c", unpackProgram(name))
		program.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH")}
		program.Dir = t.TempDir()
		return program.Run()
	}
	names := func(home string) (names []string) {
		entries, err := os.ReadDir(home)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	source, home := t.TempDir(), t.TempDir()
	for _, file := range []string{filepath.Join(source, "new"), filepath.Join(home, "old")} {
		if err := os.WriteFile(file, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.CommandContext(t.Context(), "tar", "-cf", filepath.Join(home, name), "-C", source,
		".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := run(home); err != nil || !slices.Equal(names(home), []string{"new", "old"}) {
		t.Errorf("%v, %v", err, names(home))
	}
	if err := os.WriteFile(filepath.Join(home, name), []byte(strings.Repeat("not a tar", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	failure, ok := errors.AsType[*exec.ExitError](run(home))
	if !ok || failure.ExitCode() != 2 || !slices.Equal(names(home), []string{"new", "old"}) {
		t.Errorf("%v, %v", failure, names(home))
	}
}

// The name of the uploaded archive cannot be guessed.
func TestImport(t *testing.T) {
	requests := filepath.Join(t.TempDir(), "requests")
	server := httptest.NewServer(newStub(requests))
	t.Cleanup(server.Close)
	archive := filepath.Join(t.TempDir(), "a.tar")
	if err := os.WriteFile(archive, []byte("tar"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &threadImportCommand{
		remote: remote{URL: server.URL, Key: stubKey}, threadArg: threadArg{"notebook"},
		File: archive, Timeout: 7,
	}
	var out, errs strings.Builder
	if err := c.Run(t.Context(), streams{in: strings.NewReader(""), out: &out, err: &errs}); err != nil {
		t.Fatalf("%v: %s", err, errs.String())
	}
	if out.String() != "imported "+archive+" to notebook\n" || errs.String() != "one\nthree\ntwo\n" {
		t.Errorf("%q, %q", out.String(), errs.String())
	}
	log, err := os.ReadFile(requests)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	if len(lines) != 4 || lines[0] != "GET /v1/threads/notebook " || lines[2] != "PUT /signed tar" {
		t.Fatalf("requests\n%s", log)
	}
	var upload struct{ Path string }
	var execute api.ExecuteRequest
	for line, to := range map[string]any{lines[1]: &upload, lines[3]: &execute} {
		if err := json.Unmarshal([]byte(line[strings.Index(line, "{"):]), to); err != nil {
			t.Fatal(err)
		}
	}
	if !strings.HasPrefix(upload.Path, ".bullpen-import-") || execute.Code != unpackProgram(upload.Path) ||
		execute.ThreadID != "notebook" || execute.Timeout != 7 {
		t.Errorf("requests\n%s", log)
	}
}
