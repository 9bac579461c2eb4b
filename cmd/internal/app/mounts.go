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

	"github.com/bullpen-run/bullpen/gateway/filestore"
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

// destinations are the allowed destinations of storage connections, in addition to public addresses
// over https.
type destinations struct {
	CIDRs []netip.Prefix    `json:"cidrs,omitempty"`
	HTTP  bool              `json:"http,omitempty"`
	Ports []guard.PortRange `json:"ports,omitempty"`
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
		return openBucket(g, g.Dial, 0, m, keys) // the read-ahead of a file system has its own limit
	})
}

type dial func(ctx context.Context, network, addr string) (net.Conn, error)

// openBucket opens the part of a bucket that a mount has. It returns a [*proto.FieldError] if the
// guard refuses the endpoint.
func openBucket(g *guard.Guard, dial dial, maxConns int, m proto.Mount, keys proto.S3Credentials) (*s3.Bucket, error) {
	if err := checkEndpoint(g, m); err != nil {
		return nil, err
	}
	return s3.OpenBucket(s3.BucketConfig{
		S3Mount: *m.S3, Credentials: keys, Prefix: m.Prefix, Dial: dial,
		MaxConns: maxConns,
	})
}

// checkEndpoint checks the text of a mount's endpoint.
func checkEndpoint(g *guard.Guard, m proto.Mount) error {
	if m.S3 == nil || m.S3.Endpoint == "" {
		return nil
	}
	return g.CheckURL("endpoint", m.S3.Endpoint)
}

// openMounts opens the mounter of storage connections, or returns why this worker cannot mount any.
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
		Command: []string{"bullpen", MountServer, string(allowed)}, Check: func(m proto.Mount) error {
			return checkEndpoint(g, m)
		},
	})
}

// requestConns is how many connections to a bucket's server one request to the gateway may use.
const requestConns = 16

// buckets are the storage connections, as a gateway uses them.
type buckets struct {
	guard *guard.Guard
	roots []string // in which directories may be
}

func openBuckets(cfg *Config) (buckets, error) {
	g, err := cfg.destinations().guard()
	return buckets{g, cfg.MountRoots}, err
}

// CheckEndpoint implements [admin.Buckets].
func (b buckets) CheckEndpoint(ctx context.Context, field, url string) error {
	return b.guard.Check(ctx, field, url)
}

// Test implements [admin.Buckets].
func (b buckets) Test(ctx context.Context, m proto.Mount, keys proto.S3Credentials) error {
	return b.use(m, keys, func(bucket *s3.Bucket) error { return bucket.Test(ctx, m.ReadOnly) })
}

// HasObjects implements [admin.Buckets].
func (b buckets) HasObjects(ctx context.Context, m proto.Mount, keys proto.S3Credentials) (has bool, err error) {
	err = b.use(m, keys, func(bucket *s3.Bucket) error {
		has, err = bucket.HasObjects(ctx)
		return err
	})
	return has, err
}

// maxBucketBytes is how much a gateway reads from a connection to a bucket. Tests and looks need a
// few KiB; lists that a server never ends would take memory.
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
	var refused refusal
	dial := refused.dial(b.guard)
	bucket, err := openBucket(b.guard, func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &bucketConn{conn, maxBucketBytes}, nil
	}, requestConns, m, keys)
	if err != nil {
		return err
	}
	defer func() { _ = bucket.Close() }()
	return refused.explain(f(bucket))
}

// refusal is why a guard refused the address of a server.
type refusal struct {
	reason atomic.Pointer[guard.RefusedError]
}

// dial returns the dial of a guard, whose refusals are remembered.
func (r *refusal) dial(g *guard.Guard) dial {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := g.Dial(ctx, network, addr)
		if refused, ok := errors.AsType[*guard.RefusedError](err); ok {
			r.reason.Store(refused)
		}
		return conn, err
	}
}

// explain returns the refusal, if any, instead of the error that it caused.
func (r *refusal) explain(err error) error {
	if refused := r.reason.Load(); refused != nil && err != nil {
		return &proto.StorageTestError{Step: "connect to the server", Why: refused.Reason}
	}
	return err
}

// Bucket implements [filestore.Mounts].
func (b buckets) Bucket(m proto.Mount, keys proto.S3Credentials) (filestore.BucketFiles, error) {
	files := new(bucketFiles)
	bucket, err := openBucket(b.guard, files.dial(b.guard), requestConns, m, keys)
	files.Files = &s3.Files{Bucket: bucket}
	return files, err
}

// Directory implements [filestore.Mounts].
func (b buckets) Directory(m proto.Mount) (filestore.MountFiles, error) {
	return mount.OpenDirectory(b.roots, m)
}

// bucketFiles are the files of a bucket. If the guard refuses the address of the server, their
// errors say so.
type bucketFiles struct {
	*s3.Files
	refusal
}

// List implements [filestore.MountFiles].
func (b *bucketFiles) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	return b.explain(b.Files.List(ctx, dir, recursive, each))
}

// Open implements [filestore.MountFiles].
func (b *bucketFiles) Open(ctx context.Context, path string) (*proto.FileContent, error) {
	content, err := b.Files.Open(ctx, path)
	return content, b.explain(err)
}

// CheckPut implements [filestore.MountFiles].
func (b *bucketFiles) CheckPut(ctx context.Context, path string, size int64) error {
	return b.explain(b.Files.CheckPut(ctx, path, size))
}
