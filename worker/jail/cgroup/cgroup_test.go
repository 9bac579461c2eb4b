package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fake creates files by path and content and returns their root.
func fake(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func contents(t *testing.T, root, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

const (
	mountV1 = `25 1 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 25 0:30 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
32 25 0:31 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
33 25 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
34 25 0:33 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`
	mountV2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
)

func TestLocate(t *testing.T) {
	for name, tt := range map[string]struct {
		mountinfo, cgroup string
		version           int
		dirs              []string
		problem           string
	}{
		"version 1": {
			mountV1, "4:memory:/a/b\n3:pids:/\n2:cpu,cpuacct:/c\n0::/\n", 1,
			[]string{"/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu,cpuacct/c"},
			"",
		},
		"version 1 in a container that sees the host's paths": {
			strings.ReplaceAll(mountV1, " / /sys/fs/cgroup/m", " /docker/x /sys/fs/cgroup/m"),
			"4:memory:/docker/x\n3:pids:/docker/x\n2:cpu,cpuacct:/\n", 1,
			[]string{"/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids/docker/x", "/sys/fs/cgroup/cpu,cpuacct"},
			"",
		},
		"version 2": {
			mountV2, "0::/system.slice/bullpen.service\n", 2,
			[]string{"/sys/fs/cgroup/system.slice/bullpen.service"},
			"",
		},
		"version 2 outside of its namespace's root": {mountV2, "0::/../other\n", 2, []string{"/sys/fs/cgroup"}, ""},
		"version 2 from a leaf":                     {mountV2, "0::/x/bullpen-worker\n", 2, []string{"/sys/fs/cgroup/x"}, ""},
		"divided": {
			strings.Join(strings.Split(mountV1, "\n")[:2], "\n") + "\n" + mountV2, "4:memory:/\n0::/\n", 0, nil,
			"controller pids, cpu, cpuacct is not mounted",
		},
		"none": {"", "0::/\n", 0, nil, "mount a cgroup2 file system"},
	} {
		t.Run(name, func(t *testing.T) {
			root := fake(t, map[string]string{"proc/self/mountinfo": tt.mountinfo, "proc/self/cgroup": tt.cgroup})
			got, err := locate(root)
			if tt.problem != "" {
				if err == nil || !strings.Contains(err.Error(), tt.problem) {
					t.Errorf("got %v, %v", got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var dirs []string
			for _, d := range got.dirs {
				dirs = append(dirs, strings.TrimPrefix(d, root))
			}
			if got.version != tt.version || !slices.Equal(dirs, tt.dirs) {
				t.Errorf("got version %d at %q", got.version, dirs)
			}
		})
	}
}

// v2Files are the files of a group that is not the root.
func v2Files(dir string, files map[string]string) map[string]string {
	for _, f := range []string{
		"cgroup.procs", "cgroup.subtree_control", "memory.max", "memory.swap.max",
		"memory.oom.group", "pids.max", "cpu.max",
	} {
		files[dir+"/"+f] = ""
	}
	files[dir+"/cgroup.controllers"] = "cpuset cpu io memory pids\n"
	return files
}

func TestVersion2Delegation(t *testing.T) {
	const own = "sys/fs/cgroup/unit"
	files := map[string]string{"proc/self/mountinfo": mountV2, "proc/self/cgroup": "0::/unit\n"}
	for _, d := range []string{own, own + "/bullpen", own + "/bullpen/me"} {
		v2Files(d, files)
	}
	root := fake(t, files)
	tree, err := open(root, "me")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{own, own + "/bullpen", own + "/bullpen/me"} {
		if got := contents(t, root, d+"/cgroup.subtree_control"); got != "+memory +pids +cpu" {
			t.Errorf("%s: %q", d, got)
		}
	}
	if tree.Version() != 2 {
		t.Errorf("version %d", tree.Version())
	}
	files[own+"/cgroup.controllers"] = "cpu memory\n"
	if _, err := open(fake(t, files), "me"); err == nil || !strings.Contains(err.Error(), `controller "pids"`) ||
		!strings.Contains(err.Error(), "Delegate=yes") {
		t.Errorf("got %v", err)
	}
	files[own+"/cgroup.controllers"] = "cpu memory pids\n"
	files[own+"/cgroup.subtree_control"] = "cpu io memory pids\n"
	root = fake(t, files)
	if _, err := open(root, "me"); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, root, own+"/cgroup.subtree_control"); got != files[own+"/cgroup.subtree_control"] {
		t.Errorf("enabled what was enabled: %q", got)
	}
}

func TestVersion2Group(t *testing.T) {
	files := v2Files("g", map[string]string{
		"g/cpu.stat":      "usage_usec 1500\nuser_usec 1000\n",
		"g/memory.events": "low 0\nmax 9\noom 1\noom_kill 2\noom_group_kill 1\n",
		"g/memory.peak":   "4096\n",
	})
	root := fake(t, files)
	g := &Group{version: 2, dirs: []string{filepath.Join(root, "g")}}
	if err := errors.Join(g.Limit(Limits{Memory: 1 << 30, Tasks: 288}), g.Throttle(1.5)); err != nil {
		t.Fatal(err)
	}
	for f, want := range map[string]string{
		"memory.max": "1073741824", "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "288",
		"cpu.max": "150000 100000",
	} {
		if got := contents(t, root, "g/"+f); got != want {
			t.Errorf("%s = %q, want %q", f, got, want)
		}
	}
	want := Usage{CPUTime: 1500 * time.Microsecond, MemoryPeak: 4096, OOMKills: 2, LimitOOMs: 1}
	if u, err := g.Usage(); err != nil || u != want {
		t.Errorf("got %+v, %v", u, err)
	}
	if err := g.Unthrottle(); err != nil || contents(t, root, "g/cpu.max") != "max" {
		t.Errorf("unthrottle: %v", err)
	}
	if f, err := g.WatchOOM(); f != nil || err != nil {
		t.Errorf("watch: %v, %v", f, err)
	}
	for _, f := range []string{"memory.peak", "memory.swap.max"} {
		if err := os.Remove(filepath.Join(root, "g", f)); err != nil {
			t.Fatal(err)
		}
	}
	want.MemoryPeak = 0
	if u, err := g.Usage(); err != nil || u != want {
		t.Errorf("without a peak: %+v, %v", u, err)
	}
	if err := errors.Join(g.Limit(Limits{Memory: 1, Tasks: 1}), g.Throttle(0.001)); err != nil ||
		contents(t, root, "g/cpu.max") != "1000 100000" {
		t.Errorf("without swap: %v", err)
	}
	if err := os.Remove(filepath.Join(root, "g/pids.max")); err != nil {
		t.Fatal(err)
	}
	if err := g.Limit(Limits{Memory: 1, Tasks: 1}); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "pids.max") {
		t.Errorf("without pids: %v", err)
	}
}

// Linux has kernel and vmalloc in memory.stat since 5.18, pagetables since 5.11.
func TestVersion2KernelMemory(t *testing.T) {
	for stat, want := range map[string]int64{
		"kernel 100\nsock 7\nkernel_stack 1\nslab_reclaimable 30\nslab_unreclaimable 16\n":   70,
		"sock 7\nkernel_stack 1\npagetables 2\npercpu 4\nvmalloc 8\nslab_unreclaimable 16\n": 31,
		"sock 7\nkernel_stack 1\nslab_unreclaimable 16\n":                                    17,
	} {
		root := fake(t, map[string]string{parentName + "/memory.stat": stat})
		tree := &Tree{version: 2, dirs: []string{root}}
		if n, err := tree.Kernel(); err != nil || n != want {
			t.Errorf("of %q: %d, %v", stat, n, err)
		}
	}
}

// TestReal runs on the machine's own control groups.
func TestReal(t *testing.T) {
	dead, err := Open("test-dead")
	if err != nil {
		t.Fatal(err)
	}
	left, err := dead.New("1", false)
	if err != nil {
		t.Fatal(err)
	}
	sleeper, err := left.StartProcess("/bin/sleep", []string{"sleep", "600"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	tree, err := Open("test-live")
	if err != nil {
		t.Fatal(err)
	}
	if swept, err := tree.Sweep(func(i string) bool { return i == "test-dead" }); err != nil ||
		!slices.Equal(swept, []string{"test-dead"}) {
		t.Errorf("swept %q, %v", swept, err)
	}
	if state, err := sleeper.Wait(); err != nil || state.String() != "signal: killed" {
		t.Errorf("what was left ended with %v, %v", state, err)
	}
	g, err := tree.New("1", false)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(g.Limit(Limits{Memory: 1 << 20, Tasks: 10}), g.Throttle(0.5)); err != nil {
		t.Error(err)
	}
	if _, err := tree.New("1", false); err == nil {
		t.Error("made a group twice")
	}
	if u, err := g.Usage(); err != nil || u.OOMKills != 0 {
		t.Errorf("got %+v, %v", u, err)
	}
	if err := errors.Join(g.Unthrottle(), g.Remove(), tree.Close(), dead.closeHome()); err != nil {
		t.Error(err)
	}
}

// enterEnv makes the test binary print the error of CheckEntry on version 1.
const enterEnv = "BULLPEN_TEST_ENTER"

// On version 1, a worker in a user namespace without the host's root reports that no process of
// another user can enter its groups.
func TestCheckEntry(t *testing.T) {
	for name, tt := range map[string]struct {
		first int // id of the host that is root of the user namespace
		want  string
	}{
		"the host's root": {0, "<nil>\n"},
		"another root":    {1 << 20, "version 1"},
	} {
		t.Run(name, func(t *testing.T) {
			ids := []syscall.SysProcIDMap{{HostID: tt.first, Size: 1 << 16}}
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe") // by its path, another user may not reach it
			cmd.Env = append(os.Environ(), enterEnv+"=1")
			cmd.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids,
				Credential: &syscall.Credential{},
			}
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), tt.want) {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	if err := (&Tree{version: 2}).CheckEntry(); err != nil {
		t.Errorf("on version 2: %v", err)
	}
}
