package main

import (
	"context"
	"iter"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type connectionCommands struct {
	Create connectionCreateCommand `cmd:"" help:"Create a storage connection (admin)."`
	List   connectionListCommand   `cmd:"" help:"List storage connections (admin)."`
	Show   connectionShowCommand   `cmd:"" help:"Show a storage connection (admin)."`
	Update connectionUpdateCommand `cmd:"" help:"Change a storage connection (admin)."`
	Rm     connectionRmCommand     `cmd:"" help:"Remove a storage connection that no API key names; the storage stays, but a volume is removed with its files (admin)."`
	Test   connectionTestCommand   `cmd:"" help:"Test a storage connection (admin)."`
}

// connectionOf names a storage connection.
type connectionOf struct {
	Org  string `placeholder:"ORG" help:"Organisation of the connection. Default: the API key's."`
	Slug string `arg:"" help:"Slug of the connection: a-z 0-9 _ -. Programs see it at /data/SLUG."`
}

// connectionFlags are the changeable settings of a connection.
type connectionFlags struct {
	Kind        *string      `enum:"s3,directory,volume" placeholder:"KIND" help:"s3 (default) for a bucket, directory for a directory of the workers (global admin), or volume."`
	Endpoint    *string      `placeholder:"URL" help:"Server of the bucket, such as https://s3.example.com. Default: Amazon's."`
	Region      *string      `placeholder:"REGION" help:"Region of the bucket. Most servers other than Amazon's accept us-east-1."`
	Bucket      *string      `placeholder:"BUCKET" help:"Name of the bucket."`
	PathStyle   *bool        `negatable:"" help:"The bucket is in the path of URLs instead of the host name. Most servers other than Amazon's need it."`
	Credential  *string      `placeholder:"SECRET" help:"Name of the secret with the credentials of the bucket, as JSON: {\"access_key_id\":\"…\",\"secret_access_key\":\"…\"}."`
	Directory   *string      `placeholder:"DIR" help:"Absolute path of the directory, in one of the workers' --mount-roots."`
	Bytes       *proto.Bytes `placeholder:"SIZE" help:"Quota of the volume, 1MiB to 1000GiB."`
	Prefix      *string      `placeholder:"PATH" help:"Part of the storage that programs see, such as shared/data. Default: everything."`
	ReadOnly    *bool        `negatable:"" help:"Programs cannot change anything."`
	Description *string      `placeholder:"TEXT" help:"Description for people."`
	NoTest      bool         `help:"Store a bucket that only workers can reach: the gateway does not test it."`
}

// apply changes the settings that were given.
func (f *connectionFlags) apply(c *api.ConnectionRequest) {
	if f.Kind != nil {
		c.Kind = proto.MountKind(*f.Kind)
	}
	set(&c.Endpoint, f.Endpoint)
	set(&c.Region, f.Region)
	set(&c.Bucket, f.Bucket)
	set(&c.PathStyle, f.PathStyle)
	set(&c.Credential, f.Credential)
	set(&c.Directory, f.Directory)
	set(&c.Bytes, f.Bytes)
	set(&c.Prefix, f.Prefix)
	set(&c.ReadOnly, f.ReadOnly)
	set(&c.Description, f.Description)
}

type connectionCreateCommand struct {
	remote          `embed:""`
	connectionOf    `embed:""`
	connectionFlags `embed:""`
}

func (*connectionCreateCommand) Help() string {
	return `The gateway tests a bucket first: it lists objects and, unless the connection is read-only, writes a small
object, reads it back and deletes it. API keys see a connection only if they name it: bullpen key update --mount.

Example:

  bullpen secret set DATA_KEY < keys.json
  bullpen connection create data --endpoint https://s3.example.com --region us-east-1 \
    --bucket acme --path-style --credential DATA_KEY
  bullpen key update key_1 --mount data:tenants/acme`
}

func (c *connectionCreateCommand) Run(ctx context.Context, s streams) error {
	wanted := &api.ConnectionRequest{Slug: c.Slug, Kind: proto.MountS3}
	c.apply(wanted)
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().Connections(c.Org, !c.NoTest).Create(ctx, wanted)
	}, func(p *page, connection *api.Connection) { printConnections(p, *connection) })
}

type connectionListCommand struct {
	remote `embed:""`
	Org    string `placeholder:"ORG" help:"Connections of this organisation alone."`
}

func (c *connectionListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Connection, error] {
		return cl.Admin().Connections(c.Org, true).List(ctx, c.Org)
	}, func(p *page, list []api.Connection) { printConnections(p, list...) })
}

type connectionShowCommand struct {
	remote       `embed:""`
	connectionOf `embed:""`
}

func (c *connectionShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().Connections(c.Org, true).Get(ctx, c.Slug)
	}, func(p *page, connection *api.Connection) { printConnections(p, *connection) })
}

type connectionUpdateCommand struct {
	remote          `embed:""`
	connectionOf    `embed:""`
	connectionFlags `embed:""`
}

func (*connectionUpdateCommand) Help() string {
	return `Changes what is given, and nothing if somebody else changes the connection at the same time. It applies to
executions that are accepted from then on. The gateway tests the connection first, as when it is created.`
}

func (c *connectionUpdateCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().Connections(c.Org, !c.NoTest).Edit(ctx, c.Slug, c.apply)
	}, func(p *page, connection *api.Connection) { printConnections(p, *connection) })
}

type connectionRmCommand struct {
	remote       `embed:""`
	connectionOf `embed:""`
}

func (c *connectionRmCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().Connections(c.Org, true).Remove(ctx, c.Slug)
	}, func(p *page, connection *api.Connection) { printConnections(p, *connection) })
}

type connectionTestCommand struct {
	remote       `embed:""`
	connectionOf `embed:""`
}

func (*connectionTestCommand) Help() string {
	return "The gateway uses the bucket as when the connection is created. An error names the step that failed, and " +
		"what the server answered."
}

func (c *connectionTestCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().TestConnection(ctx, c.Org, c.Slug)
	}, func(p *page, connection *api.Connection) { printConnections(p, *connection) })
}

func printConnections(p *page, list ...api.Connection) {
	p.row("SLUG", "ORG", "KIND", "STORAGE", "CREDENTIAL", "ACCESS", "TESTED", "DESCRIPTION")
	for _, c := range list {
		p.row(c.Slug, c.Org, c.Kind, storageOf(&c), c.Credential, accessOf(&c), c.TestedAt, c.Description)
	}
}

// accessOf returns what programs can do with a connection, for people.
func accessOf(c *api.Connection) string {
	if c.ReadOnly {
		return "read-only"
	}
	return "read-write"
}

// storageOf returns where the storage of a connection is, for people.
func storageOf(c *api.Connection) string {
	storage := c.Directory
	switch c.Kind {
	case proto.MountVolume:
		storage = c.Bytes.String()
	case proto.MountS3:
		storage = strings.TrimSuffix(c.Endpoint, "/") + "/" + c.Bucket
		if c.Endpoint == "" {
			storage = "s3://" + c.Bucket
		}
	}
	if c.Prefix != "" {
		storage += "/" + c.Prefix
	}
	return storage
}

// parseMount parses SLUG, SLUG:PREFIX, and either with :ro at its end.
func parseMount(text string) proto.KeyMount {
	text, readOnly := strings.CutSuffix(text, ":ro")
	slug, prefix, _ := strings.Cut(text, ":")
	return proto.KeyMount{Connection: slug, Prefix: prefix, ReadOnly: readOnly}
}
