package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func (s *Server) createKey(w http.ResponseWriter, r *http.Request) error {
	req, err := decodeBody[api.KeyRequest](s, w, r)
	if err != nil {
		return err
	}
	if _, err := adminOrg(r, req.Org); err != nil {
		return err
	}
	wanted := req.Key()
	if err := s.checkGrantable(r, &wanted); err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	if err := s.checkKeyMounts(ctx, &wanted); err != nil {
		return err
	}
	noSandbox := proto.FieldErrorf("sandbox", "%q does not exist; make it first", proto.Shorten(wanted.Sandbox))
	if wanted.Sandbox != "" { // before an organisation is created for the key
		if _, err := s.Profiles.Profile(ctx, wanted.Sandbox); errors.Is(err, proto.ErrNotFound) {
			return noSandbox
		}
	}
	if err := s.ensureOrg(ctx, r, &wanted); err != nil {
		return err
	}
	if err := s.checkKeyLimits(ctx, &wanted); err != nil {
		return err
	}
	key, secret, err := s.KeyAdmin.Create(ctx, wanted)
	if errors.Is(err, proto.ErrNotFound) {
		return noSandbox
	}
	if err != nil {
		return fmt.Errorf("create key: %w", err)
	}
	auditAfter(r, key.Org, key.ID, auditKey(&key))
	answer := api.NewKey(&key)
	answer.Secret = secret
	w.Header().Set("Location", "/v1/admin/keys/"+key.ID)
	return writeValue(w, http.StatusCreated, answer)
}

// ensureOrg creates the organisation of a key that is about to be created, if it does not exist. The
// organisation gets the plan of the key then. The audit log has records of it beside those of the
// key.
func (s *Server) ensureOrg(ctx context.Context, r *http.Request, key *proto.Key) error {
	_, err := s.Orgs.Org(ctx, key.Org)
	if !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	org := proto.Org{Name: key.Org, Plan: proto.UnlimitedPlan, CreatedAt: time.Now().UTC()}
	if key.Plan != "" {
		if err := s.checkPlanExists(ctx, "plan", key.Plan); err != nil {
			return err
		}
		org.Plan, key.Plan = key.Plan, ""
	}
	err = s.auditPart(r, "org.create", org.Name, org.Name, func() (any, error) { return api.NewOrg(&org), s.Orgs.Create(ctx, org) })
	if err != nil && !errors.Is(err, proto.ErrExists) {
		return fmt.Errorf("create organisation %s: %w", org.Name, err)
	}
	return nil
}

// checkKeyLimits returns an error if a key would allow more than the plan of its organisation.
func (s *Server) checkKeyLimits(ctx context.Context, key *proto.Key) error {
	org, err := s.Orgs.Org(ctx, key.Org)
	if err != nil {
		return fmt.Errorf("look up organisation %s: %w", key.Org, err)
	}
	if err := checkNotDeleting(&org); err != nil {
		return err
	}
	plan, err := s.planNamed(ctx, org.Plan)
	if err != nil {
		return err
	}
	if key.Plan != "" {
		own, err := s.Plans.Plan(ctx, key.Plan)
		switch {
		case errors.Is(err, proto.ErrNotFound):
			return s.checkPlanExists(ctx, "plan", key.Plan)
		case err != nil:
			return fmt.Errorf("look up plan %s: %w", key.Plan, err)
		case !own.Within(plan):
			return proto.FieldErrorf("plan", "must not allow more than the plan %s of the organisation %s; give the organisation another plan first, or leave this out", plan.Name, org.Name)
		}
		plan = plan.Narrow(own)
	}
	for _, limit := range []struct {
		field   string
		n, most int
	}{{"concurrent", key.Concurrent, plan.Concurrent}, {"max_timeout", key.MaxTimeout, plan.MaxTimeout}, {"request_rate", key.RequestRate, plan.RequestRate}} {
		if limit.n > proto.LimitOf(limit.most) {
			return proto.FieldErrorf(limit.field, "must be at most %d, which is what the plan allows", limit.most)
		}
	}
	return nil
}

func (s *Server) listKeys(w http.ResponseWriter, r *http.Request) error {
	keys, err := s.KeyAdmin.List(r.Context())
	if err != nil {
		return fmt.Errorf("list keys: %w", err)
	}
	org, err := listedOrg(r)
	if err != nil {
		return err
	}
	answer := api.Keys{Keys: []api.Key{}}
	for i := range keys {
		if org == "" || keys[i].Org == org {
			answer.Keys = append(answer.Keys, s.keyWithUse(&keys[i]))
		}
	}
	return writeValue(w, http.StatusOK, answer)
}

// keyInPath returns the key that a request names. change reports that the request changes it.
func (s *Server) keyInPath(ctx context.Context, r *http.Request, change bool) (proto.Key, error) {
	key, err := s.KeyAdmin.Get(ctx, chi.URLParam(r, "id"))
	if err == nil {
		err = administer(r, &key, change)
	}
	if errors.Is(err, proto.ErrNotFound) {
		err = api.Errorf(api.CodeNotFound, "there is no API key of that id; see /v1/admin/keys")
	}
	return key, err
}

func (s *Server) getKey(w http.ResponseWriter, r *http.Request) error {
	key, err := s.keyInPath(r.Context(), r, false)
	if err != nil {
		return err
	}
	return s.writeKey(w, &key)
}

// keyWithUse returns the form of a key with its last use.
func (s *Server) keyWithUse(key *proto.Key) api.Key {
	answer := api.NewKey(key)
	if at, ok := s.KeyUses.LastUsed(key.ID); ok {
		answer.LastUsedAt = &api.Time{Time: at.Truncate(time.Second)}
	}
	return answer
}

// writeKey answers with a key. Its ETag does not depend on its last use, which nobody changes.
func (s *Server) writeKey(w http.ResponseWriter, key *proto.Key) error {
	tag, err := entityTag(api.NewKey(key))
	if err != nil {
		return err
	}
	w.Header().Set("ETag", tag)
	return writeValue(w, http.StatusOK, s.keyWithUse(key))
}

func (s *Server) replaceKey(w http.ResponseWriter, r *http.Request) error {
	settings, err := decodeBody[api.KeySettings](s, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	key, err := s.keyInPath(ctx, r, true)
	if err != nil {
		return err
	}
	wanted := key
	settings.Apply(&wanted)
	if err := s.checkGrantable(r, &wanted); err != nil {
		return err
	}
	if err := s.checkKeyMounts(ctx, &wanted); err != nil {
		return err
	}
	if err := s.checkKeyLimits(ctx, &wanted); err != nil {
		return err
	}
	if key.ID == infoOf(ctx).key.ID && s.checkAddress(r, &wanted) != nil {
		return proto.FieldErrorf("allowed_networks", "must contain %s, from which this request came with the key itself; use another key, or another address", s.clientAddress(r))
	}
	key, err = s.KeyAdmin.Change(ctx, key.ID, func(key *proto.Key) error {
		auditBefore(r, key.Org, key.ID, auditKey(key))
		if err := checkMatch(r, api.NewKey(key)); err != nil {
			return err
		}
		settings.Apply(key)
		return checkNotRevoked(key)
	})
	if err != nil {
		return fmt.Errorf("replace key: %w", err)
	}
	auditAfter(r, key.Org, key.ID, auditKey(&key))
	return s.writeKey(w, &key)
}

func checkNotRevoked(key *proto.Key) error {
	if key.RevokedAt != nil {
		return api.Errorf(api.CodeConflict, "this API key is revoked; create another one")
	}
	return nil
}

func (s *Server) rotateKey(w http.ResponseWriter, r *http.Request) error {
	request, err := decodeOptionalBody[api.KeyRotation](s, w, r)
	if err != nil {
		return err
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	key, err := s.keyInPath(ctx, r, true)
	if err != nil {
		return err
	}
	if err := checkNotRevoked(&key); err != nil {
		return err
	}
	auditBefore(r, key.Org, key.ID, auditKey(&key))
	overlap := proto.DefaultOverlap
	if request.Overlap != nil {
		overlap = *request.Overlap
	}
	key, secret, err := s.KeyAdmin.Rotate(ctx, key.ID, time.Now().UTC().Add(time.Duration(overlap)))
	if err != nil {
		return fmt.Errorf("rotate key: %w", err)
	}
	auditAfter(r, key.Org, key.ID, auditKey(&key))
	answer := api.NewKey(&key)
	answer.Secret = secret
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) revokeKey(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := detached(r.Context())
	defer cancel()
	key, err := s.keyInPath(ctx, r, true)
	if err == nil {
		err = checkMatch(r, api.NewKey(&key))
	}
	if err == nil {
		auditBefore(r, key.Org, key.ID, auditKey(&key))
		key, err = s.KeyAdmin.Revoke(ctx, key.ID)
	}
	if err != nil {
		return fmt.Errorf("revoke key: %w", err)
	}
	auditAfter(r, key.Org, key.ID, auditKey(&key))
	return writeValue(w, http.StatusOK, api.NewKey(&key))
}
