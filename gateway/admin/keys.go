package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Keys creates, changes and revokes API keys.
type Keys interface {
	// Create stores a new key with the name, organisation, plan, rights, limit and sandbox profiles
	// of k, and returns it with its secret. It returns [proto.ErrNotFound] if one of the profiles
	// does not exist.
	Create(ctx context.Context, k proto.Key) (key proto.Key, secret string, err error)
	keyList
	web.Pages[proto.Key]
	// Revoke revokes a key. It returns [proto.ErrNotFound] if the key does not exist, and a
	// [*proto.LastKeyError] if it is the last one of a global administrator.
	Revoke(ctx context.Context, id string) (proto.Key, error)
	// Get returns a key, even if it is revoked, or [proto.ErrNotFound].
	Get(ctx context.Context, id string) (proto.Key, error)
	// Change stores the result of change for a key, and returns it. change may be called again. Its
	// error is returned unchanged. Change returns [proto.ErrNotFound] if the key or an added
	// sandbox profile does not exist, and a [*proto.LastKeyError] if no global administrator's key
	// would be left.
	Change(ctx context.Context, id string, change func(*proto.Key) error) (proto.Key, error)
	// Rotate replaces the secret of a key and returns both. The previous secret works until the given
	// time. Rotate returns the same errors as Change.
	Rotate(ctx context.Context, id string, until time.Time) (key proto.Key, secret string, err error)
}

// KeyRoutes are the routes of API keys.
type KeyRoutes struct {
	*web.Core
	Keys        Keys
	Orgs        Orgs
	Plans       planFinder
	Profiles    profileFinder
	Connections connectionFinder

	resource *web.Resource[proto.Key, api.Key]
}

// Handlers returns the handlers of the routes.
func (s *KeyRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Key, api.Key]{
		Core: s.Core, Kind: "key", Path: "/v1/admin/keys", Param: "id", Form: api.NewKey, Live: s.withUse,
		Name:    func(k *proto.Key) (org, id string) { return k.Org, k.ID },
		Audited: auditKey,
		Answer:  func(list []api.Key, next *string) any { return api.Keys{Keys: list, NextCursor: next} },
		NotFound: func(string) error {
			return api.Errorf(api.CodeNotFound, "there is no API key of that id; see /v1/admin/keys")
		},
	}
	s.resource = x
	return []web.Handler{
		{ID: "createKey", Handle: s.create},
		{ID: "listKeys", Handle: x.List(web.ListedOrg, s.Keys)},
		{ID: "revokeKey", Handle: x.Remove(s.revoke)},
		{ID: "getKey", Handle: x.Get(func(ctx context.Context, r *web.Request) (proto.Key, error) {
			return s.inPath(ctx, r, false)
		})},
		{ID: "replaceKey", Handle: s.replace},
		{ID: "rotateKey", Handle: s.rotate},
	}
}

// checkGrantable returns an error unless the API key of a request may grant another one its
// privileges. An organisation's administrator cannot grant more than the organisation has.
func checkGrantable(r *web.Request, keys keyList, wanted *proto.Key) error {
	own := &r.Key
	if own.Global {
		return nil
	}
	if wanted.Global {
		return api.NotGlobal("only a global administrator creates the key of another")
	}
	granted, now := map[string]bool{}, time.Now()
	for _, k := range keys.List(own.Org) {
		if k.Valid(now) {
			addProfiles(granted, &k)
		}
	}
	for _, name := range wanted.AllowedProfiles() {
		if !granted[name] {
			return api.NotGlobal("no API key of this organisation has the sandbox profile %q; only a global administrator "+
				"grants it the first time", proto.Shorten(name))
		}
	}
	return nil
}

// addProfiles adds the names of the sandbox profiles that requests with a key may choose.
func addProfiles(to map[string]bool, key *proto.Key) {
	for _, name := range key.AllowedProfiles() {
		to[name] = true
	}
}

// checkProfiles returns an error unless the sandbox profiles of these names exist.
func (s *KeyRoutes) checkProfiles(ctx context.Context, field string, names ...string) error {
	for _, name := range names {
		_, err := s.Profiles.Profile(ctx, name)
		if errors.Is(err, proto.ErrNotFound) {
			return proto.FieldErrorf(field, "%q does not exist; make it first", proto.Shorten(name))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// errLostProfile is returned for a key if a sandbox profile is removed at the same time.
var errLostProfile = proto.FieldErrorf("profiles", "or profile names a sandbox profile that was just removed")

func (s *KeyRoutes) create(w http.ResponseWriter, r *web.Request) error {
	req, err := web.DecodeBody[api.KeyRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	if _, err := web.AdminOrg(r, req.Org); err != nil {
		return err
	}
	wanted := req.Key()
	if err := checkGrantable(r, s.Keys, &wanted); err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	if err := s.checkMounts(ctx, &wanted); err != nil {
		return err
	}
	// Before an organisation is created for the key.
	if err := s.checkProfiles(ctx, "profile", wanted.AllowedProfiles()[0]); err != nil {
		return err
	}
	if err := s.checkProfiles(ctx, "profiles", wanted.Profiles...); err != nil {
		return err
	}
	if err := s.ensureOrg(ctx, r, &wanted); err != nil {
		return err
	}
	if err := s.checkLimits(ctx, &wanted); err != nil {
		return err
	}
	key, secret, err := s.Keys.Create(ctx, wanted)
	if errors.Is(err, proto.ErrNotFound) {
		return errLostProfile
	}
	if err != nil {
		return fmt.Errorf("create key: %w", err)
	}
	s.resource.After(r, &key)
	answer := api.NewKey(&key)
	answer.Secret = secret
	s.resource.Location(w, &key)
	return web.WriteValue(w, http.StatusCreated, answer)
}

// ensureOrg creates the organisation of a new key if it does not exist, with the key's plan. The
// audit log records this in addition to the key's creation.
func (s *KeyRoutes) ensureOrg(ctx context.Context, r *web.Request, key *proto.Key) error {
	_, err := s.Orgs.Org(ctx, key.Org)
	if !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	org := proto.Org{Name: key.Org, Plan: proto.UnlimitedPlan, CreatedAt: time.Now().UTC()}
	if key.Plan != "" {
		if err := checkPlanExists(ctx, s.Plans, "plan", key.Plan); err != nil {
			return err
		}
		org.Plan, key.Plan = key.Plan, ""
	}
	err = s.AuditPart(r, "org.create", org.Name, org.Name, func() (any, error) {
		return api.NewOrg(&org), s.Orgs.Create(ctx, org)
	})
	if err != nil && !errors.Is(err, proto.ErrExists) {
		return fmt.Errorf("create organisation %s: %w", org.Name, err)
	}
	return nil
}

// checkLimits returns an error if a key would allow more than the plan of its organisation.
func (s *KeyRoutes) checkLimits(ctx context.Context, key *proto.Key) error {
	org, err := s.Orgs.Org(ctx, key.Org)
	if err != nil {
		return fmt.Errorf("look up organisation %s: %w", key.Org, err)
	}
	if err := checkNotDeleting(&org); err != nil {
		return err
	}
	plan, err := s.Plans.Plan(ctx, org.Plan)
	if errors.Is(err, proto.ErrNotFound) {
		return &proto.Rejection{Reason: proto.RejectedNoPlan, Name: org.Plan}
	}
	if err != nil {
		return fmt.Errorf("look up plan %s: %w", org.Plan, err)
	}
	if key.Plan != "" {
		own, err := s.Plans.Plan(ctx, key.Plan)
		switch {
		case errors.Is(err, proto.ErrNotFound):
			return checkPlanExists(ctx, s.Plans, "plan", key.Plan)
		case err != nil:
			return fmt.Errorf("look up plan %s: %w", key.Plan, err)
		case !own.Within(plan):
			return proto.FieldErrorf(
				"plan", "must not allow more than the plan %s of the organisation %s; give the organisation another plan first, "+
					"or leave this out", plan.Name, org.Name)
		}
		plan = plan.Narrow(own)
	}
	for _, limit := range []struct {
		field   string
		n, most int
	}{
		{"concurrent", key.Concurrent, plan.Concurrent},
		{"max_timeout", key.MaxTimeout, plan.MaxTimeout},
		{"request_rate", key.RequestRate, plan.RequestRate},
	} {
		if limit.n > proto.LimitOf(limit.most) {
			return proto.FieldErrorf(limit.field, "must be at most %d, which is what the plan allows", limit.most)
		}
	}
	return nil
}

// inPath returns the key that a request names. change reports that the request changes it.
func (s *KeyRoutes) inPath(ctx context.Context, r *web.Request, change bool) (proto.Key, error) {
	id := chi.URLParam(r.Request, "id")
	key, err := s.Keys.Get(ctx, id)
	if err == nil {
		err = web.Administer(r, &key, change)
	}
	if errors.Is(err, proto.ErrNotFound) {
		err = s.resource.NotFound(id)
	}
	return key, err
}

// withUse returns the form of a key with its last use.
func (s *KeyRoutes) withUse(key *proto.Key) api.Key {
	answer := api.NewKey(key)
	if at, ok := s.KeyUses.LastUsed(key.Org, key.ID); ok {
		answer.LastUsedAt = &api.Time{Time: at.Truncate(time.Second)}
	}
	return answer
}

func (s *KeyRoutes) replace(w http.ResponseWriter, r *web.Request) error {
	settings, err := web.DecodeBody[api.KeySettings](s.Core, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	key, err := s.inPath(ctx, r, true)
	if err != nil {
		return err
	}
	wanted := key
	settings.Apply(&wanted)
	if err := checkGrantable(r, s.Keys, &wanted); err != nil {
		return err
	}
	if err := s.checkMounts(ctx, &wanted); err != nil {
		return err
	}
	if err := s.checkProfiles(ctx, "profiles", wanted.Profiles...); err != nil {
		return err
	}
	if err := s.checkLimits(ctx, &wanted); err != nil {
		return err
	}
	if key.ID == r.Key.ID && s.CheckAddress(r.Request, &wanted) != nil {
		return proto.FieldErrorf("allowed_networks",
			"must contain %s, from which this request came with the key itself; use another key, or another address",
			s.ClientAddress(r.Request))
	}
	key, err = s.Keys.Change(ctx, key.ID, func(key *proto.Key) error {
		if err := s.resource.Before(r, key); err != nil {
			return err
		}
		settings.Apply(key)
		return checkNotRevoked(key)
	})
	if errors.Is(err, proto.ErrNotFound) {
		if _, errGet := s.Keys.Get(ctx, wanted.ID); errGet == nil {
			return errLostProfile
		}
	}
	if err != nil {
		return fmt.Errorf("replace key: %w", err)
	}
	s.resource.After(r, &key)
	return s.resource.Write(w, http.StatusOK, &key)
}

func checkNotRevoked(key *proto.Key) error {
	if key.RevokedAt != nil {
		return api.Errorf(api.CodeConflict, "this API key is revoked; create another one")
	}
	return nil
}

func (s *KeyRoutes) rotate(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeOptionalBody[api.KeyRotation](s.Core, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	key, err := s.inPath(ctx, r, true)
	if err != nil {
		return err
	}
	if err := checkNotRevoked(&key); err != nil {
		return err
	}
	web.AuditBefore(r, key.Org, key.ID, auditKey(&key))
	overlap := proto.DefaultOverlap
	if request.Overlap != nil {
		overlap = *request.Overlap
	}
	key, secret, err := s.Keys.Rotate(ctx, key.ID, time.Now().UTC().Add(time.Duration(overlap)))
	if err != nil {
		return fmt.Errorf("rotate key: %w", err)
	}
	s.resource.After(r, &key)
	answer := api.NewKey(&key)
	answer.Secret = secret
	return web.WriteValue(w, http.StatusOK, answer)
}

func (s *KeyRoutes) revoke(ctx context.Context, r *web.Request, id string) (*proto.Key, error) {
	key, err := s.inPath(ctx, r, true)
	if err != nil {
		return nil, err
	}
	if err := s.resource.Before(r, &key); err != nil {
		return nil, err
	}
	if key, err = s.Keys.Revoke(ctx, id); err != nil {
		return nil, err
	}
	s.resource.After(r, &key)
	return &key, nil
}

// checkMounts returns an error unless the organisation of a key has the connections that it names.
func (s *KeyRoutes) checkMounts(ctx context.Context, key *proto.Key) error {
	for _, m := range key.Mounts {
		c, err := s.Connections.Connection(ctx, key.Org, m.Connection)
		if errors.Is(err, proto.ErrNotFound) {
			return proto.FieldErrorf("mounts", "must name storage connections of the organisation %s; %q is none", key.Org,
				m.Connection)
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
