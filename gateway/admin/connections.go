package admin

import (
	"cmp"
	"context"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// connectionTestTimeout bounds the test of a storage connection.
const connectionTestTimeout = 15 * time.Second

// Connections stores the storage connections of organisations.
type Connections interface {
	connectionFinder
	web.Pages[proto.Connection] // by organisation and slug
	// Create stores a new connection. It returns [proto.ErrExists] if the organisation has one of
	// that slug, and a [*proto.FieldError] if it has too many.
	Create(ctx context.Context, c proto.Connection) error
	// Change stores the result of change for a connection, and returns it. change may be called
	// again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no
	// such connection.
	Change(ctx context.Context, org, slug string, change func(*proto.Connection) error) (proto.Connection, error)
	// Remove removes a connection for which check returns nil, and returns it. It returns
	// [proto.ErrNotFound] if there is none, and a [*proto.BoundConnectionError] if unrevoked keys
	// use it. It marks a volume as being removed before it calls empty. If empty fails, the mark
	// stays, and the next Remove continues. Both may be called again.
	Remove(ctx context.Context, org, slug string, check, empty func(proto.Connection) error) (proto.Connection, error)
}

// connectionFinder finds storage connections.
type connectionFinder interface {
	// Connection returns a connection, or [proto.ErrNotFound].
	Connection(ctx context.Context, org, slug string) (proto.Connection, error)
}

// Buckets uses the buckets of storage connections.
type Buckets interface {
	// CheckEndpoint returns a [*proto.FieldError] if buckets must not be at a URL.
	CheckEndpoint(ctx context.Context, field, url string) error
	// Test uses a bucket as a mount does. It returns a [*proto.StorageTestError] if that fails.
	Test(ctx context.Context, m proto.Mount, keys proto.S3Credentials) error
}

// Credentials reads the credentials of buckets.
type Credentials interface {
	// BucketCredentials returns the credentials of a bucket from a secret, or a [*proto.FieldError].
	BucketCredentials(ctx context.Context, org, secret string) (proto.S3Credentials, error)
}

// ConnectionRoutes are the routes of storage connections.
type ConnectionRoutes struct {
	*web.Core
	Connections Connections
	Orgs        orgFinder
	Buckets     Buckets
	Credentials Credentials
	Volumes     *VolumeRoutes
	MaxVolume   proto.Bytes // largest quota of a new or changed volume

	resource *web.Resource[proto.Connection, api.Connection]
}

// Handlers returns the handlers of the routes.
func (s *ConnectionRoutes) Handlers() []web.Handler {
	x := newConnectionResource(s.Core)
	s.resource = x
	return []web.Handler{
		{ID: "createConnection", Handle: x.Create(s.read,
			func(ctx context.Context, c proto.Connection) (proto.Connection, error) {
				c.CreatedAt = time.Now().UTC()
				c.UpdatedAt = c.CreatedAt
				return c, s.Connections.Create(ctx, c)
			})},
		{ID: "listConnections", Handle: x.List(web.ListedOrg, s.Connections)},
		{ID: "getConnection", Handle: x.Get(func(ctx context.Context, r *web.Request) (c proto.Connection, err error) {
			org, slug, err := connectionPath(r)
			if err != nil {
				return c, err
			}
			return s.Connections.Connection(ctx, org, slug)
		})},
		{ID: "replaceConnection", Handle: x.Put(s.readReplacement, s.replace)},
		{ID: "removeConnection", Handle: x.Remove(s.remove)},
		{ID: "testConnection", Handle: s.test},
	}
}

func newConnectionResource(core *web.Core) *web.Resource[proto.Connection, api.Connection] {
	return &web.Resource[proto.Connection, api.Connection]{
		Core: core, Kind: "storage connection", Path: "/v1/admin/connections", Param: "slug", Form: api.NewConnection,
		Name: func(c *proto.Connection) (org, id string) { return c.Org, c.Slug },
		Answer: func(list []api.Connection, next *string) any {
			return api.Connections{Connections: list, NextCursor: next}
		},
		NotFound: func(slug string) error {
			return api.Errorf(api.CodeNotFound, "there is no storage connection %s in this organisation", proto.Shorten(slug))
		},
	}
}

// connectionPath returns the organisation and the slug of the connection that a request names. A slug of
// the wrong form does not exist.
func connectionPath(r *web.Request) (org, slug string, err error) {
	slug = chi.URLParam(r.Request, "slug")
	if org, err = web.NamedOrg(r); err == nil && proto.CheckSlug("slug", slug) != nil {
		err = proto.ErrNotFound
	}
	return org, slug, err
}

// checkDirectory returns an error if a request concerns a directory of workers and its key is not a
// global administrator's.
func checkDirectory(r *web.Request, c *proto.Connection) error {
	if c.Kind == proto.MountDirectory && !r.Key.Global {
		return api.NotGlobal("only a global administrator creates, changes and removes storage connections of kind directory")
	}
	return nil
}

// read decodes a connection from a request's body, and tests it unless the request opts out.
func (s *ConnectionRoutes) read(w http.ResponseWriter, r *web.Request) (c proto.Connection, err error) {
	org, slug := r.URL.Query().Get("org"), chi.URLParam(r.Request, "slug")
	if _, err = web.AdminOrg(r, org); err != nil {
		return c, err
	}
	err = s.WithBody(w, r, func(body []byte) (err error) {
		c, err = api.DecodeConnection(org, slug, body)
		return err
	})
	if err != nil {
		return c, err
	}
	if c.Org, err = web.AdminOrg(r, cmp.Or(org, c.Org)); err != nil {
		return c, err
	}
	if err := checkDirectory(r, &c); err != nil {
		return c, err
	}
	if err := checkVolumeSize(&c, s.MaxVolume); err != nil {
		return c, err
	}
	if err := CheckMayGetObjects(r.Context(), s.Orgs, c.Org); err != nil {
		return c, err
	}
	test, err := web.QueryBool(r, "test", true)
	if err != nil || c.S3 == nil {
		return c, err
	}
	if c.S3.Endpoint != "" {
		if err := s.Buckets.CheckEndpoint(r.Context(), "endpoint", c.S3.Endpoint); err != nil {
			return c, err
		}
	}
	keys, err := s.Credentials.BucketCredentials(r.Context(), c.Org, c.S3.Credential)
	if err != nil || !test {
		return c, err
	}
	return c, s.use(r.Context(), &c, keys)
}

// use tests a bucket, and stores the time in the connection.
func (s *ConnectionRoutes) use(ctx context.Context, c *proto.Connection, keys proto.S3Credentials) error {
	ctx, cancel := context.WithTimeout(ctx, connectionTestTimeout)
	defer cancel()
	m, err := c.Mount(proto.KeyMount{}, "")
	if err != nil {
		return err
	}
	done, err := s.Transfers.Begin(ctx, c.Org) // the server of a bucket can make a test last
	if err != nil {
		return err
	}
	defer done()
	if err := s.Buckets.Test(ctx, m, keys); err != nil {
		return err
	}
	c.TestedAt = new(time.Now().UTC())
	return nil
}

func (s *ConnectionRoutes) readReplacement(w http.ResponseWriter, r *web.Request) (c proto.Connection, err error) {
	if _, _, err := connectionPath(r); err != nil {
		return c, err
	}
	return s.read(w, r)
}

func (s *ConnectionRoutes) replace(
	ctx context.Context, r *web.Request, slug string, wanted proto.Connection,
) (proto.Connection, error) {
	return s.Connections.Change(ctx, wanted.Org, slug, func(c *proto.Connection) error {
		if err := s.resource.Before(r, c); err != nil {
			return err
		}
		if err := checkDirectory(r, c); err != nil {
			return err
		}
		if c.Removing {
			return &proto.RemovingConnectionError{Connection: c.Slug}
		}
		if c.Kind != wanted.Kind && (c.Kind == proto.MountVolume || wanted.Kind == proto.MountVolume) {
			return proto.FieldErrorf("kind", "must stay %s: a volume is created and removed with its connection", c.Kind)
		}
		if c.Snapshot && !wanted.ReadOnly {
			return proto.FieldErrorf(
				"read_only", "must stay true: the volume is a snapshot; fork it to get one that programs can change")
		}
		old := *c
		*c = wanted
		c.Snapshot, c.CreatedAt, c.UpdatedAt = old.Snapshot, old.CreatedAt, time.Now().UTC()
		if c.TestedAt == nil && c.SameStorage(&old) { // not tested now
			c.TestedAt = old.TestedAt
		}
		return nil
	})
}

func (s *ConnectionRoutes) remove(ctx context.Context, r *web.Request, _ string) (*proto.Connection, error) {
	org, slug, err := connectionPath(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), web.VersionsTimeout)
	defer cancel()
	c, err := s.Connections.Remove(ctx, org, slug, func(c proto.Connection) error {
		if err := checkDirectory(r, &c); err != nil {
			return err
		}
		return s.resource.Before(r, &c)
	}, func(c proto.Connection) error { return s.Volumes.remove(ctx, &c) })
	return &c, err
}

func (s *ConnectionRoutes) test(w http.ResponseWriter, r *web.Request) error {
	org, slug, err := connectionPath(r)
	if err != nil {
		return s.resource.Error(slug, err)
	}
	tested, err := s.Connections.Connection(r.Context(), org, slug)
	if err != nil {
		return s.resource.Error(slug, err)
	}
	web.AuditBefore(r, org, slug, api.NewConnection(&tested))
	if tested.Kind == proto.MountVolume {
		return api.Errorf(api.CodeConflict,
			"the storage connection %s is a volume, whose storage is that of this server; there is nothing to test", slug)
	}
	if tested.S3 == nil {
		return api.Errorf(api.CodeConflict,
			"only workers see the directory of the storage connection %s; run a program to test it", slug)
	}
	keys, err := s.Credentials.BucketCredentials(r.Context(), org, tested.S3.Credential)
	if err != nil {
		return err
	}
	if err := s.use(r.Context(), &tested, keys); err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	c, err := s.Connections.Change(ctx, org, slug, func(c *proto.Connection) error {
		if !c.UpdatedAt.Equal(tested.UpdatedAt) {
			return proto.ErrConflict
		}
		c.TestedAt = tested.TestedAt
		return nil
	})
	if err != nil {
		return s.resource.Error(slug, err)
	}
	s.resource.After(r, &c)
	return s.resource.Write(w, http.StatusOK, &c)
}
