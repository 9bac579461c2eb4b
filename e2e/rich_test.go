package e2e

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// rich is a Python program that is run as one cell.
func rich(code string) request { return python(code).and("rich", true) }

// form returns one form of a display, which is a text.
func form(t *testing.T, d *proto.Display, kind string) string {
	t.Helper()
	var text string
	if err := json.Unmarshal(d.Data[kind], &text); err != nil {
		t.Errorf("%s of %v: %v", kind, d.Data, err)
	}
	return text
}

// texts returns the plain texts of displays.
func texts(t *testing.T, displays []proto.Display) (all []string) {
	t.Helper()
	for i := range displays {
		all = append(all, form(t, &displays[i], "text/plain"))
	}
	return all
}

// testRich runs programs whose displays become results and events.
func testRich(t *testing.T, p *programs) {
	const secret = "canary-rich-4d1e"
	sys := newSystem(t, p, topology{}, 4)
	a := sys.api
	r := a.do(http.MethodPut, "/v1/admin/secrets/TOKEN?org=acme", request{"value": secret})
	if r.status != http.StatusOK {
		t.Fatalf("store a secret: %s", r)
	}
	a.newProfile("little-output", request{"output": "64KiB"})
	newKey := func(settings request) *api {
		t.Helper()
		settings = settings.and("name", "n", "org", "acme", "plan", "pro", "scopes", []string{"execute", "read"})
		var made struct{ Key string }
		a.do(http.MethodPost, "/v1/admin/keys", settings).into(t, &made)
		return a.with(made.Key)
	}

	result := a.inline(rich("import sys\nprint(sys.argv[1:], input(), __name__)\n6 * 7").and("args", []string{"a b"},
		"stdin", "line\n"))
	if !result.Success || result.Stdout != "['a b'] line __main__\n" || result.ResultsTruncated ||
		!slices.Equal(texts(t, result.Results), []string{"42"}) || !result.Results[0].Result {
		t.Errorf("a value: %+v", result)
	}

	result = a.inline(rich("import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.title('squares')\nplt.show()"))
	if len(result.Results) != 1 || !strings.Contains(string(result.Results[0].Chart), `"squares"`) {
		t.Fatalf("a plot: %+v", result)
	}
	picture, err := base64.StdEncoding.DecodeString(form(t, &result.Results[0], "image/png"))
	if err != nil || !strings.HasPrefix(string(picture), "\x89PNG") {
		t.Errorf("a picture: %v, %.20q", err, picture)
	}

	// What was shown before a failure, a timeout and an exit is kept.
	const show = "from IPython.display import display\ndisplay('first')\n"
	result = a.inline(rich(show + "print(1)\n1/0\n'never'"))
	if result.ExitCode != 1 || !strings.Contains(result.Stderr, "ZeroDivisionError: division by zero") ||
		!slices.Equal(texts(t, result.Results), []string{"'first'"}) {
		t.Errorf("a failure: %+v", result)
	}
	result = a.inline(rich(show+"import time; time.sleep(100)").and("timeout", 20)) // the import of IPython included
	if result.Error == nil || len(result.Results) != 1 {
		t.Errorf("a timeout: %+v", result)
	}
	result = a.inline(rich(show + "import sys; sys.exit(7)"))
	if result.ExitCode != 7 || len(result.Results) != 1 {
		t.Errorf("an exit: %+v", result)
	}

	testRichEvents(t, a)

	// Secrets are masked wherever they are shown.
	result = newKey(request{"secrets": []string{"TOKEN=GH_TOKEN!"}}).inline(rich(show +
		"import os\nv = os.environ['GH_TOKEN']\n" +
		"display({'text/html': '<b>' + v, 'application/json': {v: [v, 1]}}, raw=True, metadata={'m': v})\nv"))
	shown, err := json.Marshal(result.Results)
	if err != nil || len(result.Results) != 3 || strings.Contains(string(shown), secret) ||
		strings.Count(string(shown), "***") != 5 {
		t.Errorf("a secret: %v, %s", err, shown)
	}

	// Limits cut results, and say so.
	result = a.inline(rich(show + "for i in range(120): display(i)"))
	if len(result.Results) != proto.MaxDisplays || !result.ResultsTruncated {
		t.Errorf("121 results: %d, truncated %t", len(result.Results), result.ResultsTruncated)
	}
	result = newKey(request{"profile": "little-output"}).inline(
		rich("from IPython.display import display\ndisplay({'text/plain': 'small', 'text/html': 'x' * 100_000}, raw=True)"))
	if !slices.Equal(texts(t, result.Results), []string{"small"}) || !result.ResultsTruncated ||
		!slices.Equal(result.Results[0].Truncated, []string{"text/html"}) {
		t.Errorf("a large result with little output: %+v", result)
	}

	// The files of a thread are there, and the record and the request have everything.
	in := func(code string) request { return rich(code).and("thread_id", "cells") }
	a.inline(in("open('note', 'w').write('kept')"))
	id := a.submit(in("open('note').read()"))
	a.ended(id)
	var rec struct{ Results []proto.Display }
	a.get(execution(id)).into(t, &rec)
	if !slices.Equal(texts(t, rec.Results), []string{"'kept'"}) {
		t.Errorf("the record of a thread's execution: %+v", rec)
	}
	if r := a.get(execution(id, "request")); !strings.Contains(string(r.body), `"rich":true`) {
		t.Errorf("its request: %s", r)
	}
	if r := a.execute(bash("true").and("rich", true)); r.status != http.StatusBadRequest ||
		!strings.Contains(string(r.body), "rich must not be given with the language bash") {
		t.Errorf("another language: %s", r)
	}
}

// testRichEvents reads displays from streams, in the program's order. A large one has a part in the result only.
func testRichEvents(t *testing.T, a *api) {
	const code = `
import sys
from IPython.display import display
print('one', end='')
display(1)
print('two', file=sys.stderr)
display({'text/plain': 'large', 'image/png': 'A' * 600_000}, raw=True)
print('three')
`
	r := a.execute(rich(code), accept, ndjson)
	var got []string
	for line := range strings.Lines(string(r.body)) {
		var e struct {
			Type, Data string
			Index      int
			Display    proto.Display
			Omitted    []string
			Result     *proto.Result
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case "output":
			got = append(got, e.Data)
		case "display":
			got = append(got, form(t, &e.Display, "text/plain"))
			if large := e.Index == 1; large != slices.Equal(e.Omitted, []string{"image/png"}) || len(e.Display.Data) != 1 {
				t.Errorf("display %d has %d forms, and omits %q", e.Index, len(e.Display.Data), e.Omitted)
			}
		case "result":
			if e.Result.Stdout != "onethree\n" || len(form(t, &e.Result.Results[1], "image/png")) != 600_000 {
				t.Errorf("the result has %q and %d results", e.Result.Stdout, len(e.Result.Results))
			}
		}
	}
	if want := []string{"one", "1", "two\n", "large", "three\n"}; !slices.Equal(got, want) {
		t.Errorf("events %q instead of %q", got, want)
	}
}
