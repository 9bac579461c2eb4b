package files

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
)

const dirMode = 0o755

// Tree is the file system of a sandbox.
type Tree struct {
	Users *account.Users
	Lane  *account.Lane // for changes

	lists chan struct{} // holds an element for each list that is being made
	held  atomic.Int64  // bytes of lists, see maxAllLists
}

type heldKey struct{}

// Hold returns a handler of requests whose lists count until their answers have been sent.
func (t *Tree) Hold(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		held := new(int64)
		defer func() { t.held.Add(-*held) }()
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), heldKey{}, held)))
	})
}

// hold counts the bytes of a list.
func (t *Tree) hold(ctx context.Context, bytes int) error {
	if held, ok := ctx.Value(heldKey{}).(*int64); ok {
		*held += int64(bytes)
	}
	if t.held.Add(int64(bytes)) > maxAllLists {
		return connect.NewError(connect.CodeResourceExhausted,
			fmt.Errorf("lists that are being sent take more than %d bytes: read them first", maxAllLists))
	}
	return nil
}

// maxLists limits the lists that are made at a time, which take memory. Others wait.
const maxLists = 2

// NewTree returns a tree.
func NewTree(users *account.Users, lane *account.Lane) *Tree {
	return &Tree{Users: users, Lane: lane, lists: make(chan struct{}, maxLists)}
}

// errPath is returned for a path that no file can have.
type pathError string

func (e pathError) Error() string { return string(e) }

// resolve returns the absolute form of a path, which may be relative to the user's home.
func resolve(path string, user account.User) (string, error) {
	switch {
	case strings.IndexByte(path, 0) >= 0:
		return "", pathError("the path contains a zero byte")
	case len(path) >= unix.PathMax:
		return "", pathError("the path is too long")
	case path == "" || path == "~":
		return filepath.Clean(user.Home), nil
	case strings.HasPrefix(path, "~/"):
		return filepath.Join(user.Home, path[2:]), nil
	case strings.HasPrefix(path, "~"):
		return "", pathError("the path begins with ~ and a name: only ~ alone is a home")
	case filepath.IsAbs(path):
		return filepath.Clean(path), nil
	}
	return filepath.Join(user.Home, path), nil
}

// change calls f with a directory and a path relative to it that mean path. If the user may not do what
// f does, it calls f once more on a thread with the guest's rights; then path is a single name. With
// parents, it first creates those that are missing; they belong to the user.
func (t *Tree) change(
	user account.User, path string, parents bool, f func(dir int, path string, owner *account.User) error,
) error {
	err := t.Lane.Do(user, func() error {
		if parents {
			if err := makeParents(path); err != nil {
				return err
			}
		}
		return f(unix.AT_FDCWD, path, nil)
	})
	if user.Current() || !errors.Is(err, os.ErrPermission) {
		return err
	}
	dir, walkErr := openParent(path, parents, user)
	if walkErr != nil {
		return walkErr
	}
	defer func() { _ = unix.Close(dir) }()
	return f(dir, filepath.Base(path), &user)
}

// makeParents creates the directories above a path.
func makeParents(path string) error {
	dir := filepath.Dir(path)
	err := os.MkdirAll(dir, dirMode) //nolint:gosec // clients may name any
	if errors.Is(err, os.ErrExist) {
		// There is something that is no directory, or cannot be looked into.
		if _, statErr := os.Stat(dir); statErr != nil { //nolint:gosec // see above
			return statErr
		}
		return &os.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
	}
	return err
}

// openParent opens the directory that contains a path. If there is a symbolic link on the way, permission is
// denied. With create, directories that are missing are created for the user.
func openParent(path string, create bool, user account.User) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	dir, err := unix.Open("/", flags, 0)
	if err != nil {
		return -1, err
	}
	for name := range strings.SplitSeq(strings.Trim(filepath.Dir(path), "/"), "/") {
		if name == "" {
			continue
		}
		next, err := unix.Openat(dir, name, flags, 0)
		if errors.Is(err, unix.ENOENT) && create {
			if err = makeDir(dir, name, &user); err == nil || errors.Is(err, unix.EEXIST) {
				next, err = unix.Openat(dir, name, flags, 0)
			}
		}
		_ = unix.Close(dir)
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			err = unix.EACCES
		}
		if err != nil {
			return -1, &os.PathError{Op: "open", Path: path, Err: err}
		}
		dir = next
	}
	return dir, nil
}

// makeDir creates a directory, for an owner if it is not nil.
func makeDir(dir int, name string, owner *account.User) error {
	if err := unix.Mkdirat(dir, name, dirMode); err != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: err}
	}
	if owner == nil {
		return nil
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer func() { _ = unix.Close(fd) }()
	// Somebody may have put another directory in its place.
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return &os.PathError{Op: "stat", Path: name, Err: err}
	}
	if int(stat.Uid) != os.Geteuid() {
		return nil
	}
	if err := unix.Fchown(fd, int(owner.UID), int(owner.GID)); err != nil {
		return &os.PathError{Op: "chown", Path: name, Err: err}
	}
	return nil
}
