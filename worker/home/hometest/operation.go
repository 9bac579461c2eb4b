// Package hometest draws random changes of homes, for tests.
package hometest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// component draws from few names, so that operations often refer to the same files.
var component = rapid.SampledFrom([]string{"a", "b", "\xff\n"})

func path(t *rapid.T, label string) string {
	return strings.Join(rapid.SliceOfN(component, 1, 3).Draw(t, label), "/")
}

// Operation draws a change of a directory, and returns its name. The change fails if the directory has
// nothing to apply it to.
func Operation(t *rapid.T) (string, func(root string) error) {
	name, other := path(t, "name"), path(t, "other")
	n := rapid.IntRange(0, 20_000).Draw(t, "n")
	at := func(f func(path string) error) func(string) error {
		return func(root string) error { return f(filepath.Join(root, name)) }
	}
	content := bytes.Repeat([]byte{byte(n)}, n)
	switch op := rapid.SampledFrom([]string{
		"mkdir", "mkdir", "mkdirs", "mkdirs", "write", "write", "write", "append", "sparse", "truncate", "rename", "rename",
		"rename", "rename",
		"remove", "remove all", "symlink", "link", "link", "chmod", "time", "attribute", "no attribute", "fifo",
	}).Draw(t, "operation"); op {
	case "mkdir":
		return op, at(func(p string) error { return os.Mkdir(p, 0o750) })
	case "mkdirs":
		return op, at(func(p string) error { return os.MkdirAll(p, 0o750) })
	case "write":
		return op, at(func(p string) error {
			// A FIFO is not to be waited for.
			f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
			if err != nil {
				return err
			}
			_, err = f.Write(content)
			return errors.Join(err, f.Close())
		})
	case "append", "sparse":
		return op, at(func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			end, err := f.Seek(0, 2)
			if op == "sparse" {
				end += int64(n) * 10
			}
			_, err2 := f.WriteAt([]byte(op), end)
			return errors.Join(err, err2, f.Close())
		})
	case "truncate":
		return op, at(func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			return errors.Join(f.Truncate(int64(n)), f.Close())
		})
	case "rename":
		return op, func(root string) error { return os.Rename(filepath.Join(root, name), filepath.Join(root, other)) }
	case "remove":
		return op, at(os.Remove)
	case "remove all":
		return op, at(func(p string) error {
			// os.RemoveAll would wait for a FIFO that is on the way.
			if _, err := os.Lstat(p); err != nil {
				return err
			}
			return os.RemoveAll(p)
		})
	case "symlink":
		return op, at(func(p string) error { return os.Symlink(other, p) })
	case "link":
		return op, func(root string) error { return os.Link(filepath.Join(root, name), filepath.Join(root, other)) }
	case "chmod":
		return op, at(func(p string) error {
			return unix.Fchmodat(unix.AT_FDCWD, p, uint32(n)&0o777, unix.AT_SYMLINK_NOFOLLOW)
		})
	case "time":
		return op, at(func(p string) error {
			ts := unix.NsecToTimespec(int64(n) * int64(time.Hour+1))
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
		})
	case "attribute":
		return op, at(func(p string) error { return unix.Lsetxattr(p, fmt.Sprint("user.", n%3), content[:n%100], 0) })
	case "no attribute":
		return op, at(func(p string) error { return unix.Lremovexattr(p, fmt.Sprint("user.", n%3)) })
	default:
		return op, at(func(p string) error { return unix.Mkfifo(p, 0o644) })
	}
}
