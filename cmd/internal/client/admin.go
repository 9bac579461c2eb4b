package client

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	orgsPath  = "/v1/admin/orgs"
	plansPath = "/v1/admin/plans"
	keysPath  = "/v1/admin/keys"

	membersPath  = "/v1/admin/members"
	sessionsPath = "/v1/admin/sessions"
)

// Objects of administrators.
type (
	Org         = api.Org
	KeySettings = api.KeySettings
)

// edit reads the object at a path, and stores what change makes of it, unless somebody else has
// changed the object meanwhile.
func edit[T, R any](ctx context.Context, c *Client, path string, change func(*T) R) (*T, error) {
	object := new(T)
	_, header, err := c.decode(ctx, call{method: http.MethodGet, path: path, resend: true}, object)
	if err != nil {
		return nil, err
	}
	stored, _, err := get[T](ctx, c, call{
		method: http.MethodPut, path: path, body: change(object), header: map[string]string{"If-Match": header.Get("ETag")},
	})
	return stored, err
}

// CreateOrg creates an organisation.
func (c *Client) CreateOrg(ctx context.Context, o *api.OrgRequest) (*Org, error) {
	org, _, err := get[Org](ctx, c, call{method: http.MethodPost, path: orgsPath, body: o})
	return org, err
}

// Orgs lists the organisations that the key in use may see.
func (c *Client) Orgs(ctx context.Context) ([]Org, error) {
	list, _, err := get[api.Orgs](ctx, c, call{method: http.MethodGet, path: orgsPath, resend: true})
	return list.Orgs, err
}

// Org returns an organisation.
func (c *Client) Org(ctx context.Context, name string) (*Org, error) {
	org, _, err := get[Org](ctx, c, call{method: http.MethodGet, path: orgsPath + "/" + url.PathEscape(name), resend: true})
	return org, err
}

// EditOrg changes an organisation.
func (c *Client) EditOrg(ctx context.Context, name string, change func(*api.OrgRequest)) (*Org, error) {
	return edit(ctx, c, orgsPath+"/"+url.PathEscape(name), func(o *Org) *api.OrgRequest {
		wanted := &api.OrgRequest{Title: o.Title, Plan: o.Plan, Suspended: o.Suspended}
		change(wanted)
		return wanted
	})
}

// Member is a person who may sign in to an organisation.
type Member = api.Member

// Session is the login of a browser.
type Session = api.Session

// CreateMember adds a member to an organisation.
func (c *Client) CreateMember(ctx context.Context, m *api.MemberRequest) (*Member, error) {
	member, _, err := get[Member](ctx, c, call{method: http.MethodPost, path: membersPath, body: m})
	return member, err
}

// Members lists the members of an organisation, or of all that the key in use may see if org is
// empty.
func (c *Client) Members(ctx context.Context, org string) ([]Member, error) {
	list, _, err := get[api.Members](ctx, c, call{method: http.MethodGet, path: ofOrg(membersPath, org), resend: true})
	return list.Members, err
}

// EditMember changes the role of a member.
func (c *Client) EditMember(ctx context.Context, id string, change func(*api.MemberSettings)) (*Member, error) {
	return edit(ctx, c, membersPath+"/"+url.PathEscape(id), func(m *Member) *api.MemberSettings {
		settings := m.Settings()
		change(&settings)
		return &settings
	})
}

// RemoveMember removes a member and returns it.
func (c *Client) RemoveMember(ctx context.Context, id string) (*Member, error) {
	member, _, err := get[Member](ctx, c, call{method: http.MethodDelete, path: membersPath + "/" + url.PathEscape(id)})
	return member, err
}

// Sessions lists the sessions of browsers in an organisation, or in all that the key in use may see
// if org is empty.
func (c *Client) Sessions(ctx context.Context, org string) ([]Session, error) {
	list, _, err := get[api.Sessions](ctx, c, call{method: http.MethodGet, path: ofOrg(sessionsPath, org), resend: true})
	return list.Sessions, err
}

// EndSession ends the session of a browser.
func (c *Client) EndSession(ctx context.Context, id string) error {
	return c.empty(ctx, call{method: http.MethodDelete, path: sessionsPath + "/" + url.PathEscape(id)})
}

// ofOrg returns the path of a list of one organisation's objects, or of all if org is empty.
func ofOrg(path, org string) string {
	if org == "" {
		return path
	}
	return path + "?" + url.Values{"org": {org}}.Encode()
}

// CreatePlan creates a plan.
func (c *Client) CreatePlan(ctx context.Context, p *proto.Plan) (*proto.Plan, error) {
	plan, _, err := get[proto.Plan](ctx, c, call{method: http.MethodPost, path: plansPath, body: p})
	return plan, err
}

// Plans lists all plans.
func (c *Client) Plans(ctx context.Context) ([]proto.Plan, error) {
	list, _, err := get[api.Plans](ctx, c, call{method: http.MethodGet, path: plansPath, resend: true})
	return list.Plans, err
}

// Plan returns a plan.
func (c *Client) Plan(ctx context.Context, name string) (*proto.Plan, error) {
	plan, _, err := get[proto.Plan](ctx, c, call{method: http.MethodGet, path: plansPath + "/" + url.PathEscape(name), resend: true})
	return plan, err
}

// EditPlan changes a plan.
func (c *Client) EditPlan(ctx context.Context, name string, change func(*proto.Plan)) (*proto.Plan, error) {
	return edit(ctx, c, plansPath+"/"+url.PathEscape(name), func(p *proto.Plan) *proto.Plan {
		change(p)
		return p
	})
}

// RemovePlan removes a plan and returns it.
func (c *Client) RemovePlan(ctx context.Context, name string) (*proto.Plan, error) {
	plan, _, err := get[proto.Plan](ctx, c, call{method: http.MethodDelete, path: plansPath + "/" + url.PathEscape(name)})
	return plan, err
}

// CreateKey creates an API key. It is not sent again when the connection breaks, because that could
// create two.
func (c *Client) CreateKey(ctx context.Context, k *NewKey) (*Key, error) {
	key, _, err := get[Key](ctx, c, call{
		method: http.MethodPost, path: keysPath, body: k,
		header: map[string]string{"Idempotency-Key": newIdempotencyKey()},
	})
	if mayHaveHappened(err) {
		return nil, fmt.Errorf("%w; the key may have been made all the same: see `bullpen key list`", err)
	}
	return key, err
}

// Keys lists the API keys of an organisation, or of all that the key in use may see if org is
// empty.
func (c *Client) Keys(ctx context.Context, org string) ([]Key, error) {
	list, _, err := get[api.Keys](ctx, c, call{method: http.MethodGet, path: ofOrg(keysPath, org), resend: true})
	return list.Keys, err
}

// GetKey returns an API key without its secret.
func (c *Client) GetKey(ctx context.Context, id string) (*Key, error) {
	k, _, err := get[Key](ctx, c, call{method: http.MethodGet, path: keyPath(id), resend: true})
	return k, err
}

// EditKey changes an API key.
func (c *Client) EditKey(ctx context.Context, id string, change func(*KeySettings)) (*Key, error) {
	return edit(ctx, c, keyPath(id), func(k *Key) *KeySettings {
		settings := k.Settings()
		change(&settings)
		return &settings
	})
}

// RotateKey gives an API key a new secret, and returns the key with it. The previous secret works
// for the overlap.
func (c *Client) RotateKey(ctx context.Context, id string, overlap time.Duration) (*Key, error) {
	k, _, err := get[Key](ctx, c, call{
		method: http.MethodPost, path: keyPath(id) + "/rotate", body: api.KeyRotation{Overlap: new(proto.Seconds(overlap))},
	})
	if mayHaveHappened(err) {
		return nil, fmt.Errorf("%w; the key may have a new secret that nobody knows: rotate it again within the overlap", err)
	}
	return k, err
}

// RevokeKey revokes an API key.
func (c *Client) RevokeKey(ctx context.Context, id string) (*Key, error) {
	k, _, err := get[Key](ctx, c, call{method: http.MethodDelete, path: keyPath(id), resend: true})
	return k, err
}

func keyPath(id string) string { return keysPath + "/" + url.PathEscape(id) }
