package nsjail

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// masked are the files and directories of /proc that are empty in a jail, if the host has them:
// those that container runtimes mask, and others that programs do not need and that reveal the host
// or other tenants.
var masked = [...]string{ // read only
	"acpi", "asound", "buddyinfo", "bus", "cgroups", "cmdline", "config.gz", "crypto", "diskstats", "driver/rtc", "fs",
	"interrupts", "irq",
	"kallsyms", "kcore", "key-users", "keys", "latency_stats", "locks", "modules", "partitions", "pressure", "sched_debug",
	"schedstat", "scsi", "softirqs", "swaps", "sys/kernel/pty", "sysrq-trigger", "timer_list", "timer_stats", "zoneinfo",
}

// replaced are the files and directories of /proc that programs need and that reveal the host or
// other tenants. A jail has constant copies of them, if the host has them.
var replaced = [...]string{"stat", "vmstat", "sys/fs", bootID} // read only

const bootID = "sys/kernel/random/boot_id"

// constantBootID is the boot id in all jails of all workers, but those of live sandboxes. The host's would
// reveal to two programs that they run on the same machine.
const constantBootID = "00000000-0000-4000-8000-000000000000\n"

// newBootID returns the boot id of a jail that starts as a machine does: for a live sandbox, each start is a boot
// after which nothing of what ran before is left.
func newBootID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x\n", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// hostSockets are the files of /proc/net that count for the whole host. They cannot be masked,
// because each process has a directory with them. The program may not read them.
var hostSockets = [...]string{"protocols", "rt_acct", "sockstat", "softnet_stat", "stat/rt_cache"} // read only

// proc holds a jail's replacements for the host's files in /proc.
type proc struct {
	files, dirs []string          // those of masked that this host has
	copies      map[string][]byte // content of each file in and below replaced
	replaced    []string          // those of replaced that this host has
	sockets     []string          // those of hostSockets that this host has
}

func findProc() (*proc, error) {
	p := &proc{copies: map[string][]byte{}}
	for _, name := range masked {
		info, err := os.Stat("/proc/" + name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return nil, err
		case info.IsDir():
			p.dirs = append(p.dirs, name)
		case info.Mode()&0o006 != 0: // the others are not accessible to root in a jail and need no mask
			p.files = append(p.files, name)
		}
	}
	for _, name := range replaced {
		if err := p.copyConstant(name); err != nil {
			return nil, err
		}
	}
	for _, name := range hostSockets {
		if _, err := os.Stat("/proc/self/net/" + name); err == nil {
			p.sockets = append(p.sockets, name)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return p, nil
}

// copyConstant adds the file name, or the files below the directory name, without values that
// change while the host runs.
func (p *proc) copyConstant(name string) error {
	before := len(p.copies)
	err := filepath.WalkDir("/proc/"+name, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case d.IsDir() && path == "/proc/sys/fs/binfmt_misc": // a mount of the host's
			return fs.SkipDir
		case d.IsDir():
			return nil
		}
		info, err := d.Info()
		if err != nil || info.Mode()&0o004 == 0 {
			return err
		}
		b, err := os.ReadFile(path) //nolint:gosec // a file of the kernel's
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, "/proc/")
		if b = constant(name, b); b != nil {
			p.copies[name] = b
		}
		return nil
	})
	if len(p.copies) > before {
		p.replaced = append(p.replaced, name)
	}
	return err
}

var (
	numbers = regexp.MustCompile(` [0-9]+`)
	cpuLine = regexp.MustCompile(`(?m)^(cpu[0-9]* +)\d+ \d+ \d+ \d+`)
	booted  = regexp.MustCompile(`(?m)^btime .*$`)
)

// constant returns the content of a /proc file in a jail, or nil if jails lack the file. Counters
// are zero, except that processors were idle for one tick, so that no program divides by zero.
func constant(name string, content []byte) []byte {
	switch name {
	case bootID:
		return []byte(constantBootID)
	case "stat":
		zero := cpuLine.ReplaceAll(numbers.ReplaceAll(content, []byte(" 0")), []byte("${1}0 0 0 1"))
		return booted.ReplaceAllLiteral(zero, booted.Find(content)) // programs calculate with it when processes have started
	case "vmstat":
		return numbers.ReplaceAll(content, []byte(" 0"))
	case "sys/fs/aio-nr", "sys/fs/dentry-state", "sys/fs/file-nr", "sys/fs/inode-nr", "sys/fs/inode-state":
		return nil
	}
	if strings.HasPrefix(name, "sys/fs/quota/") {
		return nil
	}
	return bytes.Clone(content)
}

// write writes the copies below dir, and an empty directory for masks.
func (p *proc) write(dir string) error {
	if err := makeDirs(dir, strings.TrimPrefix(emptyDir, "/")); err != nil {
		return err
	}
	for name, content := range p.copies {
		path := filepath.Join(jail.ProcDir, name)
		if err := makeDirs(dir, strings.TrimPrefix(filepath.Dir(path), "/")); err != nil {
			return err
		}
		if err := writeFile(filepath.Join(dir, path), content); err != nil {
			return err
		}
	}
	return nil
}

// emptyDir is an empty read-only directory in a jail.
const emptyDir = jail.ProcDir + "/empty"

// mounts returns the mounts over a jail's /proc. root is the path of the jail's / as the mounting
// process sees it.
func (p *proc) mounts(root string) (all []mount) {
	for _, name := range p.files {
		all = append(all, mount{source: "/dev/null", target: "/proc/" + name, device: true})
	}
	for _, name := range p.dirs {
		all = append(all, mount{source: root + emptyDir, target: "/proc/" + name})
	}
	for _, name := range p.replaced {
		all = append(all, mount{source: root + jail.ProcDir + "/" + name, target: "/proc/" + name})
	}
	return all
}

// hideHostSockets makes the files of hostSockets in a jail's network namespace readable only for
// the worker's user. They belong to root of the jail. The worker becomes their owner first, because
// changing the mode of another user's file needs one more capability.
func (p *proc) hideHostSockets(pid int) error {
	for _, name := range p.sockets {
		path := procPath(pid, "net/"+name)
		if err := os.Chown(path, os.Geteuid(), os.Getegid()); err != nil {
			return err
		}
		if err := unix.Chmod(path, 0o400); err != nil {
			return &fs.PathError{Op: "chmod", Path: path, Err: err}
		}
	}
	return nil
}
