// Package jail says what a sandbox is: what may be asked of one (Spec, Program)
// and how a run in it ended (Outcome). How it is built is for the packages
// below: nsjail makes jails, jailinit is PID 1 inside, wire is what the two say
// to each other, cgroup limits them.
//
// A jail is prepared before it is known what will run in it, runs one program
// and is gone. It may be prepared so far that the program's interpreter is there
// and waits (Spec.Ahead). A program's failure is an Outcome; an error means that we
// failed.
package jail

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Spec is what a sandbox is, before it knows its program. Every number must be
// positive.
type Spec struct {
	// Root is a directory that holds the jail's root file system, which nobody
	// changes while there are jails on it; empty for the host's runtimes.
	Root string
	// Network is what the jail reaches; the zero value is nothing.
	Network proto.Network
	CPU     float64 // cores; fractions are allowed
	Memory  int64   // bytes, of everything in the jail, tmpfs included; there is no swap
	Pids    int     // processes and threads of the program
	// HomeBytes and TmpBytes are the sizes of the home and of /tmp, bytes. They are
	// in memory up to a half and a quarter of it; larger ones lie on disk. /dev/shm
	// has the size of /tmp, but is in memory always, half of it at most.
	HomeBytes int64
	TmpBytes  int64
	Inodes    int64 // files in the home, and in /tmp
	// Home is the home to bring along; nil is an empty one. With one, HomeBytes and
	// Inodes are the limits of what the program adds to it and changes in it, and
	// that always lies on disk.
	Home Home
	// Ahead is what Source.Ahead says: an interpreter to start while it is not known
	// yet what it will run. Such a jail is made when nobody waits for it, and takes
	// no time from those that run. Nil starts nothing.
	Ahead *Program
	// HomeLater says that Jail.Bring will bring the home; Home must be nil.
	HomeLater bool
}

// Home is a home directory that is brought along instead of an empty one.
type Home interface {
	// Mount makes the home on an empty volume, for the program's user and group
	// outside the jail, while the jail is still being made. The mount is in no
	// namespace; the jail moves it to its place, and sees to it that it is nosuid and
	// nodev there. The file and the volume are the home's to close from then on, also
	// when the jail is closed or dies, or never comes to be. When Mount fails, the
	// volume is the jail's.
	Mount(v Volume, uid, gid int) (*os.File, error)
}

// Volume is an empty directory with a limit on bytes and inodes.
type Volume interface {
	// Path names the directory within this process, until Close.
	Path() string
	// Close ends the volume and all that is on it, whoever still uses it.
	Close() error
}

// Program is what to run in a jail.
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
	// Stdout and Stderr receive what the program writes, unaltered, as it is
	// written; nil discards. They are written from two goroutines, and no longer
	// after Run has returned. A writer that blocks holds up the program, and Run.
	Stdout, Stderr io.Writer
}

// Owner says to whom a file belongs.
type Owner uint8

// Owners.
const (
	// OwnerProgram is the program's own uid; the file lies in its home or /tmp.
	OwnerProgram Owner = iota
	// OwnerInit is the jail's root, so that the program can read but not change
	// the file; it lies in JobDir.
	OwnerInit
)

// File is a file to write before the program starts. Missing parent directories
// are made, with mode 0755 and the same owner.
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

// Outcome is how a run ended and what it used.
type Outcome struct {
	Kind       Kind
	ExitCode   int           // for Exited
	Signal     int           // for Signaled and Seccomp
	Step       string        // for StartFailed, such as "chdir /home/baponi"
	Detail     string        // a sentence for people, or empty
	Duration   time.Duration // from the program's start to its end, wall clock
	CPUTime    time.Duration // user and system, of everything in the jail
	MemoryPeak int64         // bytes, of everything in the jail; 0 where the kernel does not say
	// Network is what went over the network; nil where that was blocked.
	Network *proto.NetworkUsage
}

// Jail is one prepared sandbox.
type Jail interface {
	// Run runs p and returns when it is dead, all it started is dead, and all
	// they wrote has been handed to p.Stdout and p.Stderr. When ctx is done the
	// program is killed and the outcome is Killed. A jail runs one program.
	//
	// An interpreter that was started ahead goes on with a program that is what it
	// was started for, see Program.Continues. For any other it is killed, and the
	// program is started as in a jail where nothing waits.
	Run(ctx context.Context, p Program) (Outcome, error)
	// Load tells the jail of the program that Run is to run, so that it starts sooner
	// then: its files are written, and an interpreter that waits for it gets ready.
	// Nothing of the program runs. It is called once, after Bring, or not at all; of p
	// all but Timeout, Stdout and Stderr has to be there.
	Load(ctx context.Context, p Program) error
	// Bring mounts the home of a jail with Spec.HomeLater, as Prepare would have done
	// with Spec.Home, once, before Run.
	Bring(ctx context.Context, h Home) error
	// Alive reports whether the jail can still be used: what waits in it may have died.
	Alive() bool
	// Memory is what the jail holds now, in bytes.
	Memory() (int64, error)
	// Close kills the jail if it is still alive and gives everything back. After
	// Run it does nothing.
	Close() error
}

// ErrFull says that there are as many jails of a parent as can be at a time.
var ErrFull = errors.New("there are as many jails of this parent as can be")

// Zygote is a jail that others are made within, all for programs of whoever the parent
// is for. It may have an interpreter: programs that run in a fork of that have its hash
// seed, and its layout of memory. Its methods may be called from several goroutines.
type Zygote interface {
	// Fork makes a jail. The Spec must have the limits of that of the parent. If its
	// Ahead has the arguments of the parent's, a fork of the parent's interpreter waits
	// there, as if it had been started as Ahead; any other is started there. The error may be ErrFull; after any
	// other that is not the context's the parent is of no use.
	Fork(ctx context.Context, spec Spec) (Jail, error)
	// Alive reports whether jails can be forked.
	Alive() bool
	// Memory is what the parent holds now, in bytes, without what the jails hold
	// that were forked from it.
	Memory() (int64, error)
	// Close ends the parent when the last jail is gone that was forked from it, and
	// returns then. None is forked any more, and those that have not run are not alive.
	Close() error
}
