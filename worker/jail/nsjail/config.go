package nsjail

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// Numbers of the descriptors that nsjail is started with, after those for the init (package wire).
const (
	initFD   = 7 // the init's executable
	configFD = 8 // nsjail's configuration
)

// jobDirBytes is the size of jail.JobDir: the code, and a few staged files.
const jobDirBytes = 16 << 20

// devices are the nodes of the jail's /dev, bind-mounted from the host's.
var devices = [...]string{"null", "zero", "full", "random", "urandom"} // read only

// terminalDevice is the node of a process's own terminal, in jails that have terminals.
const terminalDevice = "tty"

// devicesOf returns the nodes of the /dev of a jail.
func devicesOf(spec jail.Spec) []string {
	if spec.Terminals > 0 {
		return append(slices.Clone(devices[:]), terminalDevice)
	}
	return devices[:]
}

// layout holds what a configuration is generated from.
type layout struct {
	*skeleton
	home  string
	uids  *uidSet
	files int // RLIMIT_NOFILE
	share share
	proc  *proc
	spec  jail.Spec
	// bootID is the boot id that programs read; empty for the one of all jails.
	bootID string
	// childUIDs are the uids of the jails forked from this one; nil if it is not a zygote.
	childUIDs []*uidSet
}

// config returns nsjail's configuration, in the text form of its protobuf.
func (l layout) config() string {
	var b text
	b.line("mode: ONCE")
	b.line("hostname: %q", hostname)
	b.line("log_level: WARNING")
	// The worker enforces the exact time limit. nsjail's counts whole seconds, so it is off.
	b.line("time_limit: 0")
	b.line("nice_level: 0")
	b.line("clone_newuser: true clone_newns: true clone_newpid: true")
	b.line("clone_newipc: true clone_newuts: true clone_newcgroup: true")
	b.line("clone_newnet: false") // the init creates it when the ids are mapped
	for _, key := range []string{"uidmap", "gidmap"} {
		b.ids(key, l.uids)
		for i, c := range l.childUIDs {
			b.line("%s { inside_id: \"%d\" outside_id: \"%d\" count: 2 }", key, childID(i), c.first)
		}
	}
	// The init needs these to become the program, to kill it, and to empty the bounding set. It
	// drops the last three early: they serve to limit inotify, to create the network and bring up
	// its loopback, and to make /proc read-only afterwards. The program gets none.
	b.line(`cap: "CAP_KILL" cap: "CAP_SETGID" cap: "CAP_SETUID" cap: "CAP_SETPCAP" cap: "CAP_SYS_RESOURCE" cap: ` +
		`"CAP_SYS_ADMIN" cap: "CAP_NET_ADMIN"`)
	if l.spec.Guest { // which handles the files of the sandbox's users
		b.line(`cap: "CAP_CHOWN" cap: "CAP_DAC_OVERRIDE" cap: "CAP_FOWNER" cap: "CAP_FSETID"`)
	}
	// The control group limits memory and CPU. HARD is the worker's own limit: raising one above it
	// needs a capability that many hosts do not grant. The init sets the limit on core dumps.
	b.line("rlimit_as_type: HARD rlimit_cpu_type: HARD rlimit_fsize_type: HARD rlimit_core_type: HARD")
	b.line("rlimit_stack_type: SOFT rlimit_memlock_type: SOFT rlimit_rtprio_type: SOFT")
	b.line("rlimit_msgqueue: %d rlimit_msgqueue_type: VALUE", l.share.queues)
	b.line("rlimit_nofile: %d rlimit_nofile_type: VALUE", l.files)
	if l.childUIDs == nil {
		b.line("rlimit_nproc: %d rlimit_nproc_type: VALUE", l.spec.Pids)
	} else { // all children's processes count against it; each child also has its own limit
		b.line("rlimit_nproc_type: HARD")
	}
	b.line("mount { src: %q dst: \"/\" is_bind: true nosuid: true nodev: true }", l.dir)
	for _, d := range l.binds {
		b.line("mount { src: %q dst: %q is_bind: true nosuid: true nodev: true }", d.src, d.dst)
	}
	b.line("mount { dst: \"/proc\" fstype: \"proc\" rw: true nosuid: true nodev: true noexec: true }")
	// Read-only, so that no program changes the timestamps of the host's nodes. Devices remain
	// writable.
	for _, d := range devicesOf(l.spec) {
		b.line("mount { src: %q dst: %q is_bind: true nosuid: true noexec: true }", "/dev/"+d, "/dev/"+d)
	}
	kind := ""
	if l.spec.Guest {
		kind = wire.Guest
	}
	if l.childUIDs == nil {
		for _, m := range l.own(l.dir) {
			b.mount(m)
		}
		if l.bootID != "" {
			b.line("mount { src_content: %q dst: %q is_bind: true nosuid: true nodev: true noexec: true }", l.bootID,
				"/proc/"+bootID)
		}
	} else {
		kind = wire.Zygote
		if l.spec.Prewarm != nil && l.spec.Prewarm.Preloads() {
			for _, m := range l.importAreas() {
				b.mount(m)
			}
		}
	}
	b.line("pass_fd: %d pass_fd: %d pass_fd: %d", wire.ControlFD, wire.LockFD, wire.FilterFD)
	b.line("exec_bin { path: %q arg0: \"init\" arg: %q arg: \"%d\" arg: \"%d\" exec_fd: true }", selfFD(initFD), kind,
		l.share.instances, l.share.watches)
	return b.String()
}

// mount is a mount of one jail, which a forked jail mounts anew.
type mount struct {
	source, target string
	fstype         string // empty for a bind mount
	options        string
	device         bool // the bind mount's source is a device, or the file system holds some
}

// own returns a jail's own mounts, in their order. root is the path of the jail's / as the mounting
// process sees it.
func (l layout) own(root string) []mount {
	all := append(l.proc.mounts(root), tmpfs("/dev/shm", min(l.spec.TmpBytes, l.spec.Memory/2), l.spec.Inodes, "1777", 0))
	for _, a := range areas(l.spec, l.home) {
		if !a.onDisk { // a disk area is attached when the jail exists
			all = append(all, tmpfs(a.path, a.bytes, l.spec.Inodes, strconv.FormatUint(uint64(a.mode), 8), jail.ProgramID))
		}
	}
	if l.spec.Terminals > 0 {
		// A separate instance: it shows neither the host's terminals nor those of other jails.
		all = append(all, mount{
			source: "devpts", target: "/dev/pts", fstype: "devpts",
			options: fmt.Sprintf("ptmxmode=0666,mode=0620,max=%d", l.spec.Terminals), device: true,
		})
	}
	return append(all, tmpfs(jail.JobDir, jobDirBytes, 1024, "0755", 0))
}

// importAreas returns the home and /tmp of a zygote's interpreter, which modules may write to
// during import. Each forked jail mounts its own over them. They are in memory even if those of the
// jails are not.
func (l layout) importAreas() (all []mount) {
	for _, a := range areas(l.spec, l.home) {
		all = append(all, tmpfs(a.path, min(a.bytes, l.spec.Memory/4), l.spec.Inodes,
			strconv.FormatUint(uint64(a.mode), 8), 0))
	}
	return all
}

func tmpfs(target string, size, inodes int64, mode string, owner int) mount {
	return mount{
		source: "tmpfs", target: target, fstype: "tmpfs",
		options: fmt.Sprintf("size=%d,nr_inodes=%d,mode=%s,uid=%d,gid=%d", size, inodes, mode, owner, owner),
	}
}

// area is a directory that belongs to the program.
type area struct {
	path   string
	bytes  int64
	mode   uint32
	onDisk bool // too large for memory, or a home that the caller mounts now or later
}

// areas returns the home and /tmp.
func areas(spec jail.Spec, home string) []area {
	return []area{
		{home, spec.HomeBytes, 0o755, spec.Home != nil || spec.MountHomeLater ||
			proto.HomeOnDisk(spec.HomeBytes, spec.Memory)},
		{"/tmp", spec.TmpBytes, 0o1777, proto.TmpOnDisk(spec.TmpBytes, spec.Memory)},
	}
}

// args returns nsjail's arguments. Everything is in the configuration except --rw, for which it has
// no option. --rw makes nsjail skip its own remount of /; the mount in the configuration makes /
// read-only all the same. That remount would clear nosuid and nodev. The kernel refuses this if the
// directory is mounted with them, as /run is on most hosts.
func args() []string { return []string{"nsjail", "--config", selfFD(configFD), "--rw"} }

func selfFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

type text struct{ strings.Builder }

func (t *text) line(format string, args ...any) { _, _ = fmt.Fprintf(t, format+"\n", args...) }

// ids maps the jail's ids to unprivileged ones, and maps no others: those of the init and the program, or
// those of a system, in the user namespace around the jail.
func (t *text) ids(key string, s *uidSet) {
	if s.size == RootUIDs {
		last := s.size - 1
		t.line("%s { inside_id: \"0\" outside_id: \"1\" count: %d }", key, last)
		t.line("%s { inside_id: \"%d\" outside_id: \"%d\" count: 1 }", key, nobody, 1+last)
		return
	}
	t.line("%s { inside_id: \"0\" outside_id: \"%d\" count: 1 }", key, s.first)
	t.line("%s { inside_id: \"%d\" outside_id: \"%d\" count: 1 }", key, jail.ProgramID, s.program())
}

func (t *text) mount(m mount) {
	switch {
	case m.device && m.fstype != "":
		t.line("mount { dst: %q fstype: %q options: %q rw: true nosuid: true noexec: true }", m.target, m.fstype, m.options)
	case m.device:
		t.line("mount { src: %q dst: %q is_bind: true nosuid: true noexec: true }", m.source, m.target)
	case m.fstype == "":
		t.line("mount { src: %q dst: %q is_bind: true nosuid: true nodev: true noexec: true }", m.source, m.target)
	default:
		t.line("mount { dst: %q fstype: %q options: %q rw: true nosuid: true nodev: true }", m.target, m.fstype, m.options)
	}
}
