// Package wire is the control protocol between a worker and the init inside a jail. The two
// exchange frames over one stream socket. The package imports nothing, and the functions that the
// init uses allocate nothing: the init must start fast and has no Go runtime.
//
// A frame is a 4-byte little-endian length of what follows, one byte of type, and the payload.
// Numbers in payloads are little-endian. A string is a 4-byte length, that many nonzero bytes, and
// a zero byte, so that it can be passed to the kernel in place. Content is a 4-byte length and its
// bytes. A list is a 4-byte count and its elements. A frame that exceeds its cap, has an unknown
// type or has a malformed payload ends the conversation.
//
// From the init to the worker:
//
//	Ready    version u8                       Once, first. The kernel attaches the
//	                                          sender's pid (SCM_CREDENTIALS). The
//	                                          worker identifies the init by that, not
//	                                          by the payload.
//	Waiting                                   The interpreter of Prewarm is ready.
//	Started                                   The program's execve succeeded, or the
//	                                          waiting interpreter has begun the
//	                                          program. The worker's clock starts.
//	Failed   step string, errno u32           The program, or the interpreter of
//	                                          Prewarm, could not be started. The init
//	                                          exits after it.
//	Exited   code i32, signal i32,            The program is dead; the worker's clock
//	         seccomp u8, maxrss KiB u64       stops. seccomp is 1 if a process of the
//	                                          program made a call that no program may
//	                                          make; signal is then SIGSYS.
//	Empty                                     Every other process in the jail except
//	                                          the init is dead too, and all output is
//	                                          in the pipes. The init exits after it.
//
// From the worker to the init:
//
//	Prewarm  as Start, without files          At most once, after Ready and before
//	                                          Start. Starts an interpreter, which
//	                                          waits on descriptor PrewarmFD. The init
//	                                          exits if it dies before Start.
//	Start    argv []string, env []string,     Once, after Ready, or after Waiting. Two
//	         dir string, stdin string,        descriptors come with its first byte
//	         uid u32, gid u32,                (SCM_RIGHTS): the program's stdout and
//	         files [](path string, mode u32,  stderr. Files are written in order, as
//	         owner u8, content)               their owner, and must not exist. stdin
//	                                          is a file that is opened afterwards. A
//	                                          waiting interpreter is killed first.
//	Load     as Start                         Instead of Start, after Waiting, without
//	                                          outputs. Sends the program to the
//	                                          waiting interpreter, which runs none of
//	                                          it yet. argv is empty; env is added to
//	                                          the interpreter's own.
//	Begin                                     Once, after Load: the interpreter runs
//	                                          the program.
//	Signal   number u32                       Sent to the program's process group, if the
//	                                          program still runs.
//	Kill                                      Kills everything in the jail, as if the
//	                                          program had been killed; Exited follows.
//
// The init of a zygote's jail sends only Ready, or Failed for its interpreter. It accepts Start
// once, for the interpreter, with a third descriptor from which the interpreter reads its orders.
// It also accepts:
//
//	Jail     root u32, program u32,           Any number of times. Creates a jail
//	         processes u32, mounts [](source  whose init has its own control socket and
//	         string, target string, type      sends Ready there. JailControl and the
//	         string, flags u32, options       constants after it define the order of
//	         string)                          the descriptors that come with it. An
//	                                          error is written to stderr, and the next
//	                                          Jail is still accepted.
//
// The init of a guest's jail accepts Start with five descriptors, see GuestFile. The socket and the
// heartbeat come with Load instead if the guest was started with Prewarm. The guest runs as the
// jail's root and keeps the capabilities with which it starts processes as the program's user and
// handles their files; what it executes has none.
//
// At the end of the stream an init exits, and the kernel then kills the whole PID namespace. A jail
// therefore never outlives its worker, however the worker died. An init whose order is not whole
// within OrderSeconds exits too.
//
// A program only starts by an order that arrived whole: Start, or Load and Begin, and for a waiting
// interpreter the order described at PrewarmFD. Nothing else starts one, such as the end of a stream,
// which any process on the way causes when it dies.
package wire
