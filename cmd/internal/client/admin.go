package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Paths of the lists of objects. An object is at LIST/NAME, a key at LIST/ID.
const (
	OrgsPath      = "/v1/admin/orgs"
	PlansPath     = "/v1/admin/plans"
	KeysPath      = "/v1/admin/keys"
	SandboxesPath = "/v1/admin/sandboxes"

	membersPath  = "/v1/admin/members"
	sessionsPath = "/v1/admin/sessions"
)

// Org is an organisation.
type Org = api.Org

// KeySettings are what can be changed of an API key.
type KeySettings = api.KeySettings

// OrgData is what is stored of an organisation.
type OrgData = api.OrgData

// ReadObject reads the object at a path into v and returns its ETag.
func (c *Client) ReadObject(ctx context.Context, path string, v any) (tag string, err error) {
	_, header, err := c.decode(ctx, call{method: http.MethodGet, path: path, resend: true}, v)
	if err != nil {
		return "", err
	}
	return header.Get("ETag"), nil
}

// CreateObject adds an object to the list at a path, and reads the answer into v.
func (c *Client) CreateObject(ctx context.Context, path string, object, v any) error {
	_, _, err := c.decode(ctx, call{method: http.MethodPost, path: path, body: object}, v)
	return err
}

// ReplaceObject stores an object in place of the one at a path, if that has the ETag.
func (c *Client) ReplaceObject(ctx context.Context, path string, object any, tag string) error {
	_, _, err := c.decode(ctx, replacing(path, object, tag), new(json.RawMessage))
	return err
}

func replacing(path string, object any, tag string) call {
	return call{method: http.MethodPut, path: path, body: object, header: map[string]string{"If-Match": tag}}
}

// edit reads the object at a path, and stores what change makes of it, unless somebody else has
// changed the object meanwhile.
func edit[T, R any](ctx context.Context, c *Client, path string, change func(*T) R) (*T, error) {
	object := new(T)
	tag, err := c.ReadObject(ctx, path, object)
	if err != nil {
		return nil, err
	}
	stored, _, err := get[T](ctx, c, replacing(path, change(object), tag))
	return stored, err
}

// CreateOrg creates an organisation.
func (c *Client) CreateOrg(ctx context.Context, o *api.OrgRequest) (*Org, error) {
	org, _, err := get[Org](ctx, c, call{method: http.MethodPost, path: OrgsPath, body: o})
	return org, err
}

// Orgs lists the organisations that the key in use may see.
func (c *Client) Orgs(ctx context.Context) ([]Org, error) {
	list, _, err := get[api.Orgs](ctx, c, call{method: http.MethodGet, path: OrgsPath, resend: true})
	return list.Orgs, err
}

// Org returns an organisation.
func (c *Client) Org(ctx context.Context, name string) (*Org, error) {
	org, _, err := get[Org](ctx, c, call{method: http.MethodGet, path: orgPath(name), resend: true})
	return org, err
}

// DeleteOrg deletes an organisation with all its data, if it has the ETag. It is gone some time later.
func (c *Client) DeleteOrg(ctx context.Context, name, tag string) (*Org, error) {
	org, _, err := get[Org](ctx, c, call{method: http.MethodDelete, path: orgPath(name), header: map[string]string{"If-Match": tag}})
	return org, err
}

// OrgData returns what is stored of an organisation, which need not exist.
func (c *Client) OrgData(ctx context.Context, name string) (*OrgData, json.RawMessage, error) {
	return get[OrgData](ctx, c, call{method: http.MethodGet, path: orgPath(name) + "/data", resend: true})
}

func orgPath(name string) string { return OrgsPath + "/" + url.PathEscape(name) }

// EditOrg changes an organisation.
func (c *Client) EditOrg(ctx context.Context, name string, change func(*api.OrgRequest)) (*Org, error) {
	return edit(ctx, c, orgPath(name), func(o *Org) *api.OrgRequest {
		wanted := o.Request()
		wanted.Name = "" // the path has it
		change(&wanted)
		return &wanted
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
	plan, _, err := get[proto.Plan](ctx, c, call{method: http.MethodPost, path: PlansPath, body: p})
	return plan, err
}

// Plans lists all plans.
func (c *Client) Plans(ctx context.Context) ([]proto.Plan, error) {
	list, _, err := get[api.Plans](ctx, c, call{method: http.MethodGet, path: PlansPath, resend: true})
	return list.Plans, err
}

// Plan returns a plan.
func (c *Client) Plan(ctx context.Context, name string) (*proto.Plan, error) {
	plan, _, err := get[proto.Plan](ctx, c, call{method: http.MethodGet, path: PlansPath + "/" + url.PathEscape(name), resend: true})
	return plan, err
}

// EditPlan changes a plan.
func (c *Client) EditPlan(ctx context.Context, name string, change func(*proto.Plan)) (*proto.Plan, error) {
	return edit(ctx, c, PlansPath+"/"+url.PathEscape(name), func(p *proto.Plan) *proto.Plan {
		change(p)
		return p
	})
}

// RemovePlan removes a plan and returns it.
func (c *Client) RemovePlan(ctx context.Context, name string) (*proto.Plan, error) {
	plan, _, err := get[proto.Plan](ctx, c, call{method: http.MethodDelete, path: PlansPath + "/" + url.PathEscape(name)})
	return plan, err
}

// CreateKey creates an API key. It is not sent again when the connection breaks, because that could
// create two.
func (c *Client) CreateKey(ctx context.Context, k *NewKey) (*Key, error) {
	key, _, err := get[Key](ctx, c, call{
		method: http.MethodPost, path: KeysPath, body: k,
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
	list, _, err := get[api.Keys](ctx, c, call{method: http.MethodGet, path: ofOrg(KeysPath, org), resend: true})
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

// RotateKey replaces the secret of an API key, and returns the key with the new one. The previous
// secret works for the overlap.
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

func keyPath(id string) string { return KeysPath + "/" + url.PathEscape(id) }
