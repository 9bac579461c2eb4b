package wire

// Version is the version that Ready carries. Worker and init are built together, so it only guards
// against a stale binary.
const Version = 17

// File descriptors that the init is started with.
const (
	// ControlFD is the init's end of the control socket.
	ControlFD = 3
	// LockFD is the lock on the jail's outside uids. The init only holds it: the uids stay in use
	// until the init is dead, even if the worker dies first.
	LockFD = 4
	// ForkFD exists in the jail of a Fork. It is the init's end of the socket on which the
	// interpreter waits, see PrewarmFD.
	ForkFD = 5
	// FilterFD is a file with the filter to install. The init of a zygote's jail keeps the content
	// for the jails that it creates. The init of a Fork needs it for a program that the forked
	// interpreter cannot continue with.
	FilterFD = 6
)

// Indexes of the descriptors that come with Jail. JailControl is the control socket of the new
// jail's init, JailLock its lock. From JailCgroups on they are files through which a process joins
// control groups.
const (
	JailControl = iota
	JailLock
	JailCgroups
)

// Arguments that name the kind of jail to its init. Without an argument the jail is for one
// program.
const (
	// Zygote is a jail in which other jails are created.
	Zygote = "zygote"
	// Limit is no jail: the init limits all users of a jail together, in a user namespace around it, and
	// executes nsjail there. Its arguments are Guest's, the limit of POSIX queues, nsjail's path and
	// its arguments.
	Limit = "limit"
	// Nsjail is no jail: the init executes nsjail, which it keeps from waking up every second. Its
	// arguments are nsjail's path and its arguments.
	Nsjail = "nsjail"
	// Guest is a jail whose program is the guest of a live sandbox. It runs as the jail's root.
	Guest = "guest"
	// Fork is a jail that a zygote's interpreter created inside the zygote's jail. A fork of the
	// interpreter waits in it, under the filter.
	Fork = "fork"
)

// GuestFile is the executable of the guest as its process sees it: the descriptors of a guest's Start
// are stdout, stderr, the socket on which the guest listens (descriptor 3), its executable and the
// heartbeat of its worker.
const GuestFile = "/proc/self/fd/4"

// ForkPID is the pid of the forked interpreter in the jail of a Fork.
const ForkPID = 2

// PrewarmFD is the descriptor on which a prewarmed interpreter waits, one end of a stream socket.
// A forked interpreter first sends one byte with the descriptor of the filter on which calls are
// received. The interpreter writes one byte when it is ready. It then reads its order: strings that
// each end with a zero byte, the last one empty, and the byte Begin. The strings are the working
// directory, the file to open as standard input, and the environment variables to add to its own,
// as NAME=value. Begin is sent later than the strings. After it, the interpreter closes the
// descriptor and continues as if it had been started with these values. Before it, the interpreter
// runs no code of the program. If the stream ends before Begin, another byte comes in its place, or
// the interpreter cannot apply the strings, it exits with a status other than 0.
//
// A guest that waits first receives the descriptors of Load, each with one byte, in the order of
// Start's. It ignores the strings.
const PrewarmFD = 3

// OrderSeconds is the longest time in seconds that an init waits for the next bytes of an order that
// it has begun to read, and for Begin after Load.
const OrderSeconds = 60

// Frame types.
const (
	Ready   byte = 'R'
	Waiting byte = 'W'
	Started byte = 'B'
	Failed  byte = 'F'
	Exited  byte = 'X'
	Empty   byte = 'E'
	Prewarm byte = 'A'
	Start   byte = 'S'
	Load    byte = 'O'
	Begin   byte = 'N'
	Signal  byte = 'G'
	Kill    byte = 'K'
	Jail    byte = 'J'
)

// Caps on the length field of a frame.
const (
	// MaxToInit bounds frames that the worker sends: 1 MiB of code, 1 MiB of standard input, 64 KiB
	// each of arguments and environment, and a few staged files.
	MaxToInit = 8 << 20
	// MaxToWorker bounds frames that the init sends.
	MaxToWorker = 4 << 10
)

// NoInput is the standard input of a program without input.
const NoInput = "/dev/null"

// HeaderSize is the size of the length field and the type byte.
const HeaderSize = 5

// Owners of a file in Start.
const (
	OwnerProgram byte = 0
	OwnerInit    byte = 1
)

// StartFrame is the payload of Prewarm, Start and Load, as the worker builds it.
type StartFrame struct {
	Argv, Env []string
	Dir       string
	Stdin     string
	UID, GID  uint32
	Files     []File
}

// File is a file that the init writes before the program starts.
type File struct {
	Path    string
	Mode    uint32
	Owner   byte
	Content []byte
}

// Order is the payload of Prewarm, Start and Load, parsed in place for an init that allocates
// nothing. Its strings include their terminating zero byte.
type Order struct {
	Argv, Env Strings
	Dir       []byte
	Stdin     []byte
	UID, GID  uint32
	Files     Files
}

// Strings is an iterator over a list of strings. N is the number that remain.
type Strings struct {
	N    int
	rest reader
}

// Next returns the next string, or nil if none remains.
func (s *Strings) Next() []byte {
	if s.N == 0 {
		return nil
	}
	s.N--
	return s.rest.text()
}

// Files is an iterator over a list of files.
type Files struct{ rest reader }

// Next returns the next file. It returns false if none remains.
func (f *Files) Next() (OrderFile, bool) {
	if len(f.rest.b) == 0 {
		return OrderFile{}, false
	}
	return f.rest.file(), true
}

// OrderFile is a File in an Order.
type OrderFile struct {
	Path    []byte
	Mode    uint32
	Owner   byte
	Content []byte
}

// JailFrame is the payload of Jail, as the worker builds it.
type JailFrame struct {
	Root      uint32 // id in the zygote's jail of the new jail's root; the next id is the program's
	Program   uint32 // id of the program in the new jail
	Processes uint32 // maximum number of the program's processes
	Mounts    []Mount
}

// Mount holds the arguments of one mount(2) call.
type Mount struct {
	Source, Target, Type string
	Flags                uint32
	Options              string
}

// JailOrder is the payload of Jail, parsed in place like Order.
type JailOrder struct {
	Root, Program, Processes uint32
	Mounts                   Mounts
}

// Mounts is an iterator over a list of mounts.
type Mounts struct{ rest reader }

// Next returns the next mount. It returns false if none remains.
func (m *Mounts) Next() (OrderMount, bool) {
	if len(m.rest.b) == 0 {
		return OrderMount{}, false
	}
	return m.rest.mount(), true
}

// OrderMount is a Mount in a JailOrder.
type OrderMount struct {
	Source, Target, Type []byte
	Flags                uint32
	Options              []byte
}

// FailedFrame is the payload of Failed.
type FailedFrame struct {
	Step  string
	Errno uint32
}

// ExitedFrame is the payload of Exited. Signal is 0 if the program exited with Code.
type ExitedFrame struct {
	Code, Signal int32
	BySeccomp    bool   // a process of the program made a forbidden call; Signal is SIGSYS
	MaxRSSKiB    uint64 // of the largest process
}

// Header returns the header of a frame of type typ with a payload of n bytes.
func Header(typ byte, n int) [HeaderSize]byte {
	l := uint32(n) + 1
	return [HeaderSize]byte{byte(l), byte(l >> 8), byte(l >> 16), byte(l >> 24), typ}
}

// ParseHeader returns the type and payload length of a frame. It returns false if the length is 0
// or over limit.
func ParseHeader(h [HeaderSize]byte, limit int) (typ byte, n int, ok bool) {
	l := uint32(h[0]) | uint32(h[1])<<8 | uint32(h[2])<<16 | uint32(h[3])<<24
	if l == 0 || int64(l) > int64(limit) {
		return 0, 0, false
	}
	return h[4], int(l) - 1, true
}

// Frame returns a whole frame of type typ.
func Frame(typ byte, payload []byte) []byte {
	h := Header(typ, len(payload))
	return append(h[:], payload...)
}

// Encode returns the whole frame of type typ.
func (s *StartFrame) Encode(typ byte) []byte {
	n := 64
	for _, f := range s.Files {
		n += len(f.Content) + len(f.Path) + 14
	}
	for _, l := range [][]string{s.Argv, s.Env} {
		for _, v := range l {
			n += len(v) + 5
		}
	}
	b := make([]byte, HeaderSize, n+HeaderSize+len(s.Dir)+len(s.Stdin))
	b = appendList(b, s.Argv)
	b = appendList(b, s.Env)
	b = appendString(b, s.Dir)
	b = appendString(b, s.Stdin)
	b = appendU32(b, s.UID)
	b = appendU32(b, s.GID)
	b = appendU32(b, uint32(len(s.Files)))
	for _, f := range s.Files {
		b = appendString(b, f.Path)
		b = appendU32(b, f.Mode)
		b = append(b, f.Owner)
		b = appendU32(b, uint32(len(f.Content)))
		b = append(b, f.Content...)
	}
	h := Header(typ, len(b)-HeaderSize)
	copy(b, h[:])
	return b
}

// ParseOrder parses the payload of Prewarm, Start and Load. The returned Order refers to b.
func ParseOrder(b []byte) (Order, bool) {
	r := reader{b: b, ok: true}
	o := Order{
		Argv: r.strings(), Env: r.strings(), Dir: r.checked(), Stdin: r.checked(), UID: r.u32(), GID: r.u32(),
		Files: r.files(),
	}
	return o, r.ok && len(r.b) == 0
}

// Encode returns the whole Jail frame.
func (j *JailFrame) Encode() []byte {
	var b []byte
	for _, v := range []uint32{j.Root, j.Program, j.Processes, uint32(len(j.Mounts))} {
		b = appendU32(b, v)
	}
	for _, m := range j.Mounts {
		for _, v := range []string{m.Source, m.Target, m.Type} {
			b = appendString(b, v)
		}
		b = appendString(appendU32(b, m.Flags), m.Options)
	}
	return Frame(Jail, b)
}

// ParseJail parses the payload of Jail. The returned JailOrder refers to b.
func ParseJail(b []byte) (JailOrder, bool) {
	r := reader{b: b, ok: true}
	j := JailOrder{Root: r.u32(), Program: r.u32(), Processes: r.u32(), Mounts: r.mounts()}
	return j, r.ok && len(r.b) == 0
}

// PutFailed writes a whole Failed frame to b and returns it. The step is verb followed by object,
// truncated if they are too long.
func PutFailed(b *[MaxToWorker]byte, verb string, object []byte, errno uint32) []byte {
	const step = HeaderSize + 4
	most := b[:step+MaxToWorker/2]
	n := step + copy(most[step:], verb)
	n += copy(most[n:], object)
	h := Header(Failed, n+1+4-HeaderSize)
	copy(b[:], h[:])
	putU32(b[HeaderSize:], uint32(n-step))
	b[n] = 0
	putU32(b[n+1:], errno)
	return b[:n+1+4]
}

// ParseFailed parses the payload of Failed.
func ParseFailed(b []byte) (FailedFrame, bool) {
	r := reader{b: b, ok: true}
	step := r.checked()
	f := FailedFrame{Step: string(step[:max(len(step)-1, 0)]), Errno: r.u32()}
	return f, r.ok && len(r.b) == 0
}

// ExitedSize is the length of a whole Exited frame.
const ExitedSize = HeaderSize + 4 + 4 + 1 + 8

// Encode returns the whole Exited frame.
func (e ExitedFrame) Encode() (b [ExitedSize]byte) {
	h := Header(Exited, ExitedSize-HeaderSize)
	copy(b[:], h[:])
	putU32(b[5:], uint32(e.Code))
	putU32(b[9:], uint32(e.Signal))
	if e.BySeccomp {
		b[13] = 1
	}
	putU32(b[14:], uint32(e.MaxRSSKiB))
	putU32(b[18:], uint32(e.MaxRSSKiB>>32))
	return b
}

// ParseExited parses the payload of Exited.
func ParseExited(b []byte) (ExitedFrame, bool) {
	r := reader{b: b, ok: true}
	e := ExitedFrame{Code: int32(r.u32()), Signal: int32(r.u32()), BySeccomp: r.u8() == 1, MaxRSSKiB: r.u64()}
	return e, r.ok && len(r.b) == 0
}

// SignalFrame returns the whole Signal frame.
func SignalFrame(number uint32) []byte { return Frame(Signal, appendU32(nil, number)) }

// ParseSignal parses the payload of Signal.
func ParseSignal(b []byte) (uint32, bool) {
	r := reader{b: b, ok: true}
	n := r.u32()
	return n, r.ok && len(r.b) == 0
}
