package main_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/filesystempb"
)

func (s *sandbox) stat(user, path string) (*filesystempb.EntryInfo, error) {
	answer, err := s.filesystem.Stat(s.t.Context(), as(user, &filesystempb.StatRequest{Path: path}))
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetEntry(), nil
}

func (s *sandbox) makeDir(user, path string) (*filesystempb.EntryInfo, error) {
	answer, err := s.filesystem.MakeDir(s.t.Context(), as(user, &filesystempb.MakeDirRequest{Path: path}))
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetEntry(), nil
}

func (s *sandbox) move(user, source, destination string) (*filesystempb.EntryInfo, error) {
	answer, err := s.filesystem.Move(s.t.Context(),
		as(user, &filesystempb.MoveRequest{Source: source, Destination: destination}))
	if err != nil {
		return nil, err
	}
	return answer.Msg.GetEntry(), nil
}

func (s *sandbox) remove(user, path string) error {
	_, err := s.filesystem.Remove(s.t.Context(), as(user, &filesystempb.RemoveRequest{Path: path}))
	return err
}

// names lists a directory and returns the paths relative to it.
func (s *sandbox) names(path string, depth uint32) (string, error) {
	answer, err := s.filesystem.ListDir(s.t.Context(), as("", &filesystempb.ListDirRequest{Path: path, Depth: depth}))
	if err != nil {
		return "", err
	}
	var all []string
	for _, entry := range answer.Msg.GetEntries() {
		name, err := filepath.Rel(filepath.Join(s.home, path), entry.GetPath())
		check(s.t, err)
		if filepath.Base(name) != entry.GetName() {
			s.t.Errorf("%s has the name %s", name, entry.GetName())
		}
		all = append(all, name)
	}
	return strings.Join(all, " "), nil
}

// owned creates a file for a user.
func owned(t *testing.T, uid int, path, content string) {
	t.Helper()
	check(t, os.WriteFile(path, []byte(content), 0o644))
	check(t, os.Chown(path, uid, uid))
}

// owner returns the user that a file belongs to.
func owner(t *testing.T, path string) int {
	t.Helper()
	info, err := os.Lstat(path)
	check(t, err)
	return int(info.Sys().(*syscall.Stat_t).Uid)
}

func TestStat(t *testing.T) {
	s := newSandbox(t)
	owned(t, 1000, s.home+"/file", "Hello")
	owned(t, 4711, s.home+"/foreign", "")
	check(t, os.Mkdir(s.home+"/dir", 0o755))
	check(t, os.Symlink("file", s.home+"/link"))
	check(t, os.Symlink("dir", s.home+"/dirlink"))
	check(t, os.Symlink("nowhere", s.home+"/broken"))
	check(t, unix.Mkfifo(s.home+"/pipe", 0o600))
	check(t, os.Chmod(s.home+"/pipe", 0o600))
	check(t, os.Mkdir(s.home+"/sticky", 0o755))
	check(t, os.Chmod(s.home+"/sticky", 0o777|os.ModeSticky|os.ModeSetgid))
	for _, test := range []struct {
		path, permissions, owner, target string
		kind                             filesystempb.FileType
		mode                             uint32
		size                             int64
	}{
		{"file", "-rw-r--r--", "user", "", filesystempb.FileType_FILE_TYPE_FILE, 0o644, 5},
		{"~/foreign", "-rw-r--r--", "4711", "", filesystempb.FileType_FILE_TYPE_FILE, 0o644, 0},
		{"dir", "drwxr-xr-x", "root", "", filesystempb.FileType_FILE_TYPE_DIRECTORY, 0o755, 0},
		{"link", "lrwxrwxrwx", "root", s.home + "/file", filesystempb.FileType_FILE_TYPE_FILE, 0o777, 4},
		{"dirlink", "lrwxrwxrwx", "root", s.home + "/dir", filesystempb.FileType_FILE_TYPE_DIRECTORY, 0o777, 3},
		{"broken", "lrwxrwxrwx", "root", s.home + "/nowhere", filesystempb.FileType_FILE_TYPE_SYMLINK, 0o777, 7},
		{"pipe", "prw-------", "root", "", filesystempb.FileType_FILE_TYPE_UNSPECIFIED, 0o600, 0},
		{"sticky", "drwxrwsrwt", "root", "", filesystempb.FileType_FILE_TYPE_DIRECTORY, 0o777, 0},
	} {
		e, err := s.stat("", test.path)
		check(t, err)
		name := filepath.Base(test.path)
		if e.GetName() != name || e.GetPath() != filepath.Join(s.home, name) || e.GetType() != test.kind ||
			e.GetPermissions() != test.permissions || e.GetMode() != test.mode ||
			(e.GetSize() != test.size && e.GetType() != filesystempb.FileType_FILE_TYPE_DIRECTORY) ||
			e.GetOwner() != test.owner || e.GetGroup() != test.owner ||
			e.GetSymlinkTarget() != test.target || e.GetIsSymlink() != (test.target != "") || e.GetModifiedTime() == nil {
			t.Errorf("%s: %v", test.path, e)
		}
	}
}

func TestFilesystemErrors(t *testing.T) {
	s := newSandbox(t)
	owned(t, 1000, s.home+"/file", "")
	check(t, os.Mkdir(s.home+"/dir", 0o755))
	check(t, os.Symlink("loop", s.home+"/loop"))
	stat := func(user, path string) error { _, err := s.stat(user, path); return err }
	makeDir := func(path string) error { _, err := s.makeDir("", path); return err }
	move := func(source, destination string) error { _, err := s.move("", source, destination); return err }
	list := func(path string) error { _, err := s.names(path, 1); return err }
	_, watch := s.filesystem.CreateWatcher(t.Context(), connect.NewRequest(&filesystempb.CreateWatcherRequest{}))
	for _, test := range []struct {
		name  string
		err   error
		code  connect.Code
		words string
	}{
		{"stat missing", stat("", "missing"), connect.CodeNotFound, "missing"},
		{"stat below file", stat("", "file/x"), connect.CodeInvalidArgument, "not a directory"},
		{"stat unknown user", stat("nobody", "file"), connect.CodeUnauthenticated, "nobody"},
		{"stat other home", stat("", "~root/x"), connect.CodeInvalidArgument, "~"},
		{"stat zero byte", stat("", "a\x00b"), connect.CodeInvalidArgument, "zero byte"},
		{"stat long path", stat("", strings.Repeat("a/", 3000)), connect.CodeInvalidArgument, "too long"},
		{"makedir directory", makeDir("dir"), connect.CodeAlreadyExists, "already exists"},
		{"makedir file", makeDir("file"), connect.CodeInvalidArgument, "not a directory"},
		{"makedir below file", makeDir("file/x"), connect.CodeInvalidArgument, "not a directory"},
		{"move missing", move("missing", "to"), connect.CodeNotFound, "missing"},
		{"move into itself", move("dir", "dir/sub"), connect.CodeInvalidArgument, ""},
		{"list missing", list("missing"), connect.CodeNotFound, "missing"},
		{"list file", list("file"), connect.CodeInvalidArgument, "not a directory"},
		{"list loop", list("loop"), connect.CodeFailedPrecondition, "loop"},
		{"remove root", s.remove("root", "/"), connect.CodeInvalidArgument, "root directory"},
		{"watch", watch, connect.CodeUnimplemented, "watch"},
	} {
		t.Run(test.name, func(t *testing.T) { wantCode(t, test.err, test.code, test.words) })
	}
}

func TestMakeDir(t *testing.T) {
	s := newSandbox(t)
	e, err := s.makeDir("", "a/b/c")
	check(t, err)
	if e.GetPath() != s.home+"/a/b/c" || e.GetPermissions() != "drwxr-xr-x" || e.GetOwner() != "user" ||
		e.GetType() != filesystempb.FileType_FILE_TYPE_DIRECTORY {
		t.Errorf("%v", e)
	}
	// Where only root may create directories, they belong to the user all the same.
	e, err = s.makeDir("", s.root+"/d/e")
	check(t, err)
	if e.GetOwner() != "user" || e.GetGroup() != "user" || owner(t, s.root+"/d") != 1000 || owner(t, s.root) != 0 {
		t.Errorf("%v", e)
	}
	e, err = s.makeDir("root", "f")
	check(t, err)
	if e.GetPath() != s.root+"/f" || e.GetOwner() != "root" {
		t.Errorf("%v", e)
	}
}

func TestMove(t *testing.T) {
	s := newSandbox(t)
	owned(t, 1000, s.home+"/file", "content")
	e, err := s.move("", "file", "new/parent/moved")
	check(t, err)
	if e.GetPath() != s.home+"/new/parent/moved" || e.GetSize() != 7 || owner(t, s.home+"/new") != 1000 {
		t.Errorf("%v", e)
	}
	_, err = s.stat("", "file")
	wantCode(t, err, connect.CodeNotFound, "file")
	// Into a directory and out of a directory that the user may not change.
	_, err = s.move("", "new/parent/moved", s.root+"/file")
	check(t, err)
	_, err = s.move("", s.root+"/file", "back")
	check(t, err)
	if owner(t, s.home+"/back") != 1000 {
		t.Error("the file has another owner")
	}
	// To another file system.
	other, err := os.MkdirTemp("/dev/shm", "guest-*")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(other)) })
	check(t, os.Chmod(other, 0o777))
	check(t, os.MkdirAll(s.home+"/tree/sub", 0o755))
	owned(t, 1000, s.home+"/tree/sub/file", "deep")
	check(t, os.Chmod(s.home+"/tree/sub/file", 0o600))
	check(t, os.Symlink("sub/file", s.home+"/tree/link"))
	for _, path := range []string{"/tree/sub", "/tree"} {
		check(t, os.Chown(s.home+path, 1000, 1000))
	}
	_, err = s.move("", "tree", other+"/tree")
	check(t, err)
	b, err := os.ReadFile(other + "/tree/link")
	check(t, err)
	info, err := os.Stat(other + "/tree/sub/file")
	check(t, err)
	if string(b) != "deep" || info.Mode() != 0o600 || owner(t, other+"/tree/sub/file") != 1000 {
		t.Errorf("%q, %v", b, info.Mode())
	}
	if left, err := os.ReadDir(other); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
	_, err = s.stat("", "tree")
	wantCode(t, err, connect.CodeNotFound, "tree")
}

func TestListDir(t *testing.T) {
	s := newSandbox(t)
	for _, dir := range []string{"d/b/x", "d/b/y", "d/c/z"} {
		check(t, os.MkdirAll(filepath.Join(s.home, dir), 0o755))
	}
	owned(t, 1000, s.home+"/d/a", "")
	check(t, os.Symlink("b", s.home+"/d/link"))
	check(t, os.Symlink("d", s.home+"/dlink"))
	for _, test := range []struct {
		path  string
		depth uint32
		want  string
	}{
		{"d", 0, "a b c link"},
		{"d", 1, "a b c link"},
		{"d", 2, "a b b/x b/y c c/z link"},
		{"d", 9, "a b b/x b/y c c/z link"},
		{"dlink", 1, "a b c link"},
		{"d/b/x", 1, ""},
	} {
		if got, err := s.names(test.path, test.depth); err != nil || got != test.want {
			t.Errorf("%s, depth %d: %q, %v", test.path, test.depth, got, err)
		}
	}
}

// TestListDirNames lists what is not UTF-8, beside which everything else must stay visible.
func TestListDirNames(t *testing.T) {
	s := newSandbox(t)
	dir := s.path("names")
	check(t, os.Mkdir(dir, 0o755))
	for _, name := range []string{"a", "b\xff", "c"} {
		check(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	check(t, os.Symlink("\xff", filepath.Join(dir, "d")))
	got, err := s.names(dir, 1)
	if !strings.Contains(got, "b\ufffd") || !strings.Contains(got, "c") || !strings.Contains(got, "d") || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// TestListDirTimes lists files with times that messages cannot have.
func TestListDirTimes(t *testing.T) {
	s := newSandbox(t)
	dir, err := os.MkdirTemp("/dev/shm", "guest-*") // in memory, where all times are possible
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	for name, seconds := range map[string]int64{"after": 1 << 50, "before": -1 << 50} {
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, nil, 0o600))
		at := unix.NsecToTimespec(0)
		at.Sec = seconds
		check(t, unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{at, at}, 0))
	}
	answer, err := s.filesystem.ListDir(t.Context(), as("", &filesystempb.ListDirRequest{Path: dir, Depth: 1}))
	check(t, err)
	for i, year := range []int{9999, 1} {
		if got := answer.Msg.GetEntries()[i]; got.GetModifiedTime().AsTime().Year() != year {
			t.Errorf("%s", got)
		}
	}
}

// TestListDirBytes refuses a list whose names take too much memory.
func TestListDirBytes(t *testing.T) {
	s := newSandbox(t)
	top, err := os.MkdirTemp("/dev/shm", "guest-*") // in memory
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(top)) })
	dir := filepath.Join(top, strings.Repeat(strings.Repeat("d", 250)+"/", 14))
	check(t, os.MkdirAll(dir, 0o755))
	entry := len(dir) - 1 + 1 + 2*200 // the path without its last slash, and the name twice
	for i := range 4<<20/entry + 1 {
		if i == 4<<20/entry-1 {
			_, err = s.names(dir, 1)
			check(t, err)
		}
		check(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%0200d", i)), nil, 0o600))
	}
	_, err = s.names(dir, 1)
	wantCode(t, err, connect.CodeResourceExhausted, "4194304 bytes")
}

func TestListDirLimit(t *testing.T) {
	s := newSandbox(t)
	top, err := os.MkdirTemp("/dev/shm", "guest-*") // in memory
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(top)) })
	for _, name := range []string{"a", "b"} {
		dir := filepath.Join(top, name)
		check(t, os.Mkdir(dir, 0o755))
		check(t, exec.Command("bash", "-c", `cd "$1" && seq 5001 | xargs touch`, "bash", dir).Run())
	}
	_, err = s.names(top+"/a", 1)
	check(t, err)
	_, err = s.names(top, 2)
	wantCode(t, err, connect.CodeResourceExhausted, "10000 entries")
}

func TestRemove(t *testing.T) {
	s := newSandbox(t)
	check(t, os.MkdirAll(s.home+"/tree/a/b", 0o755))
	owned(t, 0, s.home+"/tree/a/file", "")
	owned(t, 1000, s.home+"/file", "")
	owned(t, 0, s.root+"/secret", "")
	check(t, os.Symlink(s.root, s.home+"/tree/link"))
	for _, path := range []string{"file", "tree", "missing", "missing/deeper", "file/x"} {
		check(t, s.remove("", path)) // the tree belongs to root
	}
	if entries, err := os.ReadDir(s.home); err != nil || len(entries) != 0 {
		t.Errorf("%v, %v", entries, err)
	}
	if owner(t, s.root+"/secret") != 0 {
		t.Error("gone")
	}
	check(t, s.remove("", s.root+"/secret"))
}

// TestSymlinks has programs of the user place symbolic links in the way of what the guest does for the user.
func TestSymlinks(t *testing.T) {
	s := newSandbox(t)
	owned(t, 0, s.root+"/secret", "root's")
	check(t, os.Mkdir(s.root+"/dir", 0o755))
	check(t, os.Symlink(s.root, s.home+"/link"))
	check(t, os.Symlink(s.root+"/secret", s.home+"/secret"))
	check(t, os.Symlink(s.root+"/dir", s.home+"/dir"))
	check(t, os.Lchown(s.home+"/link", 1000, 1000))
	_, makeDir := s.makeDir("", "link/made")
	_, move := s.move("", s.home+"/link/secret", "mine")
	_, moveInto := s.move("", "secret", "link/moved")
	_, below := s.makeDir("", "dir/made")
	for name, err := range map[string]error{
		"makedir": makeDir, "move": move, "move into": moveInto, "remove": s.remove("", "link/secret"), "below": below,
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, err, connect.CodePermissionDenied, "") })
	}
	for _, path := range []string{"link/secret", "secret", "link/new"} {
		if code, body := s.upload("", path, "user's"); code != 403 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	b, err := os.ReadFile(s.root + "/secret")
	check(t, err)
	if string(b) != "root's" || owner(t, s.root+"/secret") != 0 {
		t.Errorf("%q", b)
	}
	entries, err := os.ReadDir(s.root)
	check(t, err)
	if len(entries) != 2 {
		t.Errorf("%v", entries)
	}
	// The user's own links work.
	owned(t, 1000, s.home+"/file", "old")
	check(t, os.Symlink("file", s.home+"/own"))
	check(t, os.Symlink("later", s.home+"/dangling"))
	for _, path := range []string{"own", "dangling"} {
		if code, body := s.upload("", path, "new"); code != 200 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	for _, path := range []string{"file", "later"} {
		if b, err := os.ReadFile(filepath.Join(s.home, path)); err != nil || string(b) != "new" {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
}
