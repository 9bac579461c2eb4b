package cache

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// Home is the home of a thread, or a volume, for one execution. It must not be used concurrently.
type Home struct {
	cache   *Cache
	req     proto.CheckoutRequest
	head    *proto.Thread                   // of the version below the overlay
	current *proto.Thread                   // after the last save of the running sandbox; otherwise head
	pending func(ctx context.Context) error // completes a commit that may have been made; nil if there is none
	objects map[layer.Digest]bool           // of the last save of the running sandbox
	entry   *entry
	overlay *home.Overlay
	volume  jail.Volume     // nil before Mount
	mount   *os.File        // nil before Mount and after Save
	program *home.Temporary // nil if the program has no file
	saved   *saved          // nil before Save
}

// headTimeout limits how long CheckOut tries to read the head. After the loss of the leader of the
// threads' store, a cluster takes 4 to 9 s to elect another one.
const headTimeout = 20 * time.Second

// CheckOut returns the current home of a thread. It must be closed.
func (c *Cache) CheckOut(ctx context.Context, req proto.CheckoutRequest) (*Home, error) {
	h, err := c.checkOut(ctx, req)
	if err != nil {
		return nil, fmt.Errorf("check out thread %s: %w", req.Thread, err)
	}
	return h, nil
}

func (c *Cache) checkOut(ctx context.Context, req proto.CheckoutRequest) (*Home, error) {
	t, err := c.head(ctx, req.Org, req.Thread)
	if err != nil {
		return nil, err
	}
	if t.Holder != req.Trace {
		return nil, fmt.Errorf("%w: execution %s holds it", proto.ErrFenced, t.Holder)
	}
	e := c.disk.Acquire(req.Org + "/" + req.Thread)
	interruptCompaction(e, t)
	e, lower, err := c.use(ctx, e, t)
	if err != nil {
		return nil, err
	}
	return &Home{cache: c, req: req, head: t, current: t, entry: e, overlay: &home.Overlay{Lower: lower}}, nil
}

func (c *Cache) head(ctx context.Context, org, thread string) (*proto.Thread, error) {
	ctx, cancel := context.WithTimeout(ctx, headTimeout)
	defer cancel()
	return c.cfg.Heads.Get(ctx, org, thread)
}

// use makes the newest version of a thread available in an entry. It returns the version's entry
// and directory, which does not change until the entry is left. After an error the entry is
// released.
func (c *Cache) use(ctx context.Context, e *entry, t *proto.Thread) (_ *entry, dir string, err error) {
	if e, err = c.lockCurrent(ctx, e); err != nil {
		return nil, "", err
	}
	e, err = c.prepare(ctx, e, t)
	if err != nil {
		e.Value.unlock()
		c.disk.Release(e)
		return nil, "", err
	}
	e.Value.mounts++
	dir = filepath.Join(c.cfg.Dir, emptyName)
	if e.Value.Number > 0 {
		dir = e.Path(homeName)
	}
	e.Value.unlock()
	return e, dir, nil
}

// lockCurrent locks an entry, or its replacement. After an error the entry is released.
func (c *Cache) lockCurrent(ctx context.Context, e *entry) (*entry, error) {
	for {
		if err := e.Value.acquireLock(ctx); err != nil {
			c.disk.Release(e)
			return nil, err
		}
		if !c.disk.IsDetached(e) {
			return e, nil
		}
		current := c.disk.Acquire(e.Key())
		e.Value.unlock()
		c.disk.Release(e)
		e = current
	}
}

// Mount implements [jail.Home].
func (h *Home) Mount(v jail.Volume, uid, gid int) (*os.File, error) {
	mount, _, err := h.mountOn(v, uid, gid, nil)
	return mount, err
}

// MountPart is like Mount, but returns a mount of the directory that open opens below root, the root
// of the home. The caller closes it. open may create directories.
func (h *Home) MountPart(v jail.Volume, uid, gid int, open func(root int) (dir int, err error)) (*os.File, error) {
	_, part, err := h.mountOn(v, uid, gid, open)
	return part, err
}

func (h *Home) mountOn(
	v jail.Volume, uid, gid int, open func(root int) (dir int, err error),
) (mount, part *os.File, err error) {
	owner, err := h.cache.cfg.Owners.Get(uid, gid)
	if err != nil {
		return nil, nil, err
	}
	h.overlay.Volume, h.overlay.Owner = v.Path(), owner
	mount, part, err = h.overlay.MountPart(open)
	if err != nil {
		return nil, nil, err
	}
	h.volume, h.mount = v, mount
	return mount, part, nil
}

// PutStaged writes the thread's staged files into the home. The program must not have started yet.
// The error is a [*proto.UploadsError] if the files do not fit.
func (h *Home) PutStaged(ctx context.Context) error {
	for _, f := range h.head.Staged {
		err := h.put(ctx, f)
		if errors.Is(err, unix.ENOSPC) {
			return h.uploadsError()
		}
		if err != nil {
			return fmt.Errorf("put the uploaded file %q into the home: %w", f.Path, err)
		}
	}
	return nil
}

func (h *Home) uploadsError() *proto.UploadsError {
	e := &proto.UploadsError{Files: int64(len(h.head.Staged)), MaxBytes: h.req.Most.Bytes, MaxFiles: h.req.Most.Files}
	for _, f := range h.head.Staged {
		e.Bytes += f.Size
	}
	return e
}

func (h *Home) put(ctx context.Context, f proto.StagedFile) error {
	r, err := h.cache.cfg.Versions.OpenStaged(ctx, f)
	if err != nil {
		return err
	}
	return errors.Join(h.overlay.Put(h.mount, f.Path, f.Size, r, f.At), r.Close())
}

// MakeTmp turns a directory of the home into one that programs can use as /tmp. The program must
// not have started yet.
func (h *Home) MakeTmp(name string) error { return h.overlay.MakeTmp(h.mount, name) }

// PutProgram writes the program's file into the home and returns its name. The name is not the
// usual one if the home already has a file with that name. The program must not have started yet.
func (h *Home) PutProgram(usual string, content []byte) (name string, err error) {
	stem, ext, _ := strings.Cut(usual, ".")
	name = usual
	for n := 1; ; n++ {
		file, err := h.overlay.PutTemporary(h.mount, name, content)
		switch {
		case err == nil:
			h.program = file
			return name, nil
		case errors.Is(err, unix.ENOSPC) && len(h.head.Staged) > 0:
			return "", h.uploadsError()
		case !errors.Is(err, fs.ErrExist):
			return "", fmt.Errorf("put the program into the home: %w", err)
		}
		if name = "." + usual; n > 1 {
			name = "." + stem + strconv.Itoa(n) + "." + ext
		}
	}
}

// minSpace is how many bytes a program can always write, so that it can change files and
// directories of a full home.
const minSpace = 1 << 20

// LimitSpace limits the program's writes to the space left in the home. A program that exceeds it
// fails to write, instead of losing its changes afterwards. LimitSpace must be called after
// PutStaged and PutProgram. The program's file does not count.
func (h *Home) LimitSpace() error {
	used := proto.StagedSpace(h.head.Staged).Bytes
	if h.head.Version != nil {
		used += h.head.Version.Bytes
	}
	replaced, err := h.replacedBytes()
	if err != nil {
		return fmt.Errorf("limit the home of thread %s: %w", h.req.Thread, err)
	}
	return h.overlay.LimitSpace(max(h.req.Most.Bytes-used+replaced, minSpace))
}

// replacedBytes returns the size, without holes, of the files that staged files replace.
func (h *Home) replacedBytes() (int64, error) {
	lower, err := os.OpenRoot(h.overlay.Lower)
	if err != nil {
		return 0, err
	}
	defer func() { _ = lower.Close() }()
	var n int64
	for _, f := range h.head.Staged {
		info, err := lower.Lstat(f.Path)
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		if st := info.Sys().(*syscall.Stat_t); st.Nlink == 1 { // else its content remains
			n += min(st.Size, st.Blocks*512)
		}
	}
	return n, nil
}

// Close releases the home. committed reports whether the commit of Save is now the thread's newest
// version. No process of the jail may be left.
func (h *Home) Close(committed bool) error {
	var errs []error
	if h.mount != nil {
		errs = append(errs, h.mount.Close())
	}
	if h.volume != nil {
		errs = append(errs, h.volume.Close())
	}
	if h.saved == nil {
		h.entry.Value.lock <- struct{}{}
	}
	h.entry.Value.mounts--
	if h.saved != nil && committed {
		h.cache.disk.Go(h.advance)
		return errors.Join(errs...)
	}
	if h.saved != nil {
		errs = append(errs, h.saved.spool.Close())
	}
	h.entry.Value.unlock()
	h.cache.disk.Release(h.entry)
	return errors.Join(errs...)
}
