package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	schema "github.com/bullpen-run/bullpen/proto/api"
)

// agentPackage returns an npm package with a program of Claude Code that does nothing, and its integrity.
func agentPackage(t *testing.T) (content []byte, integrity string) {
	t.Helper()
	var b bytes.Buffer
	zip := gzip.NewWriter(&b)
	w := tar.NewWriter(zip)
	if err := w.WriteHeader(&tar.Header{Name: "package/cli.js", Typeflag: tar.TypeReg, Mode: 0o644, Size: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(";")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zip.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha512.Sum512(b.Bytes())
	return b.Bytes(), "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
}

// What the operator installs with the command is in the list of agents once a worker has it, and what cannot be
// used is named.
func testAgentPrograms(t *testing.T, p *programs) {
	content, integrity := agentPackage(t)
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(content)
	}))
	defer registry.Close()
	dir := filepath.Join(t.TempDir(), "agents")
	install := func(version, integrity string) (code int, output string) {
		return p.run(t, nil, "agent", "install", "claude", "--version", version, "--dir", dir, "--registry", registry.URL,
			"--integrity", integrity)
	}
	for _, version := range []string{"2.1.9", "2.1.10"} {
		if code, output := install(version, integrity); code != 0 || !strings.Contains(output, "not free software") ||
			!strings.Contains(output, filepath.Join(dir, "claude", version)) {
			t.Fatalf("exit status %d: %s", code, output)
		}
	}
	other := "sha512-" + base64.StdEncoding.EncodeToString(make([]byte, sha512.Size))
	if code, output := install("2.1.11", other); code != 1 || !strings.Contains(output, "integrity") {
		t.Errorf("another package: exit status %d: %s", code, output)
	}
	if err := os.MkdirAll(filepath.Join(dir, "codex", "0.116.0"), 0o755); err != nil {
		t.Fatal(err)
	}
	if code, output := p.run(t, nil, "agent", "installed", "--dir", dir); code != 1 ||
		!strings.Contains(output, "2.1.10   default") || !strings.Contains(output, "it has no manifest: remove "+dir) {
		t.Errorf("exit status %d: %s", code, output)
	}

	sys := newSystem(t, p, topology{separate: true}, 1, "--agents", dir, "--sandboxes", "1")
	eventually(t, "the agent is installed", func() (bool, any) {
		r := sys.do(http.MethodGet, "/sandbox-agent/v1/agents", nil)
		var list struct {
			Agents []struct{ ID, Version, Path string }
		}
		r.into(t, &list)
		one := list.Agents[0]
		return one.ID == "claude" && one.Version == "2.1.10" && one.Path == "/run/bullpen/agents/claude" &&
			strings.Contains(string(r.body), `"id":"claude","installed":true`), r
	})
	post := func(path string, body request) *reply {
		return sys.do(http.MethodPost, "/sandbox-agent/v1/"+path, body, "Content-Type", "application/json")
	}
	if r := post("agents/claude/install", request{}); r.status != http.StatusNoContent {
		t.Errorf("install: %s", r)
	}
	if r := post("sessions/s", request{"agent": "claude", "agentVersion": "2.1.8"}); r.status != http.StatusNotFound ||
		!strings.Contains(string(r.body), "no worker has version 2.1.8, only 2.1.10, 2.1.9") {
		t.Errorf("a version that is not installed: %s", r)
	}
	var workers schema.Workers
	sys.do(http.MethodGet, "/v1/admin/workers", nil).into(t, &workers)
	for _, capability := range []string{"agent:claude", "agent:claude@2.1.9", "agent:claude@2.1.10"} {
		if !slices.Contains(workers.Workers[0].Capabilities, capability) {
			t.Errorf("the worker has %v", workers.Workers[0].Capabilities)
		}
	}
	if text := fmt.Sprint(workers); strings.Contains(text, "codex") {
		t.Errorf("the worker offers an agent that it cannot use: %s", text)
	}
	if log := sys.worker.text(t); !strings.Contains(log, "agent:codex@0.116.0") ||
		!strings.Contains(log, "it has no manifest") {
		t.Errorf("the log does not name the agent that cannot be used:\n%s", sys.worker.tail())
	}
}
