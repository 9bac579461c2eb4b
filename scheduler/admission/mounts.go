package admission

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// subPathTimeout bounds the look whether a sub path exists.
const subPathTimeout = 3 * time.Second

// Connections finds the storage connections of organisations.
type Connections interface {
	// Connection returns a connection, or [proto.ErrNotFound].
	Connection(ctx context.Context, org, slug string) (proto.Connection, error)
}

// Buckets looks into the buckets of storage connections.
type Buckets interface {
	// HasObjects reports whether a mount of a bucket has objects.
	HasObjects(ctx context.Context, m proto.Mount, keys proto.S3Credentials) (bool, error)
}

// Threads finds threads.
type Threads interface {
	// Get returns a thread, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
}

// Files reads the files of threads.
type Files interface {
	// List calls each for the entries of a directory of a version, 0 for the newest. It stops at an
	// error of each. It returns [proto.ErrNotFound] if the path does not name a directory.
	List(
		ctx context.Context, org, thread string, version int64, path string, recursive bool, each func(proto.File) error,
	) error
}

// Transfers limits what each organisation transfers at a time.
type Transfers interface {
	// Begin begins a transfer of an organisation, which done ends.
	Begin(ctx context.Context, org string) (done func(), err error)
}

// mountsOf returns the mounts of a key's execution, narrowed by sub paths. It returns nil if the
// key has none.
func (a *Admission) mountsOf(ctx context.Context, key *proto.Key, subPaths []string) (mounts []proto.Mount, err error) {
	subs := map[string]string{}
	outside := func(slug string) error {
		return &proto.Rejection{Reason: proto.RejectedSubPath, Name: proto.MountsDir + "/" + slug + "/" + subs[slug]}
	}
	for _, path := range subPaths {
		slug, below := api.SplitSubPath(path)
		subs[slug] = below
		if !slices.ContainsFunc(key.Mounts, func(k proto.KeyMount) bool { return k.Connection == slug }) {
			return nil, outside(slug)
		}
	}
	for _, k := range key.Mounts {
		c, err := a.Connections.Connection(ctx, key.Org, k.Connection)
		if errors.Is(err, proto.ErrNotFound) {
			return nil, &proto.Rejection{Reason: proto.RejectedNoConnection, Name: k.Connection}
		}
		if err != nil {
			return nil, fmt.Errorf("look up storage connection %s: %w", k.Connection, err)
		}
		m, err := c.Mount(k, subs[k.Connection])
		_, removing := errors.AsType[*proto.RemovingConnectionError](err)
		switch {
		case removing:
			return nil, err
		case errors.Is(err, proto.ErrOutsideMount):
			return nil, outside(k.Connection)
		case err != nil:
			return nil, proto.FieldErrorf("sub_paths", "must be shorter: %v", err)
		}
		mounts = append(mounts, m)
	}
	return mounts, nil
}

// checkSubPaths returns an error if a read-only sub path does not exist: the program could not
// create it. Only workers know directories, and buckets that no gateway has reached.
func (a *Admission) checkSubPaths(ctx context.Context, org string, mounts []proto.Mount, subPaths []string) error {
	ctx, cancel := context.WithTimeout(ctx, subPathTimeout)
	defer cancel()
	for _, path := range subPaths {
		slug, _ := api.SplitSubPath(path)
		m := mounts[slices.IndexFunc(mounts, func(m proto.Mount) bool { return m.Slug == slug })]
		if !m.ReadOnly {
			continue
		}
		exists, err := a.mayExist(ctx, org, m)
		if err != nil {
			return err
		}
		if !exists {
			return proto.FieldErrorf("sub_paths",
				"must name parts that exist, of a connection that can only be read; %q does not", proto.Shorten(path))
		}
	}
	return nil
}

// mayExist reports whether the mount's part of the storage may exist.
func (a *Admission) mayExist(ctx context.Context, org string, m proto.Mount) (bool, error) {
	switch m.Kind {
	case proto.MountVolume:
		return a.hasVolumePath(ctx, org, &m)
	case proto.MountS3:
		c, err := a.Connections.Connection(ctx, org, m.Slug)
		if err != nil {
			return false, fmt.Errorf("look up storage connection %s: %w", m.Slug, err)
		}
		if c.TestedAt != nil {
			return a.hasObjects(ctx, org, m)
		}
	}
	return true, nil
}

// hasVolumePath reports whether the part of a volume that a program would see exists.
func (a *Admission) hasVolumePath(ctx context.Context, org string, m *proto.Mount) (bool, error) {
	thread := proto.VolumeThread(m.Slug)
	_, err := a.Threads.Get(ctx, org, thread)
	if err == nil {
		enough := errors.New("it has an entry")
		err = a.Files.List(ctx, org, thread, 0, m.Prefix, false, func(proto.File) error { return enough })
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

// hasObjects reports whether a mount of a bucket has objects.
func (a *Admission) hasObjects(ctx context.Context, org string, m proto.Mount) (bool, error) {
	keys, err := a.BucketCredentials(ctx, org, m.S3.Credential)
	if err != nil {
		return false, err
	}
	unavailable := func(err error) error {
		return &proto.Rejection{Reason: proto.RejectedStorage, Name: m.Slug, Detail: err.Error()}
	}
	done, err := a.Transfers.Begin(ctx, org)
	if err != nil {
		return false, unavailable(err)
	}
	defer done()
	exists, err := a.Buckets.HasObjects(ctx, m, keys)
	refused, isRefused := errors.AsType[*proto.StorageTestError](err)
	switch {
	case isRefused:
		return false, refused
	case errors.Is(err, fs.ErrPermission):
		return false, &proto.Rejection{Reason: proto.RejectedCredentials, Name: m.Slug}
	case err != nil:
		return false, unavailable(err)
	}
	return exists, nil
}

// BucketCredentials returns the credentials of a bucket from a secret.
func (a *Admission) BucketCredentials(ctx context.Context, org, secret string) (proto.S3Credentials, error) {
	value, err := a.Secrets.Value(ctx, org, secret)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.S3Credentials{}, proto.FieldErrorf("credential",
			"%q is no secret of this organisation; make it first", proto.Shorten(secret))
	}
	if err != nil {
		return proto.S3Credentials{}, fmt.Errorf("read the credentials of a bucket: %w", err)
	}
	keys, err := proto.ParseS3Credentials(value)
	if err != nil {
		return keys, proto.FieldErrorf("credential", "must be a secret with JSON that has access_key_id and "+
			"a secret_access_key of at least %d bytes; the value of %q is not", proto.MinSecretBytes, proto.Shorten(secret))
	}
	return keys, nil
}

// renewMounts returns the mounts for re-running a dead job: its own, as far as its key still allows
// them.
func (a *Admission) renewMounts(
	ctx context.Context, key *proto.Key, dead []proto.Mount,
) (renewed []proto.Mount, err error) {
	lost := func(slug string) error { return &proto.Rejection{Reason: proto.RejectedLostMount, Name: slug} }
	for _, old := range dead {
		at := slices.IndexFunc(key.Mounts, func(k proto.KeyMount) bool { return k.Connection == old.Slug })
		if at < 0 {
			return nil, lost(old.Slug)
		}
		k, sub := key.Mounts[at], old.At
		if proto.IsBelow(k.Prefix, old.At) {
			sub = "" // the key has less now
		}
		c, err := a.Connections.Connection(ctx, key.Org, old.Slug)
		if errors.Is(err, proto.ErrNotFound) {
			return nil, lost(old.Slug)
		}
		if err != nil {
			return nil, fmt.Errorf("look up storage connection %s: %w", old.Slug, err)
		}
		m, err := c.Mount(k, sub)
		if err != nil {
			return nil, lost(old.Slug)
		}
		m.ReadOnly = m.ReadOnly || old.ReadOnly
		renewed = append(renewed, m)
	}
	return renewed, nil
}
