// Package jail defines sandboxes: what they offer (Spec), what runs in them (Program) and how a
// run ended (Outcome). The packages below implement them: nsjail creates jails, jailinit is PID 1
// inside, wire is the protocol between the two, cgroup limits them.
//
// A jail is prepared before its program is known, runs one program and is gone. It may be
// prewarmed: the program's interpreter waits in it (Spec.Ahead). A program's failure is an
// Outcome; an error means that the sandbox failed.
package jail

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Spec describes a sandbox without its program. Every number must be positive.
type Spec struct {
	// Root is a directory that holds the jail's root file system, which nobody
	// changes while there are jails on it; empty for the host's runtimes.
	Root string
	// Network is the network that the jail can reach; the zero value is none.
	Network proto.Network
	CPU     float64 // cores; fractions are allowed
	Memory  int64   // bytes, of everything in the jail, tmpfs included; there is no swap
	Pids    int     // processes and threads of the program
	// HomeBytes and TmpBytes are the sizes of the home and of /tmp in bytes. They are in memory
	// up to a half and a quarter of it; larger ones are on disk. /dev/shm has the size of /tmp,
	// but is always in memory, at most half of it.
	HomeBytes int64
	TmpBytes  int64
	Inodes    int64 // files in the home, and in /tmp
	// Home is the home to mount; nil is an empty one. With a Home, HomeBytes and Inodes limit
	// the program's changes to it, which are always on disk.
	Home Home
	// Ahead is the interpreter to start before its program is known, as Source.Ahead returns
	// it. Such a jail is created at a low CPU weight, since nobody waits for it. Nil starts
	// nothing.
	Ahead *Program
	// HomeLater means that Jail.Bring will mount the home; Home must be nil.
	HomeLater bool
}

// Home is a home directory to mount instead of an empty one.
type Home interface {
	// Mount creates the home on an empty volume, for the program's uid and gid outside the
	// jail, while the jail is still being created. The mount is detached: the jail moves it to
	// its place, nosuid and nodev. The home closes the file and the volume, even if the
	// jail dies or is never completed. If Mount fails, the jail closes the volume.
	Mount(v Volume, uid, gid int) (*os.File, error)
}

// Volume is an empty directory with a limit on bytes and inodes.
type Volume interface {
	// Path names the directory within this process, until Close.
	Path() string
	// Close removes the volume with its content, even while it is in use.
	Close() error
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
	// Stdin is what the program reads from standard input, a regular file.
	// Empty is /dev/null.
	Stdin []byte
	// Timeout is counted from the program's start; 0 is no limit.
	Timeout time.Duration
	// Stdout and Stderr receive the program's output unaltered, as it is written; nil discards
	// it. Two goroutines write to them until Run returns. A writer that blocks blocks the
	// program, and Run.
	Stdout, Stderr io.Writer
}

// Owner is the owner of a file.
type Owner uint8

// Owners.
const (
	// OwnerProgram is the program's own uid; the file lies in its home or /tmp.
	OwnerProgram Owner = iota
	// OwnerInit is the jail's root, so that the program can read but not change
	// the file; it lies in JobDir.
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

// Kind is how a run ended.
type Kind string

// Kinds. The list may only grow.
const (
	Exited      Kind = "exited"       // by itself, with ExitCode
	Signaled    Kind = "signaled"     // by Signal
	TimedOut    Kind = "timeout"      // Program.Timeout passed
	OutOfMemory Kind = "oom"          // Spec.Memory was exceeded: the kernel killed something in the jail
	Seccomp     Kind = "seccomp"      // the program's first thread made a system call nobody survives
	Killed      Kind = "killed"       // by us: the context was done; Detail is its cause
	StartFailed Kind = "start_failed" // the program never ran: Step failed with Detail
)

// Outcome is how a run ended and which resources it used.
type Outcome struct {
	Kind       Kind
	ExitCode   int           // for Exited
	Signal     int           // for Signaled and Seccomp
	Step       string        // for StartFailed, such as "chdir /home/baponi"
	Detail     string        // a sentence for people, or empty
	Duration   time.Duration // from the program's start to its end, wall clock
	CPUTime    time.Duration // user and system, of everything in the jail
	MemoryPeak int64         // bytes, of everything in the jail; 0 where the kernel does not say
	// Network is the network usage; nil if the network was blocked.
	Network *proto.NetworkUsage
}

// Jail is one prepared sandbox.
type Jail interface {
	// Run runs p and returns when it is dead, all it started is dead, and all
	// they wrote has been handed to p.Stdout and p.Stderr. When ctx is done the
	// program is killed and the outcome is Killed. A jail runs one program.
	//
	// A waiting interpreter continues with a program that it was started for, see
	// Program.Continues. For any other program it is killed, and the program is started as in a
	// jail without one.
	Run(ctx context.Context, p Program) (Outcome, error)
	// Load prepares the program of the following Run, so that it starts sooner: it writes the
	// files and readies a waiting interpreter. Nothing of the program runs. Load is called at
	// most once, after Bring. It ignores p's Timeout, Stdout and Stderr.
	Load(ctx context.Context, p Program) error
	// Bring mounts the home of a jail with Spec.HomeLater, as Prepare does with Spec.Home. It is
	// called once, before Run.
	Bring(ctx context.Context, h Home) error
	// Alive reports whether the jail can still be used: a waiting interpreter may have died.
	Alive() bool
	// Memory returns the memory that the jail uses, in bytes.
	Memory() (int64, error)
	// Close kills the jail if it is alive and releases its resources. It is a no-op after Run.
	Close() error
}

// ErrFull means that a zygote has as many jails as it can have at a time.
var ErrFull = errors.New("there are as many jails of this zygote as can be")

// Zygote is a jail that others are forked from, all for programs of the same owner. Programs that
// run in a fork of its interpreter share the interpreter's hash seed and memory layout. Its methods
// may be called concurrently.
type Zygote interface {
	// Fork creates a jail. The limits of spec must be those of the zygote. If spec.Ahead has the
	// arguments of the zygote's interpreter, a fork of that waits in the jail, as if it had been
	// started as Ahead; any other interpreter is started there. The error may be ErrFull. After
	// any other error, except the context's, the zygote is unusable.
	Fork(ctx context.Context, spec Spec) (Jail, error)
	// Alive reports whether jails can be forked.
	Alive() bool
	// Memory returns the memory that the zygote uses, in bytes, without its forked jails.
	Memory() (int64, error)
	// Close closes the zygote when its last forked jail is gone, and blocks until then. Fork
	// fails from now on, and forked jails that have not run are not alive.
	Close() error
}
