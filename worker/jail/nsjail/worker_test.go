package nsjail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// bareEnv makes the test binary a worker that lacks something. Its value names what is missing, the
// path of nsjail, the run directory and a directory on disk, separated by colons.
const bareEnv = "BULLPEN_TEST_BARE"

// bare opens a Maker, makes a jail, and prints the error.
func bare() {
	f := strings.SplitN(os.Getenv(bareEnv), ":", 4)
	cfg, spec := Config{NsjailPath: f[1], RunDir: f[2], Log: slog.New(slog.DiscardHandler)}, testSpec()
	switch f[0] {
	case "home on disk":
		cfg.VolumeDir, spec.HomeBytes = f[3], spec.Memory
	case "thread":
		cfg.VolumeDir = f[3]
	case "network":
		n, err := egress.Open(context.Background(), egress.Config{
			// never queried
			Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}, Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			fmt.Println(err)
			return
		}
		defer func() { check(n.Close()) }()
		cfg.Network, spec.Network.Policy = n, proto.NetworkUnrestricted
	case "no filters":
		refuse(unix.SYS_PRCTL, unix.PR_SET_SECCOMP)
		refuse(unix.SYS_SECCOMP, 0)
	case "no namespaces":
		check(os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0))
	case "one namespace", "one namespace, and no python":
		check(os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("1"), 0))
	case "run directory as most hosts mount it":
		check(unix.Mount("tmpfs", f[2], "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"))
	default:
		if caps, ok := strings.CutPrefix(f[0], "capabilities"); ok {
			keepOnly(strings.Fields(caps))
		}
	}
	m, err := Open(cfg)
	if err == nil {
		switch f[0] {
		case "thread":
			err = bareThread(m, f[3])
		case "one namespace":
			err = bareFork(m, true)
		case "one namespace, and no python":
			err = bareFork(m, false)
		default:
			if err = bareRun(m, spec); err == nil {
				err = errors.Join(bareFork(m, true), bareFork(m, false))
			}
		}
		check(m.Close())
	}
	fmt.Println(err)
}

// bareRun runs a program in a jail of the spec.
func bareRun(m *Maker, spec jail.Spec) error {
	j, err := m.Prepare(context.Background(), spec)
	if err != nil {
		return err
	}
	o, err := j.Run(context.Background(), jail.Program{Argv: []string{"bash", "-c", "exit 3"}, Dir: "/"})
	if err == nil && (o.Kind != jail.Exited || o.ExitCode != 3) {
		err = fmt.Errorf("the program ended as %+v", o)
	}
	return err
}

// bareThread saves a thread's home after applying every change that a program can make the kernel
// perform on behalf of a worker.
func bareThread(m *Maker, dir string) error {
	if err := m.TryHome(context.Background(), testSpec()); err != nil {
		return err
	}
	lower := dir + "/lower"
	check(os.MkdirAll(lower+"/old/deep", 0o755))
	for _, name := range []string{"/old/deep/f", "/linked", "/gone"} {
		check(os.WriteFile(lower+name, []byte("x"), 0o600))
	}
	check(os.Chmod(lower+"/old/deep", 0))
	h := &trialHome{lower: lower}
	spec := testSpec()
	spec.Home = h
	j, err := m.Prepare(context.Background(), spec)
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	o, err := j.Run(context.Background(), jail.Program{
		Argv: []string{"bash", "-ec", `
chmod 700 old/deep; echo more >> old/deep/f; mv old new; ln linked second; echo y >> second; rm gone; mkdir closed; echo x > closed/f
python3 -c "import os; os.setxattr('new', 'user.x', b'y')"; touch -d @1 new linked; chmod 0 new/deep/f new/deep closed`},
		Dir: DefaultHome, Timeout: patience, Stderr: &stderr,
	})
	if err != nil {
		return err
	}
	if o.Kind != jail.Exited || o.ExitCode != 0 {
		return fmt.Errorf("the program ended as %+v: %s", o, stderr.Bytes())
	}
	err = saveHome(&home.Overlay{Lower: lower, Volume: h.volume.Path()}, nil, nil)
	check(errors.Join(h.mount.Close(), h.volume.Close()))
	return err
}

// bareFork runs a program in a forked jail and one in bash, from a zygote with or without an
// interpreter.
func bareFork(m *Maker, interpreter bool) error {
	spec := testSpec()
	if interpreter {
		program, err := jail.Source{Home: DefaultHome}.Zygote(nil)
		check(err)
		spec.Prewarm = &program
	}
	p, err := m.Zygote(context.Background(), spec)
	if err != nil {
		return err
	}
	for _, language := range []string{"python", "bash"} {
		source := jail.Source{Language: language, Code: "exit(3)", Home: DefaultHome}
		if language == "bash" {
			source.Code = "exit 3"
		}
		prewarmed, err := source.Prewarm()
		check(err)
		program, err := source.Program()
		check(err)
		spec.Prewarm = &prewarmed
		j, err := p.Fork(context.Background(), spec)
		if err != nil {
			return errors.Join(err, p.Close())
		}
		if o, err := j.Run(context.Background(), program); err != nil || o.Kind != jail.Exited || o.ExitCode != 3 {
			return errors.Join(fmt.Errorf("the program ended as %+v", o), err, p.Close())
		}
	}
	return p.Close()
}

// neededCapabilities are all capabilities that a worker needs, as listed in docs/guides/workers.md. The
// first line is always needed. The other lines are for homes on disk, threads and networks.
var neededCapabilities = map[string]uintptr{ // read only
	"DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "CHOWN": unix.CAP_CHOWN, "SETUID": unix.CAP_SETUID, "SETGID": unix.CAP_SETGID,
	"SYS_ADMIN": unix.CAP_SYS_ADMIN, "SYS_CHROOT": unix.CAP_SYS_CHROOT, "FOWNER": unix.CAP_FOWNER,
	"DAC_READ_SEARCH": unix.CAP_DAC_READ_SEARCH,
	"NET_ADMIN":       unix.CAP_NET_ADMIN, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
}

// keepOnly executes this program again with only the named capabilities and no way to gain others.
func keepOnly(names []string) {
	runtime.LockOSThread()
	keep := map[uintptr]bool{}
	for _, n := range names {
		keep[neededCapabilities[n]] = true
	}
	for c := range uintptr(unix.CAP_LAST_CAP + 1) {
		if !keep[c] {
			check(unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0))
		}
	}
	check(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	with := "nothing"
	switch {
	case keep[unix.CAP_DAC_READ_SEARCH]:
		with = "thread"
	case keep[unix.CAP_SYS_CHROOT] || keep[unix.CAP_FOWNER]:
		with = "home on disk"
	case keep[unix.CAP_NET_ADMIN] || keep[unix.CAP_NET_BIND_SERVICE]:
		with = "network"
	}
	_, rest, _ := strings.Cut(os.Getenv(bareEnv), ":")
	check(os.Setenv(bareEnv, with+":"+rest))
	exe, err := os.Executable()
	check(err)
	check(syscall.Exec(exe, os.Args, os.Environ()))
}

// refuse makes a system call fail with EINVAL, for this process and its children. If argument is
// not 0, only calls with that first argument fail.
func refuse(number, argument uint32) {
	skip := uint8(0)
	if argument == 0 {
		skip = 2
	}
	f := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: number, Jt: skip, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 16},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: argument, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EINVAL)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if _, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog))); e != 0 {
		check(e)
	}
}

// A worker works with exactly what docs/guides/workers.md says it needs. A worker with less cannot confine
// programs as promised, so it accepts none and reports why.
func TestWorkerPrivileges(t *testing.T) {
	whole := []syscall.SysProcIDMap{{Size: 1<<32 - 1}}
	few := []syscall.SysProcIDMap{{Size: 65536}}
	const works = "<nil>"
	for what, tt := range map[string]struct {
		ids  []syscall.SysProcIDMap // mapping of its own user namespace, or nil for none
		want string
		long bool // not with -short: another case lacks the same
	}{
		"nothing":                              {want: works},
		"no filters":                           {want: "filter system calls"},
		"no namespaces":                        {ids: whole, want: "CLONE_NEWUSER"},
		"one namespace":                        {ids: whole, want: "make the namespaces of a jail"},
		"one namespace, and no python":         {ids: whole, want: "make the namespaces of a jail", long: true},
		"no ids":                               {ids: few, want: "uid range 1900000000+532480 is not in /proc/self/uid_map"},
		"run directory as most hosts mount it": {want: works},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID":                             {want: works},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN SYS_CHROOT FOWNER": {want: works, long: true},
		"home on disk": {want: works, long: true},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN SYS_CHROOT": {want: "operation not permitted", long: true},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN FOWNER":     {want: "operation not permitted", long: true},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_CHROOT FOWNER":    {want: "operation not permitted", long: true},
		"thread": {want: works, long: true},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN SYS_CHROOT FOWNER DAC_READ_SEARCH": {want: works},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN SYS_CHROOT DAC_READ_SEARCH": {
			want: "operation not permitted",
		},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN FOWNER DAC_READ_SEARCH": {
			want: "operation not permitted",
		},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_CHROOT FOWNER DAC_READ_SEARCH": {
			want: "operation not permitted",
		},
		"a user namespace": {ids: whole, want: works},
		"network":          {want: works, long: true},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN NET_ADMIN NET_BIND_SERVICE": {want: works},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN NET_ADMIN":                  {want: "CAP_NET_BIND_SERVICE"},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID SYS_ADMIN NET_BIND_SERVICE":           {want: "CAP_NET_ADMIN"},
		"capabilities DAC_OVERRIDE CHOWN SETUID SETGID NET_ADMIN NET_BIND_SERVICE":           {want: "CAP_SYS_ADMIN"},
		"capabilities CHOWN SETUID SETGID":                                                   {want: "permission denied"},
		"capabilities DAC_OVERRIDE SETUID SETGID":                                            {want: "chown"},
		"capabilities DAC_OVERRIDE CHOWN SETGID":                                             {want: "uid_map"},
		"capabilities DAC_OVERRIDE CHOWN SETUID":                                             {want: "gid_map"},
	} {
		if tt.long && testing.Short() {
			continue
		}
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), exe)
			cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0", bareEnv+"="+what+":"+nsjailPath(t)+":"+runDir(t)+
				":"+diskDir(t))
			cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			if tt.ids != nil {
				cmd.SysProcAttr = &syscall.SysProcAttr{
					Cloneflags: syscall.CLONE_NEWUSER, UidMappings: tt.ids, GidMappings: tt.ids, GidMappingsEnableSetgroups: true,
				}
			}
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), tt.want) {
				t.Errorf("%v, output of the worker: %s", err, out)
			}
		})
	}
	for _, tt := range []struct {
		pattern string
		most    uint64
		ok      bool
	}{
		{"core\n", 0, true},
		{"|/usr/bin/dump %p\n", 0, false},
		{"|/usr/bin/dump %p\n", 1, true},
		{"@/run/dump\n", 1, false},
		{"\n", 0, true},
	} {
		if err := checkCore(tt.most, tt.pattern); (err == nil) != tt.ok {
			t.Errorf("%q with a limit of %d: %v", tt.pattern, tt.most, err)
		}
	}
}
