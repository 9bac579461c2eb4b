package nsjail

import (
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

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// maxLog bounds what is read of nsjail's log, for an error message.
const maxLog = 4 << 10

// oomScore makes a host that runs out of memory kill what is in jails before
// the worker.
const oomScore = "500"

// prepare starts nsjail and makes the control group at the same time, and puts
// the init into the group before it has heard of any program.
func (s *sandbox) prepare(ctx context.Context, spec jail.Spec) (err error) {
	if s.uids, err = s.m.uids.take(); err != nil {
		return err
	}
	grouped := make(chan error, 1)
	go func() {
		var err error
		name := strconv.FormatUint(s.m.seq.Add(1), 10)
		s.group, err = s.m.tree.New(name, cgroup.Limits{Memory: spec.Memory, Tasks: spec.Pids + initTasks, CPU: spec.CPU})
		grouped <- err
	}()
	err = s.start(spec)
	if err == nil {
		err = s.awaitReady(ctx)
	}
	if gerr := <-grouped; gerr != nil || err != nil {
		return errors.Join(err, gerr)
	}
	if err := s.group.Add(s.initPID); err != nil {
		return err
	}
	if err := os.WriteFile(procPath(s.initPID, "oom_score_adj"), []byte(oomScore), 0); err != nil {
		return fmt.Errorf("make the jail the first to go when the host is out of memory: %w", err)
	}
	if s.oom, err = s.group.WatchOOM(); err != nil {
		return err
	}
	s.ready = true
	return nil
}

// start starts nsjail. Every descriptor of ours is close-on-exec, so concurrent
// starts cannot inherit each other's.
func (s *sandbox) start(spec jail.Spec) error {
	l := layout{
		root: s.m.rootDir(), binds: s.m.binds, home: s.m.cfg.Home,
		uid: s.uids.first, nproc: min(spec.Pids, s.m.nproc), spec: spec,
	}
	cfg, err := memfd("nsjail.cfg", []byte(l.config()), unix.MFD_NOEXEC_SEAL)
	if err != nil {
		return err
	}
	defer func() { _ = cfg.Close() }()
	logFD, err := unix.MemfdCreate("nsjail.log", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make nsjail's log: %w", err)
	}
	s.log = os.NewFile(uintptr(logFD), "nsjail.log")
	theirs, err := s.connect()
	if err != nil {
		return err
	}
	defer func() { _ = theirs.Close() }()

	files := []*os.File{s.m.null, s.log, s.log}
	for fd, f := range map[int]*os.File{wire.ControlFD: theirs, wire.LockFD: s.uids.lock, initFD: s.m.init, configFD: cfg} {
		for len(files) <= fd {
			files = append(files, nil)
		}
		files[fd] = f
	}
	s.proc, err = os.StartProcess(s.m.cfg.NsjailPath, args(), &os.ProcAttr{
		Dir:   "/",
		Env:   []string{},
		Files: files,
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
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the control socket: %w", err)
	}
	ours := os.NewFile(uintptr(fds[0]), "control")
	theirs = os.NewFile(uintptr(fds[1]), "control")
	defer func() { _ = ours.Close() }()
	err = unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	var conn net.Conn
	if err == nil {
		conn, err = net.FileConn(ours)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the control socket: %w", err), theirs.Close())
	}
	s.conn = conn.(*net.UnixConn)
	return theirs, nil
}

// awaitReady reads the init's first frame and takes hold of the process that
// sent it.
func (s *sandbox) awaitReady(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) })
	var frame [wire.HeaderSize + 1]byte
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	n, oobn, _, _, err := s.conn.ReadMsgUnix(frame[:], oob)
	switch {
	case !stop():
		return fmt.Errorf("await the init: %w", context.Cause(ctx))
	case err != nil || n == 0:
		return fmt.Errorf("the init did not start: %s", s.lastWords())
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
	// Had the init died since, its pid could be another's by now; but no other
	// process is a child of our nsjail.
	if ppid, err := parentOf(s.initPID); err != nil || ppid != s.proc.Pid {
		_ = unix.Close(s.initFD)
		s.initFD = -1
		return fmt.Errorf("the init died at once: %s", s.lastWords())
	}
	return nil
}

func procPath(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

func parentOf(pid int) (int, error) {
	b, err := os.ReadFile(procPath(pid, "stat"))
	if err != nil {
		return 0, err
	}
	// pid (comm) state ppid: comm may hold anything, also parentheses.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 2 {
		return 0, errors.New("unreadable stat")
	}
	return strconv.Atoi(fields[1])
}

// lastWords is the end of nsjail's log, on one line.
func (s *sandbox) lastWords() string {
	info, err := s.log.Stat()
	if err != nil {
		return "its log is gone"
	}
	b := make([]byte, min(info.Size(), maxLog))
	n, _ := s.log.ReadAt(b, info.Size()-int64(len(b)))
	if n == 0 {
		return "nsjail says nothing"
	}
	return "nsjail says: " + strings.Join(strings.Fields(string(b[:n])), " ")
}
