package opencode_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
)

// server replays a recording of OpenCode's HTTP server. Each line of the recording begins with
//
//	>    a request: the method, the path, and the JSON of the body if there is one
//	<    the response to the request before: the status and the body
//	!    an event, which is sent to the event stream
//	cut  the end of the event stream
type server struct {
	t       *testing.T
	home    string // in place of /home/user in requests
	mu      sync.Mutex
	steps   []string
	changed chan struct{} // closed and replaced when events are added
	events  []string      // of the current event stream
	cut     bool          // whether no more events are added
}

// replay starts a server, and returns a recording of a program that prints its address.
func replay(t *testing.T, sandboxes *sessionstest.Sandboxes, name string) (program string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, sandboxes, name, string(text))
}

// serve is replay for the text of a recording.
func serve(t *testing.T, sandboxes *sessionstest.Sandboxes, name, text string) (program string) {
	t.Helper()
	s := &server{t: t, home: sandboxes.Path, changed: make(chan struct{})}
	s.steps = strings.Split(strings.TrimSpace(text), "\n")
	h := httptest.NewServer(s)
	t.Cleanup(func() {
		h.Close()
		if len(s.steps) > 0 {
			t.Errorf("%s: not reached: %.200s", name, s.steps[0])
		}
	})
	program = filepath.Join(t.TempDir(), name)
	lines := "args serve --hostname=127.0.0.1 --port=0\nenv OPENCODE_DISABLE_PROJECT_CONFIG=1\n" +
		"< opencode server listening on " + h.URL + "\n"
	if err := os.WriteFile(program, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	return program
}

// ServeHTTP implements [http.Handler].
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if user, password, ok := r.BasicAuth(); err != nil || !ok || user != "opencode" || password == "" {
		s.t.Errorf("%s %s: no password: %v", r.Method, r.URL, err)
	}
	if r.URL.Query().Get("directory") == "" {
		s.t.Errorf("%s %s: no directory", r.Method, r.URL)
	}
	path := r.URL.Path
	if limit := r.URL.Query().Get("limit"); limit != "" {
		path += "?limit=" + limit
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.expect(r.Method+" "+path, body) {
		w.WriteHeader(http.StatusTeapot)
		return
	}
	if path == "/event" {
		s.events, s.cut = nil, false
		s.send()
		s.mu.Unlock()
		s.stream(r.Context(), w)
		s.mu.Lock()
		return
	}
	s.send()
	if len(s.steps) > 0 && strings.HasPrefix(s.steps[0], "< ") {
		status, text, _ := strings.Cut(s.steps[0][2:], " ")
		code := 0
		_, _ = fmt.Sscan(status, &code)
		w.WriteHeader(code)
		_, _ = io.WriteString(w, text) // the client may be gone
		s.steps = s.steps[1:]
	}
	s.send()
}

// expect reports whether a request is the next of the recording.
func (s *server) expect(line string, body []byte) bool {
	if len(s.steps) == 0 {
		s.t.Errorf("%s %s after the end of the recording", line, body)
		return false
	}
	want, isRequest := strings.CutPrefix(strings.ReplaceAll(s.steps[0], "/home/user", s.home), "> ")
	text, matches := strings.CutPrefix(want, line)
	var a, b any
	if isRequest && matches && text != "" {
		matches = json.Unmarshal([]byte(text), &a) == nil && json.Unmarshal(body, &b) == nil && reflect.DeepEqual(a, b)
	}
	if !isRequest || !matches {
		s.t.Errorf("%s %s\nwant %s", line, body, s.steps[0])
		return false
	}
	s.steps = s.steps[1:]
	return true
}

// send adds the events that are next in the recording to the stream.
func (s *server) send() {
	for len(s.steps) > 0 {
		event, isEvent := strings.CutPrefix(s.steps[0], "! ")
		switch {
		case isEvent:
			s.events = append(s.events, event)
		case s.steps[0] == "cut":
			s.cut = true
		default:
			return
		}
		s.steps = s.steps[1:]
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// stream writes the events of the stream.
func (s *server) stream(ctx context.Context, w http.ResponseWriter) {
	for {
		s.mu.Lock()
		events, cut, changed := s.events, s.cut, s.changed
		s.events = nil
		s.mu.Unlock()
		for _, e := range events {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", e) // the client may be gone
		}
		_ = http.NewResponseController(w).Flush()
		if cut {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}
