package nsjail

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// victimEnv makes the test binary a worker that will be killed. Its value is a key of victims, a
// colon and the Config as JSON.
const victimEnv = "BULLPEN_TEST_VICTIM"

// remains describes what a killed worker leaves behind.
type remains struct {
	Pids []int // of nsjails and inits
	Busy int   // first uid of the jail that runs a program
}

// victim starts the jails that victimEnv names, prints their remains and waits to be killed.
func victim() {
	what, config, _ := strings.Cut(os.Getenv(victimEnv), ":")
	var cfg Config
	check(json.Unmarshal([]byte(config), &cfg))
	cfg.Log = slog.New(slog.DiscardHandler)
	m, err := Open(cfg)
	check(err)
	victims[what](m)
}

// victims maps a name to the jails that a worker has when it is killed.
var victims = map[string]func(m *Maker){ // read only
	// One jail runs a program, and bash waits in another.
	"jails": func(m *Maker) {
		spec := testSpec()
		busy, err := m.Prepare(context.Background(), spec)
		check(err)
		spec.Prewarm = prewarmedVictim("bash")
		idle, err := m.Prepare(context.Background(), spec)
		check(err)
		ended := runVictim(busy)
		leave(busy, idle)
		check(<-ended)
	},
	// A zygote with three forks: one runs and interpreters wait in two. Another fork is made and
	// closed repeatedly. All have /tmp on disk.
	"forks": func(m *Maker) {
		spec := testSpec()
		spec.TmpBytes = spec.Memory
		program, err := jail.Source{Home: DefaultHome}.Zygote(nil)
		check(err)
		spec.Prewarm = &program
		p, err := m.Zygote(context.Background(), spec)
		check(err)
		fork := func(language string) jail.Jail {
			spec := spec
			spec.Prewarm = prewarmedVictim(language)
			j, err := p.Fork(context.Background(), spec)
			check(err)
			return j
		}
		busy := fork("python")
		runVictim(busy)
		leave(busy, fork("python"), fork("bash"), p.(*zygote).jail)
		for {
			check(fork("python").Close())
		}
	},
}

func prewarmedVictim(language string) *jail.Program {
	p, err := jail.Source{Language: language, Home: DefaultHome}.Prewarm()
	check(err)
	return &p
}

// runVictim runs a program that only SIGKILL ends and returns once it is up. Even then, its hundred
// processes take a while to exit.
func runVictim(j jail.Jail) (ended <-chan error) {
	p, err := jail.Source{Language: "python", TraceID: "trc_test", Home: DefaultHome, Code: `
import os, signal
for s in signal.SIGTERM, signal.SIGHUP:
    signal.signal(s, signal.SIG_IGN)
held = bytearray(range(256)) * (1 << 19)
for _ in range(100):
    if os.fork() == 0:
        os.setsid()
        break
else:
    print("up")
while True:
    signal.pause()
`}.Program()
	check(err)
	up, w := io.Pipe()
	p.Stdout = w
	done := make(chan error, 1)
	go func() {
		_, err := j.Run(context.Background(), p)
		done <- err
	}()
	_, err = bufio.NewReader(up).ReadString('\n')
	check(err)
	return done
}

// leave prints the remains of jails as JSON. The first jail is the one that runs a program.
func leave(jails ...jail.Jail) {
	r := remains{Busy: jails[0].(*sandbox).uids.first}
	for _, j := range jails {
		s := j.(*sandbox)
		r.Pids = append(r.Pids, s.initPID)
		if s.proc != nil {
			r.Pids = append(r.Pids, s.proc.Pid)
		}
	}
	check(json.NewEncoder(os.Stdout).Encode(r))
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// All processes of a killed worker end. No uid is reused while a process still has it, and the next
// worker removes everything else.
func TestWorkerDies(t *testing.T) {
	t.Parallel()
	for what := range victims {
		t.Run(what, func(t *testing.T) {
			const forks = 4
			cfg := Config{
				NsjailPath: nsjailPath(t), RunDir: runDir(t), VolumeDir: diskDir(t), Forks: forks,
				// Exactly enough uids, in a range that only this process uses.
				UIDs: UIDs{First: DefaultUIDs.First + DefaultUIDs.Count + 2*(1+forks)*os.Getpid(), Count: 2 * (1 + forks)},
			}
			cfg.UIDLocks = filepath.Join(cfg.RunDir, "uids")
			killVictim(t, what, cfg)
			cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
			m, err := Open(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if dirs, _ := filepath.Glob(cfg.RunDir + "/workers/*"); len(dirs) != 1 {
				t.Errorf("directories %q", dirs)
			}
			p := newZygote(t, m, testSpec()) // takes all available uids
			for range forks {
				runIn(t, fork(t, p, testSpec()), program(t, "python", "print(1)")).want(t, jail.Exited, "1")
			}
			closeZygote(t, p)
			family := strings.TrimSuffix(filepath.Base(m.dir), filepath.Ext(m.dir))
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			for _, d := range ownGroups(t) {
				if entries, _ := filepath.Glob(d + "/bullpen/" + family + ".*"); len(entries) != 0 {
					t.Errorf("groups left: %q", entries)
				}
			}
			noVolumes(t, cfg.VolumeDir)
		})
	}
}

// killVictim starts a worker, kills it, and waits until its processes are gone.
func killVictim(t *testing.T, what string, cfg Config) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), victimEnv+"="+what+":"+string(config))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var left remains
	if err := json.Unmarshal(line, &left); err != nil {
		t.Fatalf("output of the worker: %q", line)
	}
	var held []unix.PollFd
	for _, pid := range left.Pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(fd) }()
		held = append(held, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	unlocked := make(chan error, 1)
	go func() {
		f, err := flock(filepath.Join(cfg.UIDLocks, strconv.Itoa(left.Busy)), unix.LOCK_EX)
		if err == nil {
			err = f.Close()
		}
		unlocked <- err
	}()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	select {
	case err := <-unlocked:
		if pids := usersOf(t, []int{left.Busy, left.Busy + 1}); err != nil || len(pids) != 0 {
			t.Errorf("processes whose uids another may get: %q, %v", pids, err)
		}
	case <-time.After(patience):
		t.Fatal("the uids of a dead worker are locked")
	}
	for i := range held {
		if !exits(t, int(held[i].Fd)) {
			t.Errorf("process %d of a dead worker is still there", left.Pids[i])
		}
	}
	var all []int
	for i := range cfg.UIDs.Count {
		all = append(all, cfg.UIDs.First+i)
	}
	if pids := usersOf(t, all); len(pids) != 0 {
		t.Errorf("processes of a dead worker: %q", pids)
	}
}

// noVolumes waits until no loop device uses a file in dir, then checks that volumes left nothing
// else behind.
func noVolumes(t *testing.T, dir string) {
	t.Helper()
	awaitDetached(t, dir+"/")
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("files of volumes: %v, %v", left, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("mounts left: %s, %v", mounts, err)
	}
}

// groups returns the directories of the groups of jails, except for those that were kept for their
// page cache: they have no members.
func groups(tb testing.TB, m *Maker) []string {
	tb.Helper()
	var all []string
	for _, d := range ownGroups(tb) {
		found, err := filepath.Glob(filepath.Join(d, "bullpen", filepath.Base(m.dir), "[0-9]*"))
		if err != nil {
			tb.Fatal(err)
		}
		all = append(all, found...)
	}
	return slices.DeleteFunc(all, func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, "memory.stat"))
		procs, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		return err == nil && len(procs) == 0
	})
}

// ownGroups returns this process's directories in the version 1 hierarchies. On version 2, it
// returns the directory above this process's leaf, in which the process creates groups.
func ownGroups(tb testing.TB) []string {
	tb.Helper()
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		tb.Fatal(err)
	}
	dirs := []string{"/sys/fs/cgroup"}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		dirs = append(dirs, filepath.Join("/sys/fs/cgroup", f[1], strings.TrimSuffix(f[2], "/bullpen-worker")))
	}
	return dirs
}
