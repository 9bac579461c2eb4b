package cell_test

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const testNonce = "00112233445566778899aabbccddeeff"

// frame is a frame of a runner.
type frame struct {
	Type, Version, Name, Value, Status string
	Sync, Run, Count, Dropped          int
	Memory                             int64
	Data, Metadata                     map[string]any
	Result                             bool
	Chart                              any
	Columns                            map[string][]any
	Truncated, Traceback               []string
	Files                              []struct {
		Path string
		Size int64
	}
}

// text returns the plain text of a display.
func (f frame) text() string {
	s, _ := f.Data["text/plain"].(string)
	return s
}

// item is a frame, or what a program printed between frames.
type item struct {
	text  string
	frame *frame
}

// readItems sends what r has to ch, which it closes at the end.
func readItems(r io.Reader, ch chan<- item) {
	defer close(ch)
	buffered := bufio.NewReaderSize(r, 1<<16)
	begin, part := []byte("\x1b_"+testNonce+";"), []byte(nil)
	var pending []byte
	for {
		b := make([]byte, 1<<16)
		n, err := buffered.Read(b)
		pending = append(pending, b[:n]...)
		for {
			i := bytes.Index(pending, begin)
			if i < 0 {
				break
			}
			end := bytes.Index(pending[i:], []byte("\x1b\\"))
			if end < 0 {
				break
			}
			chunk := pending[i+len(begin) : i+end]
			if i > 0 {
				ch <- item{text: string(pending[:i])}
			}
			part = append(part, chunk[2:]...)
			if chunk[0] == '0' {
				f := &frame{}
				if err := json.Unmarshal(part, f); err != nil {
					f.Type = "malformed: " + err.Error()
				}
				ch <- item{frame: f}
				part = nil
			}
			pending = pending[i+end+2:]
		}
		if i := bytes.IndexByte(pending, '\x1b'); i < 0 || err != nil {
			if len(pending) > 0 {
				ch <- item{text: string(pending)}
			}
			pending = nil
		} else if i > 0 {
			ch <- item{text: string(pending[:i])}
			pending = bytes.Clone(pending[i:])
		}
		if err != nil {
			return
		}
	}
}

// runner is a runner of cells that a test started.
type runner struct {
	t              *testing.T
	dir            string
	pid            int
	stdin          io.WriteCloser
	stdout, stderr chan item
	runs           int
	ready          frame
	wait           func() error
}

// outcome is what a cell did.
type outcome struct {
	stdout, stderr string
	frames         []frame
	end            frame
}

// python returns the command of an interpreter that has these modules.
func python(t *testing.T, modules string) []string {
	t.Helper()
	for _, name := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(name, "-c", "import "+modules).Run() == nil {
			return []string{name}
		}
	}
	t.Fatalf("no interpreter has the modules %s; run deploy/packages.sh", modules)
	return nil
}

// shells returns the interpreters of the two shells by name.
func shells(t *testing.T) map[string][]string {
	return map[string][]string{
		"plain":   {"/usr/bin/python3", "-S"}, // the modules of distributions are not found with -S
		"IPython": python(t, "IPython"),
	}
}

func script(t *testing.T) string {
	path, err := filepath.Abs("python.py")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// environment returns the environment of a runner.
func environment(t *testing.T) []string {
	return []string{"BULLPEN_CELL=" + testNonce, "PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "LANG=C.UTF-8"}
}

// startRunner starts a context in a directory of its own.
func startRunner(t *testing.T, interpreter []string, env ...string) *runner {
	t.Helper()
	r := &runner{t: t, dir: t.TempDir(), stdout: make(chan item, 1<<16), stderr: make(chan item, 1<<16)}
	cmd := exec.Command(interpreter[0], append(interpreter[1:], script(t))...)
	cmd.Dir = r.dir
	cmd.Env = append(environment(t), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	outRead, outWrite, _ := os.Pipe()
	errRead, errWrite, _ := os.Pipe()
	cmd.Stdout, cmd.Stderr = outWrite, errWrite
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = outWrite.Close(), errWrite.Close()
	r.stdin, r.pid, r.wait = stdin, cmd.Process.Pid, cmd.Wait
	go readItems(outRead, r.stdout)
	go readItems(errRead, r.stderr)
	t.Cleanup(func() {
		_ = syscall.Kill(-r.pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	r.ready = r.until("ready").end
	return r
}

// until returns what a runner does up to a frame of a type.
func (r *runner) until(kind string) outcome {
	r.t.Helper()
	var o outcome
	for i := range r.stdout {
		if i.frame == nil {
			o.stdout += i.text
			continue
		}
		if i.frame.Type == kind {
			o.end = *i.frame
			break
		}
		o.frames = append(o.frames, *i.frame)
	}
	if o.end.Type == "" {
		for i := range r.stderr {
			o.stderr += i.text
		}
		r.t.Fatalf("the runner ended before %s; it printed %.2000q and %.2000q", kind, o.stdout, o.stderr)
	}
	for i := range r.stderr {
		if i.frame != nil && i.frame.Sync == o.end.Sync {
			break
		}
		o.stderr += i.text
	}
	return o
}

// send sends a cell.
func (r *runner) send(code string, env map[string]string) {
	r.t.Helper()
	r.runs++
	request, _ := json.Marshal(map[string]any{"run": r.runs, "code": code, "env": env})
	if _, err := r.stdin.Write(append(request, '\n')); err != nil {
		r.t.Fatal(err)
	}
}

// run runs a cell to its end.
func (r *runner) run(code string) outcome {
	r.t.Helper()
	r.send(code, nil)
	return r.until("end")
}

// result returns the plain text of a cell's value. It fails the test if the cell fails.
func (r *runner) result(code string) string {
	r.t.Helper()
	o := r.run(code)
	if o.end.Status != "ok" || len(o.frames) == 0 {
		r.t.Fatalf("%s: %+v", code, o)
	}
	return o.frames[len(o.frames)-1].text()
}

// printed returns the next n bytes that the runner's program prints to stdout.
func (r *runner) printed(n int) string {
	text := ""
	for len(text) < n {
		i, ok := <-r.stdout
		if !ok {
			break
		}
		text += i.text
	}
	return text
}

// interrupt interrupts the running cell after it has printed "started", and returns what it did.
func (r *runner) interrupt(code string) outcome {
	r.t.Helper()
	r.send(code, nil)
	seen := ""
	for !strings.Contains(seen, "started") {
		seen += (<-r.stdout).text
	}
	_ = syscall.Kill(-r.pid, syscall.SIGINT)
	return r.until("end")
}

// cellTest is a cell and what it does. Fields that are empty are not compared, except stdout and
// stderr.
type cellTest struct {
	code, stdout, stderr string
	errorName            string
	errorValue           string // regular expression
	results              []string
}

// commonCells run in this order in one context of each shell.
var commonCells = []cellTest{
	{code: "1+1", results: []string{"2"}},
	{code: "_", results: []string{"2"}},
	{code: "x = 40"},
	{code: "x + 2;"},
	{code: ""},
	{code: "# nothing"},
	{code: "None"},
	{code: "print('out'); import sys; print('err', file=sys.stderr)", stdout: "out\n", stderr: "err\n"},
	{code: "'é\\n'", results: []string{"'é\\n'"}},
	{code: "display(1); display(2, 3)\n4", results: []string{"1", "2", "3", "4"}},
	{code: "1/0", errorName: "ZeroDivisionError", errorValue: "^division by zero$"},
	{code: "raise ValueError('a\\x7fb\\x00é')", errorName: "ValueError", errorValue: "^a\x7fb\x00é$"},
	{code: "x =", errorName: "SyntaxError", errorValue: "^invalid syntax"},
	{code: "if x:\n  1\n 2", errorName: "IndentationError", errorValue: "unindent"},
	{code: "return", errorName: "SyntaxError", errorValue: "outside function"},
	{code: "input('Name? ')", errorName: "StdinNotImplementedError", errorValue: "^input is not available"},
	{code: "import getpass; getpass.getpass()", errorName: "StdinNotImplementedError", errorValue: "not available"},
	{code: "sys.stdin.read()", results: []string{"''"}},
	{code: "try: raise SystemExit(3)\nfinally: print('bye')", stdout: "bye\n", errorName: "SystemExit", errorValue: "3"},
	{code: "__name__, sys.path[0], sys.argv", results: []string{"('__main__', '', [''])"}},
	{code: "import os; 'BULLPEN_CELL' in os.environ", results: []string{"False"}},
	{code: "import asyncio\nawait asyncio.sleep(0)\n'awaited'", results: []string{"'awaited'"}},
	{code: "async def f(): return 5\nawait f()", results: []string{"5"}},
	{code: "async def numbers(): yield 6\n[i async for i in numbers()]", results: []string{"[6]"}},
	{code: "asyncio.get_running_loop().is_running()", results: []string{"True"}},
	{code: "done = asyncio.Event()\nasync def later():\n" +
		"  await asyncio.sleep(0); done.set()\ntask = asyncio.create_task(later())"},
	{code: "await done.wait()", results: []string{"True"}},
	{code: "import contextvars; v = contextvars.ContextVar('v'); v.set(1);"},
	{code: "asyncio.current_task().cancel(); await asyncio.sleep(1)", errorName: "CancelledError"},
	{code: "for t in asyncio.all_tasks(): t.cancel()"},
	{code: "class C: pass\nimport pickle; type(pickle.loads(pickle.dumps(C()))) is C", results: []string{"True"}},
	{code: "import multiprocessing as m\ndef square(c, n): c.n = n*n; return c\n" +
		"with m.get_context('fork').Pool(2) as p: print(p.starmap(square, [(C(), 3)])[0].n)", stdout: "9\n"},
	{code: "import subprocess; subprocess.run(['echo', 'sub']).returncode", stdout: "sub\n", results: []string{"0"}},
	{
		code:   "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: print('child'); display('hidden')",
		stdout: "child\n'hidden'\n",
	},
	{
		code:    "pid = os.fork()\nif not pid: sys.exit(7)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
		results: []string{"7"},
	},
	{
		code:    "pid = os.fork()\nif not pid: await asyncio.sleep(0); 1/0\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])",
		results: []string{"1"}, stderr: "any",
	},
	{
		code: "class M:\n  def _repr_mimebundle_(self, include=None, exclude=None):\n" +
			"    return {'text/html': '<b>', 'text/plain': 'M'}\nM()",
		results: []string{"M"},
	},
	{
		code:      "class Bad:\n  def __repr__(self): raise RuntimeError('bad repr')\nBad()",
		errorName: "RuntimeError", errorValue: "bad repr",
	},
	{code: "class Worse(Exception):\n  def __str__(self): raise RuntimeError('bad str')\nraise Worse", errorName: "Worse"},
	{code: "def r(): r()\nr()", errorName: "RecursionError", errorValue: "maximum recursion"},
	{code: "sys.setrecursionlimit(60)"},
	{code: "import builtins; del builtins.len, builtins.print, builtins.isinstance, builtins.dict"},
	{code: "len([1]), isinstance(1, int)", results: []string{"(1, True)"}},
	{code: "saved = sys.stdout; sys.stdout = None"},
	{code: "1", results: []string{"1"}},
	{code: "sys.stdout = object()"},
	{code: "sys.stdout = saved; print('back')", stdout: "back\n"},
	{code: "__main__ = type('__main__', (), {})\n__main__.__name__", results: []string{"'__main__'"}},
	{code: "import warnings; warnings.warn('careful')", stderr: "any"},
	{code: "from __future__ import annotations"},
	{code: "def g(a: undefined): pass\ng.__annotations__", results: []string{"{'a': 'undefined'}"}},
	{
		code:   "import threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()",
		stdout: "thread\n",
	},
	{code: "_ = 'mine'\n1+1", results: []string{"2"}},
	{code: "_", results: []string{"'mine'"}},
}

func TestPythonCells(t *testing.T) {
	own := map[string][]cellTest{"plain": {
		{code: "def trace(*a): raise KeyError\nsys.settrace(trace)"},
		{code: "sys.setprofile(trace)", errorName: "KeyError"},
		{code: "len([1])", results: []string{"1"}},
	}, "IPython": {
		{code: "import time\n%time 1", stdout: "any", results: []string{"1"}},
		{code: "%%bash\necho script", stdout: "script\n"},
		{code: "!echo shell", stdout: "shell\r\n"},
		{code: "x = !echo listed\nx", results: []string{"['listed']"}},
		{code: "Out[1], In[1]", results: []string{"(2, '1+1')"}},
		{code: "%nothing", stderr: "UsageError: Line magic function `%nothing` not found.\n", errorName: "UsageError"},
		{code: "%pip --version", stdout: "any", results: nil},
		{code: "exit()", errorName: "SystemExit", stderr: "any"},
		{code: "a = display(1, display_id='d'); a.update(2)", results: []string{"1", "2"}},
		{code: "%%capture c\nprint('captured')"},
		{code: "c.stdout", results: []string{`'captured\n'`}},
		{code: "def trace(*a): raise KeyError\nsys.settrace(trace)", errorName: "KeyError"}, // raises in IPython's frames
		{code: "get_ipython().history_manager.enabled", results: []string{"False"}},
	}}
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter)
			for _, c := range append(slices.Clip(commonCells), own[name]...) {
				checkCell(t, c, r.run(c.code))
			}
		})
	}
}

func checkCell(t *testing.T, c cellTest, o outcome) {
	t.Helper()
	if o.stdout != c.stdout && c.stdout != "any" {
		t.Errorf("%q printed %q, want %q", c.code, o.stdout, c.stdout)
	}
	if o.stderr != c.stderr && c.stderr != "any" && c.errorName != "SystemExit" {
		t.Errorf("%q printed %q to stderr, want %q", c.code, o.stderr, c.stderr)
	}
	var results []string
	failed := frame{}
	for _, f := range o.frames {
		if f.Type == "error" {
			failed = f
		} else {
			results = append(results, f.text())
		}
	}
	if !reflect.DeepEqual(results, c.results) {
		t.Errorf("%q showed %q, want %q", c.code, results, c.results)
	}
	if failed.Name != c.errorName || !regexp.MustCompile(c.errorValue).MatchString(failed.Value) {
		t.Errorf("%q failed with %s: %q, want %s: %q", c.code, failed.Name, failed.Value, c.errorName, c.errorValue)
	}
	if want := map[bool]string{true: "ok", false: "error"}[c.errorName == ""]; o.end.Status != want {
		t.Errorf("%q has status %s, want %s", c.code, o.end.Status, want)
	}
}

func TestPythonInterrupts(t *testing.T) {
	const started = "print('started', flush=True); "
	cells := []string{
		"import time; " + started + "time.sleep(100)",
		started + "\nwhile True: pass",
		"import asyncio; " + started + "await asyncio.sleep(100)",
		"import subprocess; " + started + "subprocess.run(['sleep', '100'])",
		"async def hog():\n  " + started + "\n  while True: pass\nawait asyncio.gather(hog())",
		"class Slow:\n  def __repr__(self):\n    " + started + "\n    while True: pass\nSlow()",
		"class Slow2:\n  def _repr_html_(self):\n    " + started + "\n    time.sleep(100)\ndisplay(Slow2())",
		"import sys\nclass Out:\n  slow = True\n  def flush(self):\n    if self.slow:\n      self.slow = False\n" +
			"      sys.__stdout__.write('started\\n'); sys.__stdout__.flush()\n      while True: pass\nsys.stdout = Out()\n1",
		"sys.stdout = sys.__stdout__; " + started + "\nfor i in range(10**9): print('x' * 1000)",
		"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + started + "time.sleep(100)",
		"import threading; " + started + "threading.Event().wait()",
		"sys.stdin = open('/dev/null'); r, w = __import__('os').pipe(); " + started + "__import__('os').read(r, 1)",
	}
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter)
			r.run("kept = 1")
			cells := cells
			if name == "IPython" {
				cells = append(slices.Clip(cells), "!echo started; sleep 100", "%%bash\necho started\nsleep 100",
					started+"\nx = !sleep 100")
			}
			for _, code := range cells {
				o := r.interrupt(code)
				if len(o.frames) != 1 || o.frames[0].Name != "KeyboardInterrupt" || o.end.Status != "interrupted" {
					t.Errorf("%s: %+v", code, o)
				}
				_ = syscall.Kill(-r.pid, syscall.SIGINT) // no cell runs: ignored
				if got := r.result("kept"); got != "1" {
					t.Errorf("after %s the variable is %s", code, got)
				}
			}
		})
	}
}

func TestPythonTasksRunBetweenCells(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter)
			r.run("import asyncio\nasync def task():\n  await asyncio.sleep(.01)\n  print('from a task', flush=True)\n" +
				"t = asyncio.create_task(task())")
			if got := r.printed(12); got != "from a task\n" {
				t.Errorf("got %q from a task between cells", got)
			}
			r.run("import threading, time\nthreading.Timer(.01, print, ['from a thread'], {'flush': True}).start()")
			if got := r.printed(14); got != "from a thread\n" {
				t.Errorf("got %q from a thread between cells", got)
			}
			// An error in a task is not the context's end.
			r.run("async def fail(): raise SystemExit(2)\nt = asyncio.create_task(fail())")
			if got := r.result("1"); got != "1" {
				t.Errorf("got %q", got)
			}
		})
	}
}

// All orders of output and frames are kept: what precedes a frame in the program precedes it in
// both streams.
func TestPythonOrder(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter)
			r.send("import sys\nfor i in range(3):\n  sys.stdout.write(f'o{i}'); sys.stderr.write(f'e{i}'); display(i)", nil)
			for _, stream := range []struct {
				items chan item
				want  string
			}{{r.stdout, "o0"}, {r.stderr, "e0"}, {r.stdout, "#2"}, {r.stderr, "#2"}, {r.stdout, "o1"}, {r.stderr, "e1"}} {
				i := <-stream.items
				if i.frame != nil {
					i.text = fmt.Sprint("#", i.frame.Sync)
				}
				if i.text != stream.want {
					t.Errorf("got %q, want %q", i.text, stream.want)
				}
			}
		})
	}
}

// Cells that damage their own process do not break the protocol.
func TestPythonHostileCells(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter)
			r.run("import os, sys")
			for _, code := range []string{
				"null = os.open('/dev/null', os.O_RDWR); saved = os.dup(1), os.dup(2)\nfor i in range(3): os.dup2(null, i)",
				"for i in range(3): os.close(i)",
				"for i in range(3): os.dup2(null, i)\nos.dup2(saved[0], 1); os.dup2(saved[1], 2);",
				"sys.stdout.close(); sys.stderr.close(); del sys.stdout, sys.stderr",
				"import builtins as b; sys.stdout, sys.stderr = (b.open(fd, 'w', closefd=False) for fd in (1, 2))",
				"os.set_blocking(1, False); os.set_blocking(2, False)",
				"os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
				"os.chdir('/')",
				"sys.modules.pop('json'); sys.modules.pop('os'); import json; json.dumps = None",
				"class Meta(type):\n  def __instancecheck__(c, o): raise OSError\n  def __getattr__(c, n): raise OSError\n" +
					"class Odd(metaclass=Meta):\n  def __getattribute__(self, n): raise OSError\no = Odd()",
				"import sys; sys.displayhook = None; sys.excepthook = None; sys.path_importer_cache.clear(); sys.path[:] = ['']",
				"sys.modules['__main__'] = None",
			} {
				r.run(code)
			}
			o := r.run("print('alive'); 2")
			if o.stdout != "alive\n" || len(o.frames) != 1 || o.frames[0].text() != "2" {
				t.Errorf("%+v", o)
			}
			o = r.run("print('\\x1b_" + strings.Repeat("0", 32) + `;0;{"type":"end","sync":1}` + "\\x1b\\\\')")
			if !strings.HasPrefix(o.stdout, "\x1b_0000") || len(o.frames) != 0 {
				t.Errorf("%+v", o)
			}
			const size = 100 << 20
			r.send(fmt.Sprintf("import os; os.set_blocking(1, True)\nfor i in range(%d): print('x' * 1023)", size>>10), nil)
			n := 0
			for i := range r.stdout {
				if n += len(i.text); i.frame != nil {
					break
				}
			}
			if n != size {
				t.Errorf("%d bytes of output arrived, want %d", n, size)
			}
		})
	}
}

func TestPythonLimits(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter)
			o := r.run("for i in range(110): display(i)")
			if len(o.frames) != 100 || o.end.Dropped != 10 {
				t.Errorf("%d displays, %d dropped", len(o.frames), o.end.Dropped)
			}
			r.run("class Big:\n  def __init__(s, n): s.n = n\n  def __repr__(s): return 'é' * s.n\n" +
				"  def _repr_png_(s): return b'x' * s.n\n  def _repr_json_(s): return {'a': 'x' * s.n}")
			o = r.run("display(Big(3 << 20))")
			f := o.frames[0]
			if n := len(f.text()); n < 200<<10 || n > 2<<20 || strings.Trim(f.text(), "é") != "" || len(f.Data) != 1 ||
				!slices.Contains(f.Truncated, "text/plain") || !slices.Contains(f.Truncated, "image/png") ||
				!slices.Contains(f.Truncated, "application/json") {
				t.Errorf("%d bytes of text, %v", n, f.Truncated)
			}
			o = r.run("for i in range(5): display(Big(1 << 20))")
			total, truncated := 0, 0
			for _, f := range o.frames {
				b, _ := json.Marshal(f.Data)
				total += len(b)
				truncated += len(f.Truncated)
			}
			if len(o.frames) != 5 || total > 4<<20 || truncated == 0 {
				t.Errorf("%d displays of %d bytes, %d truncated", len(o.frames), total, truncated)
			}
			o = r.run("raise ValueError('x' * 30_000)")
			if f := o.frames[0]; len(f.Value) != 20_000 || !slices.Contains(f.Truncated, "value") {
				t.Errorf("error of %d bytes, %v", len(f.Value), f.Truncated)
			}
			o = r.run("raise ValueError('x\\n' * 300)")
			if f := o.frames[0]; len(f.Traceback) != 100 || !slices.Contains(f.Truncated, "traceback") {
				t.Errorf("traceback of %d lines, %v", len(f.Traceback), f.Truncated)
			}
		})
	}
}

func TestPythonFilesAndEnv(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startRunner(t, interpreter, "KEPT=before")
			o := r.run("import os; os.mkdir('d')\nfor n in 'a.txt', '.hidden', 'd/x', b'\\xff': open(n, 'w').write('abc')")
			var paths []string
			for _, f := range o.end.Files {
				paths = append(paths, fmt.Sprint(f.Path, f.Size))
			}
			if want := []string{"a.txt3", "\ufffd3"}; !reflect.DeepEqual(paths, want) {
				t.Errorf("files %q, want %q", paths, want)
			}
			o = r.run("open('a.txt').read(); open('mod.py', 'w').write('x = 7')")
			if len(o.end.Files) != 1 || o.end.Files[0].Path != "mod.py" {
				t.Errorf("files %v, want mod.py", o.end.Files)
			}
			if got := r.result("import mod; mod.x"); got != "7" {
				t.Errorf("a module that a cell wrote has %s", got)
			}
			if o = r.run("open('a.txt', 'a').write('d');"); len(o.end.Files) != 1 || o.end.Files[0].Size != 4 {
				t.Errorf("files %v, want a.txt", o.end.Files)
			}
			if o.end.Memory < 1<<20 || o.end.Memory > 1<<30 {
				t.Errorf("memory is %d", o.end.Memory)
			}
			r.send("os.environ['KEPT'], os.environ['NEW']", map[string]string{"KEPT": "during", "NEW": "1"})
			if f := r.until("end").frames; len(f) != 1 || f[0].text() != "('during', '1')" {
				t.Errorf("variables of a run: %+v", f)
			}
			if got := r.result("os.environ['KEPT'], os.environ.get('NEW')"); got != "('before', None)" {
				t.Errorf("variables after a run: %s", got)
			}
			r.run("import atexit; atexit.register(print, 'at exit')")
			_ = r.stdin.Close()
			if got := r.printed(8); got != "at exit\n" {
				t.Errorf("at exit it printed %q", got)
			}
			if err := r.wait(); err != nil {
				t.Errorf("at the end of requests: %v", err)
			}
		})
	}
}

// runProgram runs a program as one cell.
func runProgram(t *testing.T, interpreter []string, program, stdin string, args ...string) (o outcome, code int) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.py"), []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	args = slices.Concat(interpreter[1:], []string{script(t), "--cell", "main.py"}, args)
	cmd := exec.Command(interpreter[0], args...)
	var stdout, stderr bytes.Buffer
	cmd.Dir, cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, environment(t), strings.NewReader(stdin), &stdout, &stderr
	_ = cmd.Run()
	read := func(b *bytes.Buffer) (text string, frames []frame) {
		items := make(chan item, 1<<10)
		readItems(b, items)
		for i := range items {
			text += i.text
			if i.frame != nil {
				frames = append(frames, *i.frame)
			}
		}
		return text, frames
	}
	o.stderr, _ = read(&stderr)
	o.stdout, o.frames = read(&stdout)
	if n := len(o.frames); n > 0 && o.frames[n-1].Type == "end" {
		o.end, o.frames = o.frames[n-1], o.frames[:n-1]
	}
	return o, cmd.ProcessState.ExitCode()
}

func TestPythonProgram(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, c := range []struct {
				cellTest
				code   int
				status string
			}{
				{cellTest{
					code: "print(input(), __name__, __file__)\nimport sys; sys.argv", stdout: "typed __main__ main.py\n",
					results: []string{"['main.py', '-x', 'y']"},
				}, 0, "ok"},
				{cellTest{code: "import asyncio\nasync def f(): return 3\nasyncio.run(f())", results: []string{"3"}}, 0, "ok"},
				{cellTest{code: "import asyncio\nawait asyncio.sleep(0)\n4", results: []string{"4"}}, 0, "ok"},
				{cellTest{code: "import sys; sys.exit()"}, 0, "ok"},
				{cellTest{code: "raise SystemExit(3)"}, 3, "error"},
				{cellTest{code: "import sys; sys.exit('reason')", stderr: "reason\n"}, 1, "error"},
				{cellTest{code: "import atexit; atexit.register(print, 'bye');", stdout: "bye\n"}, 0, "ok"},
				{cellTest{code: "import os\nif os.fork(): os.wait();\nelse: print('child')", stdout: "child\n"}, 0, "ok"},
				{cellTest{code: "open('made.txt', 'w').write('abc');"}, 0, "ok"},
			} {
				o, code := runProgram(t, interpreter, c.cellTest.code, "typed\n", "-x", "y")
				var results []string
				for _, f := range o.frames {
					results = append(results, f.text())
				}
				if o.stdout != c.stdout || o.stderr != c.stderr || !reflect.DeepEqual(results, c.results) || code != c.code ||
					o.end.Status != c.status {
					t.Errorf("%s: exit code %d, %+v", c.cellTest.code, code, o)
				}
			}
			o, code := runProgram(t, interpreter, "def f():\n  1/0\nf()\n", "")
			if code != 1 || len(o.frames) != 1 || o.frames[0].Name != "ZeroDivisionError" || o.end.Status != "error" {
				t.Errorf("exit code %d, %+v", code, o)
			}
			traceback := strings.Join(o.frames[0].Traceback, "\n")
			if strings.TrimSpace(o.stderr) != strings.TrimSpace(traceback) || !strings.Contains(traceback, "main.py") ||
				!strings.Contains(traceback, "1/0") || strings.Contains(traceback, "python.py") {
				t.Errorf("traceback %s, stderr %s", traceback, o.stderr)
			}
			o, code = runProgram(t, interpreter, "x = \n", "")
			if code != 1 || len(o.frames) != 1 || o.frames[0].Name != "SyntaxError" {
				t.Errorf("exit code %d, %+v", code, o)
			}
		})
	}
}

// forkParent is a fork parent that a test started.
type forkParent struct {
	t    *testing.T
	conn *os.File
	pid  int
}

// startForkParent starts a fork parent and returns its first message too.
func startForkParent(t *testing.T, interpreter []string, preload string) (*forkParent, map[string]any) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(interpreter[0], append(interpreter[1:], script(t), "--serve")...)
	child := os.NewFile(uintptr(fds[1]), "")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = child, os.Stderr, os.Stderr
	cmd.Dir = t.TempDir()
	hostile := filepath.Join(cmd.Dir, "json.py") // in the working directory, from which nothing may be imported
	if err := os.WriteFile(hostile, []byte("raise SystemExit"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(environment(t), "BULLPEN_PRELOAD="+preload)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = child.Close()
	p := &forkParent{t: t, conn: os.NewFile(uintptr(fds[0]), ""), pid: cmd.Process.Pid}
	t.Cleanup(func() {
		_ = p.conn.Close()
		_ = cmd.Wait()
	})
	return p, p.receive()
}

func (p *forkParent) receive() map[string]any {
	p.t.Helper()
	b := make([]byte, 1<<16)
	n, err := p.conn.Read(b)
	if err != nil {
		p.t.Fatal(err)
	}
	message := map[string]any{}
	if err := json.Unmarshal(b[:n], &message); err != nil {
		p.t.Fatal(err)
	}
	return message
}

// fork starts a context.
func (p *forkParent) fork(env map[string]string) *runner {
	p.t.Helper()
	r := &runner{t: p.t, dir: p.t.TempDir(), stdout: make(chan item, 1<<16), stderr: make(chan item, 1<<16)}
	inRead, inWrite, _ := os.Pipe()
	outRead, outWrite, _ := os.Pipe()
	errRead, errWrite, _ := os.Pipe()
	order, _ := json.Marshal(map[string]any{"nonce": testNonce, "cwd": r.dir, "env": env})
	rights := unix.UnixRights(int(inRead.Fd()), int(outWrite.Fd()), int(errWrite.Fd()))
	if err := unix.Sendmsg(int(p.conn.Fd()), order, rights, nil, 0); err != nil {
		p.t.Fatal(err)
	}
	for _, f := range []*os.File{inRead, outWrite, errWrite} {
		_ = f.Close()
	}
	go readItems(outRead, r.stdout)
	go readItems(errRead, r.stderr)
	pid, ok := p.receive()["pid"].(float64)
	if !ok {
		p.t.Fatal("no pid")
	}
	r.stdin, r.pid = inWrite, int(pid)
	p.t.Cleanup(func() { _ = unix.Kill(-r.pid, unix.SIGKILL) })
	r.ready = r.until("ready").end
	return r
}

func TestPythonForkParent(t *testing.T) {
	for name, interpreter := range shells(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, ready := startForkParent(t, interpreter, "colorsys,no_such_module, string")
			failed, _ := ready["failed"].(map[string]any)
			if ready["ready"] != true || len(failed) != 1 || !strings.Contains(fmt.Sprint(failed), "no_such_module") {
				t.Errorf("ready: %v", ready)
			}
			a, b := p.fork(map[string]string{"A": "1"}), p.fork(nil)
			want := fmt.Sprintf("('', {'A': '1'}, '%s', True, True)", a.dir)
			if got := a.result("import sys, os; sys.path[0], dict(os.environ), os.getcwd(), 'colorsys' in sys.modules, " +
				"os.getsid(0) == os.getpid()"); got != want {
				t.Errorf("a new context has %s, want %s", got, want)
			}
			for _, code := range []string{"import random; random.random()", "os.getpid()"} {
				b.run("import os")
				if x, y := a.result(code), b.result(code); x == y {
					t.Errorf("%s is %s in two contexts", code, x)
				}
			}
			if got := a.result("os.listdir('/proc/self/task') == [str(os.getpid())]"); got != "True" {
				t.Errorf("a context has one thread: %s", got)
			}
			a.run("x = 1")
			if o := b.run("x"); len(o.frames) != 1 || o.frames[0].Name != "NameError" {
				t.Errorf("a variable of another context: %+v", o)
			}
			if o := a.interrupt("print('started', flush=True)\nwhile True: pass"); o.end.Status != "interrupted" {
				t.Errorf("an interrupt in a fork: %+v", o)
			}
			_ = a.stdin.Close()
			if got := p.receive(); got["exited"] != float64(a.pid) || got["status"] != 0.0 {
				t.Errorf("at a context's end: %v", got)
			}
			b.send("import os; os._exit(3)", nil)
			if got := p.receive(); got["exited"] != float64(b.pid) || got["status"] != float64(3<<8) {
				t.Errorf("at a context's end: %v", got)
			}
			c := p.fork(nil)
			_ = p.conn.Close() // the parent ends, its contexts do not
			for unix.Kill(p.pid, 0) == nil {
				if err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil); err == nil {
					break
				}
			}
			if got := c.result("1"); got != "1" {
				t.Errorf("a context without its parent: %s", got)
			}
		})
	}
}

// A library that leaves a thread is named, because a fork would lose the thread.
func TestPythonForkParentThreads(t *testing.T) {
	t.Parallel()
	interpreter := []string{"/usr/bin/python3", "-S"}
	fds, _ := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	dir := t.TempDir()
	code := "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
	if err := os.WriteFile(filepath.Join(dir, "leaves_a_thread.py"), []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	child := os.NewFile(uintptr(fds[1]), "")
	cmd := exec.Command(interpreter[0], append(interpreter[1:], script(t), "--serve")...)
	cmd.Stdin = child
	cmd.Env = append(environment(t), "BULLPEN_PRELOAD=string,leaves_a_thread", "PYTHONPATH="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = child.Close()
	p := &forkParent{t: t, conn: os.NewFile(uintptr(fds[0]), "")}
	if got := p.receive(); !strings.Contains(fmt.Sprint(got["error"]), "leaves_a_thread") {
		t.Errorf("got %v", got)
	}
	_, _ = p.conn.Close(), cmd.Wait()
}

// Data frames and pictures, with pandas and matplotlib imported in the parent.
func TestPythonRich(t *testing.T) {
	t.Parallel()
	p, _ := startForkParent(t, python(t, "IPython, matplotlib, pandas, PIL"), "pandas,matplotlib.pyplot")
	began := time.Now()
	r := p.fork(map[string]string{"HOME": t.TempDir(), "PATH": os.Getenv("PATH")})
	r.run("1")
	t.Logf("fork to first result: %v", time.Since(began))
	began = time.Now()
	const cells = 200
	for range cells {
		r.run("1")
	}
	t.Logf("a warm cell: %v", time.Since(began)/cells)
	t.Logf("private memory: %.1f MiB", float64(r.run("1").end.Memory)/(1<<20))
	o := r.run(`import pandas as pd, numpy as np, datetime, decimal
df = pd.DataFrame({
  "i": [1, 2, 3], "f": [1.5, np.nan, np.inf], "s": ["a", None, "é"], "b": [True, False, True],
  "t": pd.to_datetime(["2024-01-01 10:00", None, "2024-01-03 00:00"]), "d": [datetime.date(2024, 1, 1), None, None],
  "c": pd.Categorical(["x", "y", None]), "n": pd.array([1, None, 3], dtype="Int64"),
  "o": [[1, np.float64(2)], {"k": pd.Timestamp("2024-01-01")}, decimal.Decimal("1.5")],
  ("m", 1): [1, 2, 3], 7: pd.to_timedelta([1, 2, None], "s")}, index=pd.Index([10, 20, 30], name="id"))
df`)
	if len(o.frames) != 1 || !o.frames[0].Result {
		t.Fatalf("%+v", o)
	}
	if html, _ := o.frames[0].Data["text/html"].(string); !strings.Contains(html, "<table") {
		t.Errorf("html is %q", html)
	}
	var want map[string][]any
	if err := json.Unmarshal([]byte(`{"id":[10,20,30],"i":[1,2,3],"f":[1.5,null,null],"s":["a",null,"é"],
		"b":[true,false,true],
		"t":["2024-01-01T10:00:00",null,"2024-01-03T00:00:00"],"d":["2024-01-01",null,null],"c":["x","y",null],"n":[1,null,3],
		"o":[[1,2],{"k":"2024-01-01T00:00:00"},1.5],"m, 1":[1,2,3],"7":["P0DT0H0M1S","P0DT0H0M2S",null]}`),
		&want); err != nil {
		t.Fatal(err)
	}
	if got := o.frames[0].Columns; !reflect.DeepEqual(got, want) {
		t.Errorf("columns\n got %v\nwant %v", got, want)
	}
	t.Logf("private memory after a data frame: %.1f MiB", float64(o.end.Memory)/(1<<20))
	o = r.run("pd.DataFrame([[1, 2, 3]], columns=['a', 'a', 'a.1'])")
	want = map[string][]any{"a": {1.0}, "a.1": {2.0}, "a.1.1": {3.0}}
	if !reflect.DeepEqual(o.frames[0].Columns, want) {
		t.Errorf("columns of the same name: %v", o.frames[0].Columns)
	}
	o = r.run("pd.DataFrame({'a': range(10_001)})")
	if f := o.frames[0]; len(f.Columns["a"]) != 10_000 || !slices.Contains(f.Truncated, "columns") {
		t.Errorf("%d rows, %v", len(f.Columns["a"]), f.Truncated)
	}
	o = r.run("pd.DataFrame(np.zeros((10_000, 200)))")
	if f := o.frames[0]; f.Columns != nil || !slices.Contains(f.Truncated, "columns") {
		t.Errorf("a frame of 2 million values has %d columns, %v", len(f.Columns), f.Truncated)
	}
	if o = r.run("df['i']"); o.frames[0].Columns != nil {
		t.Errorf("a series has columns")
	}

	for _, c := range []struct {
		code string
		mime string
		n    int
	}{
		{"import matplotlib.pyplot as plt\nplt.plot([1, 2]);", "image/png", 1},
		{"plt.plot([1]); plt.show(); plt.plot([2]); plt.show()", "image/png", 2},
		{"f = plt.figure(); plt.plot([1]); f", "image/png", 2}, // as with Jupyter: the value, and what the cell drew
		{"f.gca().plot([3]); f", "image/png", 1},
		{"from matplotlib.figure import Figure\ng = Figure(); g.subplots().plot([1]); g", "image/png", 1},
		{"g;", "image/png", 0},
		{"h = plt.figure(); h.gca().plot([1]); h.show(); plt.close(h)", "image/png", 1},
		{"plt.plot([1]); 1/0", "image/png", 1},
		{"%matplotlib inline\n%config InlineBackend.figure_format = 'svg'\nplt.plot([1]);", "image/svg+xml", 1},
		{"%config InlineBackend.figure_formats = {'png', 'jpeg'}\nplt.plot([1]);", "image/jpeg", 1},
		{"from PIL import Image; Image.new('RGB', (2, 2))", "image/png", 1},
		// Programs that a cell starts have matplotlib's own backends.
		{"import subprocess, sys\ncode = 'import matplotlib.pyplot as p; p.plot([1])'\n" +
			"subprocess.run([sys.executable, '-c', code], check=True);", "", 0},
		{"from IPython.display import *\ndisplay(Latex('$x$'))", "text/latex", 1},
		{"display(Markdown('*x*'))", "text/markdown", 1},
		{"display(JSON({'a': float('nan')}))", "application/json", 1},
		{"display(Javascript('1'))", "application/javascript", 1},
		{"display({'application/vnd.vega.v5+json': {'a': 1}}, raw=True)", "application/vnd.vega.v5+json", 1},
		{"class P:\n  def _repr_pdf_(self): return b'%PDF'\nP()", "application/pdf", 1},
	} {
		o := r.run(c.code)
		n := 0
		for _, f := range o.frames {
			if v, ok := f.Data[c.mime]; ok {
				n++
				if s, ok := v.(string); ok && (c.mime == "image/png" || c.mime == "application/pdf") {
					if b, err := base64.StdEncoding.DecodeString(s); err != nil || len(b) < 4 {
						t.Errorf("%s: %q, %v", c.code, s, err)
					}
				}
			}
		}
		if n != c.n || o.stderr != "" {
			t.Errorf("%s showed %d times %s, want %d; it printed %q", c.code, n, c.mime, c.n, o.stderr)
		}
	}
	o = r.run("%config InlineBackend.figure_format = 'png'\n" +
		"plt.plot(range(90_000)); plt.figure(); plt.plot(range(200_000)); plt.figure(figsize=(2, 1), dpi=50); plt.plot([1]);")
	if len(o.frames) != 3 || !slices.Contains(o.frames[0].Truncated, "chart") || o.frames[0].Chart != nil ||
		!slices.Contains(o.frames[1].Truncated, "chart") || o.frames[2].Chart == nil {
		t.Errorf("large charts: %.3000v", o)
	}
	began = time.Now()
	r.run("plt.bar([1], [1]);")
	t.Logf("a picture: %v; private memory at last: %.1f MiB", time.Since(began), float64(r.run("1").end.Memory)/(1<<20))
}
