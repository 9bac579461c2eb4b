package e2e

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bullpen-run/bullpen/proto"
)

const profilesPath = "/v1/admin/profiles"

// boundToSandbox returns a client in its own organisation whose key is bound to a sandbox.
func (a *api) boundToSandbox(sandbox string) *api {
	a.t.Helper()
	secret, _ := a.boundKey(sandbox)
	return a.with(secret)
}

// boundKey creates an API key that is bound to a sandbox profile.
func (a *api) boundKey(sandbox string) (secret, id string) {
	a.t.Helper()
	r := a.do(http.MethodPost, "/v1/admin/keys",
		request{"name": sandbox, "org": sandbox, "plan": "pro", "profile": sandbox})
	if r.status != http.StatusCreated {
		a.t.Fatalf("make a key: %s", r)
	}
	var key struct{ ID, Key string }
	r.into(a.t, &key)
	return key.Key, key.ID
}

// sandboxed creates a profile and returns a client whose key is bound to it.
func (a *api) sandboxed(name string, profile request) *api {
	a.t.Helper()
	a.newProfile(name, profile)
	return a.boundToSandbox(name)
}

func (a *api) newProfile(name string, profile request) {
	a.t.Helper()
	if r := a.do(http.MethodPost, profilesPath, profile.and("name", name)); r.status != http.StatusCreated {
		a.t.Fatalf("make a sandbox: %s", r)
	}
}

// withOverrides adds members that try to override the sandbox's settings.
func (r request) withOverrides() request {
	return r.and("memory", "8GiB", "cpu", 64, "pids", 4096, "disk",
		request{"home": "8GiB", "tmp": "8GiB", "inodes": 100000},
		"network", request{"policy": "unrestricted"}, "output", "256MiB")
}

// fillCode is Python that writes 4 KiB blocks to a file until a write fails. It prints the size
// written, in MiB rounded up.
const fillCode = `
import errno, os
def fill(path):
    n = 0
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        while True: n += os.write(fd, bytes(4096))
    except OSError as e: print(errno.errorcode[e.errno], -(-n >> 20))
    os.close(fd)
    os.unlink(path)
def many(d):
    n = 0
    try:
        while True:
            open(d + '/' + str(n), 'w').close()
            n += 1
    except OSError as e: print(errno.errorcode[e.errno], n)
`

// testProfileLimits checks each limit of a profile just below and just above it.
func testProfileLimits(t *testing.T, a *api) {
	for name, test := range map[string]func(*testing.T, *api){
		"memory": testMemoryLimit, "pids": testPidsLimit, "cpu": testCPULimit, "disk": testDiskLimit,
		"large-disk": testLargeDisk,
		"output":     testProfileOutput, "env": testProfileEnv, "two-at-once": testTwoProfiles,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, a.in(t))
		})
	}
}

func testMemoryLimit(t *testing.T, a *api) {
	b := a.sandboxed("memory-limit", request{"memory": "256MiB"})
	touch := func(n int) request { return python(fmt.Sprintf("x = b'x' * (%d << 20)\nprint(len(x) >> 20)", n)) }
	b.ended(b.submit(touch(224).withOverrides())).succeeded(t, "224\n")
	b.ended(b.submit(touch(272).withOverrides())).failed(t, "oom", "memory_limit_exceeded",
		"more than its 256 MiB of memory")
	a.ended(a.submit(touch(272))).succeeded(t, "272\n")
}

func testPidsLimit(t *testing.T, a *api) {
	b := a.sandboxed("pids-limit", request{"pids": 32})
	const forks = `
import errno, os, signal
children = []
try:
    while len(children) < 100:
        pid = os.fork()
        if pid == 0: signal.pause()
        children.append(pid)
except OSError as e: print(errno.errorcode[e.errno])
print(len(children))
for pid in children: os.kill(pid, signal.SIGKILL)`
	b.ended(b.submit(python(forks).withOverrides())).succeeded(t, "EAGAIN\n31\n") // and itself
	a.ended(a.submit(python(forks))).succeeded(t, "100\n")
}

// testCPULimit measures how long it takes to use half a second of CPU time. The time has a lower
// bound from the limit, and may be longer on a busy machine.
func testCPULimit(t *testing.T, a *api) {
	b := a.sandboxed("cpu-limit", request{"cpu": 0.25})
	r := b.inline(python(`
import time
began, used = time.monotonic(), time.process_time()
while time.process_time() - used < 0.5: pass
print(time.monotonic() - began)`).withOverrides())
	wall, err := strconv.ParseFloat(strings.TrimSpace(r.Stdout), 64)
	// The measured time excludes the rest of the first period and the pause of the last one.
	if err != nil || wall < 1.6 {
		t.Errorf("half a second of a quarter of a processor took %s s, %v; stderr %s", r.Stdout, err, r.Stderr)
	}
}

func testDiskLimit(t *testing.T, a *api) {
	b := a.sandboxed("disk-limit",
		request{"memory": "256MiB", "disk": request{"home": "8MiB", "tmp": "5MiB", "inodes": 300}})
	rec := b.ended(b.submit(python(fillCode + "fill('x'); fill('/tmp/x'); many('.'); many('/tmp')").withOverrides()))
	// The home's directory and the program each use one of the home's inodes.
	rec.succeeded(t, "ENOSPC 8\nENOSPC 5\nENOSPC 298\nENOSPC 299\n")
}

// testLargeDisk uses a disk limit above the memory limit.
func testLargeDisk(t *testing.T, a *api) {
	b := a.sandboxed("large-disk",
		request{"memory": "64MiB", "disk": request{"home": "160MiB", "tmp": "96MiB", "inodes": 300}})
	rec := b.ended(b.submit(python(fillCode + "fill('x'); fill('/tmp/x'); many('.'); many('/tmp')").withOverrides()))
	rec.succeeded(t, "ENOSPC 160\nENOSPC 96\nENOSPC 299\nENOSPC 300\n")
}

func testProfileOutput(t *testing.T, a *api) {
	b := a.sandboxed("output-limit", request{"output": 1000})
	for _, c := range []struct {
		printed, kept int
		truncated     bool
	}{{999, 999, false}, {1000, 1000, false}, {1001, 1000, true}, {3 << 20, 1000, true}} {
		code := fmt.Sprintf("import sys\nsys.stdout.write('x' * %d)\nsys.stderr.write('y' * %[1]d)", c.printed)
		r := b.inline(python(code).withOverrides())
		if len(r.Stdout) != c.kept || len(r.Stderr) != c.kept || r.StdoutTruncated != c.truncated ||
			r.StderrTruncated != c.truncated || !r.Success {
			t.Errorf("of %d bytes: %d and %d, truncated %v and %v, error %s", c.printed, len(r.Stdout), len(r.Stderr),
				r.StdoutTruncated, r.StderrTruncated, display(r.Error))
		}
	}
}

func testProfileEnv(t *testing.T, a *api) {
	b := a.sandboxed("env", request{"env": request{"A": "profile", "B": "profile"}})
	b.ended(b.submit(bash("echo $A $B $C").and("env_vars", request{"B": "request", "C": "request"}))).succeeded(
		t, "profile request request\n")
	a.ended(a.submit(bash("echo $A $B $C").and("env_vars", request{"C": "request"}))).succeeded(t, "request\n")
	r := a.do(http.MethodPost, "/v1/admin/keys", request{
		"name": "env", "org": "env", "plan": "pro", "profile": "env", "env": request{"B": "key", "C": "key"},
	})
	var key struct{ Key string }
	r.into(t, &key)
	k := a.with(key.Key)
	k.ended(k.submit(bash("echo $A $B $C").and("env_vars", request{"C": "request"}))).succeeded(t, "profile key request\n")
}

// testTwoProfiles runs programs of two keys concurrently.
func testTwoProfiles(t *testing.T, a *api) {
	small := a.sandboxed("small",
		request{"memory": "64MiB", "env": request{"SIZE": "small"}, "disk": request{"home": "4MiB"}})
	large := a.sandboxed("large",
		request{"memory": "256MiB", "env": request{"SIZE": "large"}, "disk": request{"home": "16MiB"}})
	h := newHold()
	program := python(fillCode + "import subprocess\nsubprocess.run(['sleep', '" + h.seconds +
		"'])\nprint(os.environ['SIZE'], flush=True)\nfill('x')\n" +
		"x = b'x' * (100 << 20)\nprint('held')")
	ids := []string{small.submit(program), large.submit(program)}
	h.reached(t, 2)
	h.release(t)
	first, second := small.ended(ids[0]), large.ended(ids[1])
	first.failed(t, "oom", "memory_limit_exceeded", "64 MiB")
	if first.Stdout == nil || *first.Stdout != "small\nENOSPC 4\n" {
		t.Errorf("the small one: %s", first)
	}
	second.succeeded(t, "large\nENOSPC 16\nheld\n")
	for name, rec := range map[string]record{"small": first, "large": second} {
		if rec.Sandbox == nil || *rec.Sandbox != name || rec.Network != nil {
			t.Errorf("%s reports sandbox %s, network %v", name, display(rec.Sandbox), rec.Network)
		}
	}
}

// testNetwork runs programs with network access to the test's own network.
func testNetwork(t *testing.T, p *programs, in topology) {
	with := *p
	with.machine = newMachine(t)
	sys := newSystem(t, &with, in, 4)
	for name, test := range map[string]func(*testing.T, *system){
		"blocked": testNetworkBlocked, "unrestricted": testNetworkUnrestricted, "allowlist": testNetworkAllowlist,
		"many": testManyRefused, "private": testNetworkPrivate,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			with := *sys
			with.api = sys.in(t)
			test(t, &with)
		})
	}
}

// reachCode is a Python program that prints the results of connections and name lookups.
const reachCode = `
import errno, socket, urllib.request
def page(url, data=None): print(urllib.request.urlopen(url, data, 60).read().decode())
def connect(*where):
    for host, port in where:
        try:
            socket.create_connection((host, port), 60).close()
            print(host, port, 'open')
        except socket.gaierror: print(host, 'unknown')
        except OSError as e: print(host, port, errno.errorcode[e.errno])
`

func testNetworkBlocked(t *testing.T, sys *system) {
	rec := sys.ended(sys.submit(
		python(reachCode + "connect(('" + webAddr + "', 80), ('" + metadataAddr + "', 80), ('www.example.com', 80))").
			withOverrides()))
	rec.succeeded(t, webAddr+" 80 ENETUNREACH\n"+metadataAddr+" 80 ENETUNREACH\nwww.example.com unknown\n")
	if rec.Network != nil {
		t.Errorf("network %+v", rec.Network)
	}
}

// serverPorts returns the deployment's ports on the machine's loopback.
func (sys *system) serverPorts(t testing.TB) []int {
	t.Helper()
	urls := []string{sys.base}
	if sys.separate {
		urls = append(urls, sys.health, sys.broker.url)
	}
	var ports []int
	for _, text := range urls {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		port, err := strconv.Atoi(u.Port())
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, port)
	}
	return ports
}

// rejected checks the blocked connections of a record, except their times.
func (r record) rejected(t testing.TB, want ...proto.BlockedConnection) {
	t.Helper()
	if r.Network == nil {
		t.Fatalf("no network in %s", r)
	}
	if d := cmp.Diff(want, r.Network.Blocked, cmpopts.IgnoreFields(proto.BlockedConnection{}, "At")); d != "" {
		t.Errorf("refused connections: %s", d)
	}
	for _, b := range r.Network.Blocked {
		if b.At.Before(r.CreatedAt) || b.At.After(*r.CompletedAt) {
			t.Errorf("refused at %s, in an execution from %s to %s", b.At, r.CreatedAt, r.CompletedAt)
		}
	}
}

func testNetworkUnrestricted(t *testing.T, sys *system) {
	b := sys.sandboxed("open", request{"network": request{"policy": "unrestricted"}})
	var code, want strings.Builder
	var blocked []proto.BlockedConnection
	refused := func(addr string, port int) {
		_, _ = fmt.Fprintf(&code, "connect(('%s', %d))\n", addr, port)
		_, _ = fmt.Fprintf(&want, "%s %d ECONNREFUSED\n", addr, port)
		blocked = append(blocked,
			proto.BlockedConnection{Address: addr, Port: port, Protocol: "tcp", Reason: proto.BlockedAddress})
	}
	for _, addr := range []string{metadataAddr, privateAddr, "192.168.1.1", "10.77.0.2"} {
		refused(addr, 80)
	}
	for _, port := range sys.serverPorts(t) {
		refused(machineAddr, port)
	}
	id := b.submit(python(reachCode + "page('http://www.example.com/')\n" + code.String() +
		"page('http://other.example.com:8080/', b'x' * 100000)"))
	rec := b.ended(id)
	rec.succeeded(t, "this is www.example.com\n"+want.String()+"this is other.example.com:8080\n")
	rec.rejected(t, blocked...)
	if n := rec.Network; n != nil &&
		(n.BytesIn < 200 || n.BytesIn > 2000 || n.BytesOut < 100_000 || n.BytesOut > 102_000) {
		t.Errorf("%+v", n.Traffic)
	}
	shown := sys.command(t, b.key, "get", id)
	for _, text := range []string{"bytes in, ", "tcp " + metadataAddr + " port 80: address\n"} {
		if !strings.Contains(shown, text) {
			t.Errorf("bullpen get has no %q: %s", text, shown)
		}
	}

	b.ended(b.submit(request{
		"language": "node", "code": "fetch('http://www.example.com/').then(r => r.text()).then(console.log)",
	})).
		succeeded(t, "this is www.example.com\n")
	b.ended(b.submit(bash("exec 3<>/dev/tcp/www.example.com/80; printf 'GET / HTTP/1.0\\r\\nHost: me\\r\\n\\r\\n' >&3; "+
		"cat <&3 | tail -n 1"))).
		succeeded(t, "this is me")
	// A program reaches only its own loopback.
	b.ended(b.submit(python(reachCode+
		"s = socket.create_server(('127.0.0.1', 8080)); connect(('127.0.0.1', 8080), ('127.0.0.1', "+
		strconv.Itoa(sys.serverPorts(t)[0])+"))"))).succeeded(
		t, fmt.Sprintf("127.0.0.1 8080 open\n127.0.0.1 %d ECONNREFUSED\n", sys.serverPorts(t)[0]))
}

func testNetworkAllowlist(t *testing.T, sys *system) {
	b := sys.sandboxed("listed",
		request{"network": request{"policy": "allowlist", "allow": []string{"www.example.com:80", privateAddr}}})
	rec := b.ended(b.submit(python(
		reachCode + fmt.Sprintf("page('http://www.example.com/')\nconnect(('www.example.com', 8080), ('%s', 80), "+
			"('other.example.com', 80), ('%s', 80), ('%s', 80))", web2Addr, metadataAddr, privateAddr)).withOverrides()))
	rec.succeeded(t, fmt.Sprintf(
		"this is www.example.com\nwww.example.com 8080 ECONNREFUSED\n%s 80 ECONNREFUSED\nother.example.com unknown\n"+
			"%s 80 ECONNREFUSED\n%s 80 ECONNREFUSED\n", web2Addr, metadataAddr, privateAddr))
	rec.rejected(t,
		proto.BlockedConnection{
			Host: "www.example.com", Address: webAddr, Port: 8080, Protocol: "tcp",
			Reason: proto.BlockedNotAllowed,
		},
		proto.BlockedConnection{Address: web2Addr, Port: 80, Protocol: "tcp", Reason: proto.BlockedNotAllowed},
		proto.BlockedConnection{Host: "other.example.com", Protocol: "dns", Reason: proto.BlockedNotAllowed},
		proto.BlockedConnection{Address: metadataAddr, Port: 80, Protocol: "tcp", Reason: proto.BlockedAddress},
		proto.BlockedConnection{Address: privateAddr, Port: 80, Protocol: "tcp", Reason: proto.BlockedAddress},
	)
}

// testNetworkPrivate reaches a host of the private network that the profile lists, and no other.
func testNetworkPrivate(t *testing.T, sys *system) {
	b := sys.sandboxed("private", request{"network": request{
		"policy": "unrestricted", "private": []string{mirrorName + ":8080"}, "bandwidth": "16KiB",
	}})
	rec := b.ended(b.submit(python(reachCode + fmt.Sprintf(
		"page('http://%s:8080/', b'x' * 100000)\npage('http://www.example.com/')\nconnect(('%s', 80), ('%s', 80))",
		mirrorName, privateAddr, metadataAddr))))
	rec.succeeded(t, fmt.Sprintf("this is %s:8080\nthis is www.example.com\n%s 80 ECONNREFUSED\n%s 80 ECONNREFUSED\n",
		mirrorName, privateAddr, metadataAddr))
	rec.rejected(t,
		proto.BlockedConnection{
			Host: mirrorName, Address: privateAddr, Port: 80, Protocol: "tcp", Reason: proto.BlockedAddress,
		},
		proto.BlockedConnection{Address: metadataAddr, Port: 80, Protocol: "tcp", Reason: proto.BlockedAddress},
	)
	if n := rec.Network; n == nil || n.BytesOut < 100_000 {
		t.Errorf("%+v", n)
	}
	if rec.DurationMS == nil || *rec.DurationMS < 2000 { // 100,000 bytes at 16 KiB a second, after a burst of 64 KiB
		t.Errorf("it was faster than the bandwidth allows: %s", rec)
	}
}

// testManyRefused makes more blocked connections than a record lists.
func testManyRefused(t *testing.T, sys *system) {
	b := sys.sandboxed("refused", request{"network": request{"policy": "unrestricted"}})
	rec := b.ended(b.submit(python(reachCode + "connect(*[('" + metadataAddr + "', port) for port in range(1, 31)])")))
	var want []proto.BlockedConnection
	for port := 1; port <= proto.MaxBlocked; port++ {
		want = append(want, proto.BlockedConnection{
			Address: metadataAddr, Port: port, Protocol: "tcp", Reason: proto.BlockedAddress,
		})
	}
	if rec.Stdout == nil || strings.Count(*rec.Stdout, "ECONNREFUSED") != 30 {
		t.Errorf("%s", rec)
	}
	rec.rejected(t, want...)
}

// command runs the command line against the deployment with a key and returns its output.
func (sys *system) command(t testing.TB, key string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), sys.programs.bullpen, args...)
	cmd.Env = append(os.Environ(), "BULLPEN_URL="+sys.base, "BULLPEN_API_KEY="+key)
	var out []byte
	err := sys.programs.machine.inMachine(func() (err error) {
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil && !strings.HasPrefix(err.Error(), "exit status") {
		t.Fatalf("bullpen %s: %v\n%s", args[0], err, out)
	}
	return string(out)
}

// testSandboxImages runs programs in images, one at a time.
func testSandboxImages(t *testing.T, p *programs, in topology) {
	around := passable(t)
	sys := newSystem(t, p, in, 1, "--queue-wait", "1m", "--image-dir", filepath.Join(around, "images"))
	root := filepath.Join(around, "root")
	if err := os.CopyFS(root, os.DirFS(hostBash(t))); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(root, "opt"), 0o755); err != nil {
		t.Fatal(err)
	}
	mark := func(text string) {
		if err := os.WriteFile(filepath.Join(root, "opt", "mark"), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	mark("stored")
	sys.imageCommand(t, "import", "--json", "tiny", root)
	mark("a directory")
	look := bash("echo $(</opt/mark); [ -e /usr/bin/env ] || echo no host; echo x 2>/dev/null >/opt/mark || echo " +
		"read-only")

	b := sys.sandboxed("boxed", request{"image": "tiny"})
	b.ended(b.submit(look.withOverrides())).succeeded(t, "stored\nno host\nread-only\n")
	for _, mode := range []string{"application/json", ndjson} {
		r := b.execute(request{"language": "node", "code": "1"}, accept, mode)
		if message := r.rejection(t, http.StatusBadRequest, "validation_error"); message != "language 'node' is not "+
			"available in this sandbox image, which has bash" {
			t.Error(message)
		}
	}
	dir := sys.sandboxed("directory", request{"image": root})
	dir.ended(dir.submit(look)).succeeded(t, "a directory\nno host\nread-only\n")
	dir.ended(dir.submit(python("1"))).failed(t, "failed", "sandbox_start_error", "python3")
	sys.ended(sys.submit(bash("[ -e /opt/mark ] || echo the host"))).succeeded(t, "the host\n")

	// An accepted execution keeps its image even if the image's name is removed.
	out := sys.command(t, sys.key, "image", "rm", "tiny")
	if want := "image tiny is used by the sandbox boxed; change its image or remove the sandbox first"; !strings.Contains(
		out, want) {
		t.Errorf("removed: %s", out)
	}
	sys.do(http.MethodDelete, "/v1/admin/images/tiny", nil).rejection(t, http.StatusConflict, "conflict")
	h := newHold()
	held := sys.submit(bash(h.code()))
	h.reached(t, 1)
	queued := b.submit(look)
	if r := sys.do(http.MethodPut, profilesPath+"/boxed", request{}); r.status != http.StatusOK {
		t.Fatal(r)
	}
	sys.command(t, sys.key, "image", "rm", "tiny")
	if r := sys.get("/v1/admin/images"); strings.Contains(string(r.body), "tiny") {
		t.Errorf("not removed: %s", r)
	}
	h.release(t)
	sys.ended(held).succeeded(t, "held\nwoken\n")
	b.ended(queued).succeeded(t, "stored\nno host\nread-only\n")
	b.ended(b.submit(bash("[ -e /opt/mark ] || echo the host"))).succeeded(t, "the host\n")
	sys.do(http.MethodPost, profilesPath, request{"name": "late", "image": "tiny"}).rejection(t, http.StatusBadRequest,
		"validation_error")
}

// passable returns a directory that every user can traverse, unlike those of testing.T.
func passable(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bullpen-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// breakable is an nsjail that a test can break and repair while a worker uses it.
type breakable struct {
	t    testing.TB
	path string
	real string
}

func newBreakable(t testing.TB, p *programs) *breakable {
	b := &breakable{t, filepath.Join(t.TempDir(), "nsjail"), p.nsjail}
	b.replaceWith(p.nsjail)
	return b
}

// replaceWith makes the path point to another program.
func (b *breakable) replaceWith(program string) {
	b.t.Helper()
	next := b.path + ".next"
	err := os.Symlink(program, next)
	if err == nil {
		err = os.Rename(next, b.path)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// awaitHealth waits until the worker's health route and metrics report that it accepts jobs, or
// that it does not and why.
func (sys *system) awaitHealth(t testing.TB, status int, why, figure string) {
	t.Helper()
	at := *sys.api
	at.base, at.key = sys.health, ""
	eventually(t, why, func() (bool, any) {
		r := at.get("/readyz")
		metrics := strings.Split(string(at.get("/metrics").body), "\n")
		return r.status == status && strings.Contains(string(r.body), why) &&
			slices.Contains(metrics, "bullpen_worker_healthy "+figure), r
	})
}

// testUnfit breaks the worker's nsjail. The worker must accept no jobs until it is repaired.
func testUnfit(t *testing.T, p *programs, in topology) {
	b := newBreakable(t, p)
	with := *p
	with.nsjail = b.path
	sys := newSystem(t, &with, in, 2)
	sys.awaitHealth(t, http.StatusOK, "ready", "1")
	h := newHold()
	held := sys.submit(bash(h.code()))
	h.reached(t, 1)
	b.replaceWith("/nonexistent")
	// One failed execution reveals the problem.
	sys.ended(sys.submit(bash("echo unlucky"))).failed(t, "failed", "sandbox_start_error",
		"the cause is in the worker's log")
	sys.awaitHealth(t, http.StatusServiceUnavailable, "execute nsjail: errno 2", "0")
	waiting := []string{sys.submit(bash("echo first")), sys.submit(bash("echo second"))}
	h.release(t) // running programs are unaffected, but their slots accept no new jobs
	sys.ended(held).succeeded(t, "held\nwoken\n")
	sys.awaitHealth(t, http.StatusServiceUnavailable, "accepts no jobs", "0")
	for _, id := range waiting {
		if rec := sys.record(id); rec.Status != "queued" {
			t.Errorf("a worker that is not fit: %s", rec)
		}
	}
	b.replaceWith(b.real)
	sys.ended(waiting[0]).succeeded(t, "first\n")
	sys.ended(waiting[1]).succeeded(t, "second\n")
	sys.awaitHealth(t, http.StatusOK, "ready", "1")
	if line, ok := sys.worker.findLog(t, "worker unhealthy"); !ok || !strings.Contains(line.Error, b.path) {
		t.Errorf("the log has %+v", line)
	}
}

// testUnfitAtStart starts a worker with an nsjail that cannot make jails.
func testUnfitAtStart(t *testing.T, p *programs, in topology) {
	b := newBreakable(t, p)
	with := *p
	with.nsjail = b.path
	b.replaceWith("/bin/false")
	sys := &system{topology: in, programs: &with, data: filepath.Join(t.TempDir(), "data"), args: []string{"--slots", "2"}}
	sys.api = &api{t: t, key: newSecret(), http: newHTTP(t, nil)}
	sys.env = []string{"BULLPEN_BOOTSTRAP_KEY=" + sys.key}
	if in.separate {
		sys.broker = p.startBroker(t)
		sys.args, sys.env = append(sys.args, sys.broker.flags(p)...), append(sys.env, sys.broker.env()...)
	}
	sys.startFront(t)
	if in.separate {
		sys.startWorker(t)
	}
	sys.awaitHealth(t, http.StatusServiceUnavailable, "the init did not start", "0")
	id := sys.submit(bash("echo at last"))
	b.replaceWith(b.real)
	sys.ended(id).succeeded(t, "at last\n")
	sys.awaitHealth(t, http.StatusOK, "ready", "1")
}

// testNoNsjail starts workers that cannot run anything. They must exit at once and say what to do.
func testNoNsjail(t *testing.T, p *programs) {
	file := filepath.Join(t.TempDir(), "nsjail")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for path, why := range map[string]string{
		filepath.Dir(file) + "/none": syscall.ENOENT.Error(), file: "permission denied",
	} {
		data := filepath.Join(t.TempDir(), "data")
		proc := p.startProcess(t, "serve", nil, p.bullpen, "serve", "--listen", "127.0.0.1:0", "--data", data,
			"--nsjail", path)
		if code := proc.exitCode(t); code != 1 {
			t.Errorf("%s: exit code %d", path, code)
		}
		for _, want := range []string{path, why, "name it with --nsjail"} {
			if !strings.Contains(proc.text(t), want) {
				t.Errorf("%s: no %q in %s", path, want, proc.text(t))
			}
		}
		if _, err := os.Stat(data); err == nil {
			t.Error("something was made")
		}
	}
}
