package disk_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

// roleEnv selects a role for the test binary as another process.
const roleEnv = "BULLPEN_TEST_ROLE"

// owner is the uid and gid of volumes and of the programs that write to them.
const owner = 54321

// patience bounds waits for events that come soon or never.
const patience = time.Minute

const mib = 1 << 20

var roles = map[string]func() error{
	"fill": asTenant(fill), "fallocate": asTenant(fallocate), "files": asTenant(files), "deep": asTenant(deep),
	"setuid": asTenant(setuid), "holder": holder, "overlay": overlay, "no devices": noDevices, "no mke2fs": noMke2fs,
}

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := roles[role](); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// play returns a command that runs the test binary in a role, with a file as descriptor 3.
func play(tb testing.TB, role string, file *os.File, args ...string) *exec.Cmd {
	tb.Helper()
	exe, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	cmd := exec.CommandContext(tb.Context(), exe, args...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", roleEnv+"="+role)
	cmd.Stderr = os.Stderr
	if file != nil {
		cmd.ExtraFiles = []*os.File{file}
	}
	return cmd
}

// tenant runs a role as the owner of a volume and returns its output.
func tenant(tb testing.TB, v *disk.Volume, role string, args ...string) string {
	tb.Helper()
	dir, err := os.Open(v.Path())
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = dir.Close() }()
	out, err := play(tb, role, dir, args...).Output()
	if err != nil {
		tb.Fatalf("%s: %v: %s", role, err, out)
	}
	return strings.TrimSpace(string(out))
}

// volume is the path of a tenant's volume.
const volume = "/proc/self/fd/3/"

// asTenant drops all privileges, since root may use reserved blocks.
func asTenant(f func() error) func() error {
	return func() error {
		if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(owner, owner, owner),
			syscall.Setresuid(owner, owner, owner)); err != nil {
			return err
		}
		return f()
	}
}

// fill writes as much as fits, and prints how much and the error.
func fill() error {
	f, err := os.Create(volume + "big")
	if err != nil {
		return err
	}
	// A deleted file counts as long as it is open.
	if len(os.Args) > 1 {
		if err := os.Remove(volume + "big"); err != nil {
			return err
		}
	}
	var total int
	b := make([]byte, 1<<20)
	for {
		n, err := f.Write(b)
		total += n
		if errors.Is(err, unix.ENOSPC) && len(b) > 1 {
			b = b[:len(b)/2]
			continue
		}
		if err != nil {
			fmt.Println(total, errors.Unwrap(err), f.Sync())
			return f.Close()
		}
	}
}

// fallocate allocates a number of bytes in a huge sparse file.
func fallocate() error {
	n, err := strconv.ParseInt(os.Args[1], 10, 64)
	if err != nil {
		return err
	}
	f, err := os.Create(volume + "sparse")
	if err != nil {
		return err
	}
	fmt.Println(f.Truncate(1<<40), unix.Fallocate(int(f.Fd()), 0, 1<<30, n))
	return f.Close()
}

// files creates as many files as fit in several directories, and prints the number including
// directories, and the error.
func files() error {
	for n := 0; ; n++ {
		dir := volume + strconv.Itoa(n/1000)
		err := os.Mkdir(dir, 0o755)
		if err == nil {
			continue
		}
		if errors.Is(err, os.ErrExist) {
			var f *os.File
			if f, err = os.Create(filepath.Join(dir, strconv.Itoa(n))); err == nil {
				_ = f.Close()
				continue
			}
		}
		fmt.Println(n, errors.Unwrap(err))
		return nil
	}
}

// deep creates nested directories.
func deep() error {
	at := 3
	for n := 0; ; n++ {
		if err := unix.Mkdirat(at, "d", 0o755); err != nil {
			fmt.Println(n, err)
			return nil
		}
		next, err := unix.Openat(at, "d", unix.O_PATH, 0)
		if err != nil {
			return err
		}
		if at != 3 {
			_ = unix.Close(at)
		}
		at = next
	}
}

// setuid prints the uid of a running setuid program that belongs to root.
func setuid() error {
	out, err := exec.CommandContext(context.Background(), volume+"id", "-u").Output()
	fmt.Printf("%s", out)
	return err
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func openPool(tb testing.TB) (*disk.Pool, string) {
	tb.Helper()
	dir := tb.TempDir()
	p, err := disk.Open(disk.Config{Dir: dir, Log: slog.New(slog.NewTextHandler(tb.Output(), nil))})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
		nothingLeft(tb, dir)
	})
	return p, dir
}

func getVolume(tb testing.TB, p *disk.Pool, size disk.Size) *disk.Volume {
	tb.Helper()
	v, err := p.Get(tb.Context(), size, owner, owner)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := v.Close(); err != nil {
			tb.Error(err)
		}
	})
	return v
}

// attached returns the loop devices whose file is in a directory.
func attached(tb testing.TB, dir string) []string {
	tb.Helper()
	all, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		tb.Fatal(err)
	}
	var ours []string
	for _, name := range all {
		// The device may have been removed.
		if file, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(file), dir+"/") {
			ours = append(ours, name)
		}
	}
	return ours
}

// until polls until a condition holds. The kernel and exiting processes release resources
// asynchronously.
func until(tb testing.TB, what string, so func() bool) {
	tb.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	late := time.After(patience)
	for !so() {
		select {
		case <-again.C:
		case <-late:
			tb.Fatalf("not so after %v: %s", patience, what)
		}
	}
}

// nothingLeft checks that no loop device uses the directory and that the directory is empty.
func nothingLeft(tb testing.TB, dir string) {
	tb.Helper()
	until(tb, "no loop device is left", func() bool { return len(attached(tb, dir)) == 0 })
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		tb.Errorf("left in the directory: %v, %v", left, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), dir) {
		tb.Errorf("left mounted: %s, %v", mounts, err)
	}
}

// holder gets volumes, reports that, and waits to be killed.
func holder() error {
	p, err := disk.Open(disk.Config{Dir: os.Args[1], Log: quiet()})
	if err != nil {
		return err
	}
	for range 3 {
		v, err := p.Get(context.Background(), disk.Size{Bytes: 64 * mib, Inodes: 1000}, owner, owner)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(v.Path(), "data"), make([]byte, mib), 0o600); err != nil {
			return err
		}
	}
	fmt.Println("holding")
	_, err = bufio.NewReader(os.Stdin).ReadString('\n')
	return err
}

// inPrivate starts a role in its own mount namespace.
func inPrivate(cmd *exec.Cmd) *exec.Cmd {
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	return cmd
}

// overlay attaches a volume in its own namespace and uses it as an upper layer.
func overlay() error {
	dir := os.Args[1]
	p, err := disk.Open(disk.Config{Dir: filepath.Join(dir, "images"), Log: quiet()})
	if err != nil {
		return err
	}
	v, err := p.Get(context.Background(), disk.Size{Bytes: 64 * mib, Inodes: 1000}, owner, owner)
	if err != nil {
		return err
	}
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return err
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, d := range []string{"volume", "lower", "lower/old", "merged"} {
		err = errors.Join(err, os.Mkdir(at(d), 0o755))
	}
	err = errors.Join(err, os.WriteFile(at("lower/gone"), nil, 0o600), v.Attach(self, at("volume")))
	if err != nil {
		return err
	}
	for _, d := range []string{"volume/upper", "volume/work"} {
		err = errors.Join(err, os.Mkdir(at(d), 0o755))
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,redirect_dir=on,index=on", at("lower"), at("volume/upper"),
		at("volume/work"))
	err = errors.Join(err, unix.Mount("overlay", at("merged"), "overlay", 0, options),
		os.Remove(at("merged/gone")), os.Rename(at("merged/old"), at("merged/new")))
	redirect := make([]byte, 100)
	n, xerr := unix.Lgetxattr(at("volume/upper/new"), "trusted.overlay.redirect", redirect)
	whiteout, serr := os.Lstat(at("volume/upper/gone"))
	if err = errors.Join(err, xerr, serr); err != nil {
		return err
	}
	fmt.Printf("%s %v\n", redirect[:n], whiteout.Mode()&os.ModeCharDevice != 0)
	return errors.Join(unix.Unmount(at("merged"), 0), v.Close(), p.Close())
}

// hide mounts an empty directory over another.
func hide(dir string) error { return unix.Mount("none", dir, "tmpfs", 0, "mode=755") }

func noDevices() error {
	p, err := disk.Open(disk.Config{Dir: os.Args[1], Log: quiet()})
	if err != nil {
		return err
	}
	// mke2fs needs /dev/null.
	if err := errors.Join(hide("/dev"), unix.Mknod("/dev/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))); err != nil {
		return err
	}
	_, err = p.Get(context.Background(), disk.Size{Bytes: mib, Inodes: 10}, owner, owner)
	fmt.Println(err)
	// Like a container whose /dev was populated before a device was created.
	if err := unix.Mknod("/dev/loop-control", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 237))); err != nil {
		return err
	}
	_, err = p.Get(context.Background(), disk.Size{Bytes: mib, Inodes: 10}, owner, owner)
	fmt.Println(err)
	return p.Close()
}

func noMke2fs() error {
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err := hide(dir); err != nil {
			return err
		}
	}
	_, err := disk.Open(disk.Config{Dir: os.Args[1], Log: quiet()})
	fmt.Println(err)
	return nil
}
