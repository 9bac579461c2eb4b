// Package wire is the control protocol between a worker and the init inside a
// jail: frames over one stream socket, the worker at one end, PID 1 at the
// other. It imports nothing, and what the init needs of it allocates nothing, because
// the init has neither time nor a runtime.
//
// A frame is a 4-byte little-endian length of what follows, one byte of type,
// and the payload. Numbers in payloads are little-endian; a string is a 4-byte
// length, so many bytes that are not zero, and a zero byte, so that the kernel can be
// given it as it lies; content is a 4-byte length and its bytes; a list is a 4-byte
// count and its members. A frame that is longer than its cap, of an unknown type or
// not exactly as its payload should be ends the conversation.
//
// From the init to the worker:
//
//	Ready    version u8                       once, first. The kernel attaches the
//	                                          sender's pid (SCM_CREDENTIALS): that,
//	                                          not a payload, tells the worker who
//	                                          it is.
//	Waiting                                   the interpreter of Ahead is there.
//	Started                                   the program's execve succeeded, or the
//	                                          interpreter that waited has begun
//	                                          it; the worker's clock starts
//	                                          here.
//	Failed   step string, errno u32           the program, or the interpreter of
//	                                          Ahead, could not be started. The init
//	                                          exits after it.
//	Exited   code i32, signal i32,            the program is dead; the worker's
//	         seccomp u8, maxrss KiB u64       clock stops here. seccomp is 1 if the
//	                                          signal is the filter's.
//	Empty                                     so is everything else in the jail but
//	                                          the init: what they wrote is in the
//	                                          pipes. The init exits after it.
//
// From the worker to the init:
//
//	Ahead    as Start, without files          at most once, after Ready, and before
//	                                          Start: starts an interpreter, which
//	                                          waits on descriptor AheadFD. The init
//	                                          exits if that dies before Start.
//	Start    argv []string, env []string,     once, after Ready, or after Waiting. Two
//	         dir string, stdin string,        descriptors come with its first byte
//	         uid u32, gid u32,                (SCM_RIGHTS): the program's stdout and
//	         files [](path string, mode u32,  stderr. Files are written in order, as
//	         owner u8, content)               their owner, and must not exist. stdin
//	                                          is a file, opened after that. An
//	                                          interpreter that waits is killed.
//	GoOn     as Start                         instead of Start, after Waiting, and
//	                                          without descriptors: the interpreter
//	                                          that waits is told of the program, but
//	                                          runs none of it. argv is
//	                                          empty, env what is added to its own.
//	Begin                                     once, after GoOn: it becomes the program.
//	Signal   number u32                       sent to the program, if it still runs.
//	Kill                                      everything in the jail dies, as if
//	                                          the program had been killed; Exited
//	                                          follows.
//
// The init of a jail that others are made within sends nothing but Ready, or Failed of its
// interpreter. It is told, besides Start, once, of its interpreter, with a third descriptor
// that this takes orders from:
//
//	Jail     root u32, program u32,           any number: makes a jail, whose init has a
//	         processes u32, mounts [](source  control socket of its own and sends Ready
//	         string, target string, type      there. With it come descriptors, in the
//	         string, flags u32, options       order of JailControl and what follows. What
//	         string)                          fails is told on stderr, and the next is
//	                                          made.
//
// The end of the stream, in either direction, is an order: an init that reads
// it exits, and the kernel kills the whole PID namespace with it. So a jail
// never outlives its worker, however that died.
package wire
