package worker

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/mount"
)

// volume is a volume of an execution.
type volume struct {
	slug   string
	home   Home          // nil if the program can only read
	reader VolumeVersion // nil if the program can change the volume
}

func (v *volume) close(committed bool) error {
	if v.home != nil {
		return v.home.Close(committed)
	}
	v.reader.Close()
	return nil
}

// volumeError is why a volume could not be made ready.
type volumeError struct {
	slug string
	err  error
}

func (e *volumeError) Error() string { return fmt.Sprintf("volume %s: %v", e.slug, e.err) }
func (e *volumeError) Unwrap() error { return e.err }

// checkOutVolumes checks out the volumes of a job and registers their mount functions with m.data.
// The error is a [*volumeError].
func (w *Worker) checkOutVolumes(ctx context.Context, job *proto.Job, m *preparation) error {
	mounts := map[string]mount.Volume{}
	for _, mounted := range job.Mounts {
		if mounted.Kind != proto.MountVolume {
			continue
		}
		v, err := w.checkOutVolume(ctx, job, mounted)
		if err != nil {
			return &volumeError{mounted.Slug, err}
		}
		m.volumes = append(m.volumes, v)
		if v.home == nil {
			mounts[v.slug] = v.reader.MountPart
			continue
		}
		mounts[v.slug] = func(uid, gid int, open func(root int) (int, error)) (*os.File, error) {
			changes, err := w.Mounts.Maker.Volume(ctx, changesSpace(mounted.Bytes))
			if err != nil {
				return nil, err
			}
			part, err := v.home.MountPart(changes, uid, gid, open)
			if err != nil {
				return nil, errors.Join(err, changes.Close())
			}
			return part, nil
		}
	}
	m.data.SetVolumes(mounts)
	return nil
}

// changesSpace returns the size of the file system for the changes of a volume with a quota in bytes:
// a power of two, so that there are few sizes, of which some are kept ready. Home.LimitSpace leaves
// the program what the quota has room for.
func changesSpace(quota int64) proto.Space {
	size := int64(proto.GiB)
	for size-home.OwnBytes < quota {
		size *= 2
	}
	return proto.Space{Bytes: size - home.OwnBytes, Files: proto.VolumeSpace(size).Files}
}

func (w *Worker) checkOutVolume(ctx context.Context, job *proto.Job, m proto.Mount) (v *volume, err error) {
	v = &volume{slug: m.Slug}
	if m.ReadOnly {
		v.reader, err = w.Homes.Read(ctx, job.Org, proto.VolumeThread(m.Slug))
		return v, err
	}
	v.home, err = w.Homes.CheckOut(ctx, proto.CheckoutRequest{
		Org: job.Org, Thread: proto.VolumeThread(m.Slug), Trace: job.TraceID, Most: proto.VolumeSpace(m.Bytes),
	})
	return v, err
}

// limitVolumes adds staged files to the mounted volumes of a job that the program can change, and
// limits them to their quotas. The error is a [*volumeError].
func (m *preparation) limitVolumes(ctx context.Context) error {
	for _, v := range m.volumes {
		if v.home == nil {
			continue
		}
		err := v.home.PutStaged(ctx)
		if err == nil {
			err = v.home.LimitSpace()
		}
		if err != nil {
			return &volumeError{v.slug, err}
		}
	}
	return nil
}

// volumeFailure returns the result for a volume that could not be made ready.
func volumeFailure(failed *volumeError) proto.Result {
	why := "the cause is in the worker's log"
	if uploads, ok := errors.AsType[*proto.UploadsError](failed.err); ok {
		why = uploads.Error()
	}
	return proto.Failure(proto.CodeVolumeMount, fmt.Sprintf("The volume %s could not be made ready on this worker, so the program was not started: %s.", failed.slug, why))
}

// volumeNotSaved returns the message for the tenant about a volume that was not saved.
func (w *Worker) volumeNotSaved(slug string, err error) string {
	why := w.notSaved(err).Error()
	if limit, ok := errors.AsType[*proto.LimitError](err); ok {
		why = fmt.Sprintf("it has %d bytes in %d files and directories, and its quota is %d bytes in %d", limit.Bytes, limit.Files, limit.MaxBytes, limit.MaxFiles)
	}
	if depth, ok := errors.AsType[*proto.DepthError](err); ok {
		why = fmt.Sprintf("it has more than %d directories in each other, itself included", depth.Most)
	}
	return fmt.Sprintf("The volume %s was not changed: %s.", slug, why)
}
