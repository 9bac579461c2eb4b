package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const settlerEnv = "BULLPEN_TEST_SETTLER"

// settler is a worker in a process of its own. It opens a tree and prints its group.
func settler() {
	tree, err := Open("test-settler")
	if err == nil {
		err = tree.Close()
	}
	groups, _ := os.ReadFile("/proc/self/cgroup")
	fmt.Printf("%s%v\n", groups, err)
}

// settleBeside runs settler in a new group at path, beside another process.
func settleBeside(t *testing.T, mount, path string, prefix ...string) string {
	t.Helper()
	g := &Group{tree: &Tree{version: 2}, version: 2, dirs: []string{filepath.Join(mount, path)}}
	if err := os.Mkdir(g.dirs[0], 0o750); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	})
	other, err := g.StartProcess("/bin/sleep", []string{"sleep", "600"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := other.Kill(); err != nil {
			t.Error(err)
		}
		_, _ = other.Wait()
	})
	dir, err := os.Open(g.dirs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	argv := append(prefix, os.Args[0])
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", settlerEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	moved, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", other.Pid))
	if err != nil {
		t.Fatal(err)
	}
	leaf := filepath.Join(g.dirs[0], leafName)
	switch _, err := os.Stat(leaf); {
	case len(prefix) > 0: // in a container
		if want := "0::/" + path + "/" + leafName + "\n"; string(moved) != want {
			t.Errorf("the other process is in %q, want %q", moved, want)
		}
		t.Cleanup(func() {
			if err := (&Group{tree: &Tree{version: 2}, version: 2, dirs: []string{leaf}}).Remove(); err != nil {
				t.Error(err)
			}
		})
	case !errors.Is(err, fs.ErrNotExist) || string(moved) != "0::/"+path+"\n":
		t.Errorf("left behind in %s: %v; the other process is in %q", path, err, moved)
	}
	return string(out)
}

// On version 2, a worker started by hand leaves the login session. A worker in a container moves
// the other processes into its leaf. A worker in any other group stays there and reports what is
// wrong with it.
func TestGroupWithOtherProcesses(t *testing.T) {
	where, err := locate("/")
	if err != nil {
		t.Fatal(err)
	}
	if where.version != 2 {
		return // other processes do not matter
	}
	if out := settleBeside(t, where.mount, "bullpen-test-busy"); !strings.HasPrefix(out, "0::/bullpen-test-busy\n") ||
		!strings.Contains(out, "other processes are in") && !strings.Contains(out, `controller "cpu" is not available`) {
		t.Errorf("got %s", out)
	}
	// A container has a cgroup namespace whose root is its group.
	container := []string{
		"unshare", "--cgroup", "--mount", "sh", "-c",
		"umount /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec $0",
	}
	if out := settleBeside(t, where.mount, "bullpen-test-container", container...); out != "0::/"+leafName+"\n<nil>\n" {
		t.Errorf("got %s", out)
	}
	if unix.Access("/run/systemd/system", unix.F_OK) != nil {
		return // no sessions
	}
	if out := settleBeside(t, where.mount, "user.slice/bullpen-test-session"); !strings.Contains(out, ".scope") ||
		!strings.HasSuffix(out, "\n<nil>\n") ||
		strings.Contains(out, "user.slice") {
		t.Errorf("got %s", out)
	}
}
