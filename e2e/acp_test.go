package e2e

import (
	"bufio"
	"context"
	"io"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// installACPClient installs the npm client of the Sandbox Agent API 0.4. It returns the directory with it and the
// programs that use it.
func installACPClient(ctx context.Context, t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", "acp"))); err != nil {
		t.Fatal(err)
	}
	install := exec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("npm install: %v\n%s", err, out)
	}
	return dir
}

// acpClient is a program with the npm client.
type acpClient struct {
	*exec.Cmd
	in     io.Writer
	lines  *bufio.Scanner // of its output
	failed strings.Builder
}

// startACPClient starts a program in the directory of installACPClient, with variables.
func startACPClient(ctx context.Context, t *testing.T, dir, program string, env ...string) *acpClient {
	t.Helper()
	c := &acpClient{Cmd: exec.CommandContext(ctx, "node", program)}
	c.Dir, c.Env, c.Stderr = dir, append(os.Environ(), env...), &c.failed
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	c.in, c.lines = in, bufio.NewScanner(out)
	return c
}

// testACPClientStarts has the npm client start sandbox-agent, use it and stop it.
func testACPClientStarts(t *testing.T, p *programs) {
	ctx, cancel := context.WithTimeout(t.Context(), clientsTime)
	defer cancel()
	client := exec.CommandContext(ctx, "node", "spawn.mjs")
	client.Dir = installACPClient(ctx, t)
	temporary := t.TempDir()
	client.Env = append(os.Environ(), "SANDBOX_AGENT_BIN="+p.sandboxAgent, "TMPDIR="+temporary, notPrewarmed,
		"BULLPEN_NSJAIL="+p.nsjail)
	out, err := client.CombinedOutput() // ends with the last process that has the streams
	if err != nil || !strings.Contains(string(out), "done\n") {
		t.Errorf("spawn.mjs: %v\n%s", err, out)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) > 0 {
		t.Errorf("the server was killed, and left %v, %v", left, err)
	}
}

// testACPClient runs a program with the npm client of the Sandbox Agent API 0.4, unmodified, behind a load balancer
// whose gateways leave and are killed while prompts are in progress.
func testACPClient(t *testing.T, p *programs) {
	args := []string{"--agent-mock-delay", "0s", "--drain", "1s"}
	sys := newSystem(t, p, topology{separate: true}, noSlots, args...)
	ctx, cancel := context.WithTimeout(t.Context(), clientsTime)
	defer cancel()
	dir := installACPClient(ctx, t)

	var target atomic.Pointer[url.URL]
	gateway, base := sys.front, sys.base
	route := func() {
		u, err := url.Parse(base)
		if err != nil {
			t.Fatal(err)
		}
		target.Store(u)
	}
	route()
	balancer := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target.Load()) }, FlushInterval: -1,
	})
	defer balancer.Close()

	client := startACPClient(ctx, t, dir, "client.mjs", "ACP_URL="+balancer.URL+"/sandbox-agent",
		"BULLPEN_API_KEY="+sys.key)
	// replace starts another gateway, which gets further requests, and stops the one before it.
	replace := func(name string, stop func(*process)) {
		old := gateway
		gateway, base = p.startServe(t, name, sys.env, append([]string{
			"--roles", frontRole, "--data", filepath.Join(t.TempDir(), "data"),
		}, sys.args...)...)
		route()
		stop(old)
		if _, err := client.in.Write([]byte("go on\n")); err != nil {
			t.Error(err)
		}
	}
	last := ""
	for client.lines.Scan() {
		switch last = client.lines.Text(); last {
		case "asked":
			replace("second front", func(old *process) {
				old.signal(syscall.SIGTERM)
				if code := old.exitCode(t); code != 0 {
					t.Errorf("the first gateway ended with exit code %d:\n%s", code, old.tail())
				}
			})
		case "idle":
			replace("third front", (*process).kill)
		case "in progress":
			replace("fourth front", (*process).kill)
		}
	}
	if err := client.Wait(); err != nil || last != "done" {
		t.Fatalf("client.mjs: %v after %q\n%s\n%s", err, last, client.failed.String(), gateway.tail())
	}
	if text := client.failed.String(); strings.Contains(text, "ACP write error") {
		t.Errorf("requests failed:\n%s", text)
	}
}
