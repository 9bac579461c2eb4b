package main_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

// frame returns a frame of a stream.
func frame(flags byte, message string) []byte {
	b := binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(message)))
	return append(b, message...)
}

// readFrame reads a frame of a stream.
func readFrame(t *testing.T, r io.Reader) (flags byte, message string) {
	t.Helper()
	var h [5]byte
	_, err := io.ReadFull(r, h[:])
	check(t, err)
	b := make([]byte, binary.BigEndian.Uint32(h[1:]))
	_, err = io.ReadFull(r, b)
	check(t, err)
	return h[0], string(b)
}

// sameJSON compares documents.
func sameJSON(t *testing.T, got, want string) {
	t.Helper()
	var g, w bytes.Buffer
	check(t, json.Compact(&g, []byte(got)))
	check(t, json.Compact(&w, []byte(want)))
	if g.String() != w.String() {
		t.Fatalf("%s instead of %s", got, want)
	}
}

// TestWireUnary makes requests as E2B's clients do.
func TestWireUnary(t *testing.T) {
	s := newSandbox(t)
	call := func(path, body string, headers ...string) (int, string) {
		t.Helper()
		headers = append([]string{
			"Content-Type", "application/json", "Connect-Protocol-Version", "1", "Connect-Timeout-Ms", "60000",
			"Content-Encoding", "identity",
		}, headers...)
		code, header, answer := s.do(s.request("POST", path, strings.NewReader(body), headers...))
		if kind := header.Get("Content-Type"); kind != "application/json" {
			t.Fatalf("content type %q", kind)
		}
		return code, answer
	}
	code, body := call("/process.Process/List", "{}")
	if code != 200 {
		t.Fatal(code, body)
	}
	sameJSON(t, body, "{}")
	code, body = call("/filesystem.Filesystem/MakeDir", `{"path":"dir","unknown":{"a":1}}`)
	var made struct{ Entry map[string]any }
	check(t, json.Unmarshal([]byte(body), &made))
	if code != 200 || made.Entry["type"] != "FILE_TYPE_DIRECTORY" || made.Entry["path"] != s.home+"/dir" ||
		made.Entry["modifiedTime"] == nil || made.Entry["owner"] != "user" {
		t.Fatal(code, body)
	}
	if size, ok := made.Entry["size"].(string); made.Entry["size"] != nil && (!ok || size == "") {
		t.Fatalf("int64 must be a string: %s", body)
	}
	for _, test := range []struct {
		path, body, code string
		status           int
		headers          []string
	}{
		{"/filesystem.Filesystem/Stat", `{"path":"no"}`, "not_found", 404, nil},
		{"/filesystem.Filesystem/MakeDir", `{"path":"dir"}`, "already_exists", 409, nil},
		{"/filesystem.Filesystem/Stat", `{"path":1}`, "invalid_argument", 400, nil},
		{"/filesystem.Filesystem/Stat", `{`, "invalid_argument", 400, nil},
		{"/filesystem.Filesystem/Stat", `{}`, "unauthenticated", 401, []string{"Authorization", "Basic " + basic("x")}},
		{"/filesystem.Filesystem/CreateWatcher", `{"path":"dir"}`, "unimplemented", 501, nil},
		{"/process.Process/SendSignal", `{"process":{"pid":1},"signal":"SIGNAL_SIGKILL"}`, "not_found", 404, nil},
		{
			"/process.Process/SendInput", `{"process":{"pid":1},"input":{"stdin":"` + strings.Repeat("A", 5<<20) + `"}}`,
			"resource_exhausted", 429, nil,
		},
	} {
		status, body := call(test.path, test.body, test.headers...)
		var e struct{ Code, Message string }
		check(t, json.Unmarshal([]byte(body), &e))
		if status != test.status || e.Code != test.code || e.Message == "" {
			t.Errorf("%s: %d %s", test.path, status, body)
		}
	}
}

func TestWireStream(t *testing.T) {
	s := newSandbox(t)
	start := func(body string) (*http.Response, io.Reader) {
		t.Helper()
		// Chunked, as Python's client sends it.
		r := s.request("POST", "/process.Process/Start", io.MultiReader(bytes.NewReader(frame(0, body))),
			"Content-Type", "application/connect+json", "Connect-Protocol-Version", "1", "Connect-Timeout-Ms", "60000",
			"Keepalive-Ping-Interval", "50", "Authorization", "Basic "+basic("user"))
		answer, err := s.http.Do(r)
		check(t, err)
		t.Cleanup(func() { _ = answer.Body.Close() })
		if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "application/connect+json" {
			t.Fatalf("%d %v", answer.StatusCode, answer.Header)
		}
		return answer, answer.Body
	}
	_, body := start(`{"process":{"cmd":"/bin/bash","args":["-l","-c","printf '\\0\\377'; exit 3"],"envs":{},"cwd":"/"},` +
		`"stdin":false}`)
	flags, message := readFrame(t, body)
	var first struct {
		Event struct{ Start struct{ Pid uint32 } }
	}
	check(t, json.Unmarshal([]byte(message), &first))
	if flags != 0 || first.Event.Start.Pid == 0 {
		t.Fatal(flags, message)
	}
	_, message = readFrame(t, body)
	sameJSON(t, message, `{"event":{"data":{"stdout":"AP8="}}}`)
	_, message = readFrame(t, body)
	sameJSON(t, message, `{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3","error":"exit status 3"}}}`)
	flags, message = readFrame(t, body)
	if flags != 2 {
		t.Fatal(flags)
	}
	sameJSON(t, message, "{}")
	if rest, err := io.ReadAll(body); err != nil || len(rest) > 0 {
		t.Fatalf("%q, %v", rest, err)
	}

	_, body = start(`{"process":{"cmd":"/bin/bash","cwd":"/missing"}}`)
	flags, message = readFrame(t, body)
	if flags != 2 || !strings.HasPrefix(message, `{"error":{"code":"invalid_argument","message":"cwd: `) {
		t.Fatal(flags, message)
	}
}

// TestKeepAlive gets events while nothing happens.
func TestKeepAlive(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash("sleep 1000"), "Keepalive-Ping-Interval", "1")
	for range 2 {
		if e.next().GetKeepalive() == nil {
			t.Fatalf("%v", e.msg())
		}
	}
	check(t, s.kill(pid(e.pid)))
}

func TestBinaryCodec(t *testing.T) {
	s := newSandbox(t)
	s.process = processpb.NewProcessClient(s.http, "http://guest")
	if r := s.run("", "echo x"); r.stdout != "x\n" || r.end.GetStatus() != "exit status 0" {
		t.Fatalf("%+v", r)
	}
	wantCode(t, s.kill(pid(4_000_000)), connect.CodeNotFound, "")
}
