package worker

import (
	"context"
	"io"
	"os"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// Jobs assigns jobs to slots.
type Jobs interface {
	// Take blocks until a job is assigned to this slot. It returns ctx.Err() if ctx is done first.
	Take(ctx context.Context) (Lease, error)
}

// Lease is the right to run one attempt of one job.
type Lease interface {
	Job() *proto.Job
	Attempt() int
	// Secrets returns the values of the job's secrets by name.
	Secrets(ctx context.Context) (map[string][]byte, error)
	// Claim records that the program starts. The returned context is cancelled with [proto.ErrLost]
	// when the program must be killed immediately. After an error the program must not be started.
	Claim(ctx context.Context) (claimed context.Context, baseSeq int64, err error)
	// Cancelled returns a channel that is closed when a client cancels the execution. It is called
	// after Claim.
	Cancelled() <-chan struct{}
	// Commit makes a commit of the thread's home while the program runs. It retries until ctx is done; the
	// commit may have been made then.
	Commit(ctx context.Context, c *proto.Commit) error
	// Finish writes the result unless one exists already, and returns the resulting record.
	Finish(ctx context.Context, e Outcome) (*proto.Record, error)
	// Release ends the lease without a result.
	Release()
}

// Outcome is the outcome of an attempt.
type Outcome struct {
	Result          proto.Result
	LastSeq         int64 // of the last event published
	OutputTruncated bool  // events were evicted or lost
	Usage           *proto.Usage
	Steps           *proto.Steps
	Commit          *proto.Commit        // the thread's next version; nil if nothing changed, or there is no thread
	Volumes         []proto.VolumeCommit // the next versions of volumes that changed
}

// Output publishes the events of one attempt.
type Output interface {
	Stream(s proto.Stream) Stream
	// KeepDisplay reports whether a display of n bytes goes into the result. It is called before Display.
	KeepDisplay(n int) bool
	// Display publishes the display with an index in the result.
	Display(index int, d *proto.Display)
	// Close returns the number of the last event. truncated reports whether events are missing for
	// readers.
	Close() (last int64, truncated bool)
	// OverBudget reports, after Close, whether less is kept because the organisation has used up
	// its budget of stored output.
	OverBudget() bool
}

// Stream publishes one of a program's outputs.
type Stream interface {
	io.Writer
	// Keep returns how many of the next n bytes go into the result. It is called before Write.
	Keep(n int) int
}

// Jails prepares jails.
type Jails interface {
	Prepare(ctx context.Context, spec jail.Spec) (jail.Jail, error)
	// Zygote creates a jail to fork others from.
	Zygote(ctx context.Context, spec jail.Spec) (jail.Zygote, error)
}

// Images provides the root file systems of sandboxes.
type Images interface {
	// Get returns the image with a digest. The image stays until release is called.
	Get(ctx context.Context, digest string) (img Image, release func(), err error)
}

// Agents has the programs of coding agents.
type Agents interface {
	// Find returns the directory of an agent's program. The version may be empty for the newest.
	Find(agent, version string) (dir string, err error)
}

// Image is a root file system.
type Image struct {
	Root      string                    // its directory; empty for the host's runtimes
	Languages map[proto.Language]string // the absolute path of each interpreter; nil for the usual names
	Env       map[string]string         // variables that the image sets
}

// Homes provides the homes of threads, and volumes, which are threads as well.
type Homes interface {
	// CheckOut returns the home of a thread at its newest version.
	CheckOut(ctx context.Context, req proto.CheckoutRequest) (Home, error)
	// Read returns the newest version of a thread. It is empty if there is no thread.
	Read(ctx context.Context, org, thread string) (VolumeVersion, error)
}

// VolumeVersion is a version of a volume, which does not change. Its methods must not be called
// concurrently.
type VolumeVersion interface {
	// MountPart mounts a part of it, see [mount.Volume].
	MountPart(uid, gid int, open func(root int) (dir int, err error)) (*os.File, error)
	// Close releases it after the death of the jail.
	Close()
}

// Home is a thread's home, or a volume, for one execution. Its methods must not be called
// concurrently.
type Home interface {
	jail.Home
	// MountPart is Mount for a part of it, see [mount.Volume].
	MountPart(v jail.Volume, uid, gid int, open func(root int) (dir int, err error)) (*os.File, error)
	// PutStaged writes the thread's staged files. The error is a [*proto.UploadsError] if they do
	// not fit.
	PutStaged(ctx context.Context) error
	// MakeTmp turns a directory of the home into one that programs can use as /tmp. It removes
	// anything else with that name.
	MakeTmp(name string) error
	// PutProgram writes the program's file and returns its name. The name is not the usual one if
	// the home already has a file with that name. It may be called repeatedly.
	PutProgram(usual string, content []byte) (name string, err error)
	// LimitSpace limits the program's writes to the space left in the home. It is called after
	// PutStaged, MakeTmp and PutProgram.
	LimitSpace() error
	// SaveLive stores the home of a running live sandbox as the thread's next version, and returns the
	// number of the newest version. freeze calls read while no process changes the home. commit makes a
	// commit, see [Lease]. The errors are those of Save.
	SaveLive(ctx context.Context, freeze func(ctx context.Context, read func(ctx context.Context) error) error,
		commit func(ctx context.Context, c *proto.Commit) error) (version int64, err error)
	// Save stores the changes of the program and returns the commit that makes them the thread's
	// next version, nil if there are none. The jail must be dead. It returns a [*proto.LimitError],
	// [*proto.AttributesError], [*proto.DepthError] or [*proto.FileError] if the home exceeds a limit.
	Save(ctx context.Context) (*proto.Commit, error)
	// Close releases the home after the death of the jail. committed reports whether the commit of
	// Save is the thread's newest version.
	Close(committed bool) error
}
