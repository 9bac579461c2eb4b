package main

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type keyCommands struct {
	Create keyCreateCommand `cmd:"" help:"Create an API key (admin)."`
	List   keyListCommand   `cmd:"" help:"List all API keys (admin)."`
	Show   keyShowCommand   `cmd:"" help:"Show an API key, without its secret (admin)."`
	Update keyUpdateCommand `cmd:"" help:"Change an API key (admin)."`
	Rotate keyRotateCommand `cmd:"" help:"Give an API key a new secret (admin)."`
	Revoke keyRevokeCommand `cmd:"" help:"Revoke an API key (admin)."`

	Webhook keyWebhookCommands `cmd:"" help:"Manage the webhook settings of the API key in use."`
}

// keySettingFlags are the changeable settings of a key.
type keySettingFlags struct {
	Plan         *string        `placeholder:"PLAN" help:"Plan that further limits this key, in addition to the organisation's plan. Empty for none."`
	Scopes       []proto.Scope  `enum:"execute,read,files,admin" placeholder:"SCOPE,…" help:"What the key may do: execute, read, files, admin. admin administers the organisation. Default of a new key: execute,read,files."`
	Global       *bool          `negatable:"" help:"The scope admin holds for all organisations and for the server."`
	Profiles     []string       `placeholder:"NAME,…" help:"Further sandbox profiles that requests with this key may choose. Repeatable; replaces all earlier ones. Empty for none, the default."`
	Concurrent   *int           `placeholder:"N" help:"Concurrent executions of this key; 0 for the limits of plans alone, the default."`
	MaxTimeout   *int           `placeholder:"SECONDS" help:"Longest timeout that an execution of this key may ask for; 0 for the limits of plans alone, the default."`
	RequestRate  *int           `placeholder:"N" help:"Requests that may be sent with this key in a minute; 0 for the limits of plans alone, the default."`
	ExpiresIn    *time.Duration `placeholder:"DURATION" help:"How long the key works, such as 720h; 0 for until it is revoked, the default."`
	Env          []string       `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of every program. It overrides the sandbox profile's, and the request's variables override it. Repeatable; replaces all earlier ones."`
	AllowNetwork []string       `placeholder:"CIDR,…" help:"Allowed source network or address of requests, such as 192.0.2.0/24. Repeatable; replaces all earlier ones. Empty for anywhere, the default."`
	Secret       []string       `sep:"none" placeholder:"NAME[=VARIABLE]" help:"Secret for programs, as a variable or, without =VARIABLE, as a file. A ! at the end masks it in the output. Repeatable; replaces all earlier ones."`
	Mount        []string       `sep:"none" placeholder:"SLUG[:PREFIX][:ro]" help:"Storage connection that programs see at /data/SLUG, or its part below PREFIX; :ro makes it read-only. Repeatable; replaces all earlier ones. Empty for none."`
}

// apply changes the settings that were given.
func (f *keySettingFlags) apply(k *api.KeySettings) error {
	set(&k.Plan, f.Plan)
	set(&k.Global, f.Global)
	setLimit(&k.Concurrent, f.Concurrent)
	setLimit(&k.MaxTimeout, f.MaxTimeout)
	setLimit(&k.RequestRate, f.RequestRate)
	if f.Scopes != nil {
		k.Scopes = f.Scopes
	}
	if f.Profiles != nil {
		k.Profiles = slices.DeleteFunc(slices.Clone(f.Profiles), func(name string) bool { return name == "" })
	}
	if f.Secret != nil {
		k.Secrets = f.Secret
	}
	if f.AllowNetwork != nil {
		k.AllowedNetworks = nil
		for _, text := range f.AllowNetwork {
			if text == "" {
				continue
			}
			network, err := proto.ParseNetwork(text)
			if err != nil {
				return usagef("--allow-network %s must %s", text, err)
			}
			k.AllowedNetworks = append(k.AllowedNetworks, network)
		}
	}
	if f.Mount != nil {
		k.Mounts = nil
		for _, text := range f.Mount {
			if text != "" {
				k.Mounts = append(k.Mounts, parseMount(text))
			}
		}
	}
	if f.Env != nil {
		env, err := nameValues("-e", f.Env)
		if err != nil {
			return err
		}
		k.Env = env
	}
	switch {
	case f.ExpiresIn == nil:
	case *f.ExpiresIn < 0:
		return usagef("--expires-in must not be negative")
	case *f.ExpiresIn == 0:
		k.ExpiresAt = nil
	default:
		k.ExpiresAt = &api.Time{Time: time.Now().Add(*f.ExpiresIn)}
	}
	return nil
}

// setLimit stores a limit, if it was given; 0 removes it.
func setLimit(to **int, flag *int) {
	switch {
	case flag == nil:
	case *flag == 0:
		*to = nil
	default:
		*to = flag
	}
}

type keyCreateCommand struct {
	remote          `embed:""`
	keySettingFlags `embed:""`
	Name            string `required:"" placeholder:"NAME" help:"Name of the key, for people."`
	Org             string `required:"" placeholder:"ORG" help:"Organisation of the key: a-z 0-9 _ -."`
	Profile         string `placeholder:"NAME" help:"Sandbox profile of requests that choose none. It cannot be changed later. Default: the profile named default."`
	Format          string `enum:"sk,e2b" default:"sk" placeholder:"FORMAT" help:"Form of the key: sk for this server's own, or e2b for E2B's clients. Default: ${default}."`
}

func (*keyCreateCommand) Help() string {
	return `Prints the key on standard output. The server stores only a hash and cannot show it again.

If the organisation does not exist, it is created, with the plan of --plan or else without limits. Otherwise --plan
narrows this key alone.`
}

func (c *keyCreateCommand) Run(ctx context.Context, s streams) error {
	wanted := &api.KeyRequest{Org: c.Org, Profile: c.Profile, KeySettings: api.KeySettings{Name: c.Name}}
	if c.Format == string(proto.KeyFormatE2B) { // an older server does not know the field
		wanted.Format = c.Format
	}
	if err := c.apply(&wanted.KeySettings); err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.Key, error) {
		k, err := cl.Admin().Keys.Create(ctx, wanted)
		return k, uncertain(err, "see `bullpen key list`")
	}, func(p *page, k *api.Key) { printSecret(s, p, k) })
}

// printSecret prints the secret of a key alone on standard output.
func printSecret(s streams, p *page, k *api.Key) {
	_, _ = fmt.Fprintf(s.err, "Key %s of %s (%s, profile %s). It is not shown again:\n", k.ID, k.Org,
		scopesOf(k), profilesOf(k))
	p.textf("%s\n", k.Secret)
}

type keyShowCommand struct {
	remote `embed:""`
	ID     string `arg:"" help:"Id of the key, as bullpen key list prints it."`
}

func (c *keyShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Key, error) {
		return cl.Admin().Keys.Get(ctx, c.ID)
	}, func(p *page, k *api.Key) { printKeys(p, *k) })
}

type keyUpdateCommand struct {
	remote          `embed:""`
	keySettingFlags `embed:""`
	Name            *string `placeholder:"NAME" help:"Name of the key, for people."`
	ID              string  `arg:"" help:"Id of the key, as bullpen key list prints it."`
}

func (*keyUpdateCommand) Help() string {
	return `Changes what is given, and nothing if somebody else changes the key at the same time. It applies to requests
from then on. The organisation of a key and its --profile stay.`
}

func (c *keyUpdateCommand) Run(ctx context.Context, s streams) error {
	if err := c.apply(new(api.KeySettings)); err != nil { // before the key is read
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.Key, error) {
		return cl.Admin().Keys.Edit(ctx, c.ID, func(k *api.KeySettings) {
			_ = c.apply(k) // as before
			set(&k.Name, c.Name)
		})
	}, func(p *page, k *api.Key) { printKeys(p, *k) })
}

type keyRotateCommand struct {
	remote  `embed:""`
	Overlap time.Duration `default:"24h" placeholder:"DURATION" help:"How long the previous secret keeps working, up to 168h. Default: ${default}."`
	ID      string        `arg:"" help:"Id of the key, as bullpen key list prints it."`
}

func (*keyRotateCommand) Help() string {
	return "Prints the new secret on standard output. The server stores only a hash and cannot show it again."
}

func (c *keyRotateCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Key, error) {
		k, err := cl.Admin().RotateKey(ctx, c.ID, c.Overlap)
		return k, uncertain(err, "the key may have a secret that nobody knows: rotate it again within the overlap")
	}, func(p *page, k *api.Key) { printSecret(s, p, k) })
}

// scopesOf returns the scopes of a key for people.
func scopesOf(k *api.Key) string {
	var scopes []string
	for _, s := range k.Scopes {
		if s == proto.ScopeAdmin && k.Global {
			s = "global-admin"
		}
		scopes = append(scopes, string(s))
	}
	return strings.Join(scopes, ",")
}

// profilesOf returns the sandbox profiles that requests with a key may choose, its own first.
func profilesOf(k *api.Key) string {
	return strings.Join((&proto.Key{Profile: k.Profile, Profiles: k.Profiles}).AllowedProfiles(), ",")
}

// mountsOf returns the mounts of a key in the form of key create.
func mountsOf(k *api.Key) string {
	var mounts []string
	for _, m := range k.Mounts {
		text := m.Connection
		if m.Prefix != "" {
			text += ":" + m.Prefix
		}
		if m.ReadOnly {
			text += ":ro"
		}
		mounts = append(mounts, text)
	}
	return strings.Join(mounts, ",")
}

type keyListCommand struct {
	remote `embed:""`
	Org    string `placeholder:"ORG" help:"Keys of this organisation alone."`
}

func (c *keyListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Key, error] {
		return cl.Admin().Keys.List(ctx, c.Org)
	}, func(p *page, keys []api.Key) { printKeys(p, keys...) })
}

type keyRevokeCommand struct {
	remote `embed:""`
	ID     string `arg:"" help:"Id of the key, as bullpen key list prints it."`
}

func (c *keyRevokeCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Key, error) {
		return cl.Admin().RevokeKey(ctx, c.ID)
	}, func(p *page, k *api.Key) { printKeys(p, *k) })
}

func printKeys(p *page, keys ...api.Key) {
	p.row("ID", "NAME", "ORG", "PLAN", "SCOPES", "PROFILE", "MOUNTS", "CONCURRENT", "TIMEOUT", "KEY", "CREATED", "USED",
		"EXPIRES", "REVOKED")
	for _, k := range keys {
		p.row(k.ID, k.Name, k.Org, k.Plan, scopesOf(&k), profilesOf(&k), mountsOf(&k), k.Concurrent, k.MaxTimeout, k.Hint,
			k.CreatedAt, k.LastUsedAt, k.ExpiresAt, k.RevokedAt)
	}
}
