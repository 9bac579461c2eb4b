package nsjail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

const hostname = "bullpen"

// systemDirs are the host's directories besides /usr that a jail sees. They are links into /usr on
// a merged system, and directories on others.
var systemDirs = [...]string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} // read only

// copied are the files and directories of the host's /etc that are copied for jails, if they exist.
var copied = [...]string{ // read only
	"alternatives", "fonts", "ld.so.cache", "localtime", "matplotlibrc", "mime.types", "os-release",
	"protocols", "services", "ssl/certs", "ssl/openssl.cnf",
}

// bind is a directory or file on the host that is mounted read-only in a jail.
type bind struct{ src, dst string }

// skeleton is the read-only / of jails with the mounts in it.
type skeleton struct {
	dir   string
	binds []bind
}

const (
	// maxEtc is the maximum size in bytes of an image's /etc.
	maxEtc = 64 << 20
	// maxTop is the maximum number of files and directories at the top of an image. Each is a mount
	// in every jail.
	maxTop = 128
)

// newSkeleton creates a skeleton in dir.
func newSkeleton(dir, home string, key rootKey, proc *proc) (*skeleton, error) {
	s := &skeleton{dir: dir}
	if err := errors.Join(s.addOwn(home, key), proc.write(dir)); err != nil {
		return nil, err
	}
	if key.image == "" {
		return s, s.showHost()
	}
	return s, s.showImage(key.image)
}

// addOwn adds what jails with this key have besides the host's or the image's files.
func (s *skeleton) addOwn(home string, key rootKey) error {
	if err := s.frame(home); err != nil {
		return err
	}
	if key.guest {
		home = proto.SandboxHome // also there, see jail.Jail.BindHome
		if err := errors.Join(makeDirs(s.dir, home), makeDirs(s.dir, "root")); err != nil {
			return err
		}
		for _, p := range proto.AgentPrograms() { // mount points, see jail.Jail.MountAgent
			if err := makeDirs(s.dir, proto.AgentDir(p.Agent)); err != nil {
				return err
			}
		}
	}
	if key.terminals {
		if err := s.addTerminals(); err != nil {
			return err
		}
	}
	resolver := ""
	if key.network {
		resolver = "nameserver " + egress.ResolverIPv4.String() + "\n"
	}
	return writeEtc(filepath.Join(s.dir, "etc"), home, resolver)
}

// showHost adds the host's runtimes.
func (s *skeleton) showHost() error {
	s.binds = []bind{{"/usr", "/usr"}}
	for _, dir := range []string{"usr", "etc/ssl"} {
		if err := makeDirs(s.dir, dir); err != nil {
			return err
		}
	}
	for _, name := range systemDirs {
		if err := s.adopt("/", name); err != nil {
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
		if err := copyTree(filepath.Join("/etc", name), filepath.Join(s.dir, "etc", name)); err != nil {
			return err
		}
	}
	return nil
}

// showImage adds everything at the top of a root file system image, except a jail's own entries. It
// follows no links in the image. It recreates them instead, so that they lead only into the jail.
func (s *skeleton) showImage(image string) error {
	entries, err := os.ReadDir(image)
	if err != nil {
		return fmt.Errorf("read the sandbox's image: %w", err)
	}
	if len(entries) > maxTop {
		return fmt.Errorf("the image has %d directories and files at its top, more than the %d that a jail shows",
			len(entries), maxTop)
	}
	for _, e := range entries {
		if _, err := os.Lstat(filepath.Join(s.dir, e.Name())); err == nil {
			continue // a jail's own
		}
		if err := s.adopt(image, e.Name()); err != nil {
			return err
		}
	}
	return s.copyEtc(image)
}

// copyEtc copies the image's /etc, except the files that every jail has.
func (s *skeleton) copyEtc(image string) error {
	from, to := filepath.Join(image, "etc"), filepath.Join(s.dir, "etc")
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
			continue // a jail's own
		}
		if err := copyTree(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// frame creates what every jail has.
func (s *skeleton) frame(home string) error {
	for _, dir := range []string{
		"", "proc", "sys", "dev", "dev/shm", "etc", "tmp", "data", strings.TrimPrefix(proto.ContainerData, "/"), home,
		jail.JobDir, jail.PythonDir, jail.PrewarmDir, cell.Dir,
	} {
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
	files := map[string][]byte{
		jail.PythonDir + "/sitecustomize.py": jail.PythonSite,
		jail.PrewarmDir + "/prewarm.sh":      jail.PrewarmBash,
		jail.PrewarmDir + "/prewarm.js":      jail.PrewarmNode,
		jail.PrewarmDir + "/zygote.py":       jail.ZygoteScript,
	}
	for name, content := range cell.Files() {
		files[cell.Dir+"/"+name] = content
	}
	for name, content := range files {
		if err := writeFile(filepath.Join(s.dir, name), content); err != nil {
			return err
		}
	}
	return nil
}

// addTerminals adds the terminal devices to /dev for jails with terminals.
func (s *skeleton) addTerminals() error {
	dev := filepath.Join(s.dir, "dev")
	return errors.Join(
		makeDir(filepath.Join(dev, "pts"), 0o755), writeFile(filepath.Join(dev, terminalDevice), nil),
		os.Symlink("pts/ptmx", filepath.Join(dev, "ptmx")),
	)
}

// adopt adds the directory, file or link name of the file system root to jails. It ignores a name
// that does not exist or is anything else.
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
	case info.IsDir():
		s.binds = append(s.binds, bind{src, "/" + name})
		return makeDirs(s.dir, name)
	case info.Mode().IsRegular():
		s.binds = append(s.binds, bind{src, "/" + name})
		return writeFile(filepath.Join(s.dir, name), nil)
	}
	return nil
}

// writeEtc writes the files of /etc that every jail has. They differ only in the resolver.
func writeEtc(etc, home, resolver string) error {
	user := filepath.Base(home)
	for name, content := range map[string]string{
		"passwd": fmt.Sprintf(
			"root:x:0:0:root:/:/usr/sbin/nologin\n%s:x:%d:%d:%s:%s:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
			user, jail.ProgramID, jail.ProgramID, user, home),
		"group":         fmt.Sprintf("root:x:0:\n%s:x:%d:\nnogroup:x:65534:\n", user, jail.ProgramID),
		"hostname":      hostname + "\n",
		"hosts":         "127.0.0.1 localhost " + hostname + "\n::1 localhost\n",
		"nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n",
		"resolv.conf":   resolver,
	} {
		if err := writeFile(filepath.Join(etc, name), []byte(content)); err != nil {
			return err
		}
	}
	return nil
}

// copyTree copies directories, links as links, and world-readable files. It ignores a source that
// does not exist.
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
			return os.Symlink(target, to) //nolint:gosec // the host's own /etc, which no tenant can write to
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

// makeDirs creates dir, below root, and its missing parents.
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

// makeDir creates path and its parents. Its mode is exactly mode, whatever the umask.
func makeDir(path string, mode fs.FileMode) error {
	if err := os.MkdirAll(path, mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

// writeFile creates a file that everyone may read, whatever the umask.
func writeFile(path string, content []byte) error {
	if err := os.WriteFile(path, content, 0o644); err != nil { //nolint:gosec // the jail's uids must read it
		return err
	}
	return os.Chmod(path, 0o644) //nolint:gosec // as above
}
