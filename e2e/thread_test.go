package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bullpen-run/bullpen/proto"
)

// of adds the thread to the request.
func (r request) of(thread string) request { return r.and("thread_id", thread) }

func node(code string) request { return request{"language": "node", "code": code} }

// describeCode is Python with a function that prints everything about a home except the program.
const describeCode = `
import hashlib, os, stat, sys
def describe():
    first = {}
    for top, dirs, files in os.walk('.'):
        dirs.sort()
        for name in sorted(dirs + files):
            path = os.path.relpath(os.path.join(top, name))
            if path in ('main.py', '.main.py'): continue
            s = os.lstat(path)
            words = [path, oct(s.st_mode), 'of', s.st_uid == os.getuid(), 'at', s.st_mtime_ns]
            if stat.S_ISLNK(s.st_mode): words += ['to', os.readlink(path)]
            if stat.S_ISREG(s.st_mode):
                words += [s.st_size, hashlib.sha256(open(path, 'rb').read()).hexdigest()[:16]]
                words += ['names', s.st_nlink, 'as', first.setdefault(s.st_ino, path)]
                words += ['holes'] if s.st_blocks * 512 < s.st_size // 2 else []
            if not stat.S_ISLNK(s.st_mode):
                words += [(x, os.getxattr(path, x)) for x in sorted(os.listxattr(path)) if x.startswith('user.')]
            print(*words)
`

// testThreadHome changes a home in every way, one call at a time. Each call must find what the
// previous one left.
func testThreadHome(t *testing.T, a *api) {
	steps := []string{`
os.makedirs('dir/empty')
os.makedirs('dir/deep/deeper')
open('dir/file', 'w').write('content\n')
os.chmod('dir/file', 0o640)
os.chmod('dir', 0o750)
open('dir/deep/deeper/script', 'w').write('#!/bin/sh\n')
os.chmod('dir/deep/deeper/script', 0o755)
open('readonly', 'w').write('x')
os.chmod('readonly', 0o400)
os.symlink('dir/file', 'link')
os.symlink('/etc/passwd', 'out')
os.symlink('nowhere', 'dangling')
os.link('dir/file', 'hard')
os.setxattr('dir/file', 'user.note', b'kept \xff')
os.setxattr('dir', 'user.note', b'of a directory')
os.utime('dir/file', ns=(1, 1000000000123456789))
os.utime('dir/empty', ns=(1, 999999999000000001))
open('zero', 'w').close()
open('name with\nline break and \u00e9', 'w').write('odd')
with open('sparse', 'wb') as f:
    f.truncate(16 << 20)
    f.seek(10 << 20)
    f.write(b'in the middle')
with open('large', 'wb') as f:
    for i in range(6): f.write(bytes([i]) * (1 << 20))
`, `
os.rename('dir', 'renamed')
open('renamed/file', 'a').write('appended\n')
os.unlink('zero')
os.unlink('link'); os.mkdir('link'); open('link/in', 'w').write('was a link')
os.rmdir('renamed/empty'); open('renamed/empty', 'w').write('was a directory')
os.unlink('out'); open('out', 'w').write('was a link to a file')
with open('sparse', 'r+b') as f: f.seek(15 << 20); f.write(b'more')
with open('large', 'r+b') as f: f.seek(5 << 20); f.write(b'changed')
`, `
import shutil
shutil.rmtree('renamed/deep'); os.mkdir('renamed/deep'); open('renamed/deep/anew', 'w').write('opaque')
os.rename('renamed/deep', 'deep'); os.rename('renamed', 'deep/renamed')
os.removexattr('deep/renamed/file', 'user.note')
os.link('deep/renamed/file', 'deep/third')
os.unlink('hard')
shutil.rmtree('link'); os.symlink('deep', 'link')
os.chmod('readonly', 0o600)
os.truncate('large', 100)
os.utime('deep/anew', ns=(1, 5))
`, `
shutil = __import__('shutil')
for name in os.listdir('.'):
    if name == 'main.py': continue
    if os.path.isdir(name) and not os.path.islink(name): shutil.rmtree(name)
    else: os.unlink(name)
open('alone', 'w').write('last')
`}
	var last string
	for i, step := range steps {
		r := a.inline(python(describeCode+"describe()\nprint('--')\n"+step+"\ndescribe()").of("home"), "X-Request-Id",
			fmt.Sprint("step ", i))
		found, left, ok := strings.Cut(r.Stdout, "--\n")
		if !ok || !r.Success || r.Stderr != "" {
			t.Fatalf("step %d: %+v", i, r)
		}
		if diff := cmp.Diff(last, found); diff != "" {
			t.Errorf("before step %d (-left +found):\n%s", i, diff)
		}
		last = left
	}
	if !strings.HasPrefix(last, "alone ") || strings.Count(last, "\n") != 1 {
		t.Errorf("at last: %s", last)
	}
	if r := a.inline(python(describeCode + "describe()").of("home")); r.Stdout != last {
		t.Errorf("at last %q, want %q", r.Stdout, last)
	}
	var is struct{ Version, Files int64 }
	a.get("/v1/threads/home").into(t, &is)
	if is.Version != 4 || is.Files != 1 {
		t.Errorf("the thread is %+v; four calls changed something, the last left one file", is)
	}
}

// testThreadEnds leaves files by programs that end in every way.
func testThreadEnds(t *testing.T, a *api) {
	small := a.sandboxed("thread-ends", request{"memory": "64MiB"})
	const leave = `
open('left', 'w').write('as it was')
open('/tmp/left', 'w').write('x'); open('/dev/shm/left', 'w').write('x')
`
	for name, test := range map[string]func(t *testing.T, a *api, thread string){
		"code": func(t *testing.T, a *api, thread string) {
			if r := a.inline(python(leave + "raise SystemExit(3)").of(thread)); r.ExitCode != 3 || r.Error != nil {
				t.Errorf("got %+v", r)
			}
		},
		"signal": func(t *testing.T, a *api, thread string) {
			if r := a.inline(python(leave + "os = __import__('os'); os.kill(os.getpid(), 9)").of(thread)); r.ExitCode != 137 ||
				r.Error != nil {
				t.Errorf("got %+v", r)
			}
		},
		"timeout": func(t *testing.T, a *api, thread string) {
			rec := a.ended(a.submit(python(leave+"while True: pass").of(thread).and("timeout", 1)))
			rec.failed(t, "timeout", "timeout", "1 s")
		},
		"oom": func(t *testing.T, _ *api, thread string) {
			rec := small.ended(small.submit(python(leave + "x = bytearray(256 << 20)").of(thread)))
			rec.failed(t, "oom", "memory_limit_exceeded", "64 MiB")
		},
		"cancel": func(t *testing.T, a *api, thread string) {
			h := newHold()
			id := a.submit(bash("echo -n as it was > left; touch /tmp/left /dev/shm/left\n" + h.code()).of(thread))
			h.reached(t, 1)
			if r := a.do(http.MethodPost, execution(id, "cancel"), nil); r.status != http.StatusAccepted {
				t.Errorf("cancel: %s", r)
			}
			a.ended(id).failed(t, "cancelled", "cancelled", "")
		},
		"stragglers": func(t *testing.T, a *api, thread string) {
			r := a.inline(bash("(trap '' TERM HUP; while :; do echo -n as it was > left; done) & until test -s left; " +
				"do :; done").of(thread))
			if !r.Success {
				t.Errorf("got %+v", r)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			thread, a := "ends-"+name, a.in(t)
			test(t, a, thread)
			if name == "oom" {
				a = small.in(t) // in the organisation that owns the thread
			}
			r := a.inline(bash("cat left; ls /tmp/left /dev/shm/left").of(thread))
			if want := "as it was"; name != "stragglers" && r.Stdout != want || strings.Count(r.Stderr, "No such file") != 2 {
				t.Errorf("afterwards: %+v", r)
			}
		})
	}
}

// testThreadModules imports an installed module in the same call and in the next one.
func testThreadModules(t *testing.T, a *api) {
	for i, step := range []request{
		python(`
import importlib, os, site
open('mine.py', 'w').write('word = "from home"')
os.makedirs(site.getusersitepackages())
open(site.getusersitepackages() + '/installed.py', 'w').write('word = "from the user site"')
importlib.invalidate_caches()
import mine, installed
print(mine.word, installed.word)`),
		python("import mine, installed\nprint(mine.word, installed.word)"),
		bash(`mkdir -p node_modules/left .local/bin node_modules/.bin
echo 'module.exports = "from home from the user site"' > node_modules/left/index.js
printf '#!/bin/sh\necho from home $1\n' | tee .local/bin/tool > node_modules/.bin/other
chmod +x .local/bin/tool node_modules/.bin/other
tool 'from the user site'`),
		node("console.log(require('left'))"),
		bash("other 'from the user site'"),
	} {
		if r := a.inline(step.of("modules")); r.Stdout != "from home from the user site\n" || r.Stderr != "" {
			t.Errorf("step %d: %+v", i, r)
		}
	}
}

// testThreadProgram checks that the program's own file is not part of the home, and adds one that
// is.
func testThreadProgram(t *testing.T, a *api) {
	run := func(r request, want string) proto.Result {
		t.Helper()
		res := a.inline(r.of("program"))
		if res.Stdout != want {
			t.Errorf("got %+v, want %q", res, want)
		}
		return res
	}
	run(python("import os; print(os.listdir('.'))"), "['main.py']\n")
	run(node("console.log(require('fs').readdirSync('.'))"), "[ 'main.js' ]\n")
	run(bash("ls -A"), "")
	run(bash("echo \"print('mine')\" > main.py; ls -A"), "main.py\n")
	r := run(python("import os, main\nprint(sorted(os.listdir('.')))\nraise ValueError(__file__)"),
		"mine\n['.main.py', '__pycache__', 'main.py']\n")
	if want := `File "/home/baponi/.main.py", line 3, in <module>`; !strings.Contains(r.Stderr, want) ||
		!strings.HasSuffix(r.Stderr, "ValueError: /home/baponi/.main.py\n") {
		t.Errorf("the traceback is %s", r.Stderr)
	}
	run(bash("ls -A; cat main.py; rm main.py"), "__pycache__\nmain.py\nprint('mine')\n")
	run(python("import os\nos.unlink('main.py')\nopen('main.py', 'w').write('replaced')"), "")
	run(bash("cat main.py"), "replaced")
}

// testThreadOrganisations uses a thread of the same name in two organisations.
func testThreadOrganisations(t *testing.T, a *api) {
	secret, _ := a.newKey("thread-stranger", "pro")
	stranger := a.with(secret)
	a.inline(bash("echo mine > secret").of("same-name"))
	if r := stranger.inline(bash("ls -A; echo yours > other").of("same-name")); r.Stdout != "" || !r.Success {
		t.Errorf("the stranger found %+v", r)
	}
	if r := a.inline(bash("ls -A").of("same-name")); r.Stdout != "secret\n" {
		t.Errorf("got %+v", r)
	}
	a.inline(bash("echo mine > secret").of("only-mine"))
	for _, r := range []*reply{
		stranger.get("/v1/threads/only-mine"), stranger.get("/v1/threads/only-mine/archive"),
		stranger.do(http.MethodDelete, "/v1/threads/only-mine", nil),
		stranger.do(http.MethodPost, "/v1/threads/only-mine/fork", request{"id": "x"}),
		stranger.downloadURL("only-mine", "secret"),
	} {
		r.rejection(t, http.StatusNotFound, "not_found")
	}
	if files := stranger.files("only-mine", "", true); len(files) > 0 {
		t.Errorf("the stranger sees %v", files)
	}
	var list struct{ Threads []struct{ ID string } }
	stranger.get("/v1/threads").into(t, &list)
	if len(list.Threads) != 1 || list.Threads[0].ID != "same-name" {
		t.Errorf("the stranger's threads are %v", list)
	}
	// Two keys of an organisation share its threads.
	colleague, _ := a.newKey("thread-stranger", "pro")
	if r := a.with(colleague).inline(bash("cat other").of("same-name")); r.Stdout != "yours\n" {
		t.Errorf("the colleague found %+v", r)
	}
}

// modes returns the headers for the three ways to execute.
func modes() map[string][]string {
	return map[string][]string{"inline": nil, "streaming": {accept, ndjson}, "async": {"Prefer", "respond-async"}}
}

// checkBusy checks that a thread that an execution holds is rejected in every mode.
func (a *api) checkBusy(t testing.TB, thread, holder string) {
	t.Helper()
	for mode, headers := range modes() {
		message := a.execute(bash("echo never").of(thread), headers...).rejection(t, http.StatusConflict, "conflict")
		if !strings.Contains(message, holder) {
			t.Errorf("%s: %q does not name %s", mode, message, holder)
		}
	}
}

// testThreadBusy requests a thread that is in use, and resends the request that uses it.
func testThreadBusy(t *testing.T, a *api) {
	h := newHold()
	program, key := bash("echo once >> log\n"+h.code()).of("busy"), []string{"Idempotency-Key", "busy " + h.seconds}
	first := a.start(program, key...)
	h.reached(t, 1)
	again, streamed := a.start(program, key...), a.start(program, append(key, accept, ndjson)...)
	id := a.submit(program, key...)
	a.checkBusy(t, "busy", id)
	if r := a.inline(bash("echo free").of("busy-not")); r.Stdout != "free\n" {
		t.Errorf("another thread: %+v", r)
	}
	a.do(http.MethodDelete, "/v1/threads/busy", nil).rejection(t, http.StatusConflict, "conflict")
	var shown struct{ Holder string }
	if a.get("/v1/threads/busy").into(t, &shown); shown.Holder != id {
		t.Errorf("shown as held by %q, it is %s", shown.Holder, id)
	}
	h.release(t)
	for _, p := range []*pending{first, again} {
		if r := p.answer(t); r.result(t).Stdout != "held\nwoken\n" || r.trace(t) != id {
			t.Errorf("got %s of %s, want the response of %s", r, r.trace(t), id)
		}
	}
	if stdout, _, _ := checkEvents(t, streamed.answer(t).events(t), 0); stdout != "held\nwoken\n" {
		t.Errorf("streamed: %q", stdout)
	}
	if r := a.execute(program, key...); r.trace(t) != id {
		t.Errorf("later: %s", r)
	}
	a.execute(bash("echo other").of("busy"), key...).rejection(t, http.StatusUnprocessableEntity, "idempotency_mismatch")
	if r := a.inline(bash("cat log").of("busy")); r.Stdout != "once\n" {
		t.Errorf("it ran so often: %q", r.Stdout)
	}
	if r := a.do(http.MethodDelete, "/v1/threads/busy", nil); r.status != http.StatusNoContent {
		t.Errorf("remove: %s", r)
	}
	a.get("/v1/threads/busy").rejection(t, http.StatusNotFound, "not_found")
	if r := a.inline(bash("ls -A").of("busy")); r.Stdout != "" || !r.Success {
		t.Errorf("a new thread of that name: %+v", r)
	}
}

// callInMode makes one call and returns its stdout as soon as it is known. In streaming mode that
// is at the result event, before the end of the response. In async mode it is when the record is
// terminal.
func (a *api) callInMode(t testing.TB, mode string, body request) string {
	t.Helper()
	switch mode {
	case "streaming":
		resp, err := a.open(t.Context(), http.MethodPost, executePath, body, accept, ndjson)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		var line []byte
		for in := bufio.NewReader(resp.Body); !bytes.Contains(line, []byte(`"type":"result"`)); {
			if line, err = in.ReadBytes('\n'); err != nil {
				t.Fatalf("%s: %v after %s", resp.Status, err, line)
			}
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		return e.Result.Stdout
	case "async":
		rec := a.ended(a.submit(body))
		if rec.Stdout == nil {
			t.Fatalf("got %s", rec)
		}
		return *rec.Stdout
	case "polled":
		id := a.submit(body)
		var rec record
		eventually(t, id+" ends", func() (bool, any) {
			rec = a.record(id)
			return proto.Status(rec.Status).Terminal(), rec
		})
		return *rec.Stdout
	default:
		return a.inline(body).Stdout
	}
}

// testThreadInARow makes each call after the response to the previous one, alternating between
// gateways.
func testThreadInARow(t *testing.T, calls int, gateways ...*api) {
	shell := func(n int) request { return bash(fmt.Sprintf("cat log; echo %d >> log", n)) }
	snake := func(n int) request {
		return python(fmt.Sprintf("f = open('log', 'a+'); f.seek(0); print(f.read(), end=''); print(%d, file=f)", n))
	}
	script := func(n int) request {
		return node(fmt.Sprintf("const fs = require('fs'); process.stdout.write(fs.readFileSync('log')); "+
			"fs.appendFileSync('log', '%d\\n')", n))
	}
	// Five programs, so that each runs in each mode.
	programs := []func(n int) request{shell, snake, shell, snake, script}
	modes := []string{"inline", "streaming", "async", "polled"}
	want := ""
	gateways[0].inline(bash("touch log").of("row"))
	for n := range calls {
		a, mode, program := gateways[n%len(gateways)], modes[n%len(modes)], programs[n%len(programs)](n)
		if got := a.callInMode(t, mode, program.of("row")); got != want {
			t.Fatalf("call %d, %s: the log is %q, want %q", n, mode, got, want)
		}
		want += fmt.Sprintln(n)
	}
}

// testRunsOnce counts how often programs run, by what they leave in the home of their thread. No
// waiting interpreter can run these: their arguments and variables have to be there at its start.
func testRunsOnce(t *testing.T, a *api) {
	calls := 150
	if testing.Short() {
		calls = 25
	}
	programs := map[string]string{
		"bash":   "echo \"[$1] $#\" >> $HOME/n",
		"python": "import sys; print(f'[{sys.argv[1] if sys.argv[1:] else str()}] {len(sys.argv) - 1}', file=open('n', 'a'))",
		"node":   "require('fs').appendFileSync('n', `[${process.argv[2] ?? ''}] ${process.argv.length - 2}\\n`)",
	}
	for language, code := range programs {
		for name, more := range map[string]request{
			"arguments": {"args": []string{"a"}}, "time zone": {"args": []string{}, "env_vars": request{"TZ": "Asia/Tokyo"}},
		} {
			t.Run(language+", "+name, func(t *testing.T) {
				t.Parallel()
				a, thread := a.in(t), "once-"+language+"-"+strings.ReplaceAll(name, " ", "-")
				body := request{"language": language, "code": code}.of(thread)
				maps.Copy(body, more)
				for range calls {
					if r := a.inline(body); r.ExitCode != 0 || r.Error != nil {
						t.Fatalf("%+v", r)
					}
				}
				want := fmt.Sprintf("%7d [a] 1\n", calls)
				if name != "arguments" {
					want = fmt.Sprintf("%7d [] 0\n", calls)
				}
				if r := a.inline(bash("sort n | uniq -c").of(thread)); r.Stdout != want {
					t.Errorf("ran\n%s, want\n%s", r.Stdout, want)
				}
			})
		}
	}
}

// testThreadsAtOnce uses many threads concurrently.
func testThreadsAtOnce(t *testing.T, a *api) {
	const threads, calls = 12, 4
	var all sync.WaitGroup
	for i := range threads {
		all.Go(func() {
			for n := range calls {
				r := a.execute(bash(fmt.Sprintf("echo %d.%d >> log; cat log", i, n)).of(fmt.Sprintf("many-%d", i)))
				var got proto.Result
				if err := json.Unmarshal(r.body, &got); err != nil || strings.Count(got.Stdout, fmt.Sprintf("%d.", i)) != n+1 ||
					strings.Count(got.Stdout, "\n") != n+1 {
					t.Errorf("call %d of thread %d: %s", n, i, r)
					return
				}
			}
		})
	}
	all.Wait()
	var list struct{ Threads []struct{ ID string } }
	a.get("/v1/threads?limit=100").into(t, &list)
	for i := range threads {
		if !slices.ContainsFunc(list.Threads, func(x struct{ ID string }) bool { return x.ID == fmt.Sprintf("many-%d", i) }) {
			t.Errorf("thread %d is not listed", i)
		}
	}
}

// testThreadLimits makes homes larger than their sandbox allows.
func testThreadLimits(t *testing.T, a *api) {
	b := a.sandboxed("thread-limits", request{"memory": "128MiB", "disk": request{"home": "4MiB", "inodes": 256}})
	// The disk limit is more than half of the memory.
	c := a.sandboxed("thread-limits-disk", request{"memory": "32MiB", "disk": request{"home": "20MiB"}})
	for thread, c := range map[string]struct {
		*api
		first  int // bytes of the first call
		second string
	}{
		"bytes": {b, 3_000_000, "head -c 3000000 /dev/zero > b"},
		"disk":  {c, 15_000_000, "head -c 10000000 /dev/zero > b"},
	} {
		t.Run(thread, func(t *testing.T) {
			t.Parallel()
			b := c.in(t)
			if r := b.inline(bash(fmt.Sprintf("head -c %d /dev/zero > a", c.first)).of(thread)); !r.Success {
				t.Fatalf("got %+v", r)
			}
			r := b.inline(bash("df -B1 --output=used . | tail -n 1; echo kept > c; " + c.second + "; exit 7").of(thread))
			used, err := strconv.Atoi(strings.TrimSpace(r.Stdout))
			if r.ExitCode != 7 || r.ErrorCode != nil || !strings.Contains(r.Stderr, "No space left on device") || err != nil ||
				used < c.first {
				t.Errorf("a call that writes too much: %+v", r)
			}
			if r := b.inline(bash("cat c; rm *").of(thread)); r.Stdout != "kept\n" || !r.Success {
				t.Errorf("the next call: %+v", r)
			}
			if r := b.inline(bash(c.second).of(thread)); !r.Success {
				t.Errorf("after files were deleted: %+v", r)
			}
		})
	}
	t.Run("files", func(t *testing.T) {
		t.Parallel()
		b := b.in(t)
		if r := b.inline(bash("mkdir d; touch d/{1..160}").of("files")); !r.Success {
			t.Fatalf("got %+v", r)
		}
		const second = "mkdir e; touch e/{1..160}"
		r := b.inline(bash(second + " && echo done; exit 7").of("files"))
		if display(r.ErrorCode) != `"thread_save_error"` || display(r.ProgramExitCode) != "7" || r.ExitCode != -1 ||
			r.Stdout != "done\n" ||
			r.ErrorMessage == nil || !strings.Contains(
			*r.ErrorMessage, "in 322 files and directories, and the sandbox allows 4194304 bytes in 256") {
			t.Errorf("got %+v: %s, program exit code %s", r, display(r.ErrorMessage), display(r.ProgramExitCode))
		}
		r = b.inline(bash("truncate -s 3T d/giant").of("files"))
		if display(r.ErrorCode) != `"thread_save_error"` || r.ErrorMessage == nil ||
			!strings.Contains(*r.ErrorMessage, `"d/giant" has 3298534883328 bytes including holes, more than 2199023255552`) {
			t.Errorf("got %+v: %s", r, display(r.ErrorMessage))
		}
		if r := b.inline(bash("ls").of("files")); r.Stdout != "d\n" {
			t.Errorf("the thread has %+v", r)
		}
		var shown struct{ Version int64 }
		if b.get("/v1/threads/files").into(t, &shown); shown.Version != 1 {
			t.Errorf("version %d", shown.Version)
		}
		if r := b.inline(bash("rm -r *; " + second).of("files")); !r.Success {
			t.Errorf("after files were deleted: %+v", r)
		}
	})
}

// testThreadUploadLimits uploads more than a home may hold.
func testThreadUploadLimits(t *testing.T, a *api) {
	b := a.sandboxed("thread-upload-limits", request{"memory": "128MiB", "disk": request{"home": "4MiB", "inodes": 256}})
	b.uploadURL("much", "x", 4<<20+1).rejection(t, http.StatusBadRequest, "validation_error")
	b.inline(bash("echo kept > file").of("much"))
	late := b.uploadURL("much", "x", 4<<20-4096).signed(t)
	key, _ := a.newKey("thread-upload-limits", "pro") // its sandbox is larger
	large := a.with(key)
	for i := range 3 {
		large.upload(t, "much", fmt.Sprint("upload", i), randomBytes(2<<20))
	}
	for _, r := range []*reply{b.uploadURL("much", "x", 1), b.useSigned(late, late.Method, randomBytes(4<<20-4096))} {
		message := r.rejection(t, http.StatusConflict, "conflict")
		for _, want := range []string{
			"has 5 bytes in 1 files", "take 6291456 bytes and 3", "has room for 4194304 bytes and 256",
		} {
			if !strings.Contains(message, want) {
				t.Errorf("not %q in %s", want, message)
			}
		}
	}
	for range 2 {
		r := b.inline(bash("ls").of("much"))
		want := "6291456 bytes in 3 files were uploaded to the thread, and the sandbox has room for 4194304 bytes in 256"
		if display(r.ErrorCode) != `"thread_mount_error"` || r.ErrorMessage == nil ||
			!strings.Contains(*r.ErrorMessage, want) {
			t.Errorf("got %s: %s, want %q", display(r.ErrorCode), display(r.ErrorMessage), want)
		}
	}
	b.upload(t, "full", "upload", randomBytes(4<<20))
	if r := b.inline(python("import os; print(os.path.getsize('upload'))").of("full")); r.Stdout != "4194304\n" {
		t.Errorf("a full home, with the program's own file besides: %+v", r)
	}
	b.upload(t, "much", "upload1", nil)
	b.upload(t, "much", "upload2", []byte("small"))
	if r := b.inline(bash("cat file upload1 upload2; wc -c < upload0").of("much")); r.Stdout != "kept\nsmall2097152\n" {
		t.Errorf("after smaller uploads: %+v", r)
	}
}

// testThreadRefused has executions in threads rejected.
func testThreadRefused(t *testing.T, a *api) {
	pro, _ := a.newKey("thread-free", "pro")
	free, _ := a.newKey("thread-free", "free") // narrower than its organisation
	poor, rich, h := a.with(free), a.with(pro), newHold()
	var running []*pending
	for range 5 {
		running = append(running, poor.start(bash(h.code())))
	}
	h.reached(t, len(running))
	for mode, headers := range modes() {
		if r := poor.execute(bash("echo never").of("refused"), headers...); r.status != http.StatusTooManyRequests {
			t.Errorf("%s over the plan's limit: %s", mode, r)
		}
		poor.execute(bash("echo never").of("refused").and("timeout", 61), headers...).rejection(t, http.StatusTooManyRequests,
			"rate_limited")
		poor.execute(bash("").of("refused"), headers...).rejection(t, http.StatusBadRequest, "validation_error")
	}
	if r := rich.inline(bash("ls -A").of("refused")); !r.Success || r.Stdout != "" {
		t.Errorf("the next call: %+v", r)
	}
	h.release(t)
	for _, p := range running {
		p.answer(t)
	}
}
