package nsjail

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// sameCases are programs that must behave in a jail as their file does outside.
var sameCases = map[string][]string{ // read only
	"python": {
		"def f():\n  raise ValueError('x')\nf()",
		"import nosuchmodule",
		"print('a'\n",
		"x = 1\n  y = 2",
		"import sys; sys.exit()",
		"import sys; sys.exit(3)",
		"import sys; sys.exit(256 + 4)",
		"import sys; sys.exit(-1)",
		"import sys; sys.exit('a message')",
		"import sys; sys.exit((1, 2))",
		"exit(9)",
		"raise KeyboardInterrupt",
		"raise SystemExit(5)",
		"import os; os._exit(6)",
		"import os; os.abort()",
		"import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
		"import os, signal; os.kill(os.getpid(), signal.SIGINT)",
		"import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
		"import os, signal; os.killpg(0, signal.SIGUSR1)",
		"import signal\nfor s in signal.valid_signals(): print(s, " +
			"signal.getsignal(s))\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
		"import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)",
		"import sys; print(repr(sys.stdin.read()), repr(sys.stdin.buffer.read()), sys.stdin.isatty())",
		"input('prompt')",
		"import sys\nfor f in (sys.stdin, sys.stdout, sys.stderr): print(f.encoding, f.errors, f.name, f.mode, f.closed, " +
			"f.isatty(), f.newlines)",
		"import sys; print(sys.stderr.line_buffering, sys.stdin.line_buffering, sys.stdout.write_through, " +
			"type(sys.stdout.buffer))",
		"print('\\u00e9 \\u4e16 \\U0001f600')",
		"print('\\udcff')",
		"import sys; sys.stdout.buffer.write(b'\\xff\\x00\\n'); sys.stdout.write('tail')",
		"import atexit; atexit.register(print, 'bye'); print('hi')",
		"import sys; print(sys.argv, sys.orig_argv, __file__, __name__, __builtins__, sys.path, sys.flags, " +
			"sys.executable, sys.prefix)",
		"import sys; print(sorted(sys.modules), sys.modules['sitecustomize'] if 'sitecustomize' in sys.modules else None)",
		"import sys; print(sorted(sys.path_importer_cache))",
		"import os; print(sorted(os.environ.items()), os.getcwd(), oct(os.umask(0)))",
		"import subprocess; print(subprocess.run(['env'], capture_output=True).stdout.decode().count('PYTHON'))",
		"import os, site, subprocess, sys; os.makedirs(site.getusersitepackages(), exist_ok=True); " +
			"print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.path, sys.stdout.line_buffering)'], " +
			"capture_output=True).stdout)",
		"import warnings; warnings.warn('careful'); 1 is 1",
		"import threading\ndef f(): raise RuntimeError('in thread')\nt = threading.Thread(target=f); t.start(); t.join(); " +
			"print('main')",
		"import os\nif os.fork() == 0:\n  print('child', flush=True); os._exit(0)\nos.wait(); print('parent')",
		"import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n  with m.Pool(2) as p: " +
			"print(p.map(f, range(5)))",
		"import multiprocessing as m\ndef f(q): q.put(__name__)\nif __name__ == '__main__':\n  c = " +
			"m.get_context('spawn'); q = c.Queue(); p = c.Process(target=f, args=(q,)); p.start(); print(q.get()); p.join(); " +
			"print(p.exitcode)",
		"import concurrent.futures as c\nwith c.ThreadPoolExecutor(20) as e: print(sum(e.map(len, ['ab'] * 100)))",
		"import asyncio\nasync def f():\n  p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1); print(await " +
			"p.communicate())\n  await asyncio.sleep(0)\nasyncio.run(f())",
		"import sqlite3, ssl, zoneinfo, tempfile, uuid, hashlib; print(tempfile.gettempdir()[:4], ssl.OPENSSL_VERSION, " +
			"len(ssl.create_default_context().get_ca_certs()) > 0, zoneinfo.ZoneInfo('Europe/Berlin'))",
		"import os; print(os.sysconf('SC_PAGESIZE'), os.nice(0), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid())",
		"import os; print(list(os.environ), os.environb[b'HOME'], os.getenv('HOME'), flush=True); os.system('env | sort')",
		"import gc, sys; print(len(gc.get_objects()) > 0, gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), " +
			"sys.getswitchinterval(), [type(f) for f in sys.meta_path], len(sys.path_hooks), sorted(vars()), sys.gettrace())",
		"open('/dev/stdout', 'w').write('a'); open('/dev/stderr', 'w').write('b'); open('/dev/fd/1', 'w').write('c')",
		// Finalizers and exit handlers can observe how an interpreter ends.
		`print('no line end', end='')`,
		"class C:\n  def __del__(self): print('gone')\nc = C()",
		"class C:\n  __slots__ = ()\n  def __del__(self): print('gone')\nc = C()",
		"class I(int):\n  __slots__ = ()\n  def __del__(self): print('gone')\ni = I()",
		"class M(type):\n  def __del__(self): print('gone')\nclass C(metaclass=M): pass",
		"import os\nclass C:\n  def __del__(self): print('gone')\nos.PathLike.c = os.c = C()",
		"import builtins\nclass C:\n  def __del__(self): print('gone')\nbuiltins.c = C(); builtins.c.c = builtins.c",
		"import os\nif os.fork() == 0:\n  f = open('f', 'w'); f.write('unflushed')\nelse:\n  print(os.wait()[1], " +
			"open('f').read())",
		"import os\nif os.fork() == 0:\n  print('child', end='')\nelse:\n  print(os.wait()[1])",
		"import os\nif os.fork() == 0:\n  raise SystemExit(3)\nprint(os.wait()[1])",
		"import gc, os\nif os.fork() == 0:\n  f = open('f', 'w'); f.write('unflushed'); gc.freeze()\nelse:\n  os.wait(); " +
			"print(open('f').read())",
		"class M(type):\n  __hash__ = type.__hash__\n  def __eq__(c, o): print('eq'); return True\nclass C(metaclass=M): " +
			"closed = True\nc = C()",
		"__builtins__.__dict__.clear()",
		"import builtins; builtins.id = builtins.map = print",
		"import os; os._exit = print",
		"import collections, weakref; c = collections.Counter(); w = weakref.WeakMethod(c.update, lambda _: print('gone'))",
		"import os, warnings; warnings.catch_warnings().__enter__(); warnings.simplefilter('always'); i = " +
			"os.scandir('/'); next(i)",
		"del __file__; raise SystemExit(3)",
		"globals().clear(); raise SystemExit(3)",
		"import sys; sys.modules['__main__'] = sys; raise SystemExit(3)",
		"import runpy; open('m.py', 'w').write('raise SystemExit(3)'); runpy.run_path('m.py', run_name='__main__')",
		"import weakref\nclass C: pass\nc = C(); r = weakref.ref(c, lambda _: print('gone'))",
		"import weakref\nclass C: pass\nc = C(); weakref.finalize(c, print, 'gone')",
		"def g():\n  try: yield\n  finally: print('closed')\nx = g(); next(x)",
		"async def f(): pass\nx = f()",
		"import sys; sys.stdout.close()",
		"import os; os.close(1); print('lost', end='')",
		"import sys; sys.stdout = sys.stderr; print('there')",
		"import sys\nclass W:\n  def write(self, s): pass\n  def flush(self): " +
			"sys.__stdout__.write('flushed')\nsys.stdout = W()",
		"import sys; sys.stdout.detach().write(b'detached')",
		"import atexit\n@atexit.register\ndef f(): raise SystemExit(3)",
		"import atexit\n@atexit.register\ndef f(): raise ValueError(3)",
		"import atexit; atexit.register(print, 'bye'); atexit._run_exitfuncs(); print('still there')",
		"import threading; threading.Thread(target=lambda: (threading.main_thread().join(), print('late'))).start(); " +
			"print('early')",
		"import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); print('early')",
		"import threading\nclass C:\n  def __del__(self): print('gone')\nl = threading.local(); l.c = C()",
		"import os, warnings; warnings.simplefilter('always'); s = os.scandir('/'); next(s)",
		"import socket, warnings; warnings.simplefilter('always'); s = socket.socket()",
		"import tempfile; d = tempfile.TemporaryDirectory()",
		"import logging; logging.basicConfig(filename='/dev/stdout'); logging.warning('x')",
		"import sys\ndef f(frame, event, arg): print(event, frame.f_code.co_name); return f\nsys.settrace(f)\ndef g(): " +
			"pass\ng()",
		"import sys\ndef g(): pass\nsys.setprofile(lambda frame, event, arg: sys.stderr.write(event + ' ' + " +
			"frame.f_code.co_name + '\\n'))\ng()",
		"import gc; gc.set_debug(gc.DEBUG_UNCOLLECTABLE); print('x')",
		"import sqlite3; c = sqlite3.connect('d'); c.execute('pragma journal_mode=wal'); c.execute('create table t (i)'); " +
			"print('x')",
		"import enum, collections.abc, typing, dataclasses, re, json, random, datetime\n@dataclasses.dataclass\nclass " +
			"C(collections.abc.Hashable): x: int\nprint(C(1), isinstance(1, typing.Hashable))",
	},
	"node": {
		"console.log('hi'); console.error('err')",
		"throw new Error('x')",
		"Promise.reject(new Error('y'))",
		"syntax error here",
		"require('nosuchmodule')",
		"process.exit(3)",
		"process.exitCode = 4",
		"process.kill(process.pid, 'SIGTERM'); setTimeout(() => {}, 60000)",
		"process.kill(process.pid, 'SIGKILL'); setTimeout(() => {}, 60000)",
		"process.abort()",
		"process.stdin.on('data', d => console.log(d)).on('end', () => console.log('end'))",
		"console.log(process.argv, process.argv0, process.execArgv, __filename, __dirname, require.main === module, " +
			"process.cwd(), process.stdout.isTTY)",
		"console.log(Object.entries(process.env).sort())",
		"process.on('exit', c => console.log('bye', c))",
		"const {Worker, isMainThread} = require('worker_threads'); if (isMainThread) new Worker(__filename); else " +
			"console.log('worker')",
		"console.log(require('child_process').execSync('echo hi').toString())",
		"const f = require('child_process').fork; if (process.send) process.send('x'); else f(__filename).on('message', m " +
			"=> console.log(m))",
		"console.log(new WebAssembly.Module(new Uint8Array([0, 97, 115, 109, 1, 0, 0, 0])))",
		"console.log(Object.keys(require.cache), module.children, module.paths.length, module.parent, require.main === " +
			"module, Object.keys(globalThis), process.listenerCount('exit'))",
		"console.log(Object.keys(process.env), process.execArgv, process.title); " +
			"console.log(require('child_process').execSync('env | sort').toString())",
		"function f() { f() }; try { f() } catch (e) { console.log(e.message) }; console.trace('here')",
		"import('fs').then(m => console.log(Object.keys(m).length, process.memoryUsage().rss > 0))",
		"fetch('http://127.0.0.1:1').catch(e => console.log(e.cause.code))",
	},
	"bash": {
		"echo out; echo err >&2; exit 3",
		"nosuchcommand",
		"if",
		"set -e; false; echo never",
		"set -u; echo $nosuchvar",
		"kill -9 $$",
		"kill -TERM $$",
		"kill -INT $$; echo after",
		"kill -PIPE $$",
		"read x; echo $?; cat; echo $?",
		"echo $0 $# $BASH $- $PWD $SHLVL",
		"ls -A | grep -v '^main' ; grep -rl nothing . ; echo $?",
		"trap 'echo bye' EXIT; exit 2",
		"trap; ulimit -c; umask",
		"env | sort",
		"(exit 4) | cat; echo ${PIPESTATUS[@]}; yes | head -1",
		"for i in 1 2 3; do (sleep 0; exit $i) & done; wait -n; wait; echo done",
		"echo a > /dev/stdout; echo b > /dev/stderr; cat <(echo c); diff <(echo 1) <(echo 2)",
		"cat <<X\nhere $HOME\nX",
		"printf 'no newline'",
		"declare -p | grep -v -e BASHPID -e EPOCH -e ' RANDOM' -e SRANDOM -e PPID -e BASHOPTS -e EUID -e ' UID' -e GROUPS " +
			"-e HOSTNAME -e BASH_ARGC -e BASH_SOURCE -e PIPESTATUS -e SECONDS",
		"echo $_ $SECONDS $OLDPWD; hash; declare -F; jobs; set | grep -c .; dirs; echo $! ${PIPESTATUS[@]} $LINENO " +
			"${BASH_SOURCE[@]}",
		"exec 1>&-; echo lost",
		"date -d @0; TZ=Asia/Tokyo date -d @0; locale 2>&1 | sort -u",
		"python3 -c 'print(1)' | tr 1 2; node -e 'console.log(3)'",
	},
}

// address matches memory addresses, which differ between runs.
var address = regexp.MustCompile("0x[0-9a-f]{8,16}")

func TestSameAsOutside(t *testing.T) {
	for n, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			setStartMode(t, m, mode)
			testSameAsOutside(t, m, n)
		})
	}
}

// testSameAsOutside runs all programs, or with -short those of start mode n.
func testSameAsOutside(t *testing.T, m *Maker, n int) {
	for language, codes := range sameCases {
		for i, code := range codes {
			if testing.Short() && i%len(modes) != n {
				continue
			}
			t.Run(language+" "+code, func(t *testing.T) {
				t.Parallel()
				if _, ok := program(t, language, code).Continues(*prewarmed(t, language)); !ok {
					t.Error("the program cannot continue in a prewarmed interpreter")
				}
				in := runCode(t, m, language, code)
				out := runOutside(t, language, code)
				in.stderr, out.stderr = address.ReplaceAllString(in.stderr, "0x"), address.ReplaceAllString(out.stderr, "0x")
				if in.stdout != out.stdout || in.stderr != out.stderr {
					t.Errorf("in the jail\n%s\n%s\noutside\n%s\n%s", in.stdout, in.stderr, out.stdout, out.stderr)
				}
				if in.Kind != out.Kind || in.ExitCode != out.ExitCode || in.Signal != out.Signal {
					t.Errorf("in the jail %+v, outside %+v", in.Outcome, out.Outcome)
				}
			})
		}
	}
}

// runOutside runs the code's file with the bare interpreter and replaces its paths in the output
// with the jail's. For python, the home has a user site directory: in a jail it is on the path even
// if it does not exist.
func runOutside(t *testing.T, language, code string) result {
	t.Helper()
	// The path is as long as the jail's home, because node wraps lines by length.
	home, job := "/tmp/"+strings.ToLower(rand.Text()[:len(DefaultHome)-len("/tmp/")]), t.TempDir()
	t.Cleanup(func() { _ = os.RemoveAll(home) })
	p, err := jail.Source{
		Language: language, Code: code, TraceID: "trc_test", Home: home,
		Env: map[string]string{"USER": filepath.Base(DefaultHome)},
	}.Program()
	if err != nil {
		t.Fatal(err)
	}
	f := p.Files[0]
	path := strings.Replace(f.Path, jail.JobDir, job, 1)
	dir := home
	if language == "python" {
		dir += userSite(t)
	}
	for _, err := range []error{os.MkdirAll(dir, 0o755), os.WriteFile(path, f.Content, 0o644)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var stdout, stderr bytes.Buffer
	// Programs in a jail start with no ignored signals. This process may ignore some, as under
	// nohup.
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/usr/bin/env", "--default-signal", p.Argv[0], path)
	cmd.Dir, cmd.Stdout, cmd.Stderr = home, &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	for _, e := range p.Env {
		if !strings.HasPrefix(e, "PYTHONPATH=") {
			cmd.Env = append(cmd.Env, e)
		}
	}
	_ = cmd.Run()
	clean := strings.NewReplacer(home, DefaultHome, job, jail.JobDir).Replace
	r := result{stdout: clean(stdout.String()), stderr: clean(stderr.String())}
	ws := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ws.Signaled() {
		r.Kind, r.Signal = jail.Signaled, int(ws.Signal())
	} else {
		r.Kind, r.ExitCode = jail.Exited, ws.ExitStatus()
	}
	return r
}

// userSite returns the path of the host python3's user site directory, relative to the home.
func userSite(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "/usr/bin/python3", "-I", "-c",
		"import sys; print('/.local/lib/python%d.%d/site-packages' % sys.version_info[:2], end='')").Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// One difference: printed lines are flushed before the program continues, also by a python that a
// bash script starts.
func TestPythonOutputStreams(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for language, code := range map[string]string{
		"python": "import time\nprint('now')\ntime.sleep(600)",
		"bash":   "python3 -c \"import time; print('now'); time.sleep(600)\"",
	} {
		out := newLines()
		p := program(t, language, code)
		p.Stdout = out
		j := prepare(t, m, testSpec())
		done := make(chan error, 1)
		go func() {
			_, err := j.Run(t.Context(), p)
			done <- err
		}()
		if got := out.next(t); got != "now" {
			t.Errorf("%s: got %q", language, got)
		}
		if err := errors.Join(j.Close(), <-done); err != nil {
			t.Error(err)
		}
	}
}

// Another difference: the user site directory is on the path before it exists. A package installed
// there can be imported at once, and the first call of a thread behaves like later ones.
func TestPythonUserSite(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	t.Run("a module that comes while the program runs", func(t *testing.T) {
		t.Parallel()
		runProgram(t, m, spec, program(t, "python", `
import os, site, subprocess, sys
try: import x
except ImportError as e: print(e, os.listdir('.'))
where = site.getusersitepackages()
subprocess.run(['bash', '-ec', f'mkdir -p {where}/package; echo "y = 1" > {where}/x.py; touch {where}/package/__init__.py; echo "z = 2" > {where}/package/sub.py'], check=True)
import x, package.sub
print(x.y, package.sub.z, x.__file__)
`)).want(t, jail.Exited, "No module named 'x' ['main.py']\n1 2 "+DefaultHome+userSite(t)+"/x.py")
	})
	t.Run("it goes before the system's modules", func(t *testing.T) {
		t.Parallel()
		runProgram(t, m, spec, program(t, "python", `
import os, site, sys
user = sys.path.index(site.getusersitepackages())
print([os.path.isdir(p) for p in sys.path[user:user + 1]], all(sys.path.index(p) > user for p in site.getsitepackages() if p in sys.path))
`)).want(t, jail.Exited, "[False] True")
	})
	// With the directory missing, python in a jail has the path that site sets when it exists.
	t.Run("as site does it", func(t *testing.T) {
		t.Parallel()
		runProgram(t, m, spec, program(t, "bash", `
python3 -m venv --without-pip /tmp/own
python3 -m venv --without-pip --system-site-packages /tmp/system
path='import sys; print(sys.path, sorted(sys.path_importer_cache), sorted(sys.modules))'
each() {
	for python in python3 /tmp/own/bin/python /tmp/system/bin/python; do
		for flags in '' -s -I -B; do "$@" $python $flags -c "$path"; done
		"$@" PYTHONNOUSERSITE=1 $python -c "$path"
		"$@" PYTHONUSERBASE=base $python -c "$path"
		"$@" PYTHONUSERBASE=/tmp//base/ $python -c "$path"
	done
}
each env PYTHONPATH=`+jail.PythonDir+` > /tmp/ours
for base in ~/.local base /tmp/base; do mkdir -p $base`+strings.TrimPrefix(userSite(t), "/.local")+`; done
each env > /tmp/plain
diff /tmp/ours /tmp/plain; wc -l < /tmp/ours
`)).want(t, jail.Exited, "21")
	})
	t.Run("as the caller wants it", func(t *testing.T) {
		t.Parallel()
		p := program(t, "python", "import site, sys; print(site.getusersitepackages() in sys.path)")
		p.Env = append(p.Env, "PYTHONNOUSERSITE=1")
		runProgram(t, m, spec, p).want(t, jail.Exited, "False")
	})
}

func TestProbe(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	got, err := m.Probe(t.Context(), testSpec())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range got {
		_, err := exec.LookPath("/usr/bin/" + r.Interpreters[0])
		if installed := err == nil || r.Language != "deno"; r.Available != installed || (r.Found != "") != installed ||
			(r.Problem == "") != installed {
			t.Errorf("%+v", r)
		}
	}
	missing, err := m.probe(t.Context(), testSpec(),
		proto.Runtime{Interpreters: []string{"nosuchruntime"}, Version: "--version"})
	if err != nil || missing.Available || missing.Problem == "" {
		t.Errorf("%+v, %v", missing, err)
	}
}
