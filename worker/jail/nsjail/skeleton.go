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

// buildRoot makes the directory that is the / of every jail, read-only there,
// and returns the host directories to bind into it.
func buildRoot(root, home string) (binds []string, err error) {
	for _, dir := range []string{
		"", "usr", "proc", "dev", "dev/shm", "etc", "etc/ssl", "tmp", "data", home, jail.JobDir, jail.PythonDir,
	} {
		if err := makeDirs(root, dir); err != nil {
			return nil, err
		}
	}
	binds = []string{"/usr"}
	for _, name := range systemDirs {
		target, err := os.Readlink("/" + name)
		switch {
		case err == nil:
			err = os.Symlink(target, filepath.Join(root, name))
		case errors.Is(err, fs.ErrNotExist):
			err = nil
		default:
			binds = append(binds, "/"+name)
			err = makeDirs(root, name)
		}
		if err != nil {
			return nil, err
		}
	}
	for _, d := range devices {
		if err := writeFile(filepath.Join(root, "dev", d), nil); err != nil {
			return nil, err
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(root, "dev", name)); err != nil {
			return nil, err
		}
	}
	if err := writeFile(filepath.Join(root, jail.PythonDir, "sitecustomize.py"), jail.PythonSite); err != nil {
		return nil, err
	}
	return binds, buildEtc(filepath.Join(root, "etc"), home)
}

func buildEtc(etc, home string) error {
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
	names := copied[:]
	python, err := filepath.Glob("/etc/python3*")
	if err != nil {
		return err
	}
	for _, p := range python {
		names = append(names, strings.TrimPrefix(p, "/etc/"))
	}
	for _, name := range names {
		if err := copyTree(filepath.Join("/etc", name), filepath.Join(etc, name)); err != nil {
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
