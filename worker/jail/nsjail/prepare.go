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
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// maxLog bounds what is read of nsjail's log, for an error message.
const maxLog = 4 << 10

// oomScore makes a host that runs out of memory kill what is in jails before
// the worker, and a jail that does, what the init has started before nsjail: that
// one keeps the worker's.
const oomScore = "500"

// What the control group allows for what is ours in it, beyond the Spec.
const (
	// ownTasks is nsjail and the init, and room besides: what a program may have is
	// limited by its own uid.
	ownTasks = 1 + 32
	// ownMemory, in bytes, is what nsjail, the init and the kernel's own for them
	// hold when the jail is ready: 1.6 to 1.9 MiB here, beside page cache, which
	// gives way. What is reported as used is without it.
	ownMemory = 9 << 18
	// forkedMemory is the same in a jail that was forked, where nsjail is not: 0.1 to
	// 0.4 MiB here.
	forkedMemory = 1 << 19
)

// own is what is ours in the jail, in bytes.
func (s *sandbox) own() int64 {
	switch {
	case s.zygote != nil:
		return forkedMemory
	case s.childUIDs != nil:
		return ownMemory + forksMemory
	default:
		return ownMemory
	}
}

// prepare makes a control group and starts nsjail in it, so that the init, too,
// is born there.
func (s *sandbox) prepare(ctx context.Context) (err error) {
	if s.uids, err = s.m.uids.take(); err != nil {
		return err
	}
	grouped := s.makeGroup()
	err = s.setUpVolumes(ctx, func() error { return s.build(ctx, grouped) })
	if err != nil {
		return err
	}
	if s.spec.Ahead != nil {
		if err := s.startAhead(ctx); err != nil {
			return err
		}
	}
	return s.finish()
}

// makeGroup makes the control group, without limits.
func (s *sandbox) makeGroup() <-chan error {
	made := make(chan error, 1)
	go func() {
		var err error
		s.group, err = s.m.tree.New(strconv.FormatUint(s.m.seq.Add(1), 10))
		made <- err
	}()
	return made
}

// setUpVolumes gives the jail that build makes what lies on disk, which is made meanwhile,
// and its network. It is always waited for, since what a home of the caller's does
// must have an end before Prepare has.
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

// build starts nsjail when there is a group for it, and waits until the init is there.
func (s *sandbox) build(ctx context.Context, grouped <-chan error) error {
	files, err := s.files()
	if err = errors.Join(err, <-grouped); err == nil && s.spec.Ahead != nil {
		err = s.group.LowerWeight()
	}
	if err == nil {
		err = s.start(files)
	}
	// Before the init is awaited: with a copy of its end of the control socket
	// open we would not hear of its death.
	files.close()
	if err != nil {
		return err
	}
	// While nsjail builds the jail.
	if err := s.limit(); err != nil {
		return err
	}
	return s.awaitReady(ctx)
}

// limit sets the limits that nsjail and the init do not feel.
func (s *sandbox) limit() (err error) {
	l := cgroup.Limits{Memory: s.spec.Memory + s.own(), Tasks: s.spec.Pids + ownTasks}
	if err := s.group.Limit(l); err != nil {
		return err
	}
	s.oom, err = s.group.WatchOOM()
	return err
}

// attachment is what is mounted in a jail when that stands.
type attachment struct {
	path   string
	attach func(pidfd int, target string) error
}

// makeVolumes makes what lies on disk.
func (s *sandbox) makeVolumes(ctx context.Context) ([]attachment, error) {
	var made []attachment
	for _, a := range areas(s.spec, s.m.cfg.Home) {
		if !a.onDisk || s.spec.HomeLater && a.path == s.m.cfg.Home {
			continue
		}
		pool, err := s.m.pool()
		if err != nil {
			return nil, err
		}
		var attach func(int, string) error
		if s.spec.Home != nil && a.path == s.m.cfg.Home {
			attach, err = s.bring(ctx, pool)
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

func (s *sandbox) makeVolume(ctx context.Context, pool *disk.Pool, a area, inodes int64) (attach func(int, string) error, err error) {
	v, err := pool.Get(ctx, disk.Size{Bytes: a.bytes, Inodes: inodes}, s.uids.first+1, s.uids.first+1)
	if err != nil {
		return nil, err
	}
	s.volumes = append(s.volumes, v)
	if err := unix.Chmod(v.Path(), a.mode); err != nil {
		return nil, fmt.Errorf("set the mode of %s: %w", a.path, err)
	}
	return v.Attach, nil
}

// bring has the spec's home made on a volume of root's.
func (s *sandbox) bring(ctx context.Context, pool *disk.Pool) (attach func(int, string) error, err error) {
	v, err := pool.Get(ctx, disk.Size{Bytes: s.spec.HomeBytes + home.OwnBytes, Inodes: s.spec.Inodes + home.OwnInodes}, 0, 0)
	if err != nil {
		return nil, err
	}
	mount, err := s.spec.Home.Mount(v, s.uids.first+1, s.uids.first+1)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mount the home: %w", err), v.Close())
	}
	safe := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &safe); err != nil {
		return nil, fmt.Errorf("make the home nosuid and nodev: %w", err)
	}
	return func(pidfd int, target string) error { return disk.Attach(mount, pidfd, target) }, nil
}

// attachNetwork lets the jail out as far as it may go.
func (s *sandbox) attachNetwork(ctx context.Context, network proto.Network) error {
	if network.Effective() == proto.NetworkBlocked {
		return nil
	}
	if s.m.cfg.Network == nil {
		return errors.New("the jail is to have a network, and this worker has no way out for it")
	}
	netns, err := os.Open(procPath(s.initPID, "ns/net"))
	if err != nil {
		return fmt.Errorf("open the jail's network: %w", err)
	}
	defer func() { _ = netns.Close() }()
	s.link, err = s.m.cfg.Network.Attach(ctx, netns, network)
	return err
}

// open makes the jail ready for a process, and begins the account.
func (s *sandbox) open() (err error) {
	if err := os.WriteFile(procPath(s.initPID, "oom_score_adj"), []byte(oomScore), 0); err != nil {
		return fmt.Errorf("make the jail the first to go when the host is out of memory: %w", err)
	}
	s.before, err = s.group.Usage()
	return err
}

// finish is what has to wait until all has been started that is started before the
// program: the limit on cpu, which that shall not eat up, and the share of a program.
func (s *sandbox) finish() error {
	if s.spec.Ahead != nil {
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

// files are the descriptors nsjail is started with, by number.
type files struct {
	fds  []*os.File
	ours []*os.File // those among them that are to be closed after the start
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

// files makes nsjail's descriptors. Every descriptor of ours is close-on-exec, so
// that concurrent starts cannot inherit each other's.
func (s *sandbox) files() (*files, error) {
	f := &files{}
	root, err := s.m.skeleton(rootKey{s.spec.Root, s.spec.Network.Effective() != proto.NetworkBlocked})
	if err != nil {
		return f, err
	}
	l := layout{
		skeleton: root, home: s.m.cfg.Home, uid: s.uids.first, files: s.m.files, masks: s.m.masks, spec: s.spec, childUIDs: s.childUIDs,
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
	for fd, file := range map[int]*os.File{
		0: s.m.null, 1: s.log, 2: s.log,
		wire.ControlFD: theirs, wire.LockFD: s.uids.lock, initFD: s.m.init, configFD: cfg,
	} {
		f.set(fd, file)
	}
	// The init of a jail that was forked lets go of its lock when it ends, which is before the kernel kills
	// what else is there. nsjail, which hands these on to nobody, outlives all of it.
	for i, pair := range s.childUIDs {
		f.set(configFD+1+i, pair.lock)
	}
	return f, nil
}

func (s *sandbox) start(f *files) (err error) {
	s.proc, err = s.group.StartProcess(s.m.cfg.NsjailPath, args(), &os.ProcAttr{
		Dir:   "/",
		Env:   []string{},
		Files: f.fds,
		// A signal from a terminal is for the worker, which drains.
		Sys: &unix.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return fmt.Errorf("start nsjail: %w", err)
	}
	return nil
}

// connect makes the control socket and returns the init's end. On ours the
// kernel vouches for the sender of each message.
func (s *sandbox) connect() (theirs *os.File, err error) {
	if s.conn, theirs, err = socketPair("control", unix.SOCK_STREAM); err != nil {
		return nil, err
	}
	s.frames = bufio.NewReaderSize(s.conn, wire.MaxToWorker)
	return theirs, nil
}

// socketPair makes two sockets of a kind, of which the kernel vouches on ours for the sender of each message.
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

// giveUpWith ends reading of a connection with ctx. What it returns is false if that has happened.
func giveUpWith(ctx context.Context, conn *net.UnixConn) (stop func() bool) {
	return context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
}

// awaitReady reads the init's first frame and takes hold of the process that
// sent it.
func (s *sandbox) awaitReady(ctx context.Context) error {
	stop := giveUpWith(ctx, s.conn)
	var frame [wire.HeaderSize + 1]byte
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	n, oobn, _, _, err := s.conn.ReadMsgUnix(frame[:], oob)
	switch {
	case !stop():
		return fmt.Errorf("await the init: %w", context.Cause(ctx))
	case err != nil || n == 0:
		return fmt.Errorf("the init did not start: %s", s.diagnostics())
	case n != len(frame) || !bytes.Equal(frame[:], wire.Frame(wire.Ready, []byte{wire.Version})):
		return errors.New("the init speaks another version: build with `make build`")
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
		return fmt.Errorf("take hold of the init: %w", err)
	}
	s.initPID = int(cred.Pid)
	// Had the init died since, its pid could be another's by now; but that would not
	// be in our group.
	if ours, err := s.group.Has(s.initPID); err != nil || !ours {
		_ = unix.Close(s.initFD)
		s.initFD = -1
		return errors.Join(fmt.Errorf("the init died at once: %s", s.diagnostics()), err)
	}
	return nil
}

func procPath(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// diagnostics is the end of what was said where the jail was made, on one line, and why
// there may be nothing.
func (s *sandbox) diagnostics() string {
	if s.zygote != nil {
		return s.said()
	}
	if u, err := s.group.Usage(); err == nil && u.OOMKills > 0 {
		return "the memory limit leaves no room for it"
	}
	return s.saidSince(0)
}

// logged is how long nsjail's log is, in bytes, as far as that can be told.
func (s *sandbox) logged() int64 {
	info, err := s.log.Stat()
	if err != nil {
		return 0
	}
	return info.Size()
}

// saidSince is the end of what was said in nsjail's log after so many bytes, on one line.
func (s *sandbox) saidSince(start int64) string {
	end := s.logged()
	b := make([]byte, max(0, min(end-start, maxLog)))
	n, _ := s.log.ReadAt(b, end-int64(len(b)))
	if n == 0 {
		return "nsjail says nothing"
	}
	return "nsjail says: " + strings.Join(strings.Fields(string(b[:n])), " ")
}
