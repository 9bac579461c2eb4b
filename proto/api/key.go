package api

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// KeyResource are the API keys.
var KeyResource = register(Resource[Key, KeyRequest, KeySettings]{
	Name: "API key", Singular: "key", Plural: "keys", Param: "id", OfOrg: true, Settings: (*Key).Settings,
	CreateDoc: "The administrator of an organisation creates keys of that organisation, with sandbox profiles that keys " +
		"of the organisation have already.",
	ReplaceDoc: "The organisation, the key's own sandbox profile and the secret stay. It applies to requests from then " +
		"on. 409 for a revoked key, and if no global administrator would be left.",
	RemoveDoc: "409 for the last one of a global administrator.",
}, func(r *Resource[Key, KeyRequest, KeySettings]) []Route {
	key := Key{
		ID: "key_1", Name: "ci", Org: "acme", Scopes: proto.UserScopes(), Profile: proto.DefaultProfileName,
		Hint: "sk-local-AbC…wxyz", CreatedAt: Time{exampleTime()},
	}
	withSecret, revoked := key, key
	withSecret.Secret = "sk-local-AbCdEfGhIjKlMnOpQrStUvWxYz0123456789abcwxyz"
	revoked.RevokedAt = &Time{exampleTime().Add(time.Hour)}
	settings := KeySettings{Name: "ci", Scopes: proto.UserScopes()}
	routes := r.routes(key, KeyRequest{Org: "acme", KeySettings: settings}, settings, Keys{Keys: []Key{key}},
		"The keys, the revoked ones included.")
	create := &routes[routeCreate]
	create.Responses, create.Tagged = created("The key, shown once.", withSecret), false
	routes[routeGet].Responses = ok("The key, without its secret.", key)
	revoke := &routes[routeRemove]
	revoke.ID, revoke.Audit, revoke.Summary = "revokeKey", "key.revoke", "Revoke an API key"
	revoke.Responses = ok("The key, revoked.", revoked)
	return append(routes, Route{
		Method: http.MethodPost, Path: "/v1/admin/keys/{id}/rotate", ID: "rotateKey", Tag: tagAdmin, Scope: proto.ScopeAdmin,
		Audit: "key.rotate", Summary: "Replace the secret of an API key", PathDoc: routes[routeGet].PathDoc,
		Doc: "The previous secret works for the overlap, one before it no more. 409 for a revoked key, and for " +
			"the server's first one.",
		OptionalBody: true, Request: KeyRotation{Overlap: new(proto.Seconds(time.Hour))},
		Responses: ok("The key with its new secret, shown once.", withSecret),
		Errors:    []int{http.StatusNotFound, http.StatusConflict},
	})
})

const maxKeyNameLen = 128 // characters

// KeySettings are the changeable settings of an API key.
type KeySettings struct {
	Name            string            `json:"name" minLength:"1" maxLength:"128"`
	Plan            string            `json:"plan,omitempty" format:"plan" doc:"A plan that further limits this key, in addition to the organisation's plan. It must not allow more. None by default."`
	Scopes          []proto.Scope     `json:"scopes,omitempty" uniqueItems:"true" default:"[\"execute\",\"read\",\"files\"]" doc:"What the key may do. admin administers the organisation."`
	Global          bool              `json:"global,omitempty" default:"false" doc:"The scope admin holds for all organisations and for the server. Only a global administrator gives it."`
	Profiles        []string          `json:"profiles,omitempty" maxItems:"16" uniqueItems:"true" must:"have at most 16 profiles" valuePattern:"^[a-z0-9][a-z0-9._-]{0,62}$" doc:"Further sandbox profiles that requests with this key may choose instead of its own."`
	Concurrent      *int              `json:"concurrent,omitempty" minimum:"1" maximum:"1000000" must:"be from 1 to 1000000; leave it out for as many as the plan allows" doc:"How many executions may run at once with this key, at most as many as the plan allows; null for the plan's limit."`
	MaxTimeout      *int              `json:"max_timeout,omitempty" minimum:"1" maximum:"86400" doc:"The longest timeout of an execution with this key in seconds, at most the plan's; null for the plan's limit."`
	RequestRate     *int              `json:"request_rate,omitempty" minimum:"1" maximum:"1000000" doc:"Requests per minute with this key, at most as many as the plan allows; null for the plan's limit."`
	ExpiresAt       *Time             `json:"expires_at,omitempty" doc:"When the key stops working; absent for never."`
	Env             map[string]string `json:"env,omitempty" maxProperties:"50" keyPattern:"^[A-Z][A-Z0-9_]*$" keyMaxLength:"128" valueMaxLength:"4096" doc:"Variables of every program of this key. They override the sandbox profile's, and the request's override them. The limits of env_vars apply here, and to all together."`
	AllowedNetworks []netip.Prefix    `json:"allowed_networks,omitempty" maxItems:"32" doc:"Where requests with the key may come from: prefixes such as 192.0.2.0/24 and 2001:db8::/32, or single addresses. Absent for anywhere. Signed URLs that were asked for with the key work from everywhere."`
	Secrets         []string          `json:"secrets,omitempty" maxItems:"16" uniqueItems:"true" must:"have at most 16 secrets" valuePattern:"^[A-Za-z][A-Za-z0-9_-]{0,62}(=[A-Z][A-Z0-9_]{0,127})?!?$" doc:"Secrets of the organisation for programs of this key, in addition to the sandbox profile's: NAME for a file, NAME=VARIABLE for a variable. A ! at the end masks the value in the output."`
	Mounts          []proto.KeyMount  `json:"mounts,omitempty" maxItems:"10" doc:"Storage connections of the organisation that programs of this key see, each once."`
}

// KeyRequest asks for a new API key.
type KeyRequest struct {
	Org     string `json:"org" pattern:"^[a-z0-9][a-z0-9_-]{0,62}$" doc:"The organisation. A global administrator's request creates one that does not exist, with the plan of the request, or else without limits."`
	Profile string `json:"profile,omitempty" format:"profile-name" default:"default" doc:"The key's own sandbox profile: that of its executions whose requests choose no other one. It cannot be changed later."`
	Format  string `json:"format,omitempty" default:"sk" enum:"sk,e2b" must:"be sk or e2b" doc:"The form of the key: sk-REGION-TOKEN, or e2b_ and hexadecimal digits for E2B's clients."`

	KeySettings
}

// Validate checks the values of the fields.
func (r *KeyRequest) Validate() error {
	if !proto.ValidOrg(r.Org) {
		return proto.FieldErrorf("org", "must be 1 to 63 characters of a-z, 0-9, _ and -, the first a letter or digit")
	}
	return r.KeySettings.Validate()
}

// Validate checks the values of the fields.
func (r *KeySettings) Validate() error {
	if n := utf8.RuneCountInString(r.Name); n < 1 || n > maxKeyNameLen || strings.ContainsFunc(r.Name, unicode.IsControl) {
		return proto.FieldErrorf("name", "must be 1 to %d characters without control characters", maxKeyNameLen)
	}
	if err := checkScopes(r.Scopes, r.Global); err != nil {
		return err
	}
	if err := checkProfiles(r.Profiles); err != nil {
		return err
	}
	if r.ExpiresAt != nil && !r.ExpiresAt.After(time.Now()) {
		return proto.FieldErrorf("expires_at", "must be in the future")
	}
	if err := proto.CheckSecretBindings("secrets", r.Secrets); err != nil {
		return err
	}
	if err := proto.CheckKeyMounts("mounts", r.Mounts); err != nil {
		return err
	}
	return proto.CheckEnvLevel("env", r.Env)
}

// checkScopes returns an error unless a key may have these scopes.
func checkScopes(scopes []proto.Scope, global bool) error {
	if len(scopes) == 0 {
		return proto.FieldErrorf("scopes", "must have at least one scope")
	}
	for i, s := range scopes {
		if slices.Contains(scopes[:i], s) {
			return proto.FieldErrorf("scopes", "must name %s only once", s)
		}
	}
	if global && !slices.Contains(scopes, proto.ScopeAdmin) {
		return proto.FieldErrorf("global", "must be false for a key without the scope admin")
	}
	return nil
}

// checkProfiles returns an error unless a key may have further profiles of these names.
func checkProfiles(names []string) error {
	for i, name := range names {
		if err := proto.CheckProfileForm("profiles", name); err != nil {
			return err
		}
		if slices.Contains(names[:i], name) {
			return proto.FieldErrorf("profiles", "must name %s only once", name)
		}
	}
	return nil
}

// Key returns the key to create, without its id and its times.
func (r *KeyRequest) Key() proto.Key {
	k := proto.Key{Org: r.Org}
	if r.Format == string(proto.KeyFormatE2B) {
		k.Format = proto.KeyFormatE2B
	}
	if r.Profile != proto.DefaultProfileName {
		k.Profile = r.Profile
	}
	r.Apply(&k)
	return k
}

// Apply stores the settings in a key.
func (r *KeySettings) Apply(k *proto.Key) {
	k.Name, k.Plan, k.Scopes, k.Global, k.Env, k.Secrets, k.Mounts = r.Name, r.Plan, r.Scopes, r.Global, r.Env,
		r.Secrets, r.Mounts
	k.AllowedNetworks, k.Profiles = r.AllowedNetworks, r.Profiles
	k.Concurrent, k.MaxTimeout, k.RequestRate, k.ExpiresAt = 0, 0, 0, nil
	if r.Concurrent != nil {
		k.Concurrent = *r.Concurrent
	}
	if r.MaxTimeout != nil {
		k.MaxTimeout = *r.MaxTimeout
	}
	if r.RequestRate != nil {
		k.RequestRate = *r.RequestRate
	}
	if r.ExpiresAt != nil {
		k.ExpiresAt = new(r.ExpiresAt.UTC())
	}
}

// KeyRotation asks for a new secret of an API key.
type KeyRotation struct {
	Overlap *proto.Seconds `json:"overlap,omitempty" default:"86400" minimum:"0" maximum:"604800" doc:"Seconds for which the previous secret keeps working."`
}

// Key is an API key. The secret is present only in the answer to the request that created the key.
type Key struct {
	ID              string            `json:"id"`
	Name            string            `json:"name"`
	Org             string            `json:"org"`
	Plan            *string           `json:"plan" doc:"The plan that further limits this key; null if only the organisation's plan applies."`
	Scopes          []proto.Scope     `json:"scopes"`
	Global          bool              `json:"global" doc:"The scope admin holds for all organisations and for the server."`
	Profile         string            `json:"profile" doc:"The sandbox profile that it is bound to."`
	Profiles        []string          `json:"profiles,omitempty" doc:"Further sandbox profiles that its requests may choose, absent if there are none."`
	Concurrent      *int              `json:"concurrent" doc:"How many executions may run at once with it; null if only the limits of plans apply."`
	MaxTimeout      *int              `json:"max_timeout" doc:"Seconds that an execution may ask for; null if only the limits of plans hold."`
	RequestRate     *int              `json:"request_rate" doc:"Requests that may be sent in a minute; null if only the limits of plans hold."`
	Env             map[string]string `json:"env,omitempty" doc:"Variables of every program, absent if there are none."`
	AllowedNetworks []netip.Prefix    `json:"allowed_networks,omitempty" doc:"Allowed source networks of requests with it, absent for any."`
	Secrets         []string          `json:"secrets,omitempty" doc:"Secrets that programs get, absent if there are none."`
	Mounts          []proto.KeyMount  `json:"mounts,omitempty" doc:"Storage connections that programs see, absent if there are none."`
	Hint            string            `json:"hint" doc:"The key's first and last characters."`
	CreatedAt       Time              `json:"created_at"`
	ExpiresAt       *Time             `json:"expires_at" doc:"When it stops working; null for never."`
	LastUsedAt      *Time             `json:"last_used_at" doc:"When a request was sent with it last, within a minute; null if none is known."`
	RevokedAt       *Time             `json:"revoked_at"`
	Overlap         *Time             `json:"overlap_until,omitempty" doc:"Until when the secret before the last rotation works, too; absent if none does."`
	Secret          string            `json:"key,omitempty" doc:"The API key itself, shown only when it is created or rotated."`
}

// Settings returns what an administrator may change of the key.
func (k *Key) Settings() KeySettings {
	s := KeySettings{
		Name: k.Name, Scopes: k.Scopes, Global: k.Global, Concurrent: k.Concurrent, MaxTimeout: k.MaxTimeout,
		RequestRate: k.RequestRate, ExpiresAt: k.ExpiresAt, Env: k.Env, Secrets: k.Secrets, Mounts: k.Mounts,
		AllowedNetworks: k.AllowedNetworks, Profiles: k.Profiles,
	}
	if k.Plan != nil {
		s.Plan = *k.Plan
	}
	return s
}

// Keys is the list of all API keys.
type Keys struct {
	Keys       []Key   `json:"keys"`
	NextCursor *string `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// NewKey returns the form of an API key without its secret.
func NewKey(k *proto.Key) Key {
	key := Key{
		ID: k.ID, Name: k.Name, Org: k.Org, Plan: optional(k.Plan), Scopes: k.Scopes, Global: k.Global, Profile: k.Profile,
		Concurrent: optional(k.Concurrent), MaxTimeout: optional(k.MaxTimeout), RequestRate: optional(k.RequestRate),
		Env: k.Env, Secrets: k.Secrets, Mounts: k.Mounts, Profiles: k.Profiles,
		AllowedNetworks: k.AllowedNetworks,
		Hint:            k.Hint, CreatedAt: Time{k.CreatedAt},
	}
	if key.Profile == "" {
		key.Profile = proto.DefaultProfileName
	}
	if k.ExpiresAt != nil {
		key.ExpiresAt = &Time{*k.ExpiresAt}
	}
	if k.RevokedAt != nil {
		key.RevokedAt = &Time{*k.RevokedAt}
	}
	if k.OverlapUntil != nil && k.OverlapUntil.After(time.Now()) {
		key.Overlap = &Time{*k.OverlapUntil}
	}
	return key
}
