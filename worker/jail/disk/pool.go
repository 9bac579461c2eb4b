// Package disk provides volumes: directories for jails with a limit of bytes and inodes that is
// independent of memory. Each is an ext4 file system in a sparse file behind a loop device, serves
// one jail, and is never reused.
//
// Nothing has a name: the file is created without one (O_TMPFILE), the mount is in no namespace
// until a jail gets it, and the loop device detaches itself after its last user. So the kernel
// frees everything when the process and its jails are gone, however they die, and there is nothing
// to sweep.
//
// Disk space is not reserved: files grow as they are written. If the host's disk fills up before a
// volume reaches its limit, writes to the volume fail with EIO or ENOSPC, or are lost as on a
// failed disk, and the volume may turn read-only. The limits of all volumes together should
// therefore fit on the disk.
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

// For each size, a pool keeps the template in memory (about 4 KiB per 128 MiB of the size) and
// ready volumes (the same on disk, and a loop device each).
const (
	maxSizes     = 8 // the most recently used
	DefaultReady = 2
)

// Config configures a Pool.
type Config struct {
	Dir   string       // directory of images, created if missing; required
	Ready int          // ready volumes for each of the last 8 sizes; default DefaultReady
	Log   *slog.Logger // default slog.Default()
}

// Size is the limit of a volume.
type Size struct {
	// Bytes limits the content of files, rounded up to blocks of 4 KiB. Each file and directory takes
	// whole blocks, and large ones some more for metadata, less than 1 %. So the usable space is never
	// more than Bytes and may be slightly less. Inode tables and other fixed parts are not counted.
	// Processes with CAP_SYS_RESOURCE outside of jails are limited by Inodes only.
	Bytes int64
	// Inodes limits the number of files, directories, links and so on, without the volume's root
	// directory.
	Inodes int64
	// Directory limits each directory, in bytes, a multiple of 1 KiB. An entry takes 8 bytes more than
	// its name, rounded up to 4. 0 is no limit.
	Directory int64
}

func (s Size) blocks() int64 { return (s.Bytes + blockSize - 1) / blockSize }

var errClosed = errors.New("the pool of volumes is closed")

// Pool creates volumes and keeps some ready.
type Pool struct {
	cfg  Config
	work sync.WaitGroup // refills

	mu     sync.Mutex
	closed bool
	sizes  []*stock // most recently used first
}

// stock is the pool's state for one size.
type stock struct {
	size         Size
	templateLock chan struct{} // semaphore for creating the template
	template     *template     // guarded by templateLock
	ready        []*Volume     // guarded by the pool's mutex, like the rest
	filling      bool
	dropped      bool
}

// Open creates a pool. Its errors name what is missing and a remedy.
func Open(cfg Config) (*Pool, error) {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Ready == 0 {
		cfg.Ready = DefaultReady
	}
	if cfg.Ready < 0 || !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("volumes: directory %q must be absolute, and the number of ready volumes, %d, must not "+
			"be negative", cfg.Dir, cfg.Ready)
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

// Get returns an empty volume whose root directory belongs to uid and gid, with mode 0755. It is
// mounted nosuid and nodev. The first volume of a size takes longer.
func (p *Pool) Get(ctx context.Context, size Size, uid, gid int) (*Volume, error) {
	if size.Bytes <= 0 || size.Bytes > MaxBytes || size.Inodes <= 0 || size.Inodes > MaxInodes {
		return nil, fmt.Errorf("get a volume: %+v is not between 1 and %d bytes and 1 and %d inodes", size,
			int64(MaxBytes), MaxInodes)
	}
	if size.Directory < 0 || size.Directory%1024 != 0 {
		return nil, fmt.Errorf("get a volume: directories of %d bytes: must be a multiple of 1024", size.Directory)
	}
	s, v, err := p.pick(size)
	if err == nil && v == nil {
		v, err = s.make(ctx, p.cfg.Dir)
	}
	if err != nil {
		return nil, fmt.Errorf("get a volume: %w", err)
	}
	p.refill(s)
	if err := unix.Fchownat(int(v.mount.Fd()), "", uid, gid, unix.AT_EMPTY_PATH); err != nil {
		return nil, errors.Join(fmt.Errorf("get a volume: %w", err), v.Close())
	}
	return v, nil
}

// pick returns the stock of a size, and a volume if one is ready.
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
		s = &stock{size: size, templateLock: make(chan struct{}, 1)}
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

// make creates a volume. It creates the template first if there is none.
func (s *stock) make(ctx context.Context, dir string) (*Volume, error) {
	select {
	case s.templateLock <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	t := s.template
	var err error
	if t == nil {
		t, err = format(ctx, dir, s.size)
		s.template = t
	}
	<-s.templateLock
	if err != nil {
		return nil, err
	}
	return newVolume(dir, t, s.size)
}

// refill creates volumes in the background until enough are ready.
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
				p.cfg.Log.Warn("volume refill failed", "error", err)
			}
			if !p.addReady(s, v) {
				return
			}
		}
	})
}

// addReady adds a volume, which may be nil, to the ready ones. It reports whether more are needed.
func (p *Pool) addReady(s *stock, v *Volume) bool {
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
			p.cfg.Log.Warn("volume not closed cleanly", "error", err)
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

// Close removes the ready volumes and waits for background work. Volumes returned by Get are closed
// by their users.
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
