package main

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// maxPath is large enough for a name in the longest of the system's directories.
const maxPath = 512

// maxSignal is the highest signal number.
const maxSignal = 64

// writeFiles writes the program's files and checks its working directory.
func writeFiles(o *order) {
	files := o.Files
	for f, ok := files.Next(); ok; f, ok = files.Next() {
		if errno := writeFile(&f, o.UID, o.GID); errno != 0 {
			fail("write ", f.Path, errno)
		}
	}
	// Checked here, because a failure in launch does not show whether chdir or execve failed.
	if errno := checkDir(o); errno != 0 {
		fail("chdir ", o.Dir, errno)
	}
}

// launch starts a process with the order's descriptors, stdout and stderr first, and closes them in
// this process. The process is under the filter and has a supervisor, which is nil for a zygote's
// interpreter.
func launch(o *order, s *supervisor) int {
	argv := o.Argv
	name := argv.Next()
	var buffer [maxPath]byte
	path, errno := lookup(name, &buffer)
	pid := 0
	if errno == 0 {
		pid, errno = spawn(path, o, s)
	}
	for _, fd := range o.fds[:o.n] {
		closeFD(int(fd))
	}
	if errno != 0 {
		fail("exec ", name, errno)
	}
	return pid
}

// spawn starts a process and returns when it runs its program, or the error if it does not.
func spawn(path *byte, o *order, s *supervisor) (int, unix.Errno) {
	argv := words(o.buffer)
	env := argv[point(argv, o.Argv):]
	point(env, o.Env)
	var ends [2]int32 // closed by execve
	if errno := socketpair(&ends); errno != 0 {
		return 0, errno
	}
	pid, errno := fork(0)
	if pid == 0 && errno == 0 {
		if errno = become(o); errno == 0 && s != nil {
			errno = confineProgram(int(ends[1]))
		}
		if errno == 0 {
			errno = execve(path, &argv[0], &env[0])
		}
		_, _ = write(int(ends[1]), []byte{byte(errno), byte(errno >> 8)})
		exit(exitConfine)
	}
	closeFD(int(ends[1]))
	var why [2]byte
	n := 0
	if errno == 0 {
		n, _ = s.receiveListener(int(ends[0]), why[:])
	}
	closeFD(int(ends[0]))
	if n > 0 {
		_, _ = wait(pid, nil, 0, nil)
		errno = unix.Errno(why[0]) | unix.Errno(why[1])<<8
	}
	return pid, errno
}

// point writes pointers to the strings and a nil pointer. It returns the number of pointers.
func point(to []uintptr, strings wire.Strings) int {
	n := 0
	for v := strings.Next(); v != nil; v = strings.Next() {
		to[n] = address(v)
		n++
	}
	to[n] = 0
	return n + 1
}

// confineProgram puts this process, which will be the program, under the filter. It sends the
// descriptor on which calls are received, if there is one, over a socket.
func confineProgram(to int) unix.Errno {
	listener, errno := programFilter.install()
	if errno == 0 && listener >= 0 {
		errno = sendDescriptor(to, listener)
	}
	return errno
}

// become makes this process, a fork of the init, ready to execute the program.
func become(o *order) unix.Errno {
	// Ignored signals stay ignored over an execve. A worker under nohup must not pass this on.
	for signal := uintptr(1); signal <= maxSignal; signal++ {
		setDisposition(signal)
	}
	errno := setMask(0)
	for _, c := range [...][4]uintptr{
		{unix.SYS_SETSID},
		{unix.SYS_SETGROUPS},
		{unix.SYS_SETRESGID, uintptr(o.GID), uintptr(o.GID), uintptr(o.GID)},
		{unix.SYS_SETRESUID, uintptr(o.UID), uintptr(o.UID), uintptr(o.UID)},
	} {
		if errno == 0 {
			errno = call(c[0], c[1], c[2], c[3])
		}
	}
	if errno == 0 {
		errno = chdir(&o.Dir[0])
	}
	for i, fd := range o.fds[:o.n] {
		if errno == 0 {
			// All descriptors that the init has opened are higher, see confine.
			errno = call(unix.SYS_DUP3, uintptr(fd), uintptr(1+i), 0)
		}
	}
	if errno == 0 {
		errno = openInput(o.Stdin)
	}
	if errno == 0 && o.guest {
		errno = grantGuest()
	}
	return errno
}

// openInput opens the program's standard input. Not even /dev/null is shared with the init, which
// inherited its own from the worker: locks and flags on it would affect every user.
func openInput(path []byte) unix.Errno {
	fd, errno := open(&path[0], unix.O_RDONLY, 0)
	if errno != 0 {
		return errno
	}
	return call(unix.SYS_DUP3, uintptr(fd), 0, 0)
}

// writeFile creates f and its missing parent directories. It writes a program's file with the
// program's file access rights, so following a symlink or mount left by a tenant needs no more than
// these rights.
func writeFile(f *wire.OrderFile, uid, gid uint32) unix.Errno {
	if f.Owner != wire.OwnerProgram {
		return makeFile(f)
	}
	actAs(uid, gid)
	errno := makeFile(f)
	actAsInit()
	return errno
}

func makeFile(f *wire.OrderFile) unix.Errno {
	if errno := makeParents(f.Path); errno != 0 {
		return errno
	}
	fd, errno := open(&f.Path[0], unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, f.Mode)
	if errno != 0 {
		return errno
	}
	for b := f.Content; len(b) > 0; {
		var n int
		n, errno = write(fd, b)
		if errno != 0 && errno != unix.EINTR {
			break
		}
		b = b[max(n, 0):]
	}
	closeFD(fd)
	return errno
}

func makeParents(path []byte) unix.Errno {
	for i := 1; i < len(path); i++ {
		if path[i] != '/' {
			continue
		}
		path[i] = 0
		errno := mkdir(&path[0], 0o755)
		path[i] = '/'
		if errno != 0 && errno != unix.EEXIST {
			return errno
		}
	}
	return 0
}

// actAs makes this process access files as uid and gid until actAsInit is called.
func actAs(uid, gid uint32) {
	_ = call(unix.SYS_SETFSGID, uintptr(gid), 0, 0)
	_ = call(unix.SYS_SETFSUID, uintptr(uid), 0, 0)
}

func actAsInit() {
	_ = call(unix.SYS_SETFSUID, 0, 0, 0)
	_ = call(unix.SYS_SETFSGID, 0, 0, 0)
}

func checkDir(o *order) unix.Errno {
	path := o.buffer[:copy(o.buffer, o.Dir)-1]
	copy(o.buffer[len(path):], "/.\x00")
	actAs(o.UID, o.GID)
	fd, errno := open(&o.buffer[0], unix.O_PATH|unix.O_DIRECTORY, 0)
	actAsInit()
	if errno == 0 {
		closeFD(fd)
	}
	return errno
}

// lookup finds a program named without a slash in the system's directories and writes its path to
// buffer. It ignores the program's own PATH, which begins in the home: the interpreter of a
// thread's code must not depend on an earlier run.
func lookup(name []byte, buffer *[maxPath]byte) (*byte, unix.Errno) {
	if slices.Contains(name, '/') {
		return &name[0], 0
	}
	for _, dir := range [...]string{"/usr/local/bin/", "/usr/bin/", "/bin/"} {
		n := copy(buffer[:], dir)
		if copy(buffer[n:], name) < len(name) {
			break
		}
		var st unix.Stat_t
		if stat(&buffer[0], &st) == 0 && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o001 != 0 {
			return &buffer[0], 0
		}
	}
	return nil, unix.ENOENT
}
