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

// result returns the result of an execution with such a volume.
func (e *volumeError) result() proto.Result {
	why := "the cause is in the worker's log"
	if uploads, ok := errors.AsType[*proto.UploadsError](e.err); ok {
		why = uploads.Error()
	}
	return proto.Failure(proto.CodeVolumeMount, fmt.Sprintf(
		"The volume %s could not be made ready on this worker, so the program was not started: %s.", e.slug, why))
}

// checkOutVolumes checks out the volumes of a job and registers their mount functions with b.mounts.
// The error is a [*volumeError].
func (a *attempt) checkOutVolumes(ctx context.Context, b *sandbox) error {
	mounts := map[string]mount.Volume{}
	for _, mounted := range a.job.Mounts {
		if mounted.Kind != proto.MountVolume {
			continue
		}
		v, err := a.checkOutVolume(ctx, mounted)
		if err != nil {
			return &volumeError{mounted.Slug, err}
		}
		b.volumes = append(b.volumes, v)
		if v.home == nil {
			mounts[v.slug] = v.reader.MountPart
			continue
		}
		mounts[v.slug] = func(uid, gid int, open func(root int) (int, error)) (*os.File, error) {
			changes, err := a.Mounts.Maker.Volume(ctx, changesSpace(mounted.Bytes))
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
	b.mounts.SetVolumes(mounts)
	return nil
}

// changesSpace returns the size of the file system for a volume's changes, given its quota in
// bytes. It is a power of two, so that sizes are few and some can be kept ready. Home.LimitSpace
// limits the program to the rest of the quota.
func changesSpace(quota int64) proto.Space {
	size := int64(proto.GiB)
	for size-home.OwnBytes < quota {
		size *= 2
	}
	return proto.Space{Bytes: size - home.OwnBytes, Files: proto.VolumeSpace(size).Files}
}

func (a *attempt) checkOutVolume(ctx context.Context, m proto.Mount) (v *volume, err error) {
	v = &volume{slug: m.Slug}
	if m.ReadOnly {
		v.reader, err = a.Homes.Read(ctx, a.job.Org, proto.VolumeThread(m.Slug))
		return v, err
	}
	v.home, err = a.Homes.CheckOut(ctx, proto.CheckoutRequest{
		Org: a.job.Org, Thread: proto.VolumeThread(m.Slug), Trace: a.job.TraceID, Most: proto.VolumeSpace(m.Bytes),
	})
	return v, err
}

// limitVolumes adds staged files to a job's writable volumes, and limits the volumes to their
// quotas. The error is a [*volumeError].
func (b *sandbox) limitVolumes(ctx context.Context) error {
	for _, v := range b.volumes {
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
