package manifest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The paths of the lists of objects. An object is at LIST/NAME, a key at LIST/ID.
const (
	plansPath       = "/v1/admin/plans"
	orgsPath        = "/v1/admin/orgs"
	profilesPath    = "/v1/admin/profiles"
	connectionsPath = "/v1/admin/connections"
	keysPath        = "/v1/admin/keys"
)

// firstKey is the id of the server's first key, which comes from its settings.
const firstKey = "key_bootstrap"

// kinds knows the server.
type kinds struct {
	client   *client.Client
	defaults proto.Profile // of sandbox profiles
	stored   []api.Key     // the keys that work, but the first one
	test     bool          // changes of storage connections are tested
}

func newKinds(ctx context.Context, c *client.Client, test bool) (*kinds, error) {
	defaults, err := c.Admin().Profile(ctx, proto.DefaultProfileName)
	if err != nil {
		return nil, fmt.Errorf("read the default sandbox profile: %w", err)
	}
	keys, err := client.Collect(c.Admin().Keys.List(ctx, ""))
	if err != nil {
		return nil, fmt.Errorf("read the API keys: %w", err)
	}
	keys = slices.DeleteFunc(keys, func(k api.Key) bool {
		return k.ID == firstKey || k.RevokedAt != nil || k.ExpiresAt != nil && !k.ExpiresAt.After(time.Now())
	})
	return &kinds{c, *defaults, keys, test}, nil
}

// whole returns the settings of a kind whose changes replace the whole object.
func whole(_, wanted any) (any, error) { return wanted, nil }

// named returns the path of an object that has its name in the path.
func named(list string) func(string) (string, error) {
	return func(name string) (string, error) { return list + "/" + name, nil }
}

// as decodes the stored form of an object that has the same form in a manifest.
func as[T any](stored []byte) (any, error) {
	v := new(T)
	err := json.Unmarshal(stored, v)
	return *v, err
}

func (k *kinds) plans() *kind {
	return &kind{
		name: "plan", path: plansPath, find: named(plansPath), form: as[proto.Plan], settings: whole,
		decode: func(body []byte) (string, any, error) {
			p, err := api.DecodePlan("", body)
			return p.Name, p, err
		},
	}
}

func (k *kinds) orgs() *kind {
	return &kind{
		name: "org", path: orgsPath, find: named(orgsPath), settings: whole,
		decode: func(body []byte) (string, any, error) {
			o, err := api.DecodeOrg("", body)
			form := api.NewOrg(&o)
			return o.Name, form.Request(), err
		},
		form: as[api.OrgRequest],
	}
}

func (k *kinds) profiles() *kind {
	return &kind{
		name: "profile", path: profilesPath, find: named(profilesPath), form: as[proto.Profile], settings: whole,
		decode: func(body []byte) (string, any, error) {
			p, err := api.DecodeProfile("", body, k.defaults)
			return p.Name, p, err
		},
	}
}

func (k *kinds) connections() *kind {
	return &kind{
		name: "connection", path: connectionsPath + k.connectionQuery(""), settings: whole,
		decode: func(body []byte) (string, any, error) {
			c, err := api.DecodeConnection("", "", body)
			if err == nil && c.Org == "" {
				err = proto.FieldErrorf("org", "must be given")
			}
			form := api.NewConnection(&c)
			return c.Org + "/" + c.Slug, form.Request(), err
		},
		find: func(name string) (string, error) {
			org, slug, _ := strings.Cut(name, "/")
			return connectionsPath + "/" + url.PathEscape(slug) + k.connectionQuery(org), nil
		},
		form: func(stored []byte) (any, error) {
			c := new(api.Connection)
			err := json.Unmarshal(stored, c)
			return c.Request(), err
		},
	}
}

// connectionQuery returns the parameters of requests about connections. org is empty where the request names
// the organisation.
func (k *kinds) connectionQuery(org string) string {
	query := url.Values{"test": {strconv.FormatBool(k.test)}}
	if org != "" {
		query.Set("org", org)
	}
	return "?" + query.Encode()
}

func (k *kinds) keys() *kind {
	return &kind{
		name: "key", path: keysPath,
		decode: func(body []byte) (string, any, error) {
			r, err := api.Decode[api.KeyRequest](body)
			return r.Org + "/" + r.Name, *r, err
		},
		find: func(name string) (string, error) {
			var ids []string
			for _, key := range k.stored {
				if key.Org+"/"+key.Name == name {
					ids = append(ids, key.ID)
				}
			}
			switch len(ids) {
			case 0:
				return "", nil
			case 1:
				return keysPath + "/" + ids[0], nil
			default:
				return "", fmt.Errorf("API keys %s and %s are both named %s: rename one with bullpen key update", ids[0],
					ids[1], name)
			}
		},
		form: func(stored []byte) (any, error) {
			key := new(api.Key)
			err := json.Unmarshal(stored, key)
			return keyForm(key), err
		},
		settings: func(present, wanted any) (any, error) {
			now, then := present.(api.KeyRequest), wanted.(api.KeyRequest)
			if now.Profile != then.Profile {
				return nil, fmt.Errorf("API key %s/%s is bound to the profile %s for good: revoke it, or give the one in the "+
					"file another name", now.Org, now.Name, now.Profile)
			}
			if now.Format != then.Format {
				return nil, fmt.Errorf("API key %s/%s has the format %s for good: revoke it, or give the one in the file "+
					"another name", now.Org, now.Name, now.Format)
			}
			return then.KeySettings, nil
		},
	}
}

// keyForm returns the form of a key in a manifest.
func keyForm(k *api.Key) api.KeyRequest {
	form := api.KeyRequest{Org: k.Org, Profile: k.Profile, Format: "sk", KeySettings: k.Settings()}
	if strings.HasPrefix(k.Hint, "e2b_") {
		form.Format = string(proto.KeyFormatE2B)
	}
	return form
}

// contents are all objects of a server, in the form of a manifest.
type contents struct {
	Plans       []proto.Plan            `json:"plans,omitempty"`
	Orgs        []api.OrgRequest        `json:"orgs,omitempty"`
	Profiles    []proto.Profile         `json:"profiles,omitempty"`
	Connections []api.ConnectionRequest `json:"connections,omitempty"`
	Keys        []api.KeyRequest        `json:"keys,omitempty"`
}

func (k *kinds) all(ctx context.Context) (*contents, error) {
	admin := k.client.Admin()
	plans, err := client.Collect(admin.Plans.List(ctx, ""))
	if err != nil {
		return nil, fmt.Errorf("read the plans: %w", err)
	}
	orgs, err := client.Collect(admin.Orgs.List(ctx, ""))
	if err != nil {
		return nil, fmt.Errorf("read the organisations: %w", err)
	}
	profiles, err := client.Collect(admin.Profiles(ctx))
	if err != nil {
		return nil, fmt.Errorf("read the sandbox profiles: %w", err)
	}
	all := new(contents)
	for _, p := range plans {
		if preset, ok := proto.PresetPlan(p.Name); !ok || p != preset {
			all.Plans = append(all.Plans, p)
		}
	}
	deleting := map[string]bool{}
	for i := range orgs {
		if orgs[i].DeletingAt != nil {
			deleting[orgs[i].Name] = true
			continue
		}
		all.Orgs = append(all.Orgs, orgs[i].Request())
	}
	for _, p := range profiles {
		if !proto.BuiltInProfile(p.Name) {
			all.Profiles = append(all.Profiles, p)
		}
	}
	connections, err := client.Collect(admin.Connections("", true).List(ctx, ""))
	if err != nil {
		return nil, fmt.Errorf("read the storage connections: %w", err)
	}
	for i := range connections {
		if !deleting[connections[i].Org] {
			all.Connections = append(all.Connections, connections[i].Request())
		}
	}
	list := k.keys()
	for i := range k.stored {
		key := keyForm(&k.stored[i])
		if deleting[key.Org] {
			continue
		}
		if _, err := list.find(key.Org + "/" + key.Name); err != nil {
			return nil, err
		}
		all.Keys = append(all.Keys, key)
	}
	return all, nil
}
