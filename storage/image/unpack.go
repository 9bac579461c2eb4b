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

// Unpack reads an image to its end and puts its files into dir, which must be there and be empty. They belong to the caller, who
// alone may write to them; everybody may read them. size is about what they take on the disk, in bytes. After an error, what is in dir
// is of no use. The errors are those of [Inspect], and those of the file system.
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

// unpacker makes the entries of an image. Since they come depth first, each is made in a directory that is open, by its name alone.
type unpacker struct {
	at   []*opened
	size int64
}

// entrySize is what a file or directory takes on a disk beside its content, in bytes, or about that.
const entrySize = 4096

type opened struct {
	root  *os.Root
	path  string // in the image; empty for the root
	mtime time.Time
}

// in gives the open directory of a path, and the name there. Those that are not on its way are done.
func (u *unpacker) in(full string) (d *os.Root, name string, err error) {
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

// leave gives the innermost open directory its time, which making its entries changed, and closes it.
func (u *unpacker) leave() error {
	d := u.at[len(u.at)-1]
	u.at = u.at[:len(u.at)-1]
	err := d.root.Chmod(".", dirMode)
	if d.path != "" {
		err = errors.Join(err, d.root.Chtimes(".", d.mtime, d.mtime))
	}
	return unpacked(d.path, errors.Join(err, d.root.Close()))
}

func (u *unpacker) dir(full string, mtime time.Time) error {
	d, name, err := u.in(full)
	if err == nil {
		err = d.Mkdir(name, 0o700)
	}
	if err != nil {
		return unpacked(full, err)
	}
	sub, err := d.OpenRoot(name)
	if err != nil {
		return unpacked(full, err)
	}
	u.at = append(u.at, &opened{sub, full, mtime})
	return nil
}

func (u *unpacker) file(full string, content io.Reader, exec bool, mtime time.Time) error {
	d, name, err := u.in(full)
	if err != nil {
		return err
	}
	f, err := d.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return unpacked(full, err)
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
	return unpacked(full, err)
}

func (u *unpacker) symlink(full, target string) error {
	d, name, err := u.in(full)
	if err == nil {
		err = d.Symlink(target, name)
	}
	return unpacked(full, err)
}

func (u *unpacker) link(full, to string) error {
	if _, _, err := u.in(full); err != nil {
		return err
	}
	return unpacked(full, u.at[0].root.Link(to, full))
}

func unpacked(full string, err error) error {
	if err != nil {
		return fmt.Errorf("unpack %.200q: %w", "/"+full, err)
	}
	return nil
}
