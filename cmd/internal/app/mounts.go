package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"sync/atomic"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/s3"
	"github.com/bullpen-run/bullpen/webhook/guard"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
	"github.com/bullpen-run/bullpen/worker/mount"
	"github.com/bullpen-run/bullpen/worker/mount/objectfs"
)

// MountServer is the command of the process that serves the mounts of an execution. Only a worker
// starts it, with [destinations] as its argument.
const MountServer = "mount-server"

// destinations are where storage connections may lead, beside public addresses over https.
type destinations struct {
	CIDRs []netip.Prefix `json:"cidrs,omitempty"`
	HTTP  bool           `json:"http,omitempty"`
	Ports []int          `json:"ports,omitempty"`
}

func (c *Config) destinations() destinations {
	return destinations{c.MountAllowCIDRs, c.MountAllowHTTP, c.MountAllowPorts}
}

func (d destinations) guard() (*guard.Guard, error) {
	return guard.New(guard.Config{For: "storage connections", AllowCIDRs: d.CIDRs, AllowHTTP: d.HTTP, AllowPorts: d.Ports})
}

// ServeMounts serves the mounts of an execution in the process of MountServer.
func ServeMounts(argument string) error {
	var d destinations
	if err := json.Unmarshal([]byte(argument), &d); err != nil {
		return fmt.Errorf("read where mounts may lead: %w", err)
	}
	g, err := d.guard()
	if err != nil {
		return err
	}
	return mount.Serve(func(m proto.Mount, keys proto.S3Credentials) (objectfs.Objects, error) {
		return openBucket(g, g.Dial, m, keys)
	})
}

type dial func(ctx context.Context, network, addr string) (net.Conn, error)

// openBucket opens the part of a bucket that a mount has. It returns a [*proto.FieldError] if the
// guard refuses the endpoint.
func openBucket(g *guard.Guard, dial dial, m proto.Mount, keys proto.S3Credentials) (*s3.Bucket, error) {
	if err := checkEndpoint(g, m); err != nil {
		return nil, err
	}
	return s3.OpenBucket(s3.BucketConfig{S3Mount: *m.S3, Credentials: keys, Prefix: m.Prefix, Dial: dial})
}

// checkEndpoint checks the text of a mount's endpoint.
func checkEndpoint(g *guard.Guard, m proto.Mount) error {
	if m.S3 == nil || m.S3.Endpoint == "" {
		return nil
	}
	return g.CheckURL("endpoint", m.S3.Endpoint)
}

// openMounts opens what mounts storage connections, or returns the reason why this worker cannot.
func openMounts(cfg *Config, maker *nsjail.Maker) (*mount.Opener, error) {
	data, err := filepath.Abs(cfg.Data)
	if err != nil {
		return nil, err
	}
	g, err := cfg.destinations().guard()
	if err != nil {
		return nil, err
	}
	allowed, err := json.Marshal(cfg.destinations())
	if err != nil {
		return nil, err
	}
	return mount.Open(mount.Config{
		Maker: maker, Roots: cfg.MountRoots, SpoolDir: filepath.Join(data, "spool"), SpoolBytes: int64(cfg.MountSpool),
		Command: []string{"bullpen", MountServer, string(allowed)}, Check: func(m proto.Mount) error { return checkEndpoint(g, m) },
	})
}

// buckets are the buckets of storage connections, as a gateway uses them.
type buckets struct{ guard *guard.Guard }

func openBuckets(cfg *Config) (buckets, error) {
	g, err := cfg.destinations().guard()
	return buckets{g}, err
}

// CheckEndpoint implements [gateway.Storage].
func (b buckets) CheckEndpoint(ctx context.Context, field, url string) error {
	return b.guard.Check(ctx, field, url)
}

// Test implements [gateway.Storage].
func (b buckets) Test(ctx context.Context, m proto.Mount, keys proto.S3Credentials) error {
	return b.use(m, keys, func(bucket *s3.Bucket) error { return bucket.Test(ctx, m.ReadOnly) })
}

// HasObjects implements [gateway.Storage].
func (b buckets) HasObjects(ctx context.Context, m proto.Mount, keys proto.S3Credentials) (has bool, err error) {
	err = b.use(m, keys, func(bucket *s3.Bucket) error {
		has, err = bucket.HasObjects(ctx)
		return err
	})
	return has, err
}

// maxBucketBytes is how much a gateway reads from a connection to a bucket. Tests and looks need a few
// KiB; lists that a server never ends would take memory.
const maxBucketBytes = 128 << 10

// bucketConn fails when more than maxBucketBytes are read.
type bucketConn struct {
	net.Conn
	left int
}

func (c *bucketConn) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, fmt.Errorf("read from a bucket: the server sent more than %d bytes", maxBucketBytes)
	}
	n, err := c.Conn.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

// use opens a bucket and calls f with it. If the guard refuses the address of the server, the error
// says so.
func (b buckets) use(m proto.Mount, keys proto.S3Credentials, f func(*s3.Bucket) error) error {
	var refused atomic.Pointer[guard.RefusedError]
	bucket, err := openBucket(b.guard, func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := b.guard.Dial(ctx, network, addr)
		if r, ok := errors.AsType[*guard.RefusedError](err); ok {
			refused.Store(r)
		}
		if err != nil {
			return nil, err
		}
		return &bucketConn{conn, maxBucketBytes}, nil
	}, m, keys)
	if err != nil {
		return err
	}
	defer func() { _ = bucket.Close() }()
	err = f(bucket)
	if r := refused.Load(); r != nil && err != nil {
		return &proto.StorageTestError{Step: "connect to the server", Why: r.Reason}
	}
	return err
}
