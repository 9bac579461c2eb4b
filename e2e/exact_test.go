package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// testExactRequest reads back what was submitted, up to the size that is kept.
func testExactRequest(t *testing.T, a *api) {
	secret := proto.NewKeySecret("local") // random
	program := bash("printf '\u00e9 < > \u2028'; cat >/dev/null # \x00").and(
		"args", []string{"", "a\nb", "\u00e9"}, "stdin", "", "env_vars", request{"B": secret, "A": secret},
		"metadata", request{"k": "v"}, "timeout", 30, "kill_grace", 1, "max_attempts", 2, "thread_id", "exact-request")
	left := proto.MaxKeptRequest - len(program["code"].(string)) - len("a\nb\u00e9")
	program["stdin"] = strings.Repeat("\x00", left)
	submit := map[string]func(request) string{
		"inline": func(r request) string { return a.execute(r).trace(t) },
		"async":  func(r request) string { id := a.submit(r); a.ended(id); return id },
	}
	for mode, run := range submit {
		t.Run(mode, func(t *testing.T) {
			r := a.get(execution(run(program), "request"))
			var got map[string]any
			r.into(t, &got)
			want := maps.Clone(program)
			delete(want, "env_vars")
			text, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			var submitted map[string]any
			if err := json.Unmarshal(text, &submitted); err != nil {
				t.Fatal(err)
			}
			for name, value := range submitted {
				if !reflect.DeepEqual(got[name], value) {
					t.Errorf("%s is %s, want %s", name, short(fmt.Sprint(got[name])), short(fmt.Sprint(value)))
				}
			}
			if names := fmt.Sprint(got["env_names"]); names != "[A B]" || bytes.Contains(r.body, []byte(secret)) {
				t.Errorf("env_names are %s, and the values are there: %v", names, bytes.Contains(r.body, []byte(secret)))
			}
			again := a.execute(r.body)
			if again.status != http.StatusOK {
				t.Errorf("run again: %s", again)
			}
			larger := program.and("stdin", strings.Repeat("\x00", left+1))
			a.get(execution(run(larger), "request")).rejection(t, http.StatusNotFound, "not_found")
		})
	}
	t.Run("running", func(t *testing.T) {
		id := a.submit(bash("echo up; sleep 60"))
		a.printed(id, "up")
		a.get(execution(id, "request")).into(t, &struct{}{})
		a.cancelled(id)
	})
}

// testExactOutput prints random bytes in each mode, and characters a byte at a time, and reads them as
// they were.
func testExactOutput(t *testing.T, a *api) {
	noise := make([]byte, 300<<10)
	_, _ = rand.Read(noise)
	// Lines that are longer than an event, and a character that is cut at the end.
	noise = slices.Concat(noise, bytes.Repeat([]byte{0xff}, 100<<10), []byte("\n\xe2\x82"))
	program := python("import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.read())); sys.stderr.write('€')").and(
		"stdin", hex.EncodeToString(noise))
	text := strings.ToValidUTF8(string(noise), "") // what JSON can hold of it is in the answers
	exact := func(t *testing.T, id string) {
		t.Helper()
		r := a.get(execution(id, "output", "stdout"))
		if r.status != http.StatusOK || !bytes.Equal(r.body, noise) ||
			r.header.Get("Content-Type") != "application/octet-stream" ||
			r.header.Get("X-Content-Type-Options") != "nosniff" ||
			!strings.HasPrefix(r.header.Get("Content-Disposition"), "attachment") || r.header.Get("X-Output-Truncated") != "" {
			t.Errorf("stdout of %s: %d, %d bytes, %v", id, r.status, len(r.body), r.header)
		}
		if r := a.get(execution(id, "output", "stderr")); string(r.body) != "€" {
			t.Errorf("stderr: %s", r)
		}
		if r := a.get(execution(id, "output", "stdout"), "Range", "bytes=1000-1999"); r.status != http.StatusPartialContent ||
			!bytes.Equal(r.body, noise[1000:2000]) {
			t.Errorf("a range: %d, %d bytes", r.status, len(r.body))
		}
	}
	inResult := func(t *testing.T, r *proto.Result) {
		t.Helper()
		if !r.StdoutInvalidUTF8 || r.StderrInvalidUTF8 || strings.ReplaceAll(r.Stdout, "\ufffd", "") != strings.ReplaceAll(
			text, "\ufffd", "") || !utf8.ValidString(r.Stdout) || r.Stderr != "€" {
			t.Errorf("a result with %d bytes, %v, %v", len(r.Stdout), r.StdoutInvalidUTF8, r.StderrInvalidUTF8)
		}
	}
	inEvents := func(t *testing.T, events []event) {
		t.Helper()
		var out, err []byte
		for _, e := range events {
			switch {
			case e.Stream == "stderr":
				err = append(err, e.Data...)
			case e.Base64 != nil:
				out = append(out, e.Base64...)
			default:
				out = append(out, e.Data...)
			}
		}
		if !bytes.Equal(out, noise) || string(err) != "€" {
			t.Errorf("%d events with %d bytes of stdout, and stderr %q", len(events), len(out), err)
		}
	}
	t.Run("inline", func(t *testing.T) {
		r := a.execute(program)
		result := r.result(t)
		inResult(t, &result)
		exact(t, r.trace(t))
		inEvents(t, a.output(r.trace(t), 0))
	})
	t.Run("streaming", func(t *testing.T) {
		events := a.stream(program)
		inEvents(t, events)
		inResult(t, events[len(events)-1].Result)
		exact(t, events[0].TraceID)
	})
	t.Run("async", func(t *testing.T) {
		id := a.submit(program)
		r := a.ended(id)
		inResult(t, &proto.Result{
			Stdout: *r.Stdout, Stderr: *r.Stderr, StdoutInvalidUTF8: r.StdoutInvalidUTF8,
			StderrInvalidUTF8: r.StderrInvalidUTF8,
		})
		exact(t, id)
	})
	t.Run("characters in pieces", func(t *testing.T) {
		r := a.execute(python("import sys, time\nfor b in '€ü😀'.encode() * 2:\n  "+
			"sys.stdout.buffer.raw.write(bytes([b]))\n  time.sleep(.15)").and("stream_partial", true))
		if result := r.result(t); result.StdoutInvalidUTF8 || result.Stdout != "€ü😀€ü😀" {
			t.Errorf("%+v", result)
		}
		for _, e := range a.output(r.trace(t), 0) {
			if e.Base64 != nil || strings.Contains(e.Data, "\ufffd") {
				t.Errorf("an event with %q", e.Data)
			}
		}
	})
	t.Run("truncated", func(t *testing.T) {
		r := a.execute(bash("head -c 3M /dev/zero | tr '\\0' '\\377'"))
		raw := a.get(execution(r.trace(t), "output", "stdout"))
		if result := r.result(t); !result.StdoutInvalidUTF8 || !result.StdoutTruncated || len(raw.body) > 2<<20 ||
			len(raw.body) < 2<<20-4 || raw.header.Get("X-Output-Truncated") != "true" {
			t.Errorf("%d bytes, %v", len(raw.body), raw.header)
		}
	})
	t.Run("running", func(t *testing.T) {
		id := a.submit(bash("echo up; sleep 60"))
		a.get(execution(id, "output", "stdout")).rejection(t, http.StatusConflict, "conflict")
		eventually(t, "the program has printed", func() (bool, any) {
			r := a.get(execution(id, "output") + "?follow=false")
			return strings.Contains(string(r.body), `up\n`), r
		})
		a.cancelled(id)
		if r := a.get(execution(id, "output", "stdout")); string(r.body) != "up\n" {
			t.Errorf("after the cancel: %s", r)
		}
	})
}
