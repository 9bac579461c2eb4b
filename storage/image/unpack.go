package image

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Unpack reads an image to its end and writes its files to dir, an existing empty directory. Only
// the caller's user can write to them, and everybody can read them. size is the approximate disk
// usage in bytes. After an error, the content of dir is incomplete. The errors are those of
// [Inspect] and of the file system.
func Unpack(r io.Reader, dir string, limits Limits) (img *proto.Image, size int64, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, 0, fmt.Errorf("unpack the image: %w", err)
	}
	u := &unpacker{at: []*opened{{root: root}}}
	img, err = readForm(r, limits, u)
	for len(u.at) > 0 && err == nil {
		err = u.leave()
	}
	for _, d := range u.at {
		_ = d.root.Close()
	}
	if err != nil {
		return nil, 0, err
	}
	return img, u.size, nil
}

// unpacker creates the entries of an image. Entries come depth first, so each is created by name in
// an open directory.
type unpacker struct {
	at   []*opened
	size int64
}

// entrySize approximates the disk usage of a file or directory besides its content, in bytes.
const entrySize = 4096

type opened struct {
	root  *os.Root
	path  string // in the image; empty for the root
	mtime time.Time
}

// enter returns the open directory of a path and the last component. It closes directories that are
// not on the path.
func (u *unpacker) enter(full string) (d *os.Root, name string, err error) {
	up, name := path.Split(full)
	if up != "" {
		up = up[:len(up)-1]
	}
	for u.at[len(u.at)-1].path != up {
		if err := u.leave(); err != nil {
			return nil, "", err
		}
	}
	u.size += entrySize
	return u.at[len(u.at)-1].root, name, nil
}

// leave restores the time of the innermost open directory, which its entries have changed, and
// closes it.
func (u *unpacker) leave() error {
	d := u.at[len(u.at)-1]
	u.at = u.at[:len(u.at)-1]
	err := d.root.Chmod(".", dirMode)
	if d.path != "" {
		err = errors.Join(err, d.root.Chtimes(".", d.mtime, d.mtime))
	}
	return unpackError(d.path, errors.Join(err, d.root.Close()))
}

func (u *unpacker) dir(full string, mtime time.Time) error {
	d, name, err := u.enter(full)
	if err == nil {
		err = d.Mkdir(name, 0o700)
	}
	if err != nil {
		return unpackError(full, err)
	}
	sub, err := d.OpenRoot(name)
	if err != nil {
		return unpackError(full, err)
	}
	u.at = append(u.at, &opened{sub, full, mtime})
	return nil
}

func (u *unpacker) file(full string, content io.Reader, exec bool, mtime time.Time) error {
	d, name, err := u.enter(full)
	if err != nil {
		return err
	}
	f, err := d.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return unpackError(full, err)
	}
	mode := os.FileMode(fileMode)
	if exec {
		mode = execMode
	}
	n, err := io.Copy(f, content)
	u.size += n
	if err == nil {
		err = f.Chmod(mode)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = d.Chtimes(name, mtime, mtime)
	}
	return unpackError(full, err)
}

func (u *unpacker) symlink(full, target string) error {
	d, name, err := u.enter(full)
	if err == nil {
		err = d.Symlink(target, name)
	}
	return unpackError(full, err)
}

func (u *unpacker) link(full, to string) error {
	if _, _, err := u.enter(full); err != nil {
		return err
	}
	return unpackError(full, u.at[0].root.Link(to, full))
}

func unpackError(full string, err error) error {
	if err != nil {
		return fmt.Errorf("unpack %.200q: %w", "/"+full, err)
	}
	return nil
}
