package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// prying tries to reach the guest and the init, and prints what it could do.
const prying = `
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
def no(what, f):
    try:
        if f() is not False:
            print(what)
    except OSError:
        pass
def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
guest = [int(p) for p in os.listdir("/proc") if p.isdigit() and open(f"/proc/{p}/comm").read() == "guest\n"]
if len(guest) != 1:
    print("guests", guest)
for pid in [1] + guest:
    for name in ["mem", "environ", "maps", "auxv", "syscall", "stack", "pagemap", "personality", "io"]:
        for mode in [os.O_RDONLY, os.O_RDWR]:
            no(f"{pid} {name}", lambda: os.read(os.open(f"/proc/{pid}/{name}", mode), 1) != b"")
    for name in ["fdinfo", "map_files"]:
        no(f"{pid} {name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
    for name in ["root", "cwd", "exe", "ns/net", "fd/3", "fd/4", "fd/5"]:
        no(f"{pid} {name}", lambda: os.readlink(f"/proc/{pid}/{name}"))
        no(f"{pid} {name} open", lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
    no(f"{pid} ptrace", lambda: call(libc.ptrace(16, pid, 0, 0)))
    no(f"{pid} seize", lambda: call(libc.ptrace(0x4206, pid, 0, 0)))
    local = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    remote = (ctypes.c_size_t * 2)(0x400000, 8)
    no(f"{pid} vm_readv", lambda: call(libc.process_vm_readv(pid, local, 1, remote, 1, 0)))
    for fd in range(3, 9):
        no(f"{pid} getfd", lambda: call(libc.syscall(438, os.pidfd_open(pid), fd, 0)))
    if os.getuid():
        for s in [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]:
            no(f"{pid} {s}", lambda: os.kill(pid, s))
        no(f"{pid} prlimit", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)))
    no(f"{pid} nice", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19) if os.getuid() else False)
if "/bullpen" in open("/proc/net/unix").read():
    print("the path of a socket")
print("done")
`

func attackGuestFromInside(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	for _, user := range []string{"user", "root"} {
		out, exit, err := v.run(user, "python3 - <<'END'\n"+prying+"\nEND")
		if out != "done\n" || exit != 0 || err != nil {
			t.Errorf("%s: %q, exit status %d, %v", user, out, exit, err)
		}
	}
	v.check("echo alive", "alive\n")
}

func attackProc(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	for _, user := range []string{"user", "root"} {
		out, _, err := v.run(user, `find /proc -type f -writable 2>/dev/null |
  while read -r f; do [ -f "$f" ] && echo "$f"; done # no devices
for f in /proc/sys/kernel/{msgmax,msgmnb,sem,shmall,pid_max} /proc/{1,2,self}/oom_score_adj /proc/self/comm; do
  (echo 1000 >$f) 2>/dev/null && echo $f
done; echo done`)
		if out != "done\n" || err != nil {
			t.Errorf("%s can write %s, %v", user, out, err)
		}
	}
}

func attackGuestEnd(t *testing.T, l *liveDeployment) {
	for _, signal := range []string{"KILL", "STOP", "ABRT"} {
		v := l.in(t).newSandbox(request{"timeout": 3600})
		_, _, _ = v.run("root", "kill -"+signal+" 2; sleep 3600")
		v.awaits("ended", "guest_ended")
	}
}

// answers checks that the guest answers, whatever its processes do.
func (v *target) answers(what string) {
	v.t.Helper()
	if r := v.get(v.path("/guest/health")); r.status != http.StatusNoContent {
		v.t.Errorf("%s: %s", what, r)
	}
	r := v.write("/tmp/probe", "user", []byte("probe"))
	if r.status != http.StatusOK && r.status != http.StatusInsufficientStorage {
		v.t.Errorf("%s: write a file: %s", what, r)
	}
	if r := v.get("/files?path=/etc/hostname", v.headers(proto.GuestPort)...); r.status != http.StatusOK {
		v.t.Errorf("%s: read a file: %s", what, r)
	}
	if r := v.call("process.Process/List", request{}); r.status != http.StatusOK {
		v.t.Errorf("%s: list processes: %s", what, r)
	}
}

func attackExhaustion(t *testing.T, l *liveDeployment) {
	for name, code := range map[string]string{
		"processes": `import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(3600)
    except OSError: break`,
		"threads": `import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(3600,)).start()
    except RuntimeError: break`,
		"forks": `import os
for _ in range(60): os.fork()
while True:
    try:
        if os.fork() == 0: os._exit(0)
        os.wait()
    except OSError: pass`,
		"processors": `import os
for _ in range(50):
    if os.fork() == 0:
        while True: pass`,
		"descriptors": `import os, time
for _ in range(8):
    os.fork()
    fds = []
    while True:
        try: fds.append(os.open("/dev/null", os.O_RDONLY))
        except OSError: break`,
		"files": `
n = 0
for d in ["/tmp", "/dev/shm"]:
    try:
        with open(d + "/fill", "wb") as f:
            while True: f.write(b"x" * (1 << 20)); f.flush()
    except OSError: pass`,
		"sockets": `import socket, time
s = []
while True:
    try: s.append(socket.socket(socket.AF_UNIX)); s[-1].bind("\0%d" % len(s)); s[-1].listen()
    except OSError: break`,
	} {
		v := l.sandbox(t)
		code += "\nprint('done', flush=True)\nimport time\ntime.sleep(3600)\n"
		v.write("a.py", "user", []byte(code))
		v.check("setsid python3 a.py >log 2>&1 </dev/null &", "")
		if name != "forks" {
			eventually(t, name, func() (bool, any) {
				r := v.get("/files?path=log", v.headers(proto.GuestPort)...)
				return strings.Contains(string(r.body), "done"), r
			})
		}
		for range 2 {
			v.answers(name)
		}
		(&liveSandbox{l.in(t), l.bystander.id}).check("echo alive", "alive\n")
		v.change(http.MethodDelete, "")
	}
}

func attackMemory(t *testing.T, l *liveDeployment) {
	for _, user := range []string{"user", "root"} {
		v := l.in(t).newSandbox(request{"timeout": 3600})
		_, _, _ = v.run(user, `for i in 1 2 3; do python3 -c 'x = [bytearray(1 << 20) for _ in range(4000)]' & done; wait`)
		v.awaits("ended", "memory_limit_exceeded")
	}
}

// memoryWatch knows how much memory the processes used before an attack.
type memoryWatch struct {
	*liveDeployment
	front, worker proto.Bytes
}

// Limits of memory, by the host's counters. Those of front and worker are beyond what they had before.
const (
	frontGrowth  = 128 * proto.MiB
	workerGrowth = 96 * proto.MiB
	guestMost    = 72 * proto.MiB
)

func (l *liveDeployment) watchMemory(t *testing.T) *memoryWatch {
	for _, proc := range []*process{l.front, l.worker} { // begin with new peaks, see proc_pid_clear_refs(5)
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", proc.cmd.Process.Pid), []byte("5"), 0); err != nil {
			t.Fatal(err)
		}
	}
	return &memoryWatch{l, l.front.status(t, "VmRSS"), l.worker.status(t, "VmRSS")}
}

// check checks the most that front and worker have had since, and what the guests have.
func (m *memoryWatch) check(t *testing.T) {
	t.Helper()
	front, worker := m.liveDeployment.front.status(t, "VmHWM")-m.front, m.liveDeployment.worker.status(t, "VmHWM")-m.worker
	guest := m.guests(t)
	t.Logf("the front has taken %d MiB, the worker %d, and the largest guest has %d",
		front/proto.MiB, worker/proto.MiB, guest/proto.MiB)
	if front > frontGrowth || worker > workerGrowth || guest > guestMost {
		t.Error("memory is not limited")
	}
}

// guests returns the peak of the largest guest on the worker.
func (l *liveDeployment) guests(t *testing.T) (most proto.Bytes) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(line, []byte("/guest.json\x00")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		peak, descends := statusOf(pid, "VmHWM"), false
		for ; pid > 1 && !descends; pid = int(statusOf(pid, "PPid")) {
			descends = pid == l.worker.cmd.Process.Pid
		}
		if descends {
			most = max(most, proto.Bytes(peak)*proto.KiB)
		}
	}
	if most == 0 {
		t.Fatal("there is no guest")
	}
	return most
}

// statusOf returns a number from /proc/PID/status, 0 if the process has ended.
func statusOf(pid int, name string) (n int64) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(text), "\n"+name+":")
	_, _ = fmt.Sscan(rest, &n)
	return n
}

// startOnly starts a program and leaves its output unread. It returns the answer's status.
func (v *target) startOnly(code string) (int, io.Closer, error) {
	message, err := json.Marshal(request{"process": request{"cmd": "/bin/bash", "args": []string{"-c", code}}})
	if err != nil {
		return 0, nil, err
	}
	body := append([]byte{0, 0, 0, byte(len(message) >> 8), byte(len(message))}, message...)
	r, err := v.open(v.t.Context(), http.MethodPost, v.path("/guest/process.Process/Start"), body,
		"Content-Type", "application/connect+json", "Connect-Protocol-Version", "1")
	if err != nil {
		return 0, nil, err
	}
	return r.StatusCode, r.Body, nil
}

var startedByFlood = repeatsFlag("live-flood", 600, 10_000, "processes that a flood of live sandboxes starts")

func attackManyProcesses(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	memory := l.watchMemory(t)
	callers(startedByFlood.n(), func(i int) {
		code := "seq 100000"
		if i%10 == 0 {
			code = "sleep 3600"
		}
		_, stream, err := v.startOnly(code)
		if err != nil {
			t.Errorf("process %d: %v", i, err)
			return
		}
		_ = stream.Close()
	})
	memory.check(t)
	var list struct{ Processes []any }
	r := v.call("process.Process/List", request{})
	if r.into(t, &list); r.status != http.StatusOK || len(list.Processes) > 256 {
		t.Errorf("%d processes: %s", len(list.Processes), r)
	}
	v.answers("after the flood")
}

func attackLists(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	const program = `import os
def deep(n):
    os.chdir("/tmp")
    for part in [str(n)] + 13 * ["x" * 250]:
        os.mkdir(part)
        os.chdir(part)
    for i in range(n):
        name = f"{i:0200}"
        open(name, "w").close()
        for a in range(4):
            os.setxattr(name, f"user.e2b.{a}", 3900 * b"v") if n > 1000 else None
for n in [1000, 2000]: deep(n)
print(os.getcwd())`
	out, _, err := v.run("user", "python3 -c '"+program+"'")
	if err != nil || !strings.HasPrefix(out, "/tmp/2000/") {
		t.Fatalf("directories in the sandbox: %q, %v", out, err)
	}
	large := strings.TrimSpace(out)
	small := strings.Replace(large, "/2000/", "/1000/", 1)
	memory := l.watchMemory(t)
	for path, want := range map[string]int{small: http.StatusOK, large: http.StatusTooManyRequests} {
		if r := v.call("filesystem.Filesystem/ListDir", request{"path": path}); r.status != want {
			t.Errorf("list %s: %s", short(path), r)
		}
	}
	for range 24 {
		r, err := v.open(t.Context(), http.MethodPost, v.path("/guest/filesystem.Filesystem/ListDir"), request{"path": small},
			"Content-Type", "application/json")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Body.Close() }()
	}
	v.answers("while lists wait")
	memory.check(t)
}

func attackOutput(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	memory := l.watchMemory(t)
	size := "1G"
	if testing.Short() {
		size = "128M"
	}
	// Without a reader, the program must end, since its output falls out of the buffer.
	for i := range 4 {
		_, stream, err := v.startOnly(fmt.Sprintf("sleep 0.2; head -c %s /dev/zero; echo x >done%d", size, i))
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.Close()
	}
	// These stop reading.
	for range 16 {
		_, stream, err := v.startOnly("cat /dev/zero")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stream.Close() }()
	}
	eventually(t, "the programs without readers end", func() (bool, any) {
		out, _, err := v.run("user", "ls done* 2>/dev/null | wc -l")
		return out == "4\n", fmt.Sprint(out, err)
	})
	v.answers("while output waits")
	(&liveSandbox{l.in(t), l.bystander.id}).check("echo alive", "alive\n")
	memory.check(t)
}

func attackFiles(t *testing.T, l *liveDeployment) {
	v := l.sandbox(t)
	dir, err := os.MkdirTemp("/var/tmp", "canary-") // sandboxes have a /tmp of their own
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	canary := filepath.Join(dir, "canary")
	if err := os.WriteFile(canary, []byte("canary"), 0o666); err != nil {
		t.Fatal(err)
	}
	v.check(`ln -s / root; ln -s /proc/self/mem mem; ln -s /proc/1/root init; ln -s /etc/passwd passwd
ln -s /run/bullpen/job job; ln -s /proc/self/oom_score_adj score; ln -s self self`, "")
	files := func(path, user string) string {
		return "/files?" + url.Values{"path": {path}, "username": {user}}.Encode()
	}
	up := strings.Repeat("../", 20)
	for _, user := range []string{"user", "root"} {
		for _, path := range []string{
			canary, up + canary[1:], "root" + canary, "init" + canary, "/proc/self/root" + canary, "/proc/1/root" + canary,
			"/proc/1/cwd" + canary, "mem", "/proc/1/mem", "/proc/1/environ", "/proc/self/fd/3", "/proc/1/fd/3", "/proc/kcore",
			"self", "/dev/mem", "/dev/random", "/proc/kmsg", up + "etc/shadow", "~root/x", "a\x00b",
		} {
			if r := v.get(files(path, user), v.headers(proto.GuestPort)...); r.status < http.StatusBadRequest {
				t.Errorf("%s reads %q: %s", user, path, r)
			}
		}
		for _, path := range []string{
			canary, "root" + canary, "init" + canary, "mem", "score", "passwd", "/etc/x", "/x", "/usr/x", "/proc/1/mem",
			"/proc/self/mem", "/proc/self/oom_score_adj", "/proc/sys/kernel/msgmax", "/proc/self/fd/1", "/proc/self/fd/4",
			"/proc/self/exe", "/dev/null", "/dev/full", "self",
		} {
			if r := v.write(path, user, []byte("owned")); r.status < http.StatusBadRequest {
				t.Errorf("%s writes %q: %s", user, path, r)
			}
		}
	}
	// The guest has more rights than `user`, but not for what a link of `user` names.
	for _, path := range []string{"job/x", "job/guest.json"} {
		if r := v.write(path, "user", []byte("owned")); r.status != http.StatusForbidden {
			t.Errorf("user writes %q: %s", path, r)
		}
		for _, r := range []*reply{
			v.call("filesystem.Filesystem/Remove", request{"path": path}),
			v.call("filesystem.Filesystem/Move", request{"source": path, "destination": "got"}),
		} {
			if r.status == http.StatusOK && path == "job/guest.json" || r.status == http.StatusUnsupportedMediaType {
				t.Errorf("user removes or moves %q: %s", path, r)
			}
		}
	}
	for _, user := range []string{"nobody", "0", "1000", "ROOT", "root\x00", "root,user", "user:root", " root", "daemon"} {
		if r := v.get(files("f", user), v.headers(proto.GuestPort)...); r.status != http.StatusUnauthorized {
			t.Errorf("as %q: %s", user, r)
		}
		basic := "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
		if user == "user:root" {
			continue // the name ends at the colon
		}
		r := v.do(http.MethodPost, "/process.Process/Start", []byte("\x00\x00\x00\x00\x02{}"),
			v.headers(proto.GuestPort, "Authorization", basic, "Content-Type", "application/connect+json")...)
		if !strings.Contains(string(r.body), "unauthenticated") {
			t.Errorf("start as %q: %s", user, r)
		}
	}
	if b, err := os.ReadFile(canary); string(b) != "canary" {
		t.Errorf("the file outside has %q, %v", b, err)
	}
	out, _, err := v.run("root", "cd /run/bullpen/job && head -c 5 guest.json && ls")
	if out != `{"env`+"guest.json\n" || err != nil {
		t.Errorf("the guest's own files: %q, %v", out, err)
	}
}

func attackSignedURLs(t *testing.T, l *liveDeployment) {
	v, other := l.sandbox(t), l.sandbox(t)
	for _, x := range []*target{v, other} {
		x.check("echo fine >f; echo secret >g", "")
	}
	signature := func(parts ...string) string {
		sum := sha256.Sum256([]byte(strings.Join(append(parts[:3:3], append([]string{v.token}, parts[3:]...)...), ":")))
		return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
	}
	in := func(d time.Duration) string { return strconv.FormatInt(time.Now().Add(d).Unix(), 10) }
	soon, past := in(time.Hour), in(-time.Hour)
	read, dated := signature("f", "read", "user"), signature("f", "read", "user", soon)
	file := func(path, signature string, more ...string) url.Values {
		query := url.Values{"path": {path}, "username": {"user"}, "signature": {signature}}
		for i := 0; i < len(more); i += 2 {
			query.Add(more[i], more[i+1])
		}
		return query
	}
	const expiration = "signature_expiration"
	asRoot := file("f", read)
	asRoot.Set("username", "root")
	asNobody := file("f", read)
	asNobody.Del("username")
	for name, c := range map[string]struct {
		want   int
		id     string
		method string
		query  url.Values
		more   string
	}{
		"as signed":        {200, v.id, "GET", file("f", read), ""},
		"until later":      {200, v.id, "GET", file("f", dated, expiration, soon), ""},
		"another path":     {401, v.id, "GET", file("g", read), ""},
		"another form":     {401, v.id, "GET", file("./f", read), ""},
		"joined parts":     {401, v.id, "GET", file("f:read", read), ""},
		"another user":     {401, v.id, "GET", asRoot, ""},
		"no user":          {401, v.id, "GET", asNobody, ""},
		"another sandbox":  {401, other.id, "GET", file("f", read), ""},
		"a write":          {401, v.id, "POST", file("f", read), ""},
		"a removal":        {401, v.id, "DELETE", file("f", read), ""},
		"two paths":        {401, v.id, "GET", file("f", read, "path", "g"), ""},
		"two users":        {401, v.id, "GET", file("f", read, "username", "root"), ""},
		"a semicolon":      {200, v.id, "GET", file("f", read), "&path=g;path=f"}, // ignored by all
		"without its date": {401, v.id, "GET", file("f", dated), ""},
		"another date":     {401, v.id, "GET", file("f", dated, expiration, in(2*time.Hour)), ""},
		"expired":          {401, v.id, "GET", file("f", signature("f", "read", "user", past), expiration, past), ""},
	} {
		status, answer := l.request(t, c.method+" /files?"+c.query.Encode()+c.more,
			"Host: 49983-"+c.id+"."+liveDomain, "Content-Length: 0")
		_, body, _ := strings.Cut(answer, "\r\n\r\n")
		if status != c.want || (body == "fine\n") != (c.want == http.StatusOK) || strings.Contains(body, "secret") {
			t.Errorf("%s: %s", name, short(answer))
		}
	}
	if status, answer := l.request(t, "GET /filesystem.Filesystem/Stat?signature="+url.QueryEscape(read),
		"Host: 49983-"+v.id+"."+liveDomain); status != http.StatusUnauthorized {
		t.Errorf("a signature for another route: %s", short(answer))
	}
}
