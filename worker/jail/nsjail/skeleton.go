package nsjail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/bullpen-run/bullpen/worker/jail"
)

const hostname = "bullpen"

// systemDirs are the host's directories a jail sees beside /usr: links into it
// on a merged system, directories of their own on others.
var systemDirs = [...]string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} // read only

// copied are the files and directories of the host's /etc a jail gets a copy of,
// where they exist.
var copied = [...]string{ // read only
	"alternatives", "ld.so.cache", "localtime", "mime.types", "os-release",
	"protocols", "services", "ssl/certs", "ssl/openssl.cnf",
}

// bind is a directory outside, mounted read-only inside a jail.
type bind struct{ src, dst string }

// skeleton is the read-only / of jails, and what is mounted into it.
type skeleton struct {
	dir   string
	binds []bind
}

// maxEtc bounds, in bytes, what is copied of an image's /etc.
const maxEtc = 64 << 20

// hostSkeleton makes the / of jails that see the host's runtimes.
func hostSkeleton(dir, home string) (*skeleton, error) {
	s := &skeleton{dir: dir, binds: []bind{{"/usr", "/usr"}}}
	if err := s.frame(home, "usr", "etc/ssl"); err != nil {
		return nil, err
	}
	for _, name := range systemDirs {
		if err := s.adopt("/", name); err != nil {
			return nil, err
		}
	}
	if err := writeEtc(filepath.Join(dir, "etc"), home); err != nil {
		return nil, err
	}
	names := copied[:]
	python, err := filepath.Glob("/etc/python3*")
	if err != nil {
		return nil, err
	}
	for _, p := range python {
		names = append(names, strings.TrimPrefix(p, "/etc/"))
	}
	for _, name := range names {
		if err := copyTree(filepath.Join("/etc", name), filepath.Join(dir, "etc", name)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// imageSkeleton makes the / of jails that see the root file system image: every
// directory at its top but those that are a jail's own. Nothing in it is
// followed: a link is made anew, so that it leads nowhere but into the jail.
func imageSkeleton(dir, home, image string) (*skeleton, error) {
	s := &skeleton{dir: dir}
	if err := s.frame(home); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(image)
	if err != nil {
		return nil, fmt.Errorf("read the sandbox's image: %w", err)
	}
	for _, e := range entries {
		if _, err := os.Lstat(filepath.Join(dir, e.Name())); err == nil {
			continue // a jail's own
		}
		if err := s.adopt(image, e.Name()); err != nil {
			return nil, err
		}
	}
	return s, s.imageEtc(image, home)
}

// imageEtc gives the jail a copy of the image's /etc, with the files every jail
// has in place of the image's.
func (s *skeleton) imageEtc(image, home string) error {
	from, to := filepath.Join(image, "etc"), filepath.Join(s.dir, "etc")
	if err := writeEtc(to, home); err != nil {
		return err
	}
	info, err := os.Lstat(from)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
		return nil
	}
	size := int64(0)
	err = filepath.WalkDir(from, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			size += info.Size()
		}
		return err
	})
	if err != nil {
		return err
	}
	if size > maxEtc {
		return fmt.Errorf("the image's /etc holds %d bytes, more than the %d that a jail gets a copy of", size, maxEtc)
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if _, err := os.Lstat(filepath.Join(to, e.Name())); err == nil {
			continue // written above
		}
		if err := copyTree(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// frame makes what every jail has, and the directories named besides.
func (s *skeleton) frame(home string, more ...string) error {
	for _, dir := range append([]string{
		"", "proc", "sys", "dev", "dev/shm", "etc", "tmp", "data", home, jail.JobDir, jail.PythonDir,
	}, more...) {
		if err := makeDirs(s.dir, dir); err != nil {
			return err
		}
	}
	for _, d := range devices {
		if err := writeFile(filepath.Join(s.dir, "dev", d), nil); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(s.dir, "dev", name)); err != nil {
			return err
		}
	}
	return writeFile(filepath.Join(s.dir, jail.PythonDir, "sitecustomize.py"), jail.PythonSite)
}

// adopt shows the directory or link name of the file system root to jails. What
// does not exist or is something else is left out.
func (s *skeleton) adopt(root, name string) error {
	src := filepath.Join(root, name)
	info, err := os.Lstat(src)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() == fs.ModeSymlink:
		target, err := os.Readlink(src)
		if err != nil {
			return err
		}
		return os.Symlink(target, filepath.Join(s.dir, name))
	case !info.IsDir():
		return nil
	}
	s.binds = append(s.binds, bind{src, "/" + name})
	return makeDirs(s.dir, name)
}

// writeEtc writes the files of /etc that are the same in every jail.
func writeEtc(etc, home string) error {
	user := filepath.Base(home)
	for name, content := range map[string]string{
		"passwd": fmt.Sprintf("root:x:0:0:root:/:/usr/sbin/nologin\n%s:x:%d:%d:%s:%s:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
			user, jail.ProgramID, jail.ProgramID, user, home),
		"group":         fmt.Sprintf("root:x:0:\n%s:x:%d:\nnogroup:x:65534:\n", user, jail.ProgramID),
		"hostname":      hostname + "\n",
		"hosts":         "127.0.0.1 localhost " + hostname + "\n::1 localhost\n",
		"nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n",
		"resolv.conf":   "",
	} {
		if err := writeFile(filepath.Join(etc, name), []byte(content)); err != nil {
			return err
		}
	}
	return nil
}

// copyTree copies directories, links as links, and files everyone may read. A
// source that does not exist is left out.
func copyTree(src, dst string) error {
	return filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		to := dst + strings.TrimPrefix(path, src)
		switch d.Type() {
		case fs.ModeDir:
			return makeDir(to, 0o755)
		case fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, to) //nolint:gosec // the host's own /etc; nobody else writes there
		case 0:
			info, err := d.Info()
			if err != nil || info.Mode()&0o004 == 0 {
				return err
			}
			b, err := os.ReadFile(path) //nolint:gosec // as above
			if err != nil {
				return err
			}
			return writeFile(to, b)
		}
		return nil
	})
}

// makeDirs makes dir and what is missing above it, below root.
func makeDirs(root, dir string) error {
	path := root
	for part := range strings.SplitSeq(dir, "/") {
		path = filepath.Join(path, part)
		if err := makeDir(path, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// makeDir makes path, with its parents, with exactly mode whatever the umask.
func makeDir(path string, mode fs.FileMode) error {
	if err := os.MkdirAll(path, mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// writeFile makes a file that everyone may read, whatever the umask.
func writeFile(path string, content []byte) error {
	if err := os.WriteFile(path, content, 0o644); err != nil { //nolint:gosec // the jail's uids must read it
		return err
	}
	return os.Chmod(path, 0o644) //nolint:gosec // as above
}
