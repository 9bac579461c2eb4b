package filestore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// mountMemory is the memory in bytes of a request about a mount's files, without content: one page
// of a list.
const mountMemory = 4 << 20

// Homes reads and stages files in the homes of threads: the newest version, overlaid by the staged
// files. Paths are cleaned and relative to the home. The path of the home itself is empty. Links
// are not followed.
type Homes interface {
	// List calls each for the entries of a directory of a version, or for everything below it if
	// recursive is true; version 0 is the newest with the staged files. It stops if each returns an
	// error. An unknown thread has no entries, and no numbered version. List returns a
	// [*proto.NoVersionError], and [proto.ErrNotFound] if the path does not name a directory.
	List(
		ctx context.Context, org, thread string, version int64, path string, recursive bool, each func(proto.File) error,
	) error
	// Open returns the content of a file of a version, a [*proto.NoVersionError] or
	// [proto.ErrNotFound].
	Open(ctx context.Context, org, thread string, version int64, path string) (*proto.FileContent, error)
	// Compare returns what differs at a path and below it between two versions, in ascending order;
	// from 0 is an empty home, to 0 the newest version with the staged files. truncated reports that
	// there may be more. It returns [proto.ErrNotFound] if there is no such thread, a
	// [*proto.NoVersionError], and a [*proto.NoFileError] if neither version has the path.
	Compare(ctx context.Context, org, thread string, from, to int64, path string) (
		changes []proto.FileChange, truncated bool, err error,
	)
	// Stage stores size bytes of body as a file, and creates the thread if it does not exist.
	// Lists, downloads and the next execution then include the file. It returns a
	// [*proto.FieldError] for an invalid file, a [*proto.StagedError] if too many files are staged,
	// and a [*proto.SpaceError] if the home would exceed most.
	Stage(ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader) error
	// Put stores size bytes of body as a file of a volume in a new version. Its errors are those of
	// Stage, and a [*proto.BusyError] if an execution holds the volume when body has been read.
	Put(ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader) error
	// Delete deletes the file or directory at a path in a new version, and returns its number. It
	// returns [proto.ErrNotFound] if there is no such thread, a [*proto.NoFileError] if the path
	// does not exist, a [*proto.PathError] for a non-empty directory unless recursive is true, and
	// a [*proto.BusyError] while an execution holds the thread.
	Delete(ctx context.Context, org, thread, path string, recursive bool) (version int64, err error)
	// Rename renames a file or directory in a new version, and returns its number. Its errors are
	// those of Delete, a [*proto.PathError] if the new path cannot be used, and a
	// [*proto.SpaceError] if the home would exceed most.
	Rename(ctx context.Context, org, thread, from, to string, most proto.Space) (version int64, err error)
	// CheckSpace returns the error with which Stage would refuse a file of that size.
	CheckSpace(ctx context.Context, org, thread, path string, size int64, most proto.Space) error
}

// Mounts opens the files of storage connections.
type Mounts interface {
	// Bucket opens the files of a mount of kind s3. Errors of its files may also be
	// [*proto.StorageTestError], if the server must not be used.
	Bucket(m proto.Mount, keys proto.S3Credentials) (BucketFiles, error)
	// Directory opens the files of a mount of kind directory. It returns a [*proto.NoDirectoryError]
	// if this gateway does not have the directory.
	Directory(m proto.Mount) (MountFiles, error)
}

// Connections finds storage connections.
type Connections interface {
	// Connection returns a storage connection, or [proto.ErrNotFound].
	Connection(ctx context.Context, org, slug string) (proto.Connection, error)
}

// Keys knows the sandboxes of API keys and the credentials of organisations.
type Keys interface {
	// ProfileOf returns the sandbox profile that a key is bound to.
	ProfileOf(ctx context.Context, key *proto.Key) (proto.Profile, error)
	// BucketCredentials returns the credentials of a bucket from a secret, or a [*proto.FieldError].
	BucketCredentials(ctx context.Context, org, secret string) (proto.S3Credentials, error)
}

// Opener opens the files that requests address. Its exported fields are set before its first use.
type Opener struct {
	*web.Core
	Homes       Homes
	Connections Connections
	Mounts      Mounts
	Parts       Parts
	Keys        Keys
	Home        string // the home of programs, absolute and cleaned: paths of files may begin with it

	// beginning has one slot per organisation: its multipart uploads begin one at a time, so that
	// concurrent ones are counted.
	beginning web.Transfers
}

// OpenPath returns the files that a request addresses, and name cleaned by clean. The files must be
// closed after use.
func (o *Opener) OpenPath(
	r *web.Request, req *api.FileRequest, name string, clean func(root, name string) (string, error),
) (*Store, string, error) {
	key := r.Key
	f, err := o.Open(r.Context(), &key, req.Source, req.ID)
	if err != nil {
		return nil, "", err
	}
	if name, err = clean(f.Root, name); err != nil {
		f.Close()
		return nil, "", err
	}
	return f, name, nil
}

// Open returns the files that a request addresses. They must be closed after use. Files outside the
// key's access do not exist for it.
func (o *Opener) Open(
	ctx context.Context, key *proto.Key, source proto.FileSource, id string,
) (*Store, error) {
	if source == proto.SourceThread {
		files := &homeFiles{Homes: o.Homes, org: key.Org, thread: id, put: o.Homes.Stage}
		files.limit = func(ctx context.Context) (proto.Space, error) { return o.HomeLimit(ctx, key) }
		return &Store{
			files: files, opener: o, Org: key.Org, ID: id, Root: o.Home, Blobs: true, source: source, done: func() {},
		}, nil
	}
	at := slices.IndexFunc(key.Mounts, func(m proto.KeyMount) bool { return m.Connection == id })
	if at < 0 {
		return nil, errNoConnection
	}
	c, err := o.Connections.Connection(ctx, key.Org, id)
	if errors.Is(err, proto.ErrNotFound) {
		return nil, errNoConnection
	}
	if err != nil {
		return nil, fmt.Errorf("look up storage connection %s: %w", id, err)
	}
	m, err := c.Mount(key.Mounts[at], "")
	if err != nil {
		return nil, api.Errorf(api.CodeConflict, "the storage connection %s cannot be used: %v", id, err)
	}
	f := &Store{
		opener: o, Org: key.Org, ID: id, Root: path.Join(proto.MountsDir, id), source: source, prefix: m.At,
		readOnly: m.ReadOnly,
	}
	if err := o.openMount(ctx, f, m); err != nil {
		return nil, err
	}
	return f, nil
}

var errNoConnection = api.Errorf(api.CodeNotFound, "this API key has no storage connection of that name")

// openMount opens the files of a mount.
func (o *Opener) openMount(ctx context.Context, f *Store, m proto.Mount) (err error) {
	if m.Kind == proto.MountVolume {
		f.Blobs = true
		// The home of a volume is the whole connection.
		f.files, f.done = &homeFiles{
			Homes: o.Homes, org: f.Org, thread: proto.VolumeThread(m.Slug), dir: m.Prefix, put: o.Homes.Put,
			limit: func(context.Context) (proto.Space, error) { return proto.VolumeSpace(m.Bytes), nil },
		}, func() {}
		return nil
	}
	end, err := o.Transfers.Begin(ctx, f.Org) // another server, or a file system, can make a request last
	if err != nil {
		return err
	}
	if !o.ReserveFor(f.Org, mountMemory) {
		end()
		return web.ErrOverloaded
	}
	f.Held, f.done = true, func() { o.Release(f.Org, mountMemory); end() }
	switch m.Kind {
	case proto.MountS3:
		var keys proto.S3Credentials
		if keys, err = o.Keys.BucketCredentials(ctx, f.Org, m.S3.Credential); err == nil {
			f.bucket, err = o.Mounts.Bucket(m, keys)
			f.files = f.bucket
		}
		if wrong, ok := errors.AsType[*proto.FieldError](err); ok {
			err = api.Errorf(api.CodeConflict,
				"the storage connection %s cannot be used, because its %s; its administrator can change it", f.ID, wrong.Message)
		}
	case proto.MountDirectory:
		f.files, err = o.Mounts.Directory(m)
	default:
		err = web.NotImplemented(fmt.Sprintf("files of storage connections of kind %s are", m.Kind),
			"run a program that has the connection")
	}
	if err != nil {
		f.done()
		return f.Wrap("open", err)
	}
	return nil
}

// HomeLimit returns the size limit of homes in the sandbox of an API key.
func (o *Opener) HomeLimit(ctx context.Context, key *proto.Key) (proto.Space, error) {
	profile, err := o.Keys.ProfileOf(ctx, key)
	return proto.Space{Bytes: int64(profile.Disk.Home), Files: profile.Disk.Inodes}, err
}

// BeginUpload begins a transfer of an organisation and reserves memory for an upload. end ends it.
func (o *Opener) BeginUpload(ctx context.Context, org string, size int64) (end func(), err error) {
	return (&Store{opener: o, Org: org}).BeginUpload(ctx, size)
}

// Tar returns a tar to unpack into a home of at most a size. Until the request ends, it reserves the memory of
// the entries.
func (o *Opener) Tar(i *web.Info, body io.Reader, most proto.Space) *proto.TarUpload {
	const step = 1 << 20
	var left int64
	return &proto.TarUpload{Body: body, Home: o.Home, Most: most, Proceed: func(memory int64) error {
		if err := o.CheckDisk(); err != nil {
			return err
		}
		for left < memory {
			if !o.Reserve(i, step) {
				return web.ErrOverloaded
			}
			left += step
		}
		left -= memory
		return nil
	}}
}
