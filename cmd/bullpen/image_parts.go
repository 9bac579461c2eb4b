package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/storage/image"
)

const (
	// partAge is how long a part of an image is reused. Later builds take the packages of their day.
	partAge = 24 * time.Hour
	// maxDownloads bounds the packages that are kept, in bytes. When there are more, all are removed.
	maxDownloads = 4 << 30
)

// partCache is a directory with what builds of images on this machine have downloaded and installed:
//
//	debs/, wheels/   downloaded packages, in a directory for each source: apt compares sizes alone, and pip
//	                 takes the newest, so those of one mirror or index must not get into a build from another
//	NAME-HASH.tar    a part: files of an image, installed from the packages that HASH stands for
//	build-N/         the directory of one build
//
// Several builds may use it at the same time: a file gets its name when it is complete.
type partCache struct{ dir string }

// openPartCache returns the cache of this user, without what is too old.
func openPartCache() (*partCache, error) {
	user, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("find the cache of image builds: %w: set XDG_CACHE_HOME to a directory", err)
	}
	c := &partCache{dir: filepath.Join(user, "bullpen", "images")}
	err = os.MkdirAll(c.dir, 0o755) //nolint:gosec // public packages
	for _, dir := range []string{user, filepath.Dir(c.dir), c.dir} {
		if err == nil {
			err = checkOwn(dir)
		}
	}
	if err == nil {
		err = c.prune()
	}
	if err != nil {
		return nil, fmt.Errorf("prepare the cache of image builds %s: %w", c.dir, err)
	}
	return c, nil
}

// checkOwn returns an error if another user may replace files of a directory, such as after sudo -E or
// with a shared XDG_CACHE_HOME. They would get into the image.
func checkOwn(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	shared := info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0
	if !ok || shared || stat.Uid != 0 && int(stat.Uid) != os.Geteuid() {
		return fmt.Errorf("another user can change %s: set XDG_CACHE_HOME to a directory of your own", dir)
	}
	return nil
}

func (c *partCache) debs() string   { return filepath.Join(c.dir, "debs") }
func (c *partCache) wheels() string { return filepath.Join(c.dir, "wheels") }

// downloads returns the directory, below that of debs or wheels, with the downloads from a source.
func (c *partCache) downloads(dir string, source ...any) (string, error) {
	name, err := hash(source)
	if err != nil {
		return "", err
	}
	dir = filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // public packages
		return "", fmt.Errorf("keep downloads of image builds: %w", err)
	}
	return dir, nil
}

// hash returns a name for content.
func hash(content []any) (string, error) {
	text, err := json.Marshal(content)
	if err != nil {
		return "", fmt.Errorf("name a part of the image: %w", err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16]), nil
}

// prune removes parts and directories of builds that are too old, and the downloads if there are too many.
func (c *partCache) prune() error {
	entries, err := os.ReadDir(c.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // another build has renamed it
		}
		path := filepath.Join(c.dir, entry.Name())
		if err == nil && path != c.debs() && path != c.wheels() && time.Since(info.ModTime()) > partAge {
			err = os.RemoveAll(path)
		}
		if err != nil {
			return err
		}
	}
	var kept int64
	for _, dir := range []string{c.debs(), c.wheels()} {
		err := filepath.WalkDir(dir, func(_ string, p fs.DirEntry, err error) error {
			if err == nil && !p.IsDir() {
				var info fs.FileInfo
				if info, err = p.Info(); err == nil {
					kept += info.Size()
				}
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil // there are no downloads, or another build has removed them
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	if kept <= maxDownloads {
		return nil
	}
	return errors.Join(os.RemoveAll(c.debs()), os.RemoveAll(c.wheels()))
}

// part is a part of an image.
type part struct {
	file   string
	exists bool
	made   time.Time // when its build began, or that of the part that it builds on
}

// part returns the part that is named by a kind of part and by everything that decides about its content.
// made is that of a new part.
func (c *partCache) part(kind string, made time.Time, content ...any) (part, error) {
	name, err := hash(content)
	if err != nil {
		return part{}, err
	}
	file := filepath.Join(c.dir, kind+"-"+name+".tar")
	info, err := os.Stat(file)
	switch {
	case err == nil:
		return part{file: file, exists: true, made: info.ModTime()}, nil
	case errors.Is(err, fs.ErrNotExist):
		return part{file: file, made: made}, nil
	default:
		return part{}, fmt.Errorf("look for a part of the image: %w", err)
	}
}

// store gives a complete file the name of the part.
func (p part) store(file string) error {
	err := os.Chtimes(file, p.made, p.made)
	if err == nil {
		err = os.Rename(file, p.file)
	}
	if err != nil {
		return fmt.Errorf("keep a part of the image: %w", err)
	}
	return nil
}

// addTo adds the files of the part to a tree.
func (p part) addTo(t *image.Tree) error {
	f, err := os.Open(p.file)
	if err != nil {
		return fmt.Errorf("read a part of the image: %w", err)
	}
	defer func() { _ = f.Close() }()
	return t.AddTar(f)
}
