package nsjail

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// victimEnv makes the test binary a worker that is about to be killed; its value
// is the nsjail and the run directory.
const victimEnv = "BULLPEN_TEST_VICTIM"

// victim runs one jail and prepares another, in which bash waits, says the pids of both inits, and
// waits to be killed.
func victim() {
	path, dir, _ := strings.Cut(os.Getenv(victimEnv), ":")
	ctx := context.Background()
	m, err := Open(Config{NsjailPath: path, RunDir: dir, Log: slog.New(slog.DiscardHandler)})
	check(err)
	spec := testSpec()
	bash, err := jail.Source{Language: "bash", Home: DefaultHome}.Ahead()
	check(err)
	spec.Ahead = &bash
	idle, err := m.Prepare(ctx, spec)
	check(err)
	busy, err := m.Prepare(ctx, testSpec())
	check(err)
	up, w := io.Pipe()
	go func() {
		_, err := bufio.NewReader(up).ReadString('\n')
		check(err)
		fmt.Println(idle.(*sandbox).initPID, busy.(*sandbox).initPID, idle.(*sandbox).proc.Pid, busy.(*sandbox).proc.Pid)
	}()
	_, err = busy.Run(ctx, jail.Program{
		Argv: []string{"bash", "-c", "trap '' TERM HUP; setsid sleep 600 & echo up; sleep 600"},
		Env:  []string{"PATH=/usr/bin:/bin"}, Dir: "/", Stdout: w,
	})
	check(err)
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func TestWorkerDies(t *testing.T) {
	dir := runDir(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), victimEnv+"="+nsjailPath(t)+":"+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var held []unix.PollFd
	for f := range strings.FieldsSeq(line) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			t.Fatalf("the worker said %q", line)
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(fd) }()
		held = append(held, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for i := range held {
		if n, err := unix.Poll(held[i:i+1], int(patience.Milliseconds())); n != 1 || err != nil {
			t.Errorf("process %d of a dead worker is still there: %v", i, err)
		}
	}
	// The next worker removes what is left.
	m, err := Open(Config{NsjailPath: nsjailPath(t), RunDir: dir, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	if err != nil {
		t.Fatal(err)
	}
	if dirs, _ := filepath.Glob(dir + "/workers/*"); len(dirs) != 1 {
		t.Errorf("directories %q", dirs)
	}
	family := strings.TrimSuffix(filepath.Base(m.dir), filepath.Ext(m.dir))
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	for _, d := range ownGroups(t) {
		if entries, _ := filepath.Glob(d + "/bullpen/" + family + ".*"); len(entries) != 0 {
			t.Errorf("groups left: %q", entries)
		}
	}
}

// ownGroups are this process's directories in the version 1 hierarchies, or the
// one of version 2, from whose leaf it makes groups beside itself.
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
