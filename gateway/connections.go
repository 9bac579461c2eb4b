package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// connectionTestTimeout bounds the test of a storage connection.
	connectionTestTimeout = 15 * time.Second
	// subPathTimeout bounds the look whether a sub path exists.
	subPathTimeout = 3 * time.Second
)

// mountsOf returns the mounts of an execution of a key, which sub paths narrow. It returns nil if
// the key has none.
func (s *Server) mountsOf(ctx context.Context, key *proto.Key, subPaths []string) (mounts []proto.Mount, err error) {
	subs := map[string]string{}
	outside := func(slug string) error {
		return api.Errorf(api.CodeForbidden, "sub_paths must be in the parts of storage connections that the API key has; %q is not",
			proto.Shorten(proto.MountsDir+"/"+slug+"/"+subs[slug]))
	}
	for _, path := range subPaths {
		slug, below := api.SplitSubPath(path)
		subs[slug] = below
		if !slices.ContainsFunc(key.Mounts, func(k proto.KeyMount) bool { return k.Connection == slug }) {
			return nil, outside(slug)
		}
	}
	for _, k := range key.Mounts {
		c, err := s.Connections.Connection(ctx, key.Org, k.Connection)
		if errors.Is(err, proto.ErrNotFound) {
			return nil, brokenSandbox("the storage connection %q of this organisation does not exist", k.Connection)
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

// checkSubPaths returns an error if a sub path that the program may only read does not exist: the
// program could not create it. Directories, and buckets that no gateway has reached, are known to
// workers alone.
func (s *Server) checkSubPaths(ctx context.Context, org string, mounts []proto.Mount, subPaths []string) error {
	ctx, cancel := context.WithTimeout(ctx, subPathTimeout)
	defer cancel()
	for _, path := range subPaths {
		slug, _ := api.SplitSubPath(path)
		m := mounts[slices.IndexFunc(mounts, func(m proto.Mount) bool { return m.Slug == slug })]
		if !m.ReadOnly {
			continue
		}
		exists, err := s.mayExist(ctx, org, m)
		if err != nil {
			return err
		}
		if !exists {
			return proto.FieldErrorf("sub_paths", "must name parts that exist, of a connection that can only be read; %q does not", proto.Shorten(path))
		}
	}
	return nil
}

// mayExist reports whether the part of the storage that a mount has may exist. Its errors are for the
// client.
func (s *Server) mayExist(ctx context.Context, org string, m proto.Mount) (bool, error) {
	switch m.Kind {
	case proto.MountVolume:
		return s.hasVolumePath(ctx, org, &m)
	case proto.MountS3:
		c, err := s.Connections.Connection(ctx, org, m.Slug)
		if err != nil {
			return false, fmt.Errorf("look up storage connection %s: %w", m.Slug, err)
		}
		if c.TestedAt != nil {
			return s.hasObjects(ctx, org, m)
		}
	}
	return true, nil
}

// hasObjects reports whether a mount of a bucket has objects. Its errors are for the client.
func (s *Server) hasObjects(ctx context.Context, org string, m proto.Mount) (bool, error) {
	keys, err := s.bucketCredentials(ctx, org, m.S3.Credential)
	if err != nil {
		return false, err
	}
	unavailable := func(err error) error {
		return fmt.Errorf("%w: %w", api.Unavailable(2, fmt.Sprintf(
			"the storage connection %s could not be asked whether a path of sub_paths exists, so nothing was accepted; send the request again", m.Slug)), err)
	}
	done, err := s.transfers.begin(ctx, org)
	if err != nil {
		return false, unavailable(err)
	}
	defer done()
	exists, err := s.Storage.HasObjects(ctx, m, keys)
	refused, isRefused := errors.AsType[*proto.StorageTestError](err)
	switch {
	case isRefused:
		return false, refused
	case errors.Is(err, fs.ErrPermission):
		return false, api.Errorf(api.CodeConflict, "the credentials of the storage connection %s are not accepted any more; the administrator can replace them", m.Slug)
	case err != nil:
		return false, unavailable(err)
	}
	return exists, nil
}

// renewMounts returns the mounts of a new execution of a dead job: what it had, as far as its key has
// it now.
func (s *Server) renewMounts(ctx context.Context, key *proto.Key, dead []proto.Mount) (renewed []proto.Mount, err error) {
	for _, old := range dead {
		at := slices.IndexFunc(key.Mounts, func(k proto.KeyMount) bool { return k.Connection == old.Slug })
		if at < 0 {
			return nil, lostMount(old.Slug)
		}
		k, sub := key.Mounts[at], old.At
		if proto.IsBelow(k.Prefix, old.At) {
			sub = "" // the key has less now
		}
		c, err := s.Connections.Connection(ctx, key.Org, old.Slug)
		if errors.Is(err, proto.ErrNotFound) {
			return nil, lostMount(old.Slug)
		}
		if err != nil {
			return nil, fmt.Errorf("look up storage connection %s: %w", old.Slug, err)
		}
		m, err := c.Mount(k, sub)
		if err != nil {
			return nil, lostMount(old.Slug)
		}
		m.ReadOnly = m.ReadOnly || old.ReadOnly
		renewed = append(renewed, m)
	}
	return renewed, nil
}

func lostMount(slug string) error {
	return api.Errorf(api.CodeConflict, "the API key does not have the part of the storage connection %s any more that the execution had", slug)
}

// bucketCredentials returns the credentials of a bucket from a secret.
func (s *Server) bucketCredentials(ctx context.Context, org, secret string) (proto.S3Credentials, error) {
	value, err := s.Secrets.Value(ctx, org, secret)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.S3Credentials{}, proto.FieldErrorf("credential", "%q is no secret of this organisation; make it first", proto.Shorten(secret))
	}
	if err != nil {
		return proto.S3Credentials{}, fmt.Errorf("read the credentials of a bucket: %w", err)
	}
	keys, err := proto.ParseS3Credentials(value)
	if err != nil {
		return keys, proto.FieldErrorf("credential", "must be a secret with JSON that has access_key_id and secret_access_key; the value of %q is not", proto.Shorten(secret))
	}
	return keys, nil
}

// checkKeyMounts returns an error unless the organisation of a key has the connections that it names.
func (s *Server) checkKeyMounts(ctx context.Context, key *proto.Key) error {
	for _, m := range key.Mounts {
		c, err := s.Connections.Connection(ctx, key.Org, m.Connection)
		if errors.Is(err, proto.ErrNotFound) {
			return proto.FieldErrorf("mounts", "must name storage connections of the organisation %s; %q is none", key.Org, m.Connection)
		}
		if err != nil {
			return fmt.Errorf("look up storage connection %s: %w", m.Connection, err)
		}
		if c.Removing {
			return &proto.RemovingConnectionError{Connection: c.Slug}
		}
	}
	return nil
}

func connectionError(slug string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no storage connection %s in this organisation", proto.Shorten(slug))
	}
	return fmt.Errorf("storage connection %s: %w", proto.Shorten(slug), err)
}

// connectionPath returns the organisation and the slug of the connection that a request names.
func connectionPath(r *http.Request) (org, slug string, err error) {
	slug = chi.URLParam(r, "slug")
	if org, err = adminOrg(r, r.URL.Query().Get("org")); err != nil {
		return "", "", err
	}
	if proto.CheckSlug("slug", slug) != nil {
		return "", "", connectionError(slug, proto.ErrNotFound)
	}
	return org, slug, nil
}

// checkDirectory returns an error if a request concerns a directory of workers and is not a global
// administrator's.
func checkDirectory(r *http.Request, c *proto.Connection) error {
	if c.Kind == proto.MountDirectory && !infoOf(r.Context()).key.Global {
		return api.NotGlobal("only a global administrator creates, changes and removes storage connections of kind directory")
	}
	return nil
}

// readConnection reads a connection from the body of a request, and tests it unless the request says
// otherwise. slug is that in the path, empty for none.
func (s *Server) readConnection(w http.ResponseWriter, r *http.Request, slug string) (c proto.Connection, err error) {
	org := r.URL.Query().Get("org")
	if _, err = adminOrg(r, org); err != nil {
		return c, err
	}
	body, err := s.readBody(w, r)
	if err != nil {
		return c, err
	}
	if c, err = api.DecodeConnection(org, slug, body); err != nil {
		return c, err
	}
	if c.Org, err = adminOrg(r, cmp.Or(org, c.Org)); err != nil {
		return c, err
	}
	if err := checkDirectory(r, &c); err != nil {
		return c, err
	}
	if err := s.checkVolumeSize(&c); err != nil {
		return c, err
	}
	if err := s.checkMayGetObjects(r.Context(), c.Org); err != nil {
		return c, err
	}
	test, err := queryBool(r, "test", true)
	if err != nil || c.S3 == nil {
		return c, err
	}
	if c.S3.Endpoint != "" {
		if err := s.Storage.CheckEndpoint(r.Context(), "endpoint", c.S3.Endpoint); err != nil {
			return c, err
		}
	}
	keys, err := s.bucketCredentials(r.Context(), c.Org, c.S3.Credential)
	if err != nil || !test {
		return c, err
	}
	return c, s.useConnection(r.Context(), &c, keys)
}

// useConnection tests a bucket, and stores the time in the connection.
func (s *Server) useConnection(ctx context.Context, c *proto.Connection, keys proto.S3Credentials) error {
	ctx, cancel := context.WithTimeout(ctx, connectionTestTimeout)
	defer cancel()
	m, err := c.Mount(proto.KeyMount{}, "")
	if err != nil {
		return err
	}
	done, err := s.transfers.begin(ctx, c.Org) // the server of a bucket can make a test last
	if err != nil {
		return err
	}
	defer done()
	if err := s.Storage.Test(ctx, m, keys); err != nil {
		return err
	}
	c.TestedAt = new(time.Now().UTC())
	return nil
}

func (s *Server) createConnection(w http.ResponseWriter, r *http.Request) error {
	c, err := s.readConnection(w, r, "")
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	c.CreatedAt = time.Now().UTC()
	c.UpdatedAt = c.CreatedAt
	if err := s.Connections.Create(ctx, c); err != nil {
		return fmt.Errorf("create storage connection: %w", err)
	}
	auditAfter(r, c.Org, c.Slug, api.NewConnection(&c))
	w.Header().Set("Location", "/v1/admin/connections/"+c.Slug)
	return writeTagged(w, http.StatusCreated, api.NewConnection(&c))
}

func (s *Server) listConnections(w http.ResponseWriter, r *http.Request) error {
	org, err := listedOrg(r)
	if err != nil {
		return err
	}
	answer := api.Connections{Connections: []api.Connection{}}
	for _, c := range s.Connections.List(org) {
		answer.Connections = append(answer.Connections, api.NewConnection(&c))
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) getConnection(w http.ResponseWriter, r *http.Request) error {
	org, slug, err := connectionPath(r)
	if err != nil {
		return err
	}
	c, err := s.Connections.Connection(r.Context(), org, slug)
	if err != nil {
		return connectionError(slug, err)
	}
	return writeTagged(w, http.StatusOK, api.NewConnection(&c))
}

func (s *Server) replaceConnection(w http.ResponseWriter, r *http.Request) error {
	_, slug, err := connectionPath(r)
	if err != nil {
		return err
	}
	wanted, err := s.readConnection(w, r, slug)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	c, err := s.Connections.Change(ctx, wanted.Org, slug, func(c *proto.Connection) error {
		auditBefore(r, c.Org, c.Slug, api.NewConnection(c))
		if err := checkMatch(r, api.NewConnection(c)); err != nil {
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
		created := c.CreatedAt
		*c = wanted
		c.CreatedAt, c.UpdatedAt = created, time.Now().UTC()
		return nil
	})
	if err != nil {
		return connectionError(slug, err)
	}
	auditAfter(r, c.Org, c.Slug, api.NewConnection(&c))
	return writeTagged(w, http.StatusOK, api.NewConnection(&c))
}

func (s *Server) deleteConnection(w http.ResponseWriter, r *http.Request) error {
	org, slug, err := connectionPath(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), versionsTimeout)
	defer cancel()
	c, err := s.Connections.Remove(ctx, org, slug, func(c proto.Connection) error {
		auditBefore(r, c.Org, c.Slug, api.NewConnection(&c))
		if err := checkDirectory(r, &c); err != nil {
			return err
		}
		return checkMatch(r, api.NewConnection(&c))
	}, func(c proto.Connection) error { return s.removeVolume(ctx, &c) })
	if err != nil {
		return connectionError(slug, err)
	}
	return writeValue(w, http.StatusOK, api.NewConnection(&c))
}

func (s *Server) testConnection(w http.ResponseWriter, r *http.Request) error {
	org, slug, err := connectionPath(r)
	if err != nil {
		return err
	}
	tested, err := s.Connections.Connection(r.Context(), org, slug)
	if err != nil {
		return connectionError(slug, err)
	}
	auditBefore(r, org, slug, api.NewConnection(&tested))
	if tested.Kind == proto.MountVolume {
		return api.Errorf(api.CodeConflict, "the storage connection %s is a volume, whose storage is that of this server; there is nothing to test", slug)
	}
	if tested.S3 == nil {
		return api.Errorf(api.CodeConflict, "only workers see the directory of the storage connection %s; run a program to test it", slug)
	}
	keys, err := s.bucketCredentials(r.Context(), org, tested.S3.Credential)
	if err != nil {
		return err
	}
	if err := s.useConnection(r.Context(), &tested, keys); err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	c, err := s.Connections.Change(ctx, org, slug, func(c *proto.Connection) error {
		if !c.UpdatedAt.Equal(tested.UpdatedAt) {
			return proto.ErrConflict
		}
		c.TestedAt = tested.TestedAt
		return nil
	})
	if err != nil {
		return connectionError(slug, err)
	}
	auditAfter(r, org, slug, api.NewConnection(&c))
	return writeTagged(w, http.StatusOK, api.NewConnection(&c))
}
