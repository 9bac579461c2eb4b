package nsjail

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// maxLog is the maximum number of bytes of nsjail's log in an error message.
const maxLog = 4 << 10

// oomScore is the OOM score of processes in jails. A host that runs out of memory kills them before
// the worker. A jail that runs out of memory kills processes that the init has started before
// nsjail, which keeps the worker's score.
const oomScore = "500"

// Allowances of the control group for bullpen's own processes, in addition to the Spec.
const (
	// ownTasks counts nsjail, the init and a reserve. The program's tasks are limited by its own
	// uid.
	ownTasks = 1 + 32
	// nsjailMemory, in bytes, covers nsjail, the init and their kernel memory when the jail is
	// ready. That is measured as 1.6 to 1.9 MiB, plus page cache, which is reclaimed on demand.
	// Reported memory usage excludes it.
	nsjailMemory = 9 << 18
	// guestMemory, in bytes, is for the guest of a live sandbox: 16 MiB of Go's heap, to which it limits
	// itself, 16 MiB of output of processes and 12 MiB of events of contexts, and its stacks and kernel memory.
	guestMemory = 64 << 20
	// guestTasks is for the guest's threads.
	guestTasks = 64
	// forkedMemory is the same for a forked jail, which has no nsjail: measured as 0.1 to 0.4 MiB.
	forkedMemory = 1 << 19
)

// ownMemory returns the memory of bullpen's own processes in the jail, in bytes.
func (s *sandbox) ownMemory() int64 {
	switch {
	case s.zygote != nil:
		return forkedMemory
	case s.childUIDs != nil:
		return nsjailMemory + zygoteMemory
	case s.spec.Guest:
		return nsjailMemory + guestMemory
	default:
		return nsjailMemory
	}
}

// prepare creates a control group and starts nsjail in it, so that the init starts in it too.
func (s *sandbox) prepare(ctx context.Context) (err error) {
	if s.uids, err = s.uidPool().acquire(); err != nil {
		return err
	}
	grouped := s.makeGroup()
	err = s.setUpVolumes(ctx, func() error { return s.build(ctx, grouped) })
	if err != nil {
		return err
	}
	if s.spec.Prewarm != nil {
		if err := s.prewarm(ctx); err != nil {
			return err
		}
	}
	return s.finish()
}

// uidPool returns the pool of the jail's uids.
func (s *sandbox) uidPool() *uidPool {
	if s.spec.RootBytes > 0 {
		return s.m.rootUIDs
	}
	return s.m.uids
}

// abandon releases a jail that could not be created because of cause, and returns the error.
func (s *sandbox) abandon(operation string, cause error) error {
	if _, host := s.oomKilled(); host {
		cause = errors.Join(cause, jail.ErrHostOutOfMemory)
	}
	s.kill()
	return errors.Join(fmt.Errorf("%s: %w", operation, cause), s.release())
}

// makeGroup creates the control group, without limits.
func (s *sandbox) makeGroup() <-chan error {
	made := make(chan error, 1)
	go func() {
		var err error
		s.group, err = s.m.tree.New(strconv.FormatUint(s.m.seq.Add(1), 10), s.spec.Guest)
		made <- err
	}()
	return made
}

// setUpVolumes calls build to create the jail and creates its volumes on disk meanwhile. It then
// attaches the volumes and the network. It always waits for the volumes: the caller's home must no
// longer be called when Prepare returns.
func (s *sandbox) setUpVolumes(ctx context.Context, build func() error) error {
	volumes := make(chan error, 1)
	var attach []attachment
	go func() {
		var err error
		attach, err = s.makeVolumes(ctx)
		volumes <- err
	}()
	if err := errors.Join(build(), <-volumes); err != nil {
		return err
	}
	for _, a := range attach {
		if err := a.attach(s.initFD, a.path); err != nil {
			return err
		}
	}
	if err := s.attachNetwork(ctx, s.spec.Network); err != nil {
		return err
	}
	return s.open()
}

// build starts nsjail once the control group exists, and waits for the init.
func (s *sandbox) build(ctx context.Context, grouped <-chan error) error {
	files, err := s.files()
	if err = errors.Join(err, <-grouped); err == nil && s.spec.Prewarm != nil {
		err = s.group.LowerWeight()
	}
	if err == nil {
		err = s.start(files)
	}
	// Closed before waiting for the init: as long as this process has the init's end of the control
	// socket open, it does not notice the init's death.
	files.close()
	if err != nil {
		return err
	}
	// Done while nsjail builds the jail.
	if err := s.limit(); err != nil {
		return err
	}
	return s.awaitReady(ctx)
}

// limit sets the limits that do not affect nsjail and the init.
func (s *sandbox) limit() (err error) {
	l := cgroup.Limits{Memory: s.spec.Memory + s.ownMemory(), Tasks: s.spec.Pids + ownTasks}
	if s.spec.Guest {
		l.Tasks += guestTasks
	}
	// First, so that no effect of the limit is missed.
	if s.oom, err = s.group.WatchOOM(); err != nil {
		return err
	}
	return s.group.Limit(l)
}

// attachment is a mount to attach to a jail once the jail exists.
type attachment struct {
	path   string
	attach func(pidfd int, target string) error
}

// makeVolumes creates the volumes on disk.
func (s *sandbox) makeVolumes(ctx context.Context) ([]attachment, error) {
	var made []attachment
	if s.spec.RootBytes > 0 {
		attach, err := s.makeRoot(ctx)
		if err != nil {
			return nil, err
		}
		made = append(made, attachment{"/", attach}) // the first: the others are attached in it
	}
	for _, a := range areas(s.spec, s.m.cfg.Home) {
		if !a.onDisk || s.spec.MountHomeLater && a.path == s.m.cfg.Home {
			continue
		}
		pool, err := s.m.pool()
		if err != nil {
			return nil, err
		}
		var attach func(int, string) error
		if s.spec.Home != nil && a.path == s.m.cfg.Home {
			attach, err = s.mountHome(ctx)
		} else {
			attach, err = s.makeVolume(ctx, pool, a, s.spec.Inodes)
		}
		if err != nil {
			return nil, err
		}
		made = append(made, attachment{a.path, attach})
	}
	return made, nil
}

func (s *sandbox) makeVolume(
	ctx context.Context, pool *disk.Pool, a area, inodes int64,
) (attach func(int, string) error, err error) {
	v, err := pool.Get(ctx, disk.Size{Bytes: a.bytes, Inodes: inodes}, s.uids.program(), s.uids.program())
	if err != nil {
		return nil, err
	}
	s.volumes = append(s.volumes, v)
	if err := unix.Chmod(v.Path(), a.mode); err != nil {
		return nil, fmt.Errorf("set the mode of %s: %w", a.path, err)
	}
	return v.Attach, nil
}

// Volume returns an empty volume owned by root for the changes of a home with a size limit.
func (m *Maker) Volume(ctx context.Context, most proto.Space) (jail.Volume, error) {
	pool, err := m.pool()
	if err != nil {
		return nil, err
	}
	v, err := pool.Get(ctx, changesSize(most), 0, 0)
	if err != nil {
		return nil, err
	}
	return v, nil
}

// changesSize returns the size of a volume for the changes to an overlay.
func changesSize(most proto.Space) disk.Size {
	return disk.Size{
		Bytes: most.Bytes + home.OwnBytes, Inodes: most.Files + home.OwnInodes, Directory: home.MaxDirectory,
	}
}

// mountHome creates the spec's home on a volume that belongs to root.
func (s *sandbox) mountHome(ctx context.Context) (attach func(int, string) error, err error) {
	v, err := s.m.Volume(ctx, proto.Space{Bytes: s.spec.HomeBytes, Files: s.spec.Inodes})
	if err != nil {
		return nil, err
	}
	mount, err := s.spec.Home.Mount(v, s.uids.program(), s.uids.program())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mount the home: %w", err), v.Close())
	}
	safe := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &safe); err != nil {
		return nil, fmt.Errorf("make the home nosuid and nodev: %w", err)
	}
	return func(pidfd int, target string) error { return disk.Attach(mount, pidfd, target) }, nil
}

// attachNetwork attaches the network that the jail may reach.
func (s *sandbox) attachNetwork(ctx context.Context, network proto.Network) error {
	if network.Effective() == proto.NetworkBlocked {
		return nil
	}
	if s.m.cfg.Network == nil {
		return errors.New("the jail needs a network, and this worker has no uplink")
	}
	netns, err := os.Open(procPath(s.initPID, "ns/net"))
	if err != nil {
		return fmt.Errorf("open the jail's network: %w", err)
	}
	defer func() { _ = netns.Close() }()
	s.link, err = s.m.cfg.Network.Attach(ctx, netns, network, s.spec.CPU)
	return err
}

// open makes the jail ready for a process and starts its accounting.
func (s *sandbox) open() (err error) {
	if err := s.m.limitNetwork(s.initPID); err != nil {
		return fmt.Errorf("set the limits of the jail's network: %w", err)
	}
	if err := s.m.proc.hideHostSockets(s.initPID); err != nil {
		return fmt.Errorf("hide what the host's sockets use: %w", err)
	}
	if err := os.WriteFile(procPath(s.initPID, "oom_score_adj"), []byte(oomScore), 0); err != nil {
		return fmt.Errorf("set the OOM score of the jail: %w", err)
	}
	s.before, err = s.group.Usage()
	return err
}

// finish sets the CPU limit and the CPU weight of a program. Both must wait until everything before
// the program has started, so that this work does not use up the limit.
func (s *sandbox) finish() error {
	if s.spec.Prewarm != nil {
		if err := s.group.ResetWeight(); err != nil {
			return err
		}
	}
	if err := s.group.Throttle(s.spec.CPU); err != nil {
		return err
	}
	s.ready = true
	return nil
}

// rootKey returns the key of the jail's /.
func (s *sandbox) rootKey() rootKey {
	return rootKey{s.spec.Root, s.spec.Network.Effective() != proto.NetworkBlocked, s.spec.Terminals > 0, s.spec.Guest}
}

// files holds the descriptors that nsjail is started with, indexed by number.
type files struct {
	fds  []*os.File
	ours []*os.File // those in fds to close after the start
}

func (f *files) set(fd int, file *os.File) {
	for len(f.fds) <= fd {
		f.fds = append(f.fds, nil)
	}
	f.fds[fd] = file
}

func (f *files) close() {
	for _, file := range f.ours {
		_ = file.Close()
	}
}

// files creates nsjail's descriptors. All descriptors of this process are close-on-exec, so that
// concurrent starts cannot inherit each other's.
func (s *sandbox) files() (*files, error) {
	f := &files{}
	root, err := s.m.skeleton(s.rootKey())
	if err != nil {
		return f, err
	}
	l := layout{
		skeleton: root, home: s.m.cfg.Home, uids: s.uids, files: min(s.spec.OpenFiles, s.m.files), share: s.m.share,
		proc: s.m.proc, spec: s.spec, childUIDs: s.childUIDs,
	}
	if s.spec.Guest && slices.Contains(s.m.proc.replaced, bootID) {
		l.bootID = newBootID()
	}
	cfg, err := memfd("nsjail.cfg", []byte(l.config()), unix.MFD_NOEXEC_SEAL)
	if err != nil {
		return f, err
	}
	f.ours = append(f.ours, cfg)
	logFD, err := unix.MemfdCreate("nsjail.log", unix.MFD_CLOEXEC)
	if err != nil {
		return f, fmt.Errorf("make nsjail's log: %w", err)
	}
	s.log = os.NewFile(uintptr(logFD), "nsjail.log")
	theirs, err := s.connect()
	if err != nil {
		return f, err
	}
	f.ours = append(f.ours, theirs)
	calls := s.m.filter
	if len(s.spec.SystemCalls) > 0 {
		if calls, err = filterFile(s.spec.SystemCalls); err != nil {
			return f, err
		}
		f.ours = append(f.ours, calls)
	}
	for fd, file := range map[int]*os.File{
		0: s.m.null, 1: s.log, 2: s.log,
		wire.ControlFD: theirs, wire.LockFD: s.uids.lock, wire.FilterFD: calls, initFD: s.m.init, configFD: cfg,
	} {
		f.set(fd, file)
	}
	// The init of a forked jail releases its lock when it exits, before the kernel kills the jail's
	// other processes. nsjail outlives all of them and passes these locks to no other process.
	for i, pair := range s.childUIDs {
		f.set(configFD+1+i, pair.lock)
	}
	return f, nil
}

func (s *sandbox) start(f *files) (err error) {
	argv := append([]string{"nsjail", wire.Nsjail, s.m.cfg.NsjailPath}, args()...)
	// A terminal's signals are for the worker, which drains.
	sys := &unix.SysProcAttr{Setpgid: true}
	if s.uids.size == RootUIDs {
		argv = append([]string{
			"limit", wire.Limit, strconv.Itoa(s.m.share.instances), strconv.Itoa(s.m.share.watches),
			strconv.FormatUint(s.m.share.queues, 10), s.m.cfg.NsjailPath,
		}, args()...)
		sys.Cloneflags, sys.GidMappingsEnableSetgroups = unix.CLONE_NEWUSER, true
		sys.UidMappings = s.uids.around()
		sys.GidMappings = sys.UidMappings
	}
	attr := &os.ProcAttr{Dir: "/", Env: []string{}, Files: f.fds, Sys: sys}
	s.proc, err = s.group.StartProcess(selfFD(initFD), argv, attr)
	if err != nil {
		return fmt.Errorf("start nsjail: %w", err)
	}
	return nil
}

// connect creates the control socket and returns the init's end. On this end, the kernel attaches
// the credentials of each message's sender.
func (s *sandbox) connect() (theirs *os.File, err error) {
	if s.conn, theirs, err = socketPair("control", unix.SOCK_STREAM); err != nil {
		return nil, err
	}
	s.frames = bufio.NewReaderSize(s.conn, wire.MaxToWorker)
	return theirs, nil
}

// socketPair creates a pair of connected sockets of type kind. On the end ours, the kernel attaches
// the credentials of each message's sender.
func socketPair(name string, kind int) (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make the %s socket: %w", name, err)
	}
	end := os.NewFile(uintptr(fds[0]), name)
	theirs = os.NewFile(uintptr(fds[1]), name)
	defer func() { _ = end.Close() }()
	err = unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	var conn net.Conn
	if err == nil {
		conn, err = net.FileConn(end)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make the %s socket: %w", name, err), theirs.Close())
	}
	return conn.(*net.UnixConn), theirs, nil
}

// cancelReads aborts reads from conn when ctx is done. The returned stop reports whether it was
// called before that.
func cancelReads(ctx context.Context, conn *net.UnixConn) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
}

// awaitReady reads the init's first frame and opens a pidfd of its sender.
func (s *sandbox) awaitReady(ctx context.Context) error {
	stop := cancelReads(ctx, s.conn)
	var frame [wire.HeaderSize + 1]byte
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	n, oobn, _, _, err := s.conn.ReadMsgUnix(frame[:], oob)
	switch {
	case !stop():
		return fmt.Errorf("await the init: %w", context.Cause(ctx))
	case err != nil || n == 0:
		return fmt.Errorf("the init did not start with %s: %s", s.m.cfg.NsjailPath, s.diagnostics())
	case n != len(frame) || !bytes.Equal(frame[:], wire.Frame(wire.Ready, []byte{wire.Version})):
		return errors.New("the init has another protocol version: build with `make build`")
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return fmt.Errorf("await the init: no credentials: %w", err)
	}
	cred, err := unix.ParseUnixCredentials(&msgs[0])
	if err != nil {
		return fmt.Errorf("await the init: %w", err)
	}
	if s.initFD, err = unix.PidfdOpen(int(cred.Pid), 0); err != nil {
		return fmt.Errorf("open a pidfd of the init: %w", err)
	}
	s.initPID = int(cred.Pid)
	// If the init has died since, its pid may belong to another process by now, but not to one in
	// this control group.
	if ours, err := s.group.Has(s.initPID); err != nil || !ours {
		_ = unix.Close(s.initFD)
		s.initFD = -1
		return errors.Join(fmt.Errorf("the init died at once: %s", s.diagnostics()), err)
	}
	return nil
}

func procPath(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// diagnostics returns, on one line, the end of the output of the process that created the jail, or
// why there may be none.
func (s *sandbox) diagnostics() string {
	if s.zygote != nil {
		return s.creatorLog()
	}
	if limit, _ := s.oomKilled(); limit {
		return "the memory limit is too low for it"
	}
	return s.logSince(0)
}

// logSize returns the length of nsjail's log in bytes, or 0 if it is unknown.
func (s *sandbox) logSize() int64 {
	info, err := s.log.Stat()
	if err != nil {
		return 0
	}
	return info.Size()
}

// logSince returns the end of nsjail's log after byte start, on one line.
func (s *sandbox) logSince(start int64) string {
	end := s.logSize()
	b := make([]byte, max(0, min(end-start, maxLog)))
	n, _ := s.log.ReadAt(b, end-int64(len(b)))
	if n == 0 {
		return "nsjail logged nothing"
	}
	return "nsjail logged: " + strings.Join(strings.Fields(string(b[:n])), " ")
}
