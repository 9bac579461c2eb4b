package gateway

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// volumeOf returns the connection of kind volume that a request names.
func (s *Server) volumeOf(r *http.Request) (c proto.Connection, err error) {
	org, slug, err := connectionPath(r)
	if err != nil {
		return c, err
	}
	if c, err = s.Connections.Connection(r.Context(), org, slug); err != nil {
		return c, connectionError(slug, err)
	}
	if c.Kind != proto.MountVolume {
		return c, api.Errorf(api.CodeConflict, "the storage connection %s is no volume: its kind is %s", slug, c.Kind)
	}
	return c, nil
}

// checkVolumeSize returns an error if the quota of a volume exceeds what the operator allows: programs
// may write as much to the disk of a worker.
func (s *Server) checkVolumeSize(c *proto.Connection) error {
	if c.Kind == proto.MountVolume && proto.Bytes(c.Bytes) > s.MaxVolume {
		return proto.FieldErrorf("bytes", "is %s, and a volume of this server may have at most %s; the operator sets that with --max-volume-size", proto.Bytes(c.Bytes), s.MaxVolume)
	}
	return nil
}

// volumeHead returns the head of a volume. One that nobody has written to has none, and is empty.
func (s *Server) volumeHead(ctx context.Context, c *proto.Connection) (*proto.Thread, error) {
	head, err := s.Threads.Get(ctx, c.Org, proto.VolumeThread(c.Slug))
	if errors.Is(err, proto.ErrNotFound) {
		return &proto.Thread{CreatedAt: c.CreatedAt, UsedAt: c.CreatedAt}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up volume %s: %w", c.Slug, err)
	}
	return head, nil
}

func (s *Server) getVolume(w http.ResponseWriter, r *http.Request) error {
	c, err := s.volumeOf(r)
	if err != nil {
		return err
	}
	head, err := s.volumeHead(r.Context(), &c)
	if err != nil {
		return err
	}
	return writeValue(w, http.StatusOK, api.NewVolume(&c, head))
}

// hasVolumePath reports whether the part of a volume that a program would see exists.
func (s *Server) hasVolumePath(ctx context.Context, org string, m *proto.Mount) (bool, error) {
	thread := proto.VolumeThread(m.Slug)
	_, err := s.Threads.Get(ctx, org, thread)
	if err == nil {
		enough := errors.New("it has an entry")
		err = s.Files.List(ctx, org, thread, m.Prefix, false, func(proto.File) error { return enough })
		if errors.Is(err, enough) {
			err = nil
		}
	}
	if errors.Is(err, proto.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for a path in volume %s: %w", m.Slug, err)
	}
	return true, nil
}

// removeVolume removes the files of a volume that is marked as being removed. Its error is for the
// client.
func (s *Server) removeVolume(ctx context.Context, c *proto.Connection) error {
	err := s.Versions.Remove(ctx, c.Org, proto.VolumeThread(c.Slug))
	busy, isBusy := errors.AsType[*proto.BusyError](err)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return nil
	case isBusy:
		return api.Errorf(api.CodeConflict, "the volume %s is in use by execution %s, and nothing else can use it any more; remove it again when that has ended", c.Slug, busy.Holder)
	default:
		return err
	}
}

// forkVolume creates a volume that begins with the files of another.
func (s *Server) forkVolume(w http.ResponseWriter, r *http.Request) error {
	fork, err := decodeBody[api.ForkVolumeRequest](s, w, r)
	if err != nil {
		return err
	}
	from, err := s.volumeOf(r)
	if err != nil {
		return err
	}
	if from.Removing {
		return &proto.RemovingConnectionError{Connection: from.Slug}
	}
	if err := s.checkMayGetObjects(r.Context(), from.Org); err != nil {
		return err
	}
	if err := s.checkQuota(r.Context(), from.Org, proto.QuotaStored); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), versionsTimeout)
	defer cancel()
	c := from
	c.Slug, c.ReadOnly, c.Description, c.CreatedAt = fork.Slug, fork.ReadOnly, fork.Description, time.Now().UTC()
	c.UpdatedAt = c.CreatedAt
	if err := c.Check(); err != nil {
		return err
	}
	if err := s.checkVolumeSize(&c); err != nil {
		return err
	}
	switch _, err := s.Connections.Connection(ctx, c.Org, c.Slug); {
	case err == nil:
		return fmt.Errorf("fork volume: storage connection %s: %w", c.Slug, proto.ErrExists)
	case !errors.Is(err, proto.ErrNotFound):
		return fmt.Errorf("look up storage connection %s: %w", c.Slug, err)
	}
	// The connection comes last: programs never see a fork without its files.
	head, err := s.Versions.Fork(ctx, c.Org, proto.VolumeThread(from.Slug), fork.Version, proto.VolumeThread(c.Slug))
	switch {
	case errors.Is(err, proto.ErrNotFound) && fork.Version > 0:
		return api.Errorf(api.CodeNotFound, "the volume %s does not have that version", from.Slug)
	case errors.Is(err, proto.ErrNotFound): // nobody has written to it
	case errors.Is(err, proto.ErrExists):
		return api.Errorf(api.CodeConflict, "files of an earlier volume %s are still stored; choose another slug, or create a volume of that slug, which has them, and remove it", c.Slug)
	case err != nil:
		return fmt.Errorf("fork volume %s: %w", from.Slug, err)
	}
	if err := s.Connections.Create(ctx, c); err != nil {
		return fmt.Errorf("fork volume: %w", errors.Join(err, s.undoFork(ctx, &c, head, err)))
	}
	auditAfter(r, c.Org, c.Slug, api.NewConnection(&c))
	w.Header().Set("Location", "/v1/admin/connections/"+c.Slug)
	return writeTagged(w, http.StatusCreated, api.NewConnection(&c))
}

// undoFork removes the files of a fork, whose head was nil if it has none, after its connection was
// refused with cause. After any other error the connection may exist, and files that no connection
// has are reported when their slug is used again.
func (s *Server) undoFork(ctx context.Context, c *proto.Connection, head *proto.Thread, cause error) error {
	_, refused := errors.AsType[*proto.FieldError](cause)
	if head == nil || !refused {
		return nil
	}
	switch now, err := s.Threads.Get(ctx, c.Org, head.ID); {
	case errors.Is(err, proto.ErrNotFound):
		return nil
	case err != nil:
		return err
	case !now.CreatedAt.Equal(head.CreatedAt) || now.Fence != head.Fence: // of somebody else, or in use
		return nil
	}
	return s.removeVolume(ctx, c)
}

// archiveVolume writes the part of a volume that its connection has as a tar.
func (s *Server) archiveVolume(w http.ResponseWriter, r *http.Request) error {
	version, err := queryInt(r, "version", 1, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	c, err := s.volumeOf(r)
	if err != nil {
		return err
	}
	dir, err := proto.CleanFilePath(proto.MountsDir+"/"+c.Slug, r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	if c.Removing {
		return &proto.RemovingConnectionError{Connection: c.Slug}
	}
	done, err := s.transfers.begin(r.Context(), c.Org)
	if err != nil {
		return err
	}
	defer done()
	out := tarAnswer(w, r, c.Slug)
	err = s.Versions.Archive(r.Context(), c.Org, proto.VolumeThread(c.Slug), version, path.Join(c.Prefix, dir), out)
	missing, isMissing := errors.AsType[*proto.NoFileError](err)
	switch {
	case isMissing:
		return api.Errorf(api.CodeNotFound, "%s", missing)
	case errors.Is(err, proto.ErrNotFound) && version == 0 && dir == "": // nobody has written to it
		return tar.NewWriter(out).Close()
	case errors.Is(err, proto.ErrNotFound):
		return api.Errorf(api.CodeNotFound, "the volume %s does not have that version or directory", c.Slug)
	case err != nil:
		return fmt.Errorf("archive volume %s: %w", c.Slug, err)
	}
	return nil
}
