package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"sync"
	"sync/atomic"
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
	u := &unpacker{at: []*opened{{root: root}}, small: make(chan smallFile)}
	u.at[0].uses.Store(1)
	for range runtime.GOMAXPROCS(0) {
		u.writers.Go(u.writeSmallFiles)
	}
	img, err = readForm(r, limits, u, nil)
	close(u.small)
	u.writers.Wait()
	if err = errors.Join(err, u.failure()); err == nil {
		for len(u.at) > 1 {
			u.leave()
		}
		u.leave()
		err = u.failure()
	}
	for _, d := range u.at {
		_ = d.root.Close()
	}
	if err != nil {
		return nil, 0, err
	}
	return img, u.size, nil
}

const (
	// entrySize approximates the disk usage of a file or directory besides its content, in bytes.
	entrySize = 4096
	// maxSmallFile is the largest content of a file that another goroutine writes, in bytes.
	maxSmallFile = 1 << 20
)

// unpacker creates the entries of an image. Entries come depth first, so each is created by name in
// an open directory. Small files are written concurrently, since creating a file takes longer than
// decompressing it.
type unpacker struct {
	at      []*opened
	size    int64
	small   chan smallFile
	pending sync.WaitGroup // small files that are not written yet
	writers sync.WaitGroup

	mu  sync.Mutex
	err error // the first one
}

// opened is a directory of the image. It is closed after its last use.
type opened struct {
	root  *os.Root
	path  string // in the image; empty for the root
	mtime time.Time
	uses  atomic.Int32 // small files to be written, and one until the directory has been left
}

// smallFile is a file to be written by another goroutine.
type smallFile struct {
	dir     *opened
	name    string
	content []byte
	exec    bool
	mtime   time.Time
}

func (u *unpacker) failure() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.err
}

func (u *unpacker) fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.err == nil {
		u.err = err
	}
}

// enter returns the open directory of a path and the last component. It leaves directories that are
// not on the path.
func (u *unpacker) enter(full string) (d *opened, name string, err error) {
	up, name := path.Split(full)
	if up != "" {
		up = up[:len(up)-1]
	}
	for u.at[len(u.at)-1].path != up {
		u.leave()
	}
	u.size += entrySize
	return u.at[len(u.at)-1], name, u.failure()
}

// leave ends the use of the innermost open directory.
func (u *unpacker) leave() {
	d := u.at[len(u.at)-1]
	u.at = u.at[:len(u.at)-1]
	u.release(d)
}

// release ends a use of a directory. After the last one it restores the time, which the entries have
// changed, and closes the directory.
func (u *unpacker) release(d *opened) {
	if d.uses.Add(-1) > 0 {
		return
	}
	err := d.root.Chmod(".", dirMode)
	if d.path != "" {
		err = errors.Join(err, d.root.Chtimes(".", d.mtime, d.mtime))
	}
	if err = errors.Join(err, d.root.Close()); err != nil {
		u.fail(unpackError(d.path, err))
	}
}

func (u *unpacker) dir(full string, mtime time.Time) error {
	d, name, err := u.enter(full)
	if err == nil {
		err = d.root.Mkdir(name, 0o700)
	}
	if err != nil {
		return unpackError(full, err)
	}
	sub, err := d.root.OpenRoot(name)
	if err != nil {
		return unpackError(full, err)
	}
	next := &opened{root: sub, path: full, mtime: mtime}
	next.uses.Store(1)
	u.at = append(u.at, next)
	return nil
}

func (u *unpacker) file(full string, content io.Reader, size int64, exec bool, mtime time.Time) error {
	d, name, err := u.enter(full)
	if err != nil {
		return err
	}
	u.size += size
	if size > maxSmallFile {
		return unpackError(full, writeFile(d.root, name, content, exec, mtime))
	}
	small := smallFile{d, name, make([]byte, size), exec, mtime}
	if _, err := io.ReadFull(content, small.content); err != nil {
		return unpackError(full, err)
	}
	d.uses.Add(1)
	u.pending.Add(1)
	u.small <- small
	return nil
}

func (u *unpacker) writeSmallFiles() {
	for f := range u.small {
		if err := writeFile(f.dir.root, f.name, bytes.NewReader(f.content), f.exec, f.mtime); err != nil {
			u.fail(unpackError(path.Join(f.dir.path, f.name), err))
		}
		u.release(f.dir)
		u.pending.Done()
	}
}

func writeFile(dir *os.Root, name string, content io.Reader, exec bool, mtime time.Time) error {
	f, err := dir.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	mode := os.FileMode(fileMode)
	if exec {
		mode = execMode
	}
	if _, err = io.Copy(f, content); err == nil {
		err = f.Chmod(mode)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return dir.Chtimes(name, mtime, mtime)
}

func (u *unpacker) symlink(full, target string) error {
	d, name, err := u.enter(full)
	if err == nil {
		err = d.root.Symlink(target, name)
	}
	return unpackError(full, err)
}

func (u *unpacker) link(full, to string) error {
	if _, _, err := u.enter(full); err != nil {
		return err
	}
	u.pending.Wait()
	return unpackError(full, u.at[0].root.Link(to, full))
}

func unpackError(full string, err error) error {
	if err != nil {
		return fmt.Errorf("unpack %.200q: %w", "/"+full, err)
	}
	return nil
}
