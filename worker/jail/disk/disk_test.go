package disk_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

func TestByteLimit(t *testing.T) {
	p, _ := openPool(t)
	// Less than, exactly and more than a block group; a size that is no multiple of a block; more
	// inodes than the usual ratio allows.
	for _, size := range []disk.Size{
		{Bytes: 4096, Inodes: 1},
		{Bytes: 64 * mib, Inodes: 4096},
		{Bytes: 300 * mib, Inodes: 100},
		{Bytes: 3*mib + 1, Inodes: 500_000},
	} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			got := tenant(t, getVolume(t, p, size), "fill")
			written, _ := strconv.ParseInt(strings.TrimSuffix(got, " no space left on device <nil>"), 10, 64)
			// A file of more than four extents has a block for the extent list.
			limit := (size.Bytes + 4095) / 4096 * 4096
			if least := limit - limit/(128*mib)/2*4096; written < least || written > limit {
				t.Errorf("a file took %s, want %d to %d", got, least, limit)
			}
		})
	}
}

func TestDeletedButOpenCounts(t *testing.T) {
	p, _ := openPool(t)
	v := getVolume(t, p, disk.Size{Bytes: 16 * mib, Inodes: 100})
	for range 2 {
		if got := tenant(t, v, "fill", "deleted"); got != fmt.Sprintf("%d no space left on device <nil>", 16*mib) {
			t.Errorf("a deleted file took %s", got)
		}
	}
}

func TestFallocateLimit(t *testing.T) {
	p, _ := openPool(t)
	size := disk.Size{Bytes: 64 * mib, Inodes: 100}
	// The extent tree takes one block.
	for n, want := range map[int64]string{size.Bytes: "<nil> <nil>", size.Bytes + 4096: "<nil> no space left on device"} {
		if got := tenant(t, getVolume(t, p, size), "fallocate", strconv.FormatInt(n, 10)); got != want {
			t.Errorf("fallocate of %d bytes: %s, want %s", n, got, want)
		}
	}
}

func TestInodeLimit(t *testing.T) {
	p, _ := openPool(t)
	for _, size := range []disk.Size{
		{Bytes: mib, Inodes: 1},
		{Bytes: 64 * mib, Inodes: 4096},
		{Bytes: 300 * mib, Inodes: 1000},
		{Bytes: 10 << 30, Inodes: 10_007},
	} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			want := fmt.Sprintf("%d no space left on device", size.Inodes)
			for _, role := range []string{"files", "deep"} {
				if role == "deep" && size.Inodes > 4096 {
					continue // each directory takes 4 KiB
				}
				if got := tenant(t, getVolume(t, p, size), role); got != want {
					t.Errorf("%s: %s, want %s", role, got, want)
				}
			}
		})
	}
}

func TestDirectoryLimit(t *testing.T) {
	p, _ := openPool(t)
	const limit, entry = 64 << 10, 256
	v := getVolume(t, p, disk.Size{Bytes: 16 * mib, Inodes: 10_000, Directory: limit})
	for _, dir := range []string{"one", "two"} {
		dir = filepath.Join(v.Path(), dir)
		err := os.Mkdir(dir, 0o700)
		n := 0
		for ; err == nil && n <= limit/entry; n++ {
			err = os.Mkdir(filepath.Join(dir, fmt.Sprintf("%0*d", entry-8, n)), 0o700)
		}
		info, serr := os.Stat(dir)
		if !errors.Is(err, unix.ENOSPC) || n < limit/entry/3 || serr != nil || info.Size() != limit {
			t.Errorf("%d directories in one: %v; %v", n, err, serr)
		}
	}
}

func TestVolumeOwner(t *testing.T) {
	p, _ := openPool(t)
	size := disk.Size{Bytes: 64 * mib, Inodes: 4096}
	// The first volume is created on demand; the others may have been ready.
	for range 4 {
		v := getVolume(t, p, size)
		info, err := os.Stat(v.Path())
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		var fs unix.Statfs_t
		if err := errors.Join(unix.Stat(v.Path(), &st), unix.Statfs(v.Path(), &fs)); err != nil {
			t.Fatal(err)
		}
		if info.Mode() != os.ModeDir|0o755 || st.Uid != owner || st.Gid != owner {
			t.Errorf("the directory is %v of %d:%d", info.Mode(), st.Uid, st.Gid)
		}
		if fs.Flags&unix.ST_NOSUID == 0 || fs.Flags&unix.ST_NODEV == 0 || fs.Flags&unix.ST_RDONLY != 0 {
			t.Errorf("mounted with flags %#x", fs.Flags)
		}
		if left, err := os.ReadDir(v.Path()); len(left) > 0 || err != nil {
			t.Errorf("not empty: %v, %v", left, err)
		}
	}
}

func TestNextTenantSeesNothing(t *testing.T) {
	p, _ := openPool(t)
	size := disk.Size{Bytes: 16 * mib, Inodes: 100}
	for range 5 {
		v := getVolume(t, p, size)
		name := filepath.Join(v.Path(), "secret")
		if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("a file of the one before: %v", err)
		}
		if err := os.WriteFile(name, []byte("secret"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSetuidHasNoEffect(t *testing.T) {
	p, _ := openPool(t)
	v := getVolume(t, p, disk.Size{Bytes: 16 * mib, Inodes: 100})
	path, err := exec.LookPath("id")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(v.Path(), "id")
	if err := errors.Join(os.WriteFile(name, program, 0o600), os.Chmod(name, 0o755|os.ModeSetuid)); err != nil {
		t.Fatal(err)
	}
	if got := tenant(t, v, "setuid"); got != strconv.Itoa(owner) {
		t.Errorf("a setuid program of root's ran as %s", got)
	}
}

func TestDeviceNodesHaveNoEffect(t *testing.T) {
	p, _ := openPool(t)
	name := filepath.Join(getVolume(t, p, disk.Size{Bytes: mib, Inodes: 10}).Path(), "null")
	if err := unix.Mknod(name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Open(name); !errors.Is(err, os.ErrPermission) {
		t.Errorf("opened a device node: %v", err)
	}
}

func TestCloseDuringUse(t *testing.T) {
	p, _ := openPool(t)
	v := getVolume(t, p, disk.Size{Bytes: 64 * mib, Inodes: 100})
	f, err := os.Create(filepath.Join(v.Path(), "open"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := errors.Join(v.Close(), v.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("x"); !errors.Is(err, unix.EIO) {
		t.Errorf("wrote after Close: %v", err)
	}
}

func TestManyAtOnce(t *testing.T) {
	before := descriptors(t)
	p, dir := openPool(t)
	const n = 50
	size := disk.Size{Bytes: 64 * mib, Inodes: 1000}
	volumes := make([]*disk.Volume, n)
	var wg sync.WaitGroup
	for i := range volumes {
		wg.Go(func() {
			v, err := p.Get(t.Context(), size, owner, owner)
			if err != nil {
				t.Error(err)
				return
			}
			volumes[i] = v
			if err := os.WriteFile(filepath.Join(v.Path(), "mine"), []byte(strconv.Itoa(i)), 0o600); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	if got := len(attached(t, dir)); got < n || got > n+disk.DefaultReady {
		t.Errorf("%d loop devices for %d volumes", got, n)
	}
	for i, v := range volumes {
		wg.Go(func() {
			if got, err := os.ReadFile(filepath.Join(v.Path(), "mine")); string(got) != strconv.Itoa(i) || err != nil {
				t.Errorf("volume %d holds %q, %v", i, got, err)
			}
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	until(t, "only those kept ready have a loop device", func() bool { return len(attached(t, dir)) <= disk.DefaultReady })
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

func descriptors(tb testing.TB) int {
	tb.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	return len(all)
}

func TestReadyVolumesAreBounded(t *testing.T) {
	p, dir := openPool(t)
	for i := range int64(12) {
		v := getVolume(t, p, disk.Size{Bytes: (i + 1) * mib, Inodes: 100})
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// Two for each of the last eight sizes.
	until(t, "16 volumes are ready", func() bool { return len(attached(t, dir)) == 16 })
}

func TestKilledProcessLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	cmd := play(t, "holder", nil, dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdin.Close() }()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "holding\n" || err != nil {
		t.Errorf("output of the process: %q, %v", line, err)
	}
	if got := len(attached(t, dir)); got < 3 {
		t.Errorf("%d loop devices for 3 volumes", got)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	nothingLeft(t, dir)
}

// TestAttachToAJail uses the real nsjail: user, mount and pid namespaces, and a program that is
// mapped to the volume's owner.
func TestAttachToAJail(t *testing.T) {
	p, dir := openPool(t)
	v := getVolume(t, p, disk.Size{Bytes: 64 * mib, Inodes: 1000})
	args := []string{
		"-Mo", "-q", "-u", fmt.Sprintf("1000:%d:1", owner), "-g", fmt.Sprintf("1000:%d:1", owner), "-T", "/home",
		"-R", "/bin", "-R", "/lib", "-R", "/lib64", "-R", "/usr", "--", "/bin/sh", "-c",
		`echo ready; read go; echo data > /home/file && cat /home/file && stat -c '%u %a %T' -f -c '%T' /home
		id -u; read go; cat /home/file`,
	}
	cmd := exec.CommandContext(t.Context(), nsjailPath(t), args...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	next := func(want string) {
		t.Helper()
		if lines.Scan(); lines.Text() != want {
			t.Fatalf("output of the jail: %q, want %q: %s", lines.Text(), want, stderr.String())
		}
	}
	next("ready")
	if err := v.Attach(childOf(t, cmd.Process.Pid), "/home"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(stdin, "\n"); err != nil {
		t.Fatal(err)
	}
	next("data")
	next("ext2/ext3")
	next("1000")
	if got, err := os.ReadFile(filepath.Join(v.Path(), "file")); string(got) != "data\n" || err != nil {
		t.Errorf("outside the file holds %q, %v", got, err)
	}
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(stdin, "\n"); err != nil {
		t.Fatal(err)
	}
	if lines.Scan() {
		t.Errorf("after Close output of the jail: %q", lines.Text())
	}
	if err := cmd.Wait(); err == nil {
		t.Error("after Close the jail could read the volume")
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t, dir)
}

func TestAttachFails(t *testing.T) {
	p, _ := openPool(t)
	v := getVolume(t, p, disk.Size{Bytes: mib, Inodes: 10})
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(self) }()
	missing := filepath.Join(t.TempDir(), "missing")
	if err := v.Attach(self, missing); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("attached at a missing directory: %v", err)
	}
}

func nsjailPath(tb testing.TB) string {
	tb.Helper()
	if p := os.Getenv("BULLPEN_NSJAIL"); p != "" {
		return p
	}
	path, err := filepath.Abs("../../../bin/nsjail/nsjail/bin/nsjail")
	if err != nil {
		tb.Fatal(err)
	}
	return path
}

// childOf opens the only child of a process.
func childOf(tb testing.TB, pid int) int {
	tb.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	if err != nil {
		tb.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		tb.Fatal(err)
	}
	fd, err := unix.PidfdOpen(child, 0)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

func TestOverlayOnAVolume(t *testing.T) {
	dir := t.TempDir()
	out, err := inPrivate(play(t, "overlay", nil, dir)).Output()
	if err != nil || string(out) != "old true\n" {
		t.Errorf("redirect and whiteout: %q, %v", out, err)
	}
	nothingLeft(t, filepath.Join(dir, "images"))
}

func TestErrorsHaveRemedies(t *testing.T) {
	dir := t.TempDir()
	for role, want := range map[string][]string{
		"no devices": {"load the module loop", "mount the host's /dev, where new devices appear"},
		"no mke2fs":  {"install e2fsprogs"},
	} {
		out, err := inPrivate(play(t, role, nil, dir)).Output()
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		if err != nil || len(lines) != len(want) {
			t.Errorf("%s: %q, %v", role, out, err)
			continue
		}
		for i, line := range lines {
			if !strings.Contains(line, want[i]) {
				t.Errorf("%s: %q does not contain %q", role, line, want[i])
			}
		}
	}
	nothingLeft(t, dir)
}

// TestFullHostDisk puts the images on a file system of 4 MiB.
func TestFullHostDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=4m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		until(t, "the host's disk is free to be unmounted", func() bool { return unix.Unmount(dir, 0) == nil })
	})
	p, err := disk.Open(disk.Config{Dir: dir, Ready: 1})
	if err != nil {
		t.Fatal(err)
	}
	size := disk.Size{Bytes: 64 * mib, Inodes: 1000}
	// The disk is free again for another volume.
	for range 2 {
		v, err := p.Get(t.Context(), size, owner, owner)
		if err != nil {
			t.Fatal(err)
		}
		if got := tenant(t, v, "fill"); strings.HasSuffix(got, "<nil>") {
			t.Errorf("64 MiB fit on 4: %s", got)
		}
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestCancelledGet(t *testing.T) {
	p, _ := openPool(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	size := disk.Size{Bytes: mib, Inodes: 10}
	if _, err := p.Get(ctx, size, owner, owner); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled Get: %v", err)
	}
	// The next call is not blocked.
	getVolume(t, p, size)
}

func TestInvalidSizes(t *testing.T) {
	for _, cfg := range []disk.Config{{}, {Dir: "relative"}, {Dir: t.TempDir(), Ready: -1}, {Dir: "/proc"}} {
		if _, err := disk.Open(cfg); err == nil {
			t.Errorf("%+v was accepted", cfg)
		}
	}
	p, _ := openPool(t)
	for _, size := range []disk.Size{
		{},
		{Bytes: mib},
		{Inodes: 10},
		{Bytes: -1, Inodes: 1},
		{Bytes: disk.MaxBytes + 1, Inodes: 10},
		{Bytes: mib, Inodes: disk.MaxInodes + 1},
		{Bytes: mib, Inodes: 10, Directory: -1},
		{Bytes: mib, Inodes: 10, Directory: 1000},
	} {
		if _, err := p.Get(t.Context(), size, owner, owner); err == nil {
			t.Errorf("%+v was accepted", size)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Get(t.Context(), disk.Size{Bytes: mib, Inodes: 10}, owner, owner); err == nil {
		t.Error("Get of a closed pool succeeded")
	}
}

// TestLargestSizes creates volumes of the extreme sizes. They take no disk space.
func TestLargestSizes(t *testing.T) {
	p, err := disk.Open(disk.Config{Dir: t.TempDir(), Ready: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []disk.Size{{Bytes: disk.MaxBytes, Inodes: 10}, {Bytes: 4096, Inodes: disk.MaxInodes}} {
		v := getVolume(t, p, size)
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// BenchmarkGetAndClose measures a volume with its replacement.
func BenchmarkGetAndClose(b *testing.B) {
	for _, size := range []disk.Size{{Bytes: 64 * mib, Inodes: 4096}, {Bytes: 10 << 30, Inodes: 100_000}} {
		b.Run(fmt.Sprintf("%dMiB", size.Bytes/mib), func(b *testing.B) {
			p, _ := openPool(b)
			for b.Loop() {
				v, err := p.Get(b.Context(), size, owner, owner)
				if err != nil {
					b.Fatal(err)
				}
				if err := v.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A process that is being started briefly holds the files that were open here.
func TestVolumesOfNewSizesWhileProcessesStart(t *testing.T) {
	p, _ := openPool(t)
	ctx, stop := context.WithCancel(t.Context())
	var starters sync.WaitGroup
	for range 4 {
		starters.Go(func() {
			for ctx.Err() == nil {
				_ = exec.Command("/bin/true").Run()
			}
		})
	}
	defer starters.Wait()
	defer stop()
	for i := range int64(40) {
		v, err := p.Get(t.Context(), disk.Size{Bytes: 1 << 20, Inodes: 100 + i}, 1000, 1000)
		if err != nil {
			t.Fatal(err)
		}
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	}
}
