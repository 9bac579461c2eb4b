// Package jail defines sandboxes: what they offer (Spec), what runs in them (Program) and how a run
// ended (Outcome). The packages below implement them: nsjail creates jails, jailinit is PID 1
// inside, wire is the protocol between the two, cgroup limits them.
//
// A jail is prepared before its program is known, runs one program and is then closed. It may be
// prewarmed: the program's interpreter waits in it (Spec.Prewarm). A program's failure is an
// Outcome; an error means that the sandbox failed.
package jail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Spec describes a sandbox without its program. Every number but Terminals must be positive.
type Spec struct {
	// Root is a directory that holds the jail's root file system. If empty, the jail uses the
	// host's runtimes. Nobody may change the directory while jails use it.
	Root string
	// Network is the network that the jail can reach. The zero value is none.
	Network proto.Network
	CPU     float64 // cores; fractions are allowed
	Memory  int64   // bytes, of everything in the jail, including tmpfs; there is no swap
	Pids    int     // processes and threads of the program
	// OpenFiles limits the open files of each process. The worker's own limit may be lower.
	OpenFiles int
	// SystemCalls are calls that the program can make in addition to the usual ones, from
	// proto.AddableSystemCalls.
	SystemCalls []string
	// Terminals limits the pseudo-terminals that exist at a time; 0 is none.
	Terminals int
	// HomeBytes and TmpBytes are the sizes of the home and of /tmp in bytes. The home is in memory
	// if it is at most half of Memory, /tmp if it is at most a quarter; otherwise they are on disk.
	// /dev/shm has the size of /tmp, but is always in memory and at most half of it.
	HomeBytes int64
	TmpBytes  int64
	Inodes    int64 // files in the home, and in /tmp
	// Home is the home to mount; nil is an empty one. With a Home, HomeBytes and Inodes limit the
	// program's changes to it, which are always on disk.
	Home Home
	// Prewarm is the interpreter to start before its program is known, as Source.Prewarm returns
	// it; nil for none. Such a jail is created at a low CPU weight, since no execution waits for
	// it. A zygote's interpreter starts at a program's weight.
	Prewarm *Program
	// Guest means that the jail is for the guest of a live sandbox.
	Guest bool
	// RootBytes, if not 0, makes the root file system of a jail with Guest and Root writable for its root,
	// and limits the changes, which are on disk and end with the jail. Inodes limits them too. The jail
	// has the users and groups from 0 to 2046, and nobody.
	RootBytes int64
	// MountHomeLater means that Jail.MountHome will mount the home; Home must be nil.
	MountHomeLater bool
}

// Home is a home directory to mount instead of an empty one.
type Home interface {
	// Mount creates the home on an empty volume, for the program's uid and gid outside the jail,
	// while the jail is still being created. The returned mount is detached: the jail attaches it,
	// nosuid and nodev. The home closes the file and the volume, even if the jail dies or is never
	// completed. If Mount fails, the jail closes the volume.
	Mount(v Volume, uid, gid int) (*os.File, error)
}

// Volume is an empty directory with a limit on bytes and inodes.
type Volume interface {
	// Path returns the path of the directory. It is valid within this process, until Close.
	Path() string
	// Close removes the volume with its content, even while it is in use.
	Close() error
}

// Data are the file systems that a program sees below proto.MountsDir.
type Data interface {
	// Mount returns the mounts for the program's uid and gid outside of the jail, nosuid and nodev.
	// They are in no mount namespace. The jail closes them.
	Mount(uid, gid int) ([]DataMount, error)
	// Abort is called when the jail is killed, perhaps repeatedly. From then on no request of the
	// program to a mount may block: a process that waits for one does not die. It must not block.
	Abort()
}

// DataMount is one mount of Data.
type DataMount struct {
	Name  string // its path in proto.MountsDir
	Mount *os.File
}

// Program is a program to run in a jail.
type Program struct {
	// Argv is the command. A name without a slash is looked up in the system's
	// directories, never in the PATH of Env.
	Argv []string
	// Env is the whole environment, as NAME=value.
	Env []string
	// Dir is the working directory; it must exist.
	Dir string
	// Files are written in order before the program starts. None may exist yet.
	Files []File
	// Stdin is the content of standard input, a regular file. If empty, standard input is
	// /dev/null.
	Stdin []byte
	// LowWeight gives the program a tenth of the CPU weight of others.
	LowWeight bool
	// Timeout is counted from the program's start; 0 is no limit. When it has passed, the program's
	// process group gets SIGTERM, and after TimeoutGrace everything in the jail is killed. If
	// TimeoutGrace is 0, it is killed immediately.
	Timeout, TimeoutGrace time.Duration
	// Cancel, when closed, ends the program in the same way with CancelGrace. If it is closed
	// before Run, the jail is killed immediately. Of timeout and cancel, the first one decides when
	// the program is killed.
	Cancel      <-chan struct{}
	CancelGrace time.Duration
	// Listener, if not nil, is a listening Unix socket, and makes the program the guest of a live
	// sandbox, in a jail with Spec.Guest. Argv are the guest's arguments. The guest serves the socket
	// as descriptor 3, which no other process in the jail can reach. Heartbeat is the file of the
	// worker's heartbeat, which the guest reads.
	Listener, Heartbeat *os.File
	// Interception, if not nil, takes over connections of the program. The jail must have a network.
	Interception *Interception
	// Stdout and Stderr receive the program's output unaltered, as it is written. If nil, the
	// output is discarded. Two goroutines write to them until Run returns. A writer that blocks
	// blocks the program and Run.
	Stdout, Stderr io.Writer
}

// Interception takes over TCP connections of a program to some hosts.
type Interception struct {
	// Hosts are names with ports. A connection matches if the jail's resolver has returned its
	// address for the name.
	Hosts []proto.NetworkRule
	// Serve is called with each connection to a host, whose indices in Hosts are matched. If it
	// returns false, it has consumed read from the connection and answered nothing, and the connection
	// is relayed. Otherwise it has ended the connection. dial connects to the address that the program
	// connected to; Serve closes what dial returns. ctx is done when the jail is closed.
	Serve func(ctx context.Context, conn net.Conn, matched []int, dial func() (net.Conn, error)) (read []byte, served bool)
}

// Owner is the owner of a file.
type Owner uint8

// The owners.
const (
	// OwnerProgram is the program's own uid. The file is in its home or /tmp.
	OwnerProgram Owner = iota
	// OwnerInit is the jail's root: the program can read the file but not change it. The file is in
	// JobDir.
	OwnerInit
)

// File is a file to write before the program starts. Missing parent directories are created,
// with mode 0755 and the same owner.
type File struct {
	Path    string
	Mode    uint32 // permission bits
	Owner   Owner
	Content []byte
}

// Kind is the way in which a run ended.
type Kind string

// The kinds. The list may only grow.
const (
	Exited      Kind = "exited"    // the program exited with ExitCode
	Signaled    Kind = "signaled"  // Signal killed the program
	TimedOut    Kind = "timeout"   // Program.Timeout passed, see Outcome.Graceful
	Cancelled   Kind = "cancelled" // Program.Cancel was closed, see Outcome.Graceful
	OutOfMemory Kind = "oom"       // Spec.Memory was exceeded, or Uncharged was too much
	// HostOutOfMemory means that the kernel killed a process in the jail because the host, or the
	// worker's own control group, had no memory left. The jail was within Spec.Memory.
	HostOutOfMemory Kind = "host_oom"
	Seccomp         Kind = "seccomp"      // a process of the program made a forbidden system call
	Killed          Kind = "killed"       // the context was done; Detail is its cause
	StartFailed     Kind = "start_failed" // the program did not run: Step failed with Detail
)

// Outcome describes how a run ended and which resources it used.
type Outcome struct {
	Kind     Kind
	ExitCode int // for Exited
	Signal   int // for Signaled and Seccomp
	// Graceful means that a TimedOut or Cancelled program ended by itself after SIGTERM: with
	// ExitCode, or if Signal is not 0 by that signal.
	Graceful   bool
	Step       string        // for StartFailed, such as "chdir /home/baponi"
	Detail     string        // a human-readable sentence, or empty
	Duration   time.Duration // from the program's start to its end, wall clock
	CPUTime    time.Duration // user and system, of everything in the jail
	MemoryPeak int64         // bytes, of everything in the jail; 0 if the kernel does not report it
	// Uncharged is the kernel memory in bytes, not charged to Spec.Memory, for which an OutOfMemory
	// program was killed; 0 if it exceeded Spec.Memory.
	Uncharged int64
	// Network is the network usage; nil if the network was blocked.
	Network *proto.NetworkUsage
}

// Jail is one prepared sandbox.
type Jail interface {
	// Run runs p. It returns when p and everything it started are dead and all their output has
	// been written to p.Stdout and p.Stderr. When ctx is done, Run kills the program immediately,
	// even after a SIGTERM, and the outcome is Killed unless p had timed out or was cancelled
	// before. A jail runs one program.
	//
	// A waiting interpreter continues with the program if it was started for such a program, see
	// Program.Continues. Otherwise it is killed, and the program is started as in a jail without
	// one.
	Run(ctx context.Context, p Program) (Outcome, error)
	// Load prepares the program of the following Run, so that it starts sooner: it writes the
	// files and readies a waiting interpreter. Nothing of the program runs. Load is called at
	// most once, after MountHome and MountData. It ignores p's Timeout, Stdout and Stderr.
	Load(ctx context.Context, p Program) error
	// MountHome mounts the home of a jail with Spec.MountHomeLater, as Prepare does with Spec.Home. It
	// is called once, before Run.
	MountHome(ctx context.Context, h Home) error
	// BindHome mounts a directory of the mounted home at another path as well, which is a directory in
	// the jail. It does not follow links in dir, which is relative to the home; "." is the whole home. It
	// is called before Load.
	BindHome(ctx context.Context, dir, target string) error
	// MountData mounts the program's data below proto.MountsDir, which is empty otherwise. It is
	// called at most once, before Load.
	MountData(ctx context.Context, d Data) error
	// MountAgent mounts a directory of the host with the program of an agent, without the mounts below it,
	// at proto.AgentDir of a jail with Spec.Guest. It is read-only, nosuid and nodev. MountAgent is called
	// before Load.
	MountAgent(ctx context.Context, agent, dir string) error
	// WhileFrozen calls f while no process in the jail runs, during Run, in a jail with Spec.Guest. The
	// processes run on as soon as f has returned, ctx is done, the limit has passed, or the jail is killed.
	// The context of f is done then too. WhileFrozen returns the error of f, or ErrNotFrozen if it did not
	// keep the processes frozen until f returned. It must not be called concurrently.
	WhileFrozen(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error
	// Alive reports whether the jail can still be used. A waiting interpreter may have died.
	Alive() bool
	// Memory returns the memory that the jail uses, in bytes.
	Memory() (int64, error)
	// Close kills the jail if it is alive and releases its resources. It is a no-op after Run.
	Close() error
}

// ErrHostOutOfMemory means that the kernel killed a process of a jail that was being created, as in
// HostOutOfMemory.
var ErrHostOutOfMemory = errors.New("the host ran out of memory, and its kernel killed a process of the jail")

// The errors of Jail.WhileFrozen.
var (
	// ErrNotFrozen means that the processes of a jail could not be frozen, or ran on too early.
	ErrNotFrozen = errors.New("the processes were not frozen")
	// ErrFrozenTooLong is an ErrNotFrozen because the function did not return within the limit.
	ErrFrozenTooLong = fmt.Errorf("%w for long enough", ErrNotFrozen)
)

// ErrFull means that a zygote already has the maximum number of jails.
var ErrFull = errors.New("the zygote has the maximum number of jails")

// Zygote is a jail from which others are forked, all for programs of the same owner. Programs that
// run in a fork of its interpreter share the interpreter's hash seed and memory layout. Its methods
// may be called concurrently.
type Zygote interface {
	// Fork creates a jail. The limits of spec must be those of the zygote. If spec.Prewarm has the
	// arguments of the zygote's interpreter, a fork of the interpreter waits in the jail, as if
	// it had been prewarmed there. Any other interpreter is started in the jail. The error may be
	// ErrFull. After any other error, except the context's, the zygote is unusable.
	Fork(ctx context.Context, spec Spec) (Jail, error)
	// Alive reports whether jails can be forked.
	Alive() bool
	// Memory returns the memory that the zygote uses, in bytes, without its forked jails.
	Memory() (int64, error)
	// Close blocks until the last forked jail is gone, and then closes the zygote. From the call
	// on, Fork fails, and forked jails that have not run are dead.
	Close() error
}
