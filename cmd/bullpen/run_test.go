package main

import (
	"bytes"
	"context"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// onWrite calls f at the first write.
type onWrite struct {
	written bytes.Buffer
	f       func()
}

func (w *onWrite) Write(p []byte) (int, error) {
	if w.f != nil {
		w.f()
		w.f = nil
	}
	return w.written.Write(p)
}

func TestInterruptCancelsAndPrintsTheRest(t *testing.T) {
	requests := filepath.Join(t.TempDir(), "requests")
	server := httptest.NewServer(newStub(requests))
	defer server.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	out, errs := &onWrite{f: interrupt}, new(bytes.Buffer)
	c := &runCommand{remote: remote{URL: server.URL, Key: stubKey}, programFlags: programFlags{File: "-"}}
	err := c.Run(ctx, streams{in: strings.NewReader("# runs"), out: out, err: errs})

	exit, _ := errors.AsType[exitError](err)
	if exit.code != exitInterrupted {
		t.Errorf("error is %v, want exit code %d", err, exitInterrupted)
	}
	if got := out.written.String(); got != "one\n" {
		t.Errorf("standard output is %q, want what came before", got)
	}
	if exit.err == nil || !strings.Contains(exit.err.Error(), "cancelled") {
		t.Errorf("error is %v, want one that reports a cancelled execution", exit.err)
	}
	log, err := os.ReadFile(requests)
	if err != nil {
		t.Fatal(err)
	}
	if want := "POST /v1/executions/" + string(stubTrace) + "/cancel"; !strings.Contains(string(log), want) {
		t.Errorf("the server received\n%s\nwant %s", log, want)
	}
}

// afterWrite calls f after each write. It is safe for concurrent use.
type afterWrite struct {
	mu      sync.Mutex
	written bytes.Buffer
	f       func()
}

func (w *afterWrite) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.f()
	return w.written.Write(p)
}

func (w *afterWrite) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.written.String()
}

// Progress is printed on a terminal only.
func TestProgressWhileQueued(t *testing.T) {
	free := make(chan struct{})
	server := httptest.NewServer((&stub{log: filepath.Join(t.TempDir(), "requests"), free: free}).handler())
	defer server.Close()
	errs := &afterWrite{f: sync.OnceFunc(func() { close(free) })}
	c := &runCommand{remote: remote{URL: server.URL, Key: stubKey}, programFlags: programFlags{File: "-"}}
	err := c.Run(t.Context(), streams{in: strings.NewReader("# waits"), out: new(bytes.Buffer), err: errs, terminal: true})
	if got := errs.String(); err != nil || got != "bullpen: waiting for a free slot\nbullpen: execution "+
		string(stubTrace)+"\ntwo\n" {
		t.Errorf("standard error is %q, %v", got, err)
	}
	streams{err: errs}.progressf("not a terminal")
	if strings.Contains(errs.String(), "not a terminal") {
		t.Error("progress without a terminal")
	}
}

func TestLanguage(t *testing.T) {
	for _, test := range []struct {
		file, code string
		want       proto.Language // empty for an error
	}{
		{"a.py", "", proto.Python},
		{"a.PY", "", proto.Python},
		{"a.mjs", "", proto.Node},
		{"a.sh", "#!/usr/bin/python3\n", proto.Bash},
		{"a", "#!/usr/bin/env python3\nprint(1)", proto.Python},
		{"a", "#!/usr/bin/python3.14 -I", proto.Python},
		{"a", "#!/usr/bin/env node\n", proto.Node},
		{"a", "#!/bin/sh -e\n", proto.Bash},
		{"a.rb", "", "ruby"},
		{"a.ts", "", "deno"},
		{"a", "#!/usr/bin/env ruby3.1\n", "ruby"},
		{"a", "#!/usr/bin/env -S deno run --allow-all\n", "deno"},
		{"a", "#!/bin/bash", proto.Bash},
		{"a", "#!/usr/bin/perl\n# not python\n", ""},
		{"a", "print(1)\n#!/bin/bash\n", ""},
		{"a.txt", "print(1)", ""},
		{"-", "print(1)", proto.Python},
		{"-", "#!/bin/bash\n", proto.Bash},
	} {
		got, err := (&programFlags{File: test.file}).language([]byte(test.code))
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%s with %q is %q, %v; want %q", test.file, test.code, got, err, test.want)
		}
	}
}
