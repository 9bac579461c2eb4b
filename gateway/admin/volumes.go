package admin

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Volumes reads the threads that volumes are.
type Volumes interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
}

// VolumeVersions reads, forks and removes the stored versions of volumes.
type VolumeVersions interface {
	// Archive writes a directory of a version as a tar; version 0 is the newest. Before it writes, it
	// returns [proto.ErrNotFound] if there is no such thread or version, and a [*proto.NoFileError] if
	// that has no such directory.
	Archive(ctx context.Context, org, thread string, version int64, path string, w io.Writer) error
	// Fork creates a thread from a version of another; version 0 is the newest. It returns
	// [proto.ErrNotFound] if there is no such thread or version, and [proto.ErrExists] if the new
	// id is taken.
	Fork(ctx context.Context, org, from string, version int64, to string) (*proto.Thread, error)
	// Remove removes a thread with its versions. It returns [proto.ErrNotFound] if there is none, and a
	// [*proto.BusyError] while an execution holds it.
	Remove(ctx context.Context, org, thread string) error
}

// Quotas knows how much of their monthly quotas organisations have used.
type Quotas interface {
	// CheckQuota rejects a use if the organisation has reached a hard limit this month: of the
	// named quotas, or of any if none are named.
	CheckQuota(ctx context.Context, org string, quotas ...proto.QuotaName) error
}

// VolumeRoutes are the routes of volumes, which are storage connections.
type VolumeRoutes struct {
	*web.Core
	Connections Connections
	Orgs        orgFinder
	Volumes     Volumes
	Versions    VolumeVersions
	Quotas      Quotas
	MaxVolume   proto.Bytes // largest quota of a new or changed volume

	resource *web.Resource[proto.Connection, api.Connection]
}

// Handlers returns the handlers of the routes.
func (s *VolumeRoutes) Handlers() []web.Handler {
	s.resource = newConnectionResource(s.Core)
	return []web.Handler{
		{ID: "getVolume", Handle: s.get},
		{ID: "forkVolume", Handle: s.fork},
		{ID: "archiveVolume", Handle: s.archive},
	}
}

// inPath returns the connection of kind volume that a request names.
func (s *VolumeRoutes) inPath(r *web.Request) (c proto.Connection, err error) {
	org, slug, err := connectionPath(r)
	if err == nil {
		c, err = s.Connections.Connection(r.Context(), org, slug)
	}
	if err != nil {
		return c, s.resource.Error(slug, err)
	}
	if c.Kind != proto.MountVolume {
		return c, api.Errorf(api.CodeConflict, "the storage connection %s is no volume: its kind is %s", slug, c.Kind)
	}
	return c, nil
}

// checkVolumeSize returns an error if a volume's quota exceeds the operator's limit: programs may
// write that much to a worker's disk.
func checkVolumeSize(c *proto.Connection, most proto.Bytes) error {
	if c.Kind == proto.MountVolume && proto.Bytes(c.Bytes) > most {
		return proto.FieldErrorf(
			"bytes", "is %s, and a volume of this server may have at most %s; the operator sets that with --max-volume-size",
			proto.Bytes(c.Bytes), most)
	}
	return nil
}

// head returns the head of a volume. A volume never written to has none, and is empty.
func (s *VolumeRoutes) head(ctx context.Context, c *proto.Connection) (*proto.Thread, error) {
	head, err := s.Volumes.Get(ctx, c.Org, proto.VolumeThread(c.Slug))
	if errors.Is(err, proto.ErrNotFound) {
		return &proto.Thread{CreatedAt: c.CreatedAt, UsedAt: c.CreatedAt}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up volume %s: %w", c.Slug, err)
	}
	return head, nil
}

func (s *VolumeRoutes) get(w http.ResponseWriter, r *web.Request) error {
	c, err := s.inPath(r)
	if err != nil {
		return err
	}
	head, err := s.head(r.Context(), &c)
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.NewVolume(&c, head))
}

// remove removes the files of a volume that is marked as being removed. Its error is for the
// client.
func (s *VolumeRoutes) remove(ctx context.Context, c *proto.Connection) error {
	err := s.Versions.Remove(ctx, c.Org, proto.VolumeThread(c.Slug))
	busy, isBusy := errors.AsType[*proto.BusyError](err)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return nil
	case isBusy:
		return api.Errorf(api.CodeConflict,
			"the volume %s is in use by execution %s, and nothing else can use it any more; remove it again when that has ended",
			c.Slug, busy.Holder)
	default:
		return err
	}
}

// fork creates a volume with the files of another.
func (s *VolumeRoutes) fork(w http.ResponseWriter, r *web.Request) error {
	fork, err := web.DecodeBody[api.ForkVolumeRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	from, err := s.inPath(r)
	if err != nil {
		return err
	}
	if from.Removing {
		return &proto.RemovingConnectionError{Connection: from.Slug}
	}
	if err := CheckMayGetObjects(r.Context(), s.Orgs, from.Org); err != nil {
		return err
	}
	if err := s.Quotas.CheckQuota(r.Context(), from.Org, proto.QuotaStored); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), web.VersionsTimeout)
	defer cancel()
	c := from
	c.Slug, c.ReadOnly, c.Snapshot, c.Description, c.CreatedAt = fork.Slug, fork.ReadOnly, fork.ReadOnly, fork.Description,
		time.Now().UTC()
	c.UpdatedAt = c.CreatedAt
	if err := c.Check(); err != nil {
		return err
	}
	if err := checkVolumeSize(&c, s.MaxVolume); err != nil {
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
		return api.Errorf(api.CodeConflict,
			"files of an earlier volume %s are still stored; choose another slug, or create a volume of that slug, which has "+
				"them, and remove it", c.Slug)
	case err != nil:
		return fmt.Errorf("fork volume %s: %w", from.Slug, err)
	}
	if err := s.Connections.Create(ctx, c); err != nil {
		return fmt.Errorf("fork volume: %w", errors.Join(err, s.undoFork(ctx, &c, head, err)))
	}
	s.resource.After(r, &c)
	s.resource.Location(w, &c)
	return s.resource.Write(w, http.StatusCreated, &c)
}

// undoFork removes a fork's files after its connection was refused with cause. The head is nil if
// the fork has none. After any other error the connection may exist; orphaned files are reported
// when their slug is used again.
func (s *VolumeRoutes) undoFork(ctx context.Context, c *proto.Connection, head *proto.Thread, cause error) error {
	_, refused := errors.AsType[*proto.FieldError](cause)
	if head == nil || !refused {
		return nil
	}
	switch now, err := s.Volumes.Get(ctx, c.Org, head.ID); {
	case errors.Is(err, proto.ErrNotFound):
		return nil
	case err != nil:
		return err
	case !now.CreatedAt.Equal(head.CreatedAt) || now.Fence != head.Fence: // of somebody else, or in use
		return nil
	}
	return s.remove(ctx, c)
}

// archive writes the part of a volume that its connection has as a tar.
func (s *VolumeRoutes) archive(w http.ResponseWriter, r *web.Request) error {
	version, err := web.QueryInt(r, "version", 1, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	c, err := s.inPath(r)
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
	done, err := s.Transfers.Begin(r.Context(), c.Org)
	if err != nil {
		return err
	}
	defer done()
	out := web.TarAnswer(w, r, c.Slug)
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
