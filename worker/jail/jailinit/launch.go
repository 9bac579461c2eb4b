package main

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// furnish writes the program's files and looks for its directory. The frame it
// returns names the step that failed.
func furnish(s wire.StartFrame) *wire.FailedFrame {
	for i := range s.Files {
		if err := writeFile(&s.Files[i], s.UID, s.GID); err != nil {
			return &wire.FailedFrame{Step: "write " + s.Files[i].Path, Errno: errno(err)}
		}
	}
	// Here, because ForkExec does not say whether chdir or execve failed.
	if err := checkDir(s.Dir, s.UID, s.GID); err != nil {
		return &wire.FailedFrame{Step: "chdir " + s.Dir, Errno: errno(err)}
	}
	return nil
}

// launch starts a process with these descriptors, its stdout and stderr first, and
// closes them here.
func launch(s wire.StartFrame, out []int) (int, *wire.FailedFrame) {
	files := []uintptr{0}
	for _, fd := range out {
		files = append(files, uintptr(fd))
	}
	path, err := lookup(s.Argv[0])
	var pid int
	if err == nil {
		pid, err = syscall.ForkExec(path, s.Argv, &syscall.ProcAttr{
			Dir:   s.Dir,
			Env:   s.Env,
			Files: files,
			Sys: &syscall.SysProcAttr{
				Credential: &syscall.Credential{Uid: s.UID, Gid: s.GID},
				Setsid:     true,
			},
		})
	}
	for _, fd := range out {
		_ = unix.Close(fd)
	}
	if err != nil {
		return 0, &wire.FailedFrame{Step: "exec " + s.Argv[0], Errno: errno(err)}
	}
	return pid, nil
}

// writeFile makes f and its missing parent directories. A file of the program
// is written with the program's own rights to files, so that nothing a tenant
// left behind (a symlink, a mount) is followed with more than those.
func writeFile(f *wire.File, uid, gid uint32) error {
	if f.Owner == wire.OwnerProgram {
		restore := actAs(uid, gid)
		defer restore()
	}
	if err := makeParents(f.Path); err != nil {
		return err
	}
	fd, err := unix.Open(f.Path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, f.Mode)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	for b := f.Content; len(b) > 0; {
		n, err := unix.Write(fd, b)
		if err != nil && err != unix.EINTR {
			return err
		}
		b = b[max(n, 0):]
	}
	return nil
}

func makeParents(path string) error {
	for i := 1; i < len(path); i++ {
		if path[i] != '/' {
			continue
		}
		if err := unix.Mkdir(path[:i], 0o755); err != nil && err != unix.EEXIST {
			return err
		}
	}
	return nil
}

// actAs makes this thread touch files as uid and gid until restore is called.
func actAs(uid, gid uint32) (restore func()) {
	_ = unix.Setfsgid(int(gid))
	_ = unix.Setfsuid(int(uid))
	return func() {
		_ = unix.Setfsuid(0)
		_ = unix.Setfsgid(0)
	}
}

func checkDir(dir string, uid, gid uint32) error {
	restore := actAs(uid, gid)
	defer restore()
	fd, err := unix.Open(dir+"/.", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// lookup finds a program named without a slash in the system's directories.
// The program's own PATH is not used: it begins in the home, and what runs a
// thread's code must not depend on what an earlier run left there.
func lookup(name string) (string, error) {
	if strings.IndexByte(name, '/') >= 0 {
		return name, nil
	}
	for _, dir := range []string{"/usr/local/bin/", "/usr/bin/", "/bin/"} {
		var st unix.Stat_t
		if unix.Stat(dir+name, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o001 != 0 {
			return dir + name, nil
		}
	}
	return "", unix.ENOENT
}
