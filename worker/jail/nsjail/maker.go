// Package nsjail creates jails with nsjail. Each worker process has one Maker. It owns a directory
// and a subtree of the control groups. It shares a range of uids with the host's other workers
// through locks.
package nsjail

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
	"github.com/bullpen-run/bullpen/worker/jail/hostmemory"
)

// The defaults of Config.
const (
	DefaultRunDir   = "/run/bullpen"
	DefaultUIDLocks = "/run/bullpen/uids"
	DefaultHome     = "/home/baponi"
	DefaultForks    = 32
	DefaultPrograms = 8
)

// MinPids is the minimum of Spec.Pids: the init's own threads count against the same limit, for its
// uid.
const MinPids = 16

// maxFiles is the maximum number of open files in each process of a program. Their memory is
// charged to the program, but their number counts against the host's limit (fs.file-max).
const maxFiles = 4096

// Config configures a Maker. Zero values mean the defaults.
type Config struct {
	NsjailPath string // the executable; required
	// RunDir is shared by workers that clean up after each other. Every uid must be able to
	// traverse it. The default is /run/bullpen.
	RunDir string
	UIDs   UIDs // default DefaultUIDs
	// UIDLocks is the directory of the locks on UIDs, one for the whole host. The default is
	// /run/bullpen/uids.
	UIDLocks string
	Home     string // the program's home; default /home/baponi
	// Network is the uplink of jails with a network, which cannot be created without it. The caller
	// owns it.
	Network *egress.Network
	// VolumeDir is a directory on a disk, for homes and /tmp that do not fit in memory. Such jails
	// cannot be created without it.
	VolumeDir string
	// Programs is how many programs run at a time. They share half of the inotify instances and
	// watches available to the host's root. The default is 8.
	Programs int
	Forks    int          // maximum number of jails forked from one zygote at a time; at most 128, default 32
	Log      *slog.Logger // default slog.Default()
}

var errClosing = errors.New("prepare jail: the maker of jails is closed")

// Maker creates jails.
type Maker struct {
	cfg      Config
	dir      string                   // this worker's directory in RunDir/workers
	lock     *os.File                 // held while this worker is alive, as other workers check
	init     *os.File                 // the init's executable, sealed in memory
	guest    func() (*os.File, error) // opens the executable of guests, sealed in memory, once
	filter   *os.File                 // the filter of programs without Spec.SystemCalls, sealed in memory
	null     *os.File
	proc     *proc
	pids     int // maximum of RLIMIT_NPROC
	files    int // RLIMIT_NOFILE of programs
	share    share
	tree     *cgroup.Tree
	uids     *uidPool // of two each
	rootUIDs *uidPool // for jails with a writable root

	netMu       sync.Mutex
	netLimits   []netLimit // set in each jail
	noNetLimits error      // why others are not; nil if all are
	noFragments error      // as Fragments; set by Open

	volumesMu sync.Mutex
	volumes   *disk.Pool // opened on first use

	rootsMu  sync.Mutex
	roots    map[rootKey]*root
	rootsSeq int // number of the next root

	watch      *hostWatch
	hostMemory *hostmemory.Reader

	seq    atomic.Uint64
	jails  sync.WaitGroup // jails whose resources are not yet released
	mu     sync.Mutex
	live   map[*sandbox]struct{}
	closed bool
}

// Open prepares the shared parts of all jails, and removes leftovers of dead workers. The error
// names what is missing and how to fix it.
func Open(cfg Config) (*Maker, error) {
	m := &Maker{
		cfg: cfg, live: map[*sandbox]struct{}{}, roots: map[rootKey]*root{}, guest: sync.OnceValues(openGuest),
	}
	if m.cfg.RunDir == "" {
		m.cfg.RunDir = DefaultRunDir
	}
	if m.cfg.UIDLocks == "" {
		m.cfg.UIDLocks = DefaultUIDLocks
	}
	if m.cfg.Home == "" {
		m.cfg.Home = DefaultHome
	}
	if m.cfg.UIDs == (UIDs{}) {
		m.cfg.UIDs = DefaultUIDs
	}
	if m.cfg.Forks == 0 {
		m.cfg.Forks = DefaultForks
	}
	if m.cfg.Programs == 0 {
		m.cfg.Programs = DefaultPrograms
	}
	if m.cfg.Log == nil {
		m.cfg.Log = slog.Default()
	}
	if err := m.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("jail: %w", err), m.release())
	}
	m.watch = m.watchHost(m.readHost)
	return m, nil
}

// CgroupVersion returns the version of the control groups that limit jails: 1 or 2.
func (m *Maker) CgroupVersion() int { return m.tree.Version() }

// Home returns the program's home directory inside a jail.
func (m *Maker) Home() string { return m.cfg.Home }

func (m *Maker) open() (err error) {
	if err := m.check(); err != nil {
		return err
	}
	if err := m.limits(); err != nil {
		return err
	}
	if m.hostMemory, err = hostmemory.Open(); err != nil {
		return err
	}
	if m.share, err = findShare(m.cfg.Programs); err != nil {
		return err
	}
	if m.proc, err = findProc(); err != nil {
		return err
	}
	if m.init, err = initImage(); err != nil {
		return err
	}
	if m.filter, err = filterFile(nil); err != nil {
		return err
	}
	if m.null, err = os.Open(os.DevNull); err != nil {
		return err
	}
	if err := m.cfg.UIDs.check(); err != nil {
		return err
	}
	if err := openUIDLocks(m.cfg.UIDLocks); err != nil {
		return err
	}
	m.uids = &uidPool{UIDs: m.cfg.UIDs.pairs(), size: 2, dir: m.cfg.UIDLocks}
	m.rootUIDs = &uidPool{UIDs: m.cfg.UIDs.rest(), size: RootUIDs, dir: m.cfg.UIDLocks}
	if err := m.enter(); err != nil {
		return err
	}
	limits, err := tryNetLimits()
	if m.netLimits = limits; err != nil {
		m.lackNetLimits(err)
	}
	if m.noFragments = limitFragments(); m.noFragments != nil {
		m.cfg.Log.Warn("fragments of packets not limited", "error", m.Fragments())
	}
	if _, err := m.skeleton(rootKey{}); err != nil {
		return err
	}
	// nsjail mounts a jail's root on these while it builds it. Without them, it would let a jail's
	// uid create them in /tmp.
	for _, name := range []string{"root", "tmp"} {
		if err := makeDir("/run/user/nsjail.0."+name, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// rootKey identifies a jail's /.
type rootKey struct {
	image     string // Spec.Root
	network   bool   // a resolver is available
	terminals bool   // there are terminals
	guest     bool   // for guests of live sandboxes
}

// root is a skeleton that is created on first use, which may take long for an image.
type root struct {
	dir      string
	mu       sync.Mutex
	skeleton *skeleton
}

// skeleton returns the / of jails with this key, and creates it once. Jails with other keys do not
// wait for it.
func (m *Maker) skeleton(key rootKey) (*skeleton, error) {
	r, err := m.root(key)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.skeleton != nil {
		return r.skeleton, nil
	}
	s, err := newSkeleton(r.dir, m.cfg.Home, key, m.proc)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lay out the root file system: %w", err), os.RemoveAll(r.dir))
	}
	r.skeleton = s
	return s, nil
}

func (m *Maker) root(key rootKey) (*root, error) {
	m.rootsMu.Lock()
	defer m.rootsMu.Unlock()
	if r := m.roots[key]; r != nil {
		return r, nil
	}
	if err := m.dropRoots(); err != nil {
		return nil, err
	}
	r := &root{dir: filepath.Join(m.dir, "root", strconv.Itoa(m.rootsSeq))}
	m.rootsSeq++
	m.roots[key] = r
	return r, nil
}

// dropRoots removes the skeletons of images that are gone. No jail uses them: an image exists as
// long as it is in use.
func (m *Maker) dropRoots() error {
	for key, r := range m.roots {
		if key.image == "" {
			continue
		}
		if _, err := os.Lstat(key.image); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.RemoveAll(r.dir); err != nil {
			return fmt.Errorf("remove the root file system of an image that is gone: %w", err)
		}
		delete(m.roots, key)
	}
	return nil
}

// limits computes the limits of jails from the worker's own limits, which it may be unable to
// raise.
func (m *Maker) limits() error {
	var pids, files, core unix.Rlimit
	for which, limit := range map[int]*unix.Rlimit{
		unix.RLIMIT_NPROC: &pids, unix.RLIMIT_NOFILE: &files, unix.RLIMIT_CORE: &core,
	} {
		if err := unix.Getrlimit(which, limit); err != nil {
			return err
		}
	}
	m.pids = int(min(pids.Max, 1<<22))
	m.files = int(min(files.Max, maxFiles))
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		return err
	}
	return checkCore(core.Max, string(pattern))
}

// checkCore returns an error if a worker with hard limit most cannot prevent core dumps of
// programs. If the host pipes dumps to a program, a limit of 1 byte prevents them, but a limit of 0
// does not. If the host sends them to a socket, no limit does.
func checkCore(most uint64, pattern string) error {
	pattern = strings.TrimSpace(pattern)
	switch {
	case strings.HasPrefix(pattern, "@"):
		return fmt.Errorf("core dumps of programs cannot be prevented: the host sends them to a socket "+
			"(kernel.core_pattern is %q), "+
			"whatever the limit: set it to a file or a pipe, such as `sysctl kernel.core_pattern=core`", pattern)
	case most == 0 && strings.HasPrefix(pattern, "|"):
		return fmt.Errorf("core dumps of programs cannot be prevented: the host pipes them to a program "+
			"(kernel.core_pattern is %q), "+
			"which a limit of 0 does not stop and one of 1 byte does: raise the worker's hard limit (systemd LimitCORE=1, "+
			"docker --ulimit core=1), or change the pattern", pattern)
	}
	return nil
}

func (m *Maker) check() error {
	if os.Geteuid() != 0 {
		return errors.New("the worker is not root: it needs root (not inside the jails) to map uids and make control groups")
	}
	info, err := os.Stat(m.cfg.NsjailPath)
	if err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("no nsjail at %q: run deploy/fetch.sh nsjail, or name the executable", m.cfg.NsjailPath)
	}
	if m.cfg.Forks < 1 || m.cfg.Forks > MaxForks {
		return fmt.Errorf("%d jails forked from one zygote: set 1 to %d", m.cfg.Forks, MaxForks)
	}
	for _, p := range []string{m.cfg.RunDir, m.cfg.UIDLocks, m.cfg.Home} {
		if !filepath.IsAbs(p) || p != filepath.Clean(p) || p == "/" {
			return fmt.Errorf("%q is not a clean absolute path", p)
		}
	}
	return nil
}

// enter creates this worker's directory and control groups, and removes those of dead workers. A
// worker is alive while its lock is held. A single lock makes both one atomic step.
func (m *Maker) enter() error {
	workers := filepath.Join(m.cfg.RunDir, "workers")
	for _, d := range []string{m.cfg.RunDir, workers} {
		if err := makeDir(d, 0o755); err != nil {
			return err
		}
	}
	all, err := flock(filepath.Join(m.cfg.RunDir, "lock"), unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer func() { _ = all.Close() }()
	// The name identifies the directory whose locks show whether this worker is alive. Workers with
	// another directory leave its control groups alone.
	var st unix.Stat_t
	if err := unix.Stat(m.cfg.RunDir, &st); err != nil {
		return err
	}
	prefix := fmt.Sprintf("%x.%x.", st.Dev, st.Ino)
	instance := prefix + rand.Text()[:12]
	entries, err := os.ReadDir(workers)
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for _, e := range entries {
		dir := filepath.Join(workers, e.Name())
		f, err := flock(filepath.Join(dir, "lock"), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			alive[e.Name()] = true
			continue
		}
		if err != nil {
			return err
		}
		if err := errors.Join(f.Close(), os.RemoveAll(dir)); err != nil {
			return err
		}
	}
	if m.tree, err = cgroup.Open(instance); err != nil {
		return err
	}
	swept, err := m.tree.Sweep(func(name string) bool { return strings.HasPrefix(name, prefix) && !alive[name] })
	if len(swept) > 0 {
		m.cfg.Log.Info("removed what dead workers left", "instances", strings.Join(swept, ","))
	}
	if err != nil {
		return err
	}
	m.dir = filepath.Join(workers, instance)
	if err := makeDir(m.dir, 0o755); err != nil {
		return err
	}
	m.lock, err = flock(filepath.Join(m.dir, "lock"), unix.LOCK_EX|unix.LOCK_NB)
	return err
}

func flock(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// pool returns the pool of volumes. It is opened when a jail first needs one: most workers never
// do, and it requires tools of its own.
func (m *Maker) pool() (*disk.Pool, error) {
	m.volumesMu.Lock()
	defer m.volumesMu.Unlock()
	if m.volumes != nil {
		return m.volumes, nil
	}
	if m.cfg.VolumeDir == "" {
		return nil, errors.New("the home or /tmp has to lie on a disk, since memory is too small for it or the home is " +
			"mounted later, " +
			"and there is no directory for it on a disk")
	}
	var err error
	m.volumes, err = disk.Open(disk.Config{Dir: m.cfg.VolumeDir, Log: m.cfg.Log})
	return m.volumes, err
}

// closePool closes the pool and discards its prepared volumes. The pool is reopened on demand.
func (m *Maker) closePool() (err error) {
	m.volumesMu.Lock()
	defer m.volumesMu.Unlock()
	if m.volumes != nil {
		err = m.volumes.Close()
		m.volumes = nil
	}
	return err
}

// TryDisk creates a jail of the spec with a home on disk. It keeps nothing that was created for it:
// no prepared volumes, and no directory that did not exist. A worker calls it when it starts. The
// error names what is missing and how to fix it.
func (m *Maker) TryDisk(ctx context.Context, spec jail.Spec) error {
	spec.HomeBytes = spec.Memory
	return m.onTrial(func() error { return m.tryJail(ctx, spec) })
}

// TryHome creates a jail of the spec with a caller's home, as threads use it, on top of an empty
// directory beside the volumes. Like TryDisk, it keeps nothing. The error names what is missing and
// how to fix it.
func (m *Maker) TryHome(ctx context.Context, spec jail.Spec) error {
	return m.onTrial(func() error {
		if _, err := m.pool(); err != nil { // which makes the directory
			return err
		}
		lower, err := os.MkdirTemp(m.cfg.VolumeDir, "trial-")
		if err != nil {
			return fmt.Errorf("try a home: %w", err)
		}
		h := &trialHome{lower: lower}
		spec.Home = h
		return errors.Join(m.tryJail(ctx, spec), h.close())
	})
}

// trialHome is the home of a new thread, for TryHome.
type trialHome struct {
	lower  string
	volume jail.Volume
	mount  *os.File
}

// Mount creates the home; see jail.Home.
func (h *trialHome) Mount(v jail.Volume, uid, gid int) (*os.File, error) {
	owner, err := home.NewOwner(uid, gid)
	if err != nil {
		return nil, err
	}
	defer func() { _ = owner.Close() }()
	if h.mount, err = (&home.Overlay{Lower: h.lower, Volume: v.Path(), Owner: owner}).Mount(); err != nil {
		return nil, err
	}
	h.volume = v
	return h.mount, nil
}

func (h *trialHome) close() (err error) {
	if h.volume != nil {
		err = errors.Join(h.mount.Close(), h.volume.Close())
	}
	return errors.Join(err, os.Remove(h.lower))
}

func (m *Maker) tryJail(ctx context.Context, spec jail.Spec) error {
	j, err := m.Prepare(ctx, spec)
	if err != nil {
		return err
	}
	return j.Close()
}

// onTrial calls f, discards the prepared volumes, and removes the directory of volumes if it did
// not exist before.
func (m *Maker) onTrial(f func() error) error {
	there := m.cfg.VolumeDir
	for there != "" && there != "/" {
		if _, err := os.Lstat(there); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		there = filepath.Dir(there)
	}
	err := errors.Join(f(), m.closePool())
	for dir := m.cfg.VolumeDir; dir != there; dir = filepath.Dir(dir) {
		if os.Remove(dir) != nil { // it was not created, or is in use by others
			break
		}
	}
	return err
}

// Prepare creates a jail that waits for its program. ctx is only for the preparation.
func (m *Maker) Prepare(ctx context.Context, spec jail.Spec) (jail.Jail, error) {
	s, err := m.admit(spec)
	if err != nil {
		return nil, err
	}
	if err := s.prepare(ctx); err != nil {
		return nil, s.abandon("prepare jail", err)
	}
	if !m.remember(s) {
		return nil, errors.Join(errClosing, s.Close())
	}
	return s, nil
}

// admit registers a new jail of the spec, which the caller must release.
func (m *Maker) admit(spec jail.Spec) (*sandbox, error) {
	if spec.CPU <= 0 || spec.Memory <= 0 || spec.Pids < MinPids || spec.OpenFiles <= 0 || spec.HomeBytes <= 0 ||
		spec.TmpBytes <= 0 || spec.Inodes <= 0 {
		return nil, fmt.Errorf("prepare jail: %+v is not usable: every limit must be positive, and pids at least %d",
			spec, MinPids)
	}
	if spec.Pids > m.pids {
		return nil, fmt.Errorf("prepare jail: %d pids are more than the %d that the worker's own hard limit "+
			"(RLIMIT_NPROC) allows: "+
			"raise that", spec.Pids, m.pids)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errClosing
	}
	m.jails.Add(1)
	return &sandbox{m: m, spec: spec}, nil
}

// remember records a live jail. It returns false if the Maker has been closed.
func (m *Maker) remember(s *sandbox) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.live[s] = struct{}{}
	}
	return !m.closed
}

func (m *Maker) forget(s *sandbox) {
	m.mu.Lock()
	delete(m.live, s)
	m.mu.Unlock()
	m.jails.Done()
}

// Close kills the remaining jails, waits until they are gone, and removes everything that Open
// created.
func (m *Maker) Close() error {
	m.mu.Lock()
	m.closed = true
	var left []*sandbox
	for s := range m.live {
		left = append(left, s)
	}
	m.mu.Unlock()
	var errs []error
	for _, s := range left {
		errs = append(errs, s.Close())
	}
	m.jails.Wait()
	m.watch.close()
	return errors.Join(append(errs, m.release())...)
}

func (m *Maker) release() error {
	var errs []error
	errs = append(errs, m.closePool())
	if m.hostMemory != nil {
		errs = append(errs, m.hostMemory.Close())
	}
	if m.tree != nil {
		errs = append(errs, m.tree.Close())
	}
	if m.dir != "" {
		errs = append(errs, os.RemoveAll(m.dir))
	}
	if m.uids != nil {
		errs = append(errs, m.uids.close(), m.rootUIDs.close())
	}
	for _, f := range []*os.File{m.lock, m.init, m.filter, m.null} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}
