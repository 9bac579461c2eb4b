package app

import (
	"path/filepath"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/s3"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
	"github.com/bullpen-run/bullpen/worker/mount"
	"github.com/bullpen-run/bullpen/worker/mount/objectfs"
)

// MountServer is the command of the process that serves the mounts of an execution. Only a worker
// starts it.
const MountServer = "mount-server"

// ServeMounts serves the mounts of an execution in the process of MountServer.
func ServeMounts() error {
	return mount.Serve(func(m proto.Mount, keys proto.S3Credentials) (objectfs.Objects, error) {
		return s3.OpenBucket(s3.BucketConfig{S3Mount: *m.S3, Credentials: keys, Prefix: m.Prefix})
	})
}

// openMounts opens what mounts storage connections, or returns the reason why this worker cannot.
func openMounts(cfg *Config, maker *nsjail.Maker) (*mount.Opener, error) {
	data, err := filepath.Abs(cfg.Data)
	if err != nil {
		return nil, err
	}
	return mount.Open(mount.Config{
		Maker: maker, Roots: cfg.MountRoots, SpoolDir: filepath.Join(data, "spool"), SpoolBytes: int64(cfg.MountSpool),
		Command: []string{"bullpen", MountServer},
	})
}
