package nsjail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// prewarmSpec returns testSpec with a prewarmed interpreter.
func prewarmSpec(tb testing.TB, language string) jail.Spec {
	tb.Helper()
	spec := testSpec()
	spec.Prewarm = prewarmed(tb, language)
	return spec
}

// runIn runs a program in an existing jail. p.Stdout gets its output too, if it is not nil.
func runIn(tb testing.TB, j jail.Jail, p jail.Program) result {
	tb.Helper()
	var stdout, stderr beginning
	if p.Stdout == nil {
		p.Stdout = io.Discard
	}
	p.Stdout, p.Stderr = io.MultiWriter(&stdout, p.Stdout), &stderr
	o, err := j.Run(tb.Context(), p)
	if err != nil {
		tb.Fatal(err)
	}
	return result{Outcome: o, stdout: string(stdout.kept), stderr: string(stderr.kept), written: stdout.written}
}

// inJail returns the host pid of the named process in a jail.
func inJail(tb testing.TB, j jail.Jail, name string) int {
	tb.Helper()
	b, err := os.ReadFile(procPath(j.(*sandbox).initPID, "task/"+strconv.Itoa(j.(*sandbox).initPID)+"/children"))
	if err != nil {
		tb.Fatal(err)
	}
	for f := range strings.FieldsSeq(string(b)) {
		comm, err := os.ReadFile("/proc/" + f + "/comm")
		if err == nil && strings.HasPrefix(string(comm), name) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				tb.Fatal(err)
			}
			return pid
		}
	}
	tb.Fatalf("no %s below the init, whose children are %q", name, b)
	return 0
}

// The prewarmed process itself runs the program.
func TestPrewarmedInterpreterRunsTheProgram(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for command, language := range languages {
		code := map[string]string{
			"python": "import os; print(os.stat('/proc/self').st_ctime_ns, os.environ['A'])",
			"node":   "console.log(require('fs').statSync('/proc/self').ctimeNs, process.env.A)",
			"bash":   "echo $A; cat /proc/self/loginuid > /dev/null",
		}[language]
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			j := prepare(t, m, prewarmSpec(t, language))
			waits := inJail(t, j, command)
			fd, err := unix.PidfdOpen(waits, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Close(fd) }()
			p := program(t, language, code)
			p.Env = append(p.Env, "A=x y\n=z")
			r := runIn(t, j, p)
			if r.Kind != jail.Exited || r.ExitCode != 0 || !strings.Contains(r.stdout, "x y") {
				t.Errorf("%+v", r)
			}
			if !exits(t, fd) {
				t.Error("the prewarmed interpreter did not exit with the program")
			}
		})
	}
}

// A loaded program does not start until it is run. The same holds for code in its home that python
// runs at startup.
func TestLoadedProgramDoesNotRun(t *testing.T) {
	for command, language := range languages {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			m := openMaker(t, Config{VolumeDir: diskDir(t)})
			site := strings.TrimPrefix(userSite(t), "/")
			th := newThread(t, map[string]string{
				site + "/sitecustomize.py": "open('/home/baponi/ran', 'w')",
				site + "/more.pth":         "import sys; open('/home/baponi/ran', 'w')\n",
			})
			spec := prewarmSpec(t, language)
			spec.MountHomeLater = true
			j := prepare(t, m, spec)
			waits := inJail(t, j, command)
			if err := j.MountHome(t.Context(), th); err != nil {
				t.Fatal(err)
			}
			p := program(t, language, map[string]string{
				"python": "import os; print(os.environ['A']); open('ran', 'w')",
				"node":   "console.log(process.env.A); fs = require('fs'); fs.writeFileSync('ran', '')",
				"bash":   "echo $A; : > ran",
			}[language])
			p.Env = append(p.Env, "A=x y")
			if err := j.Load(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			awaitLoaded(t, waits)
			ran := filepath.Join("/proc", strconv.Itoa(waits), "root/home/baponi/ran")
			if _, err := os.Stat(ran); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("it has run: %v", err)
			}
			runIn(t, j, p).want(t, jail.Exited, "x y")
			if err := th.save(); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(th.lower, "ran")); err != nil {
				t.Errorf("it has not run: %v", err)
			}
		})
	}
}

// awaitLoaded waits until an interpreter has entered its program's directory and is waiting for
// permission to start.
func awaitLoaded(t *testing.T, pid int) {
	t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	reads := fmt.Sprintf("%d %#x ", unix.SYS_READ, wire.PrewarmFD)
	for begin := time.Now(); ; {
		dir, err := os.Readlink(proc + "/cwd")
		call, errCall := os.ReadFile(proc + "/syscall")
		if dir == "/home/baponi" && strings.HasPrefix(string(call), reads) {
			return
		}
		if err := errors.Join(err, errCall); err != nil || time.Since(begin) > patience {
			t.Fatalf("it is in %s and does %q: %v", dir, call, err)
		}
	}
}

// A defect in a loaded program becomes its outcome, as if the program had been run at once.
func TestLoadFails(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	j := prepare(t, m, prewarmSpec(t, "python"))
	p := program(t, "python", "print(1)")
	p.Files = append(p.Files, jail.File{Path: "/etc/passwd/x", Mode: 0o644})
	if err := j.Load(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	r := runIn(t, j, p)
	if r.Kind != jail.StartFailed || r.Step != "write /etc/passwd/x" {
		t.Errorf("%+v", r)
	}
	j = prepare(t, m, prewarmSpec(t, "python"))
	gone, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("nobody wants it any more"))
	if err := j.Load(gone, p); err == nil || !strings.Contains(err.Error(), "nobody wants it any more") {
		t.Errorf("got %v", err)
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

// What an interpreter reads only at startup cannot be changed later, so a new one is started.
func TestInterceptionNeedsNetwork(t *testing.T) {
	m := newMaker(t)
	_, err := prepare(t, m, testSpec()).Run(
		t.Context(), jail.Program{Argv: []string{"bash"}, Dir: "/", Interception: &jail.Interception{}})
	if err == nil || !strings.Contains(err.Error(), "no network") {
		t.Errorf("%v", err)
	}
}

func TestProgramThatCannotContinueIsStarted(t *testing.T) {
	m := newMaker(t)
	zygote := zygoteOf(t, m, testSpec())
	for name, change := range map[string]func(p *jail.Program){
		"arguments":        func(p *jail.Program) { p.Argv = append(p.Argv, "more") },
		"another file":     func(p *jail.Program) { p.Argv[1] += "2"; p.Files[0].Path += "2" },
		"a variable":       func(p *jail.Program) { p.Env = append(p.Env, "PYTHONOPTIMIZE=1") },
		"a time zone":      func(p *jail.Program) { p.Env = append(p.Env, "TZ=Asia/Tokyo") },
		"another language": func(p *jail.Program) { *p = program(t, "bash", "echo bash $# $0") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := program(t, "python", `
import re, sys, time
print(sys.argv, sys.flags.optimize, time.tzname, re.findall("Seccomp.*", open("/proc/self/status").read()))`)
			change(&p)
			cold := runIn(t, prepare(t, m, testSpec()), p)
			j := prepare(t, m, prewarmSpec(t, "python"))
			for mode, started := range map[string]result{
				"prewarmed": runIn(t, j, p), forked: runIn(t, fork(t, zygote, testSpec()), p),
			} {
				if started.stdout != cold.stdout || started.Kind != jail.Exited || started.ExitCode != 0 || cold.stdout == "" {
					t.Errorf("%s: %+v\nand in a jail without a waiting interpreter\n%+v", mode, started, cold)
				}
			}
			m.awaitUIDsReleased(t, j.(*sandbox))
		})
	}
}

func TestJailDiesWithItsPrewarmedInterpreter(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for command, language := range languages {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			j := prepare(t, m, prewarmSpec(t, language))
			if !j.Alive() {
				t.Error("a live jail is reported dead")
			}
			if err := unix.Kill(inJail(t, j, command), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			fd := j.(*sandbox).initFD
			if !exits(t, fd) {
				t.Error("the init did not exit")
			}
			if j.Alive() {
				t.Error("a dead jail is reported alive")
			}
			if err := j.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Prepare returns an error if the interpreter does not start waiting, and nothing is left behind.
func TestInterpreterThatDoesNotWait(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for name, p := range map[string]jail.Program{
		"that ends":          {Argv: []string{"bash", "-c", "exit 3"}, Dir: "/"},
		"that is not there":  {Argv: []string{"nosuchcommand"}, Dir: "/"},
		"that closes its fd": {Argv: []string{"bash", "-c", "exec 3>&-; sleep 600"}, Dir: "/"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec := testSpec()
			spec.Prewarm = &p
			if _, err := m.Prepare(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "prewarm "+p.Argv[0]) {
				t.Errorf("got %v", err)
			}
		})
	}
	m.jails.Wait()
}

// A home that is mounted later behaves like one that is mounted when the jail is prepared.
func TestHomeMountedLater(t *testing.T) {
	for command, language := range languages {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			m := openMaker(t, Config{VolumeDir: diskDir(t)})
			site := filepath.Join(strings.TrimPrefix(userSite(t), "/"))
			th := newThread(t, map[string]string{
				"old": "1", site + "/own.py": "x = 5", site + "/more.pth": "/home/baponi/extra\nimport own; own.x += 1\n",
				"extra/further.py": "y = 7",
			})
			spec := prewarmSpec(t, language)
			spec.MountHomeLater = true
			j := prepare(t, m, spec)
			inJail(t, j, command)
			if err := j.MountHome(t.Context(), th); err != nil {
				t.Fatal(err)
			}
			code := map[string]string{
				"python": "import os, own, further; print(sorted(os.listdir()), os.getcwd(), own.x, further.y); open('new', " +
					"'w').write('2')",
				"node": "fs = require('fs'); console.log(fs.readdirSync('.').sort().join(), process.cwd()); " +
					"fs.writeFileSync('new', '2')",
				"bash": "ls -A | paste -sd,; pwd; echo -n 2 > new",
			}[language]
			want := map[string]string{
				"python": "['.local', 'extra', 'main.py', 'old'] /home/baponi 6 7",
				"node":   ".local,extra,main.js,old /home/baponi",
				"bash":   ".local,extra,old\n/home/baponi",
			}[language]
			r := runIn(t, j, program(t, language, code))
			r.want(t, jail.Exited, want)
			if err := j.MountHome(t.Context(), th); err == nil {
				t.Error("a second home was mounted")
			}
			if err := th.save(); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(filepath.Join(th.lower, "new")); err != nil || string(b) != "2" {
				t.Errorf("what the program wrote: %q, %v", b, err)
			}
		})
	}
}

// The unshared memory of a jail with an interpreter, in bytes, stays within the figures in the
// README that workers rely on.
func TestMemoryOfPrewarmedInterpreter(t *testing.T) {
	m := newMaker(t)
	for language, most := range map[string]int64{"bash": 8 << 20, "python": 12 << 20, "node": 64 << 20} {
		prepare(t, m, prewarmSpec(t, language)) // loads the pages that all jails share
		j := prepare(t, m, prewarmSpec(t, language))
		n, err := j.Memory()
		if err != nil || n < 1<<20 || n > most {
			t.Errorf("%s: %d KiB, %v", language, n>>10, err)
		}
	}
}
