// Package disk makes directories for jails with a limit of bytes and inodes that
// memory does not set: each is an ext4 of its own in a sparse file behind a loop
// device. What is on one is for one jail, and is never kept.
//
// Nothing here has a name. The file has none from the start (O_TMPFILE), the
// mount is in no namespace until a jail gets it, and the loop device takes itself
// apart after its last user. So whatever kills the process, the kernel gives all
// of it back when the process and its jails are gone, and there is nothing to
// sweep.
//
// The disk is not reserved: the files grow as they are written. If the host's disk
// gets full before a volume's limit is reached, writing there fails with EIO or
// ENOSPC, or is lost as from a disk that failed, and the volume may turn read-only.
// The limits of all volumes together should therefore fit on the disk.
package disk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// What a pool keeps for takers to come, for each size: the template in memory
// (about 4 KiB for each 128 MiB of the size) and as many volumes that are ready
// (the same on disk, and a loop device each).
const (
	maxSizes     = 8 // the last ones taken
	DefaultReady = 2
)

// Config is what a Pool needs to know.
type Config struct {
	Dir   string       // where the images are; required; made when it is missing
	Ready int          // volumes kept ready for each of the last 8 sizes taken; default DefaultReady
	Log   *slog.Logger // default slog.Default()
}

// Size is a volume's limits.
type Size struct {
	// Bytes is what files can hold, in whole blocks of 4 KiB: what is not a
	// multiple is rounded up. As on any file system each file and each directory
	// takes whole blocks, and large files and directories some more for the
	// file system's own use, less than 1 %: what fits is never more than Bytes, and
	// may be that little less. Inode tables and other fixed parts are not counted.
	// Whoever has CAP_SYS_RESOURCE outside of jails is not held to it, only to Inodes.
	Bytes int64
	// Inodes is the number of files, directories, links and so on, without the
	// volume's own directory.
	Inodes int64
}

func (s Size) blocks() int64 { return (s.Bytes + blockSize - 1) / blockSize }

var errClosed = errors.New("the pool of volumes is closed")

// Pool makes volumes, and keeps some ready.
type Pool struct {
	cfg  Config
	work sync.WaitGroup // the refills

	mu     sync.Mutex
	closed bool
	sizes  []*stock // the last taken first
}

// stock is what a pool has of one size.
type stock struct {
	size    Size
	making  chan struct{} // holds one while somebody makes the template
	made    *template     // of who holds making
	ready   []*Volume     // this and the rest under the pool's lock
	filling bool
	dropped bool
}

// Open makes a pool. The error names what is missing and what to do.
func Open(cfg Config) (*Pool, error) {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Ready == 0 {
		cfg.Ready = DefaultReady
	}
	if cfg.Ready < 0 || !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("volumes: directory %q must be absolute, and the number kept ready, %d, not negative", cfg.Dir, cfg.Ready)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("volumes: the worker is not root, which mounting needs")
	}
	if _, err := findMke2fs(); err != nil {
		return nil, fmt.Errorf("volumes: %w", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("volumes: %w", err)
	}
	probe, err := tempFile(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("volumes: %w", err)
	}
	return &Pool{cfg: cfg}, probe.Close()
}

// Take returns an empty volume whose directory is uid's and gid's, with mode
// 0755, nosuid and nodev. The first of a size takes longer than those after it.
func (p *Pool) Take(ctx context.Context, size Size, uid, gid int) (*Volume, error) {
	if size.Bytes <= 0 || size.Bytes > MaxBytes || size.Inodes <= 0 || size.Inodes > MaxInodes {
		return nil, fmt.Errorf("take a volume: %+v is not between 1 and %d bytes and 1 and %d inodes", size, int64(MaxBytes), MaxInodes)
	}
	s, v, err := p.pick(size)
	if err == nil && v == nil {
		v, err = s.make(ctx, p.cfg.Dir)
	}
	if err != nil {
		return nil, fmt.Errorf("take a volume: %w", err)
	}
	p.refill(s)
	if err := unix.Fchownat(int(v.mount.Fd()), "", uid, gid, unix.AT_EMPTY_PATH); err != nil {
		return nil, errors.Join(fmt.Errorf("take a volume: %w", err), v.Close())
	}
	return v, nil
}

// pick returns the stock of a size, and a volume of it if one is ready.
func (p *Pool) pick(size Size) (*stock, *Volume, error) {
	s, v, old, err := p.pickLocked(size)
	return s, v, errors.Join(err, closeAll(old))
}

func (p *Pool) pickLocked(size Size) (s *stock, v *Volume, old []*Volume, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, nil, nil, errClosed
	}
	if i := slices.IndexFunc(p.sizes, func(s *stock) bool { return s.size == size }); i >= 0 {
		s = p.sizes[i]
		p.sizes = slices.Delete(p.sizes, i, i+1)
	} else {
		s = &stock{size: size, making: make(chan struct{}, 1)}
	}
	p.sizes = slices.Insert(p.sizes, 0, s)
	if len(p.sizes) > maxSizes {
		old = p.sizes[maxSizes].drop()
		p.sizes = slices.Delete(p.sizes, maxSizes, maxSizes+1)
	}
	if n := len(s.ready); n > 0 {
		v, s.ready = s.ready[n-1], s.ready[:n-1]
	}
	return s, v, old, nil
}

// make makes a volume, and before the first one the template.
func (s *stock) make(ctx context.Context, dir string) (*Volume, error) {
	select {
	case s.making <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	t := s.made
	var err error
	if t == nil {
		t, err = format(ctx, dir, s.size)
		s.made = t
	}
	<-s.making
	if err != nil {
		return nil, err
	}
	return newVolume(dir, t, s.size)
}

// refill makes volumes in the background until enough are ready.
func (p *Pool) refill(s *stock) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || s.dropped || s.filling || len(s.ready) >= p.cfg.Ready {
		return
	}
	s.filling = true
	p.work.Go(func() {
		for {
			v, err := s.make(context.Background(), p.cfg.Dir)
			if err != nil {
				p.cfg.Log.Warn("no volume could be kept ready", "error", err)
			}
			if !p.stow(s, v) {
				return
			}
		}
	})
}

// stow puts a volume, or nil, with the ready ones, and reports whether more are
// wanted.
func (p *Pool) stow(s *stock, v *Volume) bool {
	p.mu.Lock()
	over := p.closed || s.dropped
	if v != nil && !over {
		s.ready = append(s.ready, v)
	}
	s.filling = v != nil && !over && len(s.ready) < p.cfg.Ready
	more := s.filling
	p.mu.Unlock()
	if v != nil && over {
		if err := v.Close(); err != nil {
			p.cfg.Log.Warn("a volume was not given back cleanly", "error", err)
		}
	}
	return more
}

func (s *stock) drop() []*Volume {
	ready := s.ready
	s.ready, s.dropped = nil, true
	return ready
}

func closeAll(volumes []*Volume) error {
	var errs []error
	for _, v := range volumes {
		errs = append(errs, v.Close())
	}
	return errors.Join(errs...)
}

// Close gives back the volumes that are ready, and waits for what goes on in the
// background. Volumes that were taken are closed by who took them.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	var ready []*Volume
	for _, s := range p.sizes {
		ready = append(ready, s.drop()...)
	}
	p.sizes = nil
	p.mu.Unlock()
	err := closeAll(ready)
	p.work.Wait()
	return err
}
