package files

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/bullpen-run/bullpen/guest/filesystempb"
)

// entry describes a path, whose last element is not followed.
func (t *Tree) entry(path string) (*filesystempb.EntryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	e := &filesystempb.EntryInfo{
		Name:         valid(filepath.Base(path)),
		Path:         valid(path),
		Type:         typeOf(info),
		Size:         info.Size(),
		Mode:         uint32(info.Mode().Perm()),
		Permissions:  permissions(info.Mode()),
		ModifiedTime: timestamp(info.ModTime()),
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = t.Users.UserName(stat.Uid), t.Users.GroupName(stat.Gid)
	}
	if info.Mode()&os.ModeSymlink != 0 {
		e.IsSymlink = true
		e.Type = filesystempb.FileType_FILE_TYPE_SYMLINK
		target, err := os.Readlink(path)
		if err != nil {
			return nil, err
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		if end, err := filepath.EvalSymlinks(path); err == nil {
			target = end
			if info, err := os.Stat(end); err == nil {
				e.Type = typeOf(info)
			}
		}
		target = valid(target)
		e.SymlinkTarget = &target
		return e, nil
	}
	e.Metadata = readMetadata(path)
	return e, nil
}

// Messages can only have times between these. File systems may have others.
var (
	firstTime = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)
)

// timestamp returns the nearest time that a message can have.
func timestamp(at time.Time) *timestamppb.Timestamp {
	if at.Before(firstTime) {
		at = firstTime
	}
	if at.After(lastTime) {
		at = lastTime
	}
	return timestamppb.New(at)
}

// valid replaces what is not UTF-8. Messages can have nothing else, but names of files can.
func valid(text string) string { return strings.ToValidUTF8(text, "\ufffd") }

func typeOf(info os.FileInfo) filesystempb.FileType {
	switch {
	case info.IsDir():
		return filesystempb.FileType_FILE_TYPE_DIRECTORY
	case info.Mode().IsRegular():
		return filesystempb.FileType_FILE_TYPE_FILE
	}
	return filesystempb.FileType_FILE_TYPE_UNSPECIFIED
}

// permissions returns a mode as ls does.
func permissions(mode os.FileMode) string {
	letters := map[os.FileMode]byte{
		os.ModeDir: 'd', os.ModeSymlink: 'l', os.ModeNamedPipe: 'p', os.ModeSocket: 's', os.ModeDevice: 'b',
		os.ModeDevice | os.ModeCharDevice: 'c',
	}
	s := []byte("?" + mode.Perm().String()[1:])
	if mode.IsRegular() {
		s[0] = '-'
	} else if letter, ok := letters[mode.Type()]; ok {
		s[0] = letter
	}
	for _, special := range []struct {
		bit    os.FileMode
		at     int
		letter byte
	}{{os.ModeSetuid, 3, 's'}, {os.ModeSetgid, 6, 's'}, {os.ModeSticky, 9, 't'}} {
		if mode&special.bit == 0 {
			continue
		}
		if s[special.at] == '-' {
			s[special.at] = special.letter - 'a' + 'A'
		} else {
			s[special.at] = special.letter
		}
	}
	return string(s)
}

// Metadata of files are extended attributes with this prefix.
const (
	metadataPrefix   = "user.e2b."
	maxMetadataName  = 255 - len(metadataPrefix)
	maxMetadataTotal = 4096
)

// readMetadata returns the metadata of a file, or nothing if there is none or the file system keeps none.
func readMetadata(path string) map[string]string {
	names, err := listAttributes(func(p []byte) (int, error) { return unix.Llistxattr(path, p) })
	if err != nil {
		return nil
	}
	var metadata map[string]string
	total := 0
	for _, name := range names {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if !ok {
			continue
		}
		value := make([]byte, maxMetadataTotal)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			continue // too large to be from here
		}
		if total += len(key) + n; total > maxMetadataTotal {
			return metadata // the same
		}
		if metadata == nil {
			metadata = map[string]string{}
		}
		metadata[key] = valid(string(value[:n]))
	}
	return metadata
}

// writeMetadata replaces the metadata of a file.
func writeMetadata(file *os.File, metadata map[string]string) error {
	fd := int(file.Fd())
	names, err := listAttributes(func(p []byte) (int, error) { return unix.Flistxattr(fd, p) })
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return err
	}
	for _, name := range names {
		key, ok := strings.CutPrefix(name, metadataPrefix)
		if _, replaced := metadata[key]; !ok || replaced {
			continue
		}
		if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
			return err
		}
	}
	for key, value := range metadata {
		if err := unix.Fsetxattr(fd, metadataPrefix+key, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

func listAttributes(list func([]byte) (int, error)) ([]string, error) {
	for {
		n, err := list(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		p := make([]byte, n)
		n, err = list(p)
		if errors.Is(err, unix.ERANGE) {
			continue // somebody has added one
		}
		if err != nil {
			return nil, err
		}
		return strings.Split(strings.TrimSuffix(string(p[:n]), "\x00"), "\x00"), nil
	}
}
