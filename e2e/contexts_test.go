package e2e

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image/png"
	"net/http"
	"strings"
	"testing"

	schema "github.com/bullpen-run/bullpen/proto/api"
)

// newContext starts an interpreter and returns its path.
func (s *liveSandbox) newContext(language string) string {
	s.t.Helper()
	var c schema.Context
	r := s.do(http.MethodPost, s.path("/contexts"), request{"language": language})
	if r.into(s.t, &c); r.status != http.StatusCreated || c.State != "idle" {
		s.t.Fatalf("create a context: %s", r)
	}
	return s.path("/contexts/" + c.ID)
}

// cell runs a cell in a context.
func (s *liveSandbox) cell(context, code string) (result schema.CellResult) {
	s.t.Helper()
	r := s.do(http.MethodPost, context+"/execute", request{"code": code})
	if r.into(s.t, &result); r.status != http.StatusOK {
		s.t.Fatalf("run a cell: %s", r)
	}
	return result
}

// checkCell runs a cell that must succeed, with that output.
func (s *liveSandbox) checkCell(context, code, want string) {
	s.t.Helper()
	if got := s.cell(context, code); got.Status != "ok" || got.Stdout != want {
		s.t.Errorf("%s: %+v, want %q", code, got, want)
	}
}

// testContexts is what tenants see of interpreters that keep their state.
func testContexts(t *testing.T, sys *system) {
	t.Run("state", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{"on_timeout": "pause", "env_vars": request{"GREETING": "hello"}})
		python, node, bash := s.newContext("python"), s.newContext("javascript"), s.newContext("bash")
		s.checkCell(python, "x = 41; open('kept.txt', 'w').write('kept')", "")
		s.checkCell(python, "import os\nprint(x + 1, os.environ['GREETING'], os.getcwd())", "42 hello /home/user\n")
		s.checkCell(node, "const y = 1", "")
		s.checkCell(node, "console.log(y + 1, process.env.GREETING)", "2 hello\n")
		s.checkCell(bash, "z=2; cd /tmp", "")
		s.checkCell(bash, "echo $z $GREETING $PWD; id -u", "2 hello /tmp\n1000\n")

		other, _ := s.newKey("other-contexts", "pro")
		for _, r := range []*reply{
			s.with(other).do(http.MethodGet, python, nil), s.with(other).do(http.MethodGet, s.path("/contexts"), nil),
			s.with(other).do(http.MethodPost, python+"/execute", request{"code": "x"}),
			s.do(http.MethodGet, s.path("/contexts/python-1-aaaaaaaaaaaaaaaa"), nil),
			s.do(http.MethodGet, s.path("/contexts/..%2Ffiles"), nil),
		} {
			if r.status != http.StatusNotFound {
				t.Errorf("%s", r)
			}
		}
		if r := s.do(http.MethodPost, s.path("/contexts"), request{"language": "cobol"}); r.status != http.StatusBadRequest {
			t.Errorf("%s", r)
		}

		// Memory is gone after a pause, and says so until a restart. Files are kept.
		s.change(http.MethodPost, "/pause")
		if r := s.do(http.MethodPost, python+"/execute", request{"code": "x"}); r.status != http.StatusConflict {
			t.Errorf("%s", r)
		}
		s.change(http.MethodPost, "/resume")
		for _, r := range []*reply{
			s.do(http.MethodPost, python+"/execute", request{"code": "x"}), s.do(http.MethodGet, python, nil),
		} {
			if r.status != http.StatusGone || !bytes.Contains(r.body, []byte("context_lost")) {
				t.Errorf("%s", r)
			}
		}
		if r := s.do(http.MethodPost, python+"/restart", nil); r.status != http.StatusOK {
			t.Errorf("%s", r)
		}
		s.checkCell(python, "print('x' in globals(), open('kept.txt').read())", "False kept\n")
		if r := s.do(http.MethodDelete, python, nil); r.status != http.StatusNoContent {
			t.Errorf("%s", r)
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("results", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{})
		python := s.newContext("python")
		got := s.cell(python, "import matplotlib.pyplot as plt\nplt.plot([1, 2, 4])\nplt.title('growth')\nplt.show()\n"+
			"import pandas as pd\nplt.savefig('left.png')\npd.DataFrame({'n': [1, 2]})")
		if got.Status != "ok" || len(got.Results) != 2 || len(got.Files) != 1 || got.Files[0].Path != "left.png" {
			t.Fatalf("%+v", got)
		}
		var text string
		var chart struct{ Type, Title string }
		if err := json.Unmarshal(got.Results[0].Data["image/png"], &text); err != nil {
			t.Fatal(err)
		}
		picture, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := png.Decode(bytes.NewReader(picture)); err != nil {
			t.Error(err)
		}
		err = json.Unmarshal(got.Results[0].Chart, &chart)
		if err != nil || chart.Type != "line" || chart.Title != "growth" {
			t.Errorf("%v %+v", err, chart)
		}
		if string(got.Results[1].Columns) != `{"n":[1,2]}` || !got.Results[1].Result {
			t.Errorf("%+v", got.Results[1])
		}
		failed := s.cell(python, "1/0")
		if failed.Status != "error" || failed.Error == nil || failed.Error.Name != "ZeroDivisionError" {
			t.Errorf("%+v", failed)
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("streams", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{})
		python := s.newContext("python")
		const code = "import time\nfor i in range(5): print(i, flush=True); time.sleep(0.05)\n'end'"
		whole := s.stream(python+"/execute", code)
		kinds := ""
		for line := range strings.Lines(whole) {
			var e struct{ Type string }
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatal(err)
			}
			kinds += e.Type + " "
		}
		if !strings.HasPrefix(kinds, "start stdout ") || !strings.HasSuffix(kinds, "stdout display end ") {
			t.Error(kinds)
		}
		// Each event is a place at which a client may be cut off.
		lines := strings.SplitAfter(whole, "\n")
		for after := range len(lines) {
			r := s.do(http.MethodGet, fmt.Sprintf("%s/runs/1?after_seq=%d", python, after), nil)
			if want := strings.Join(lines[after:], ""); r.status != http.StatusOK || string(r.body) != want {
				t.Errorf("after %d: %s, want %s", after, r, want)
			}
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("memory", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{"on_timeout": "pause"})
		python := s.newContext("python")
		r := s.do(http.MethodPost, python+"/execute", request{"code": "x = [b'x' * (1 << 20) for _ in range(1 << 20)]"})
		if r.status != http.StatusConflict && !bytes.Contains(r.body, []byte("lost")) {
			t.Errorf("%s", r)
		}
		s.awaits("paused", "memory_limit_exceeded")
		s.change(http.MethodPost, "/resume")
		if r := s.do(http.MethodPost, python+"/execute", request{"code": "x"}); r.status != http.StatusGone {
			t.Errorf("%s", r)
		}
		s.change(http.MethodDelete, "")
	})
}

// stream runs a cell and returns its events, one on a line.
func (s *liveSandbox) stream(path, code string) string {
	s.t.Helper()
	body, err := json.Marshal(request{"code": code})
	if err != nil {
		s.t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.base+path, bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+s.key)
	r.Header.Set("Accept", "application/x-ndjson")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	var all bytes.Buffer
	if _, err := all.ReadFrom(answer.Body); err != nil || answer.StatusCode != http.StatusOK {
		s.t.Fatalf("%d %v: %s", answer.StatusCode, err, all.String())
	}
	return all.String()
}
