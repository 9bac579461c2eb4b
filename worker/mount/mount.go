// Package mount mounts storage connections into jails, below proto.MountsDir.
//
// A directory is an id-mapped bind mount: programs own what the owner of the directory owns. A
// volume is mounted as the home of a thread is, by its caller. A bucket is a FUSE file system. The
// worker mounts it and starts a process that serves it, see Serve and package objectfs. That
// process has a uid of its own, no privileges, and limits on its memory and its disk space. It
// alone gets the bucket's credentials, over a socket. It ends with the execution: killing it aborts
// the mount.
package mount

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
	"github.com/bullpen-run/bullpen/worker/mount/objectfs"
)

const (
	// serverMemory limits the memory of a serving process, in bytes. It uses about half.
	serverMemory = 64 << 20
	// serverHeap is when its garbage collector works harder, in bytes.
	serverHeap  = "44MiB"
	serverTasks = 64
	// finishTimeout limits the storing of files after the program has ended.
	finishTimeout = time.Minute
	// maxNamed is how many files an error message names.
	maxNamed = 3
	// maxReports limits the reports of a serving process in bytes, which a program can influence.
	maxReports = 64 << 10
)

// Config configures an Opener.
type Config struct {
	Maker *nsjail.Maker
	// Roots are the directories that may contain connections of kind directory.
	Roots []string
	// SpoolDir is a directory on a disk, for files that programs are writing. SpoolBytes is the
	// limit of each execution in bytes.
	SpoolDir   string
	SpoolBytes int64
	// Command is the command that calls Serve, started from this process's own executable.
	Command []string
	// Check, if not nil, returns why a bucket must not be mounted.
	Check func(m proto.Mount) error
}

// Opener mounts storage.
type Opener struct{ Config }

// Open checks the configuration and what the machine needs. The error names what is missing and how
// to fix it.
func Open(cfg Config) (*Opener, error) {
	device, err := openDevice()
	if err != nil {
		return nil, err
	}
	defer func() { _ = device.Close() }()
	fs, err := fuseMount(device, proto.Mount{Slug: "try"}, 1, 1, false)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.SpoolDir, 0o700); err != nil {
		return nil, errors.Join(fmt.Errorf("make the directory of spools: %w", err), fs.Close())
	}
	for _, root := range cfg.Roots {
		fd, err := openMountRoot(root)
		if err != nil {
			return nil, errors.Join(err, fs.Close())
		}
		_ = unix.Close(fd)
	}
	return &Opener{cfg}, fs.Close()
}

// Error is why something cannot be mounted, a sentence for the tenant.
type Error struct {
	Slug    string
	Message string
	Err     error // the cause, for the log; may be nil
}

func (e *Error) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("mount %s: %s: %v", e.Slug, e.Message, e.Err)
	}
	return fmt.Sprintf("mount %s: %s", e.Slug, e.Message)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Set is the mounts of one execution. It implements jail.Data. Close must be called.
type Set struct {
	opener *Opener
	mounts []proto.Mount
	keys   map[string]proto.S3Credentials // by the name of the credential

	devices map[string]*os.File // of /dev/fuse by slug, until they are mounted and the process has them
	volumes map[string]Volume   // by slug
	// allUsers means that all users of the sandbox can use the buckets.
	allUsers bool
	control  *net.UnixConn // to the serving process; nil if there is none
	starts   chan struct{} // closed when service and err are set
	service  *nsjail.Service
	err      error

	mu      sync.Mutex
	aborted bool
	steps   int // of mounting and starting, that are done
}

// Volume mounts a part of a volume for a user and a group: the directory that open opens below
// root, the root of the volume. The mount is in no mount namespace. open may create directories,
// unless the volume is read-only.
type Volume func(uid, gid int, open func(root int) (dir int, err error)) (*os.File, error)

// Open starts what serves the mounts. It does not wait.
func (o *Opener) Open(mounts []proto.Mount) (*Set, error) {
	s := &Set{opener: o, mounts: mounts, devices: map[string]*os.File{}, starts: make(chan struct{})}
	err := proto.CheckMounts(mounts)
	var files []*os.File
	if err == nil {
		files, err = s.open()
	}
	if err != nil || files == nil {
		close(s.starts)
	}
	switch {
	case err != nil:
		return nil, errors.Join(err, s.Close())
	case files == nil:
		return s, nil
	}
	go func() {
		defer close(s.starts)
		service, err := o.Maker.StartService(nsjail.ServiceConfig{
			Path: "/proc/self/exe", Argv: o.Command, Env: serverEnv(), Files: files,
			Memory: serverMemory, Tasks: serverTasks,
		})
		for _, f := range files[:serverDevice-serverControl] {
			_ = f.Close()
		}
		s.stepDone()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.service, s.err = service, err
		if s.aborted && service != nil {
			service.Kill()
		}
	}()
	return s, nil
}

// serverEnv returns the environment of a serving process: where it finds certificate authorities.
func serverEnv() []string {
	env := []string{"GOMEMLIMIT=" + serverHeap, "GOMAXPROCS=2"}
	for _, name := range []string{"SSL_CERT_FILE", "SSL_CERT_DIR"} {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// open returns the descriptors of the serving process, nil if none is needed.
func (s *Set) open() (files []*os.File, err error) {
	defer func() {
		if err != nil {
			for _, f := range files {
				_ = f.Close()
			}
		}
	}()
	for _, m := range s.mounts {
		if m.Kind != proto.MountS3 {
			continue
		}
		if s.opener.Check != nil {
			if err := s.opener.Check(m); err != nil {
				return files, &Error{m.Slug, "its endpoint is one that this worker does not allow", err}
			}
		}
		if files == nil {
			if files, err = s.openShared(); err != nil {
				return files, err
			}
		}
		device, err := openDevice()
		if err != nil {
			return files, err
		}
		s.devices[m.Slug] = device
		files = append(files, device)
	}
	return files, nil
}

// Descriptors of a serving process.
const (
	serverControl = 3
	serverSpool   = 4
	serverDevice  = 5 // of the first mount; the others follow
)

// openShared returns the control socket and the spool.
func (s *Set) openShared() (files []*os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the socket of a mount: %w", err)
	}
	ours := os.NewFile(uintptr(fds[0]), "mount")
	defer func() { _ = ours.Close() }()
	files = append(files, os.NewFile(uintptr(fds[1]), "mount"))
	conn, err := net.FileConn(ours)
	if err != nil {
		return files, fmt.Errorf("make the socket of a mount: %w", err)
	}
	s.control = conn.(*net.UnixConn)
	spool, err := os.OpenFile(s.opener.SpoolDir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return files, fmt.Errorf(
			"make the spool of a mount: %w: it needs a file system with unnamed files (O_TMPFILE), such as ext4 or xfs", err)
	}
	return append(files, spool), nil
}

// Use takes the credentials of the mounts from the sealed values of a job. It is called before
// Mount.
func (s *Set) Use(secrets map[string][]byte) error {
	s.keys = map[string]proto.S3Credentials{}
	for _, m := range s.mounts {
		if m.Kind != proto.MountS3 {
			continue
		}
		value, ok := secrets[m.S3.Credential]
		if !ok {
			return &Error{m.Slug, "its credentials are missing", nil}
		}
		keys, err := proto.ParseS3Credentials(value)
		if err != nil {
			return &Error{m.Slug, "its credentials are malformed: the administrator can set them again", err}
		}
		s.keys[m.S3.Credential] = keys
	}
	return nil
}

// SetVolumes sets the volumes by the slugs of their mounts. It is called before Mount.
func (s *Set) SetVolumes(volumes map[string]Volume) { s.volumes = volumes }

// AllowAllUsers lets all users of the sandbox use the buckets, subject to the modes of files.
// Otherwise only the program's user can. AllowAllUsers must be called before Mount.
func (s *Set) AllowAllUsers() { s.allUsers = true }

// Mount mounts everything; see jail.Data.
func (s *Set) Mount(uid, gid int) (mounts []jail.DataMount, err error) {
	for _, m := range s.mounts {
		var mounted *os.File
		switch m.Kind {
		case proto.MountDirectory:
			mounted, err = s.opener.mountDirectory(m, uid, gid)
		case proto.MountVolume:
			mounted, err = mountVolume(s.volumes[m.Slug], m, uid, gid)
		default:
			mounted, err = fuseMount(s.devices[m.Slug], m, uid, gid, s.allUsers)
		}
		if err != nil {
			return mounts, err
		}
		mounts = append(mounts, jail.DataMount{Name: path.Join(m.Slug, m.At), Mount: mounted})
	}
	if s.control == nil {
		return mounts, nil
	}
	if <-s.starts; s.err != nil {
		return mounts, s.err
	}
	// The process reads it when it has started. Until then, the kernel holds back requests.
	if err := s.configure(uid, gid); err != nil {
		return mounts, err
	}
	if err := s.checkParts(); err != nil {
		return mounts, err
	}
	s.stepDone()
	return mounts, nil
}

// stepDone is called when everything is mounted and when the process was started. After both it
// closes this process's descriptors of the mounts: when the serving process dies, the kernel then
// aborts them.
func (s *Set) stepDone() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.steps++; s.steps == 2 {
		s.closeDevices()
	}
}

func (s *Set) closeDevices() {
	for slug, f := range s.devices {
		_ = f.Close()
		delete(s.devices, slug)
	}
}

// configure sends the serving process its configuration.
func (s *Set) configure(uid, gid int) error {
	c := serverConfig{UID: uint32(uid), GID: uint32(gid), SpoolBytes: s.opener.SpoolBytes}
	for _, m := range s.mounts {
		if m.Kind == proto.MountS3 {
			c.Mounts = append(c.Mounts, servedMount{Mount: m, Credentials: s.keys[m.S3.Credential]})
		}
	}
	if err := json.NewEncoder(s.control).Encode(c); err != nil {
		return fmt.Errorf("start a mount: %w", err)
	}
	return nil
}

// checkParts returns an error if a visible part of a bucket is a file. Only the serving process can
// check that, and it answers if any mount has a part.
func (s *Set) checkParts() error {
	if !slices.ContainsFunc(s.mounts, isPart) {
		return nil
	}
	var p parts
	if err := json.NewDecoder(s.control).Decode(&p); err != nil {
		return fmt.Errorf("look at the parts of buckets: %w", err)
	}
	if p.File != "" {
		return &Error{p.File, "the part of the bucket that the program may see is a file", nil}
	}
	return nil
}

// isPart reports whether a mount has a part of a bucket, chosen for the execution.
func isPart(m proto.Mount) bool { return m.Kind == proto.MountS3 && m.At != "" }

// Abort kills the serving process, which aborts its mounts; see jail.Data.
func (s *Set) Abort() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.aborted = true
	if s.service != nil {
		s.service.Kill()
	}
}

// WriteError means that files of a program were not stored. Its text is for the tenant.
type WriteError struct{ text string }

func (e *WriteError) Error() string { return e.text }

// Finish waits until the program's writes are stored. The jail must be dead or dying. The error is
// a *WriteError if something was not stored.
func (s *Set) Finish(ctx context.Context) error {
	if s.control == nil || s.isAborted() {
		return nil
	}
	if !s.hasReported() {
		return nil
	}
	defer context.AfterFunc(ctx, s.Abort)()
	if err := s.control.SetReadDeadline(time.Now().Add(finishTimeout)); err != nil {
		return err
	}
	reports := json.NewDecoder(io.LimitReader(s.control, maxReports))
	for {
		var r report
		if err := reports.Decode(&r); err != nil {
			why := "the process that stores files ended early, perhaps for lack of memory"
			if errors.Is(err, os.ErrDeadlineExceeded) {
				why = fmt.Sprintf("the storage did not answer within %s", finishTimeout)
			}
			return &WriteError{"Some of what the program wrote below " + proto.MountsDir +
				" may not have been stored: " + why + "."}
		}
		if r.Done {
			return writeError(r.Failures, r.Failed)
		}
	}
}

// hasReported reports whether the serving process has sent a report: it does before it accepts the
// first change.
func (s *Set) hasReported() bool {
	raw, err := s.control.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		n, _, _ = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	return err == nil && n > 0
}

func (s *Set) isAborted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.aborted
}

// writeError returns the error for n files that were not stored, given the first few of them. It
// returns nil if n is 0.
func writeError(first []objectfs.Failure, n int) error {
	if n == 0 {
		return nil
	}
	var named []string
	for _, f := range first[:min(len(first), maxNamed)] {
		named = append(named, fmt.Sprintf("%.300q (%v)", proto.MountsDir+"/"+f.Path, f.Why))
	}
	text := strings.Join(named, ", ")
	if more := n - len(first); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return &WriteError{"What the program wrote could not be stored: " + text + "."}
}

// Close kills the serving process and releases everything. The jail must be dead or dying.
func (s *Set) Close() error {
	var errs []error
	<-s.starts
	s.closeDevices()
	if s.service != nil {
		errs = append(errs, s.service.Close())
	}
	if s.control != nil {
		errs = append(errs, s.control.Close())
	}
	return errors.Join(errs...)
}

func openDevice() (*os.File, error) {
	// The server waits in blocking reads, so the runtime must not poll it.
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/fuse: %w: the worker needs the device and the kernel's FUSE (modprobe fuse)", err)
	}
	return os.NewFile(uintptr(fd), "/dev/fuse"), nil
}

// fuseMount returns a FUSE file system of the given user, in no mount namespace. Other users can
// use it only if allUsers is set.
func fuseMount(device *os.File, m proto.Mount, uid, gid int, allUsers bool) (*os.File, error) {
	fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open a FUSE file system: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	for _, option := range [][2]string{
		{"source", m.Slug},
		{"subtype", "storage"},
		{"fd", strconv.Itoa(int(device.Fd()))},
		{"rootmode", "40000"},
		{"user_id", strconv.Itoa(uid)},
		{"group_id", strconv.Itoa(gid)},
		{"max_read", strconv.Itoa(objectfs.MaxRequest)},
	} {
		err = errors.Join(err, unix.FsconfigSetString(fs, option[0], option[1]))
	}
	err = errors.Join(err, unix.FsconfigSetFlag(fs, "default_permissions"))
	if allUsers {
		err = errors.Join(err, unix.FsconfigSetFlag(fs, "allow_other"))
	}
	flags := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	if m.ReadOnly {
		err = errors.Join(err, unix.FsconfigSetFlag(fs, "ro"))
		flags |= unix.MOUNT_ATTR_RDONLY
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return nil, fmt.Errorf("mount a FUSE file system: %w: the worker needs CAP_SYS_ADMIN", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, flags)
	if err != nil {
		return nil, fmt.Errorf("mount a FUSE file system: %w", err)
	}
	return os.NewFile(uintptr(fd), m.Slug), nil
}

// serverConfig is the message to a serving process.
type serverConfig struct {
	UID        uint32        `json:"uid"`
	GID        uint32        `json:"gid"`
	SpoolBytes int64         `json:"spool_bytes"`
	Mounts     []servedMount `json:"mounts"` // in the order of their devices
}

type servedMount struct {
	proto.Mount
	Credentials proto.S3Credentials `json:"credentials"`
}

// report is a message from a serving process. The first one says that a change will be accepted.
type report struct {
	Done     bool               `json:"done,omitempty"`     // all is stored, except what failed
	Failures []objectfs.Failure `json:"failures,omitempty"` // the first maxNamed
	Failed   int                `json:"failed,omitempty"`   // all
}

// parts is the serving process's report on the mounts' parts of buckets. It is sent before any
// report.
type parts struct {
	File string `json:"file,omitempty"` // the slug of a mount whose part is a file
}

// lookAtParts looks at the parts of buckets.
func lookAtParts(open OpenBucket, mounts []servedMount) (p parts, err error) {
	for _, m := range mounts {
		if !isPart(m.Mount) {
			continue
		}
		dir, name := path.Split(m.Prefix)
		m.Prefix = strings.TrimSuffix(dir, "/")
		objects, err := open(m.Mount, m.Credentials)
		if err != nil {
			return p, err
		}
		if objectfs.IsFile(objects, name) {
			p.File = m.Slug
		}
	}
	return p, nil
}

// OpenBucket opens the part of a bucket that a mount has.
type OpenBucket func(m proto.Mount, keys proto.S3Credentials) (objectfs.Objects, error)

// Serve serves the mounts of an execution, in a process that a Set has started. The process must
// end when Serve returns.
func Serve(open OpenBucket) error {
	// Other processes with the same uid, if any, must not read the credentials.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return err
	}
	control := os.NewFile(serverControl, "control")
	in := json.NewDecoder(control)
	var c serverConfig
	if err := in.Decode(&c); err != nil {
		return fmt.Errorf("read what to serve: %w", err)
	}
	// Even if compromised, this process can neither fill the disk nor dump its memory there.
	for which, limit := range map[int]uint64{unix.RLIMIT_FSIZE: uint64(c.SpoolBytes), unix.RLIMIT_CORE: 0} {
		if err := unix.Setrlimit(which, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return fmt.Errorf("limit the process: %w", err)
		}
	}
	go func() {
		_, _ = io.Copy(io.Discard, control)
		os.Exit(1) // the worker is dead, so the result does not matter
	}()
	out := json.NewEncoder(control)
	var mu sync.Mutex
	send := func(r report) {
		mu.Lock()
		defer mu.Unlock()
		_ = out.Encode(r) // if the worker is dead, this process ends anyway
	}
	if slices.ContainsFunc(c.Mounts, func(m servedMount) bool { return isPart(m.Mount) }) {
		found, err := lookAtParts(open, c.Mounts)
		if err == nil {
			err = out.Encode(found)
		}
		if err != nil {
			return err
		}
	}
	spool := objectfs.NewSpool(os.NewFile(serverSpool, "spool"), c.SpoolBytes)
	var mounts sync.WaitGroup
	var failures []objectfs.Failure
	for i, m := range c.Mounts {
		objects, err := open(m.Mount, m.Credentials)
		if err != nil {
			return err
		}
		mounts.Go(func() {
			failed, err := objectfs.Serve(objectfs.Config{
				Objects: objects, Device: serverDevice + i, UID: c.UID, GID: c.GID, Spool: spool,
				OnWrite: func() { send(report{}) },
			})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = append(failed, objectfs.Failure{Why: syscall.EIO})
			}
			for _, f := range failed {
				failures = append(failures, objectfs.Failure{Path: path.Join(m.Slug, m.At, f.Path), Why: f.Why})
			}
		})
	}
	mounts.Wait()
	send(report{Done: true, Failures: failures[:min(len(failures), maxNamed)], Failed: len(failures)})
	return nil
}
