package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// Home is a thread's home for one execution. It is used by one goroutine.
type Home struct {
	k       *Cache
	job     *proto.Job
	head    *proto.Thread
	place   *place
	overlay *home.Overlay
	volume  jail.Volume // nil until there is one
	mount   *os.File    // the home, as long as the program has not run
	lent    *home.Lent  // the program's file; nil where it has none
	saved   *saved      // nil until it was
}

// headPatience is how long a thread's head is asked for: a cluster that has lost the leader of the threads has another after 4 to 9 s, and the
// execution has begun.
const headPatience = 20 * time.Second

// CheckOut gives the home of the job's thread as it is now. It must be closed.
func (k *Cache) CheckOut(ctx context.Context, job *proto.Job) (*Home, error) {
	asked, cancel := context.WithTimeout(ctx, headPatience)
	defer cancel()
	t, err := k.cfg.Heads.Get(asked, job.Org, job.ThreadID)
	if err != nil {
		return nil, fmt.Errorf("check out thread %s: %w", job.ThreadID, err)
	}
	if t.Holder != job.TraceID {
		return nil, fmt.Errorf("check out thread %s: %w: execution %s has it", job.ThreadID, proto.ErrFenced, t.Holder)
	}
	p := k.take(threadName(job.Org, job.ThreadID))
	k.interrupt(p, t)
	if err := p.enter(ctx); err != nil {
		k.leave(p)
		return nil, fmt.Errorf("check out thread %s: %w", job.ThreadID, err)
	}
	p, err = k.prepare(ctx, p, t)
	if err != nil {
		p.exit()
		k.leave(p)
		return nil, fmt.Errorf("check out thread %s: %w", job.ThreadID, err)
	}
	p.homes++
	lower := k.path(emptyName)
	if p.at.number > 0 {
		lower = k.path(nameOf(p.thread, p.at))
	}
	p.exit()
	return &Home{k: k, job: job, head: t, place: p, overlay: &home.Overlay{Lower: lower}}, nil
}

// Mount is [jail.Home]'s.
func (h *Home) Mount(v jail.Volume, uid, gid int) (*os.File, error) {
	owner, err := h.k.cfg.Owners.Get(uid, gid)
	if err != nil {
		return nil, err
	}
	h.overlay.Volume, h.overlay.Owner = v.Path(), owner
	mount, err := h.overlay.Mount()
	if err != nil {
		return nil, err
	}
	h.volume, h.mount = v, mount
	return mount, nil
}

// Fill puts into the home what was uploaded to the thread and is in no version yet. The program must not run yet. A [*proto.UploadsError] says
// that there is no room for it.
func (h *Home) Fill(ctx context.Context) error {
	for _, f := range h.head.Staged {
		err := h.put(ctx, f)
		if errors.Is(err, unix.ENOSPC) {
			return h.tooMuch()
		}
		if err != nil {
			return fmt.Errorf("put the uploaded file %q into the home: %w", f.Path, err)
		}
	}
	return nil
}

// tooMuch gives the error about uploads for which there is no room.
func (h *Home) tooMuch() *proto.UploadsError {
	e := &proto.UploadsError{Files: int64(len(h.head.Staged)), MaxBytes: h.job.Sandbox.HomeBytes, MaxFiles: h.job.Sandbox.Inodes}
	for _, f := range h.head.Staged {
		e.Bytes += f.Size
	}
	return e
}

func (h *Home) put(ctx context.Context, f proto.StagedFile) error {
	r, err := h.k.cfg.Versions.Blobs.Get(ctx, f.Blob)
	if err != nil {
		return err
	}
	return errors.Join(h.overlay.Put(h.mount, f.Path, f.Size, r, f.At), r.Close())
}

// Place puts a program's file into the home, under its usual name or, if the home has that already, another one, and gives the name. The
// program must not run yet.
func (h *Home) Place(usual string, content []byte) (name string, err error) {
	stem, ext, _ := strings.Cut(usual, ".")
	name = usual
	for n := 1; ; n++ {
		lent, free, err := h.overlay.Lend(h.mount, name, content)
		if errors.Is(err, unix.ENOSPC) && len(h.head.Staged) > 0 {
			return "", h.tooMuch()
		}
		if err != nil {
			return "", fmt.Errorf("put the program into the home: %w", err)
		}
		if free {
			h.lent = lent
			return name, nil
		}
		if name = "." + usual; n > 1 {
			name = "." + stem + strconv.Itoa(n) + "." + ext
		}
	}
}

// Close gives the home back. committed says that what Save gave is the thread's newest version now. Nothing of the jail may live any
// more.
func (h *Home) Close(committed bool) error {
	var errs []error
	if h.mount != nil {
		errs = append(errs, h.mount.Close())
	}
	if h.volume != nil {
		errs = append(errs, h.volume.Close())
	}
	switch {
	case h.saved == nil:
		h.place.turn <- struct{}{}
		h.k.release(h.place)
	case committed:
		h.k.follow(h)
	default:
		errs = append(errs, h.saved.spool.Close())
		h.k.release(h.place)
	}
	return errors.Join(errs...)
}

// release takes a home off its place. It is called with the place's turn, which it gives back.
func (k *Cache) release(p *place) {
	p.homes--
	p.exit()
	k.leave(p)
}
