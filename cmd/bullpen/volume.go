package main

import (
	"context"
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type volumeCommands struct {
	Create   volumeCreateCommand   `cmd:"" help:"Create an empty volume (admin)."`
	List     volumeListCommand     `cmd:"" help:"List volumes (admin)."`
	Show     volumeShowCommand     `cmd:"" help:"Show a volume and its versions (admin)."`
	Resize   volumeResizeCommand   `cmd:"" help:"Change the quota of a volume (admin)."`
	Fork     volumeForkCommand     `cmd:"" help:"Create a volume with the files of another, without copying (admin)."`
	Snapshot volumeSnapshotCommand `cmd:"" help:"Create an immutable volume with the files of another (admin)."`
	Export   volumeExportCommand   `cmd:"" help:"Write a volume as a tar archive (admin)."`
	Delete   volumeDeleteCommand   `cmd:"" help:"Remove a volume that no API key names, with all its versions (admin)."`
}

// volumeArg names a volume.
type volumeArg struct {
	Org  string `placeholder:"ORG" help:"Organisation of the volume. Default: the API key's."`
	Slug string `arg:"" help:"Slug of the volume: a-z 0-9 _ -. Programs see it at /data/SLUG."`
}

func (a *volumeArg) Validate() error { return proto.CheckSlug("slug", a.Slug) }

type volumeCreateCommand struct {
	remote      `embed:""`
	volumeArg   `embed:""`
	Size        proto.Bytes `required:"" placeholder:"SIZE" help:"Quota, 1MiB to 1000GiB."`
	Description string      `placeholder:"TEXT" help:"Description for people."`
}

func (*volumeCreateCommand) Help() string {
	return `A volume is a storage connection whose files are in the server's own blob store. API keys see it only if they
name it: bullpen key update --mount. One execution at a time can change a volume, and any number can read it.

Example:

  bullpen volume create models --size 10GiB
  bullpen key update key_1 --mount models
  bullpen key update key_2 --mount models:ro`
}

func (c *volumeCreateCommand) Run(ctx context.Context, s streams) error {
	wanted := &api.ConnectionRequest{Slug: c.Slug, Kind: proto.MountVolume, Bytes: c.Size, Description: c.Description}
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().Connections(c.Org, true).Create(ctx, wanted)
	}, printVolume)
}

type volumeListCommand struct {
	remote `embed:""`
	Org    string `placeholder:"ORG" help:"Volumes of this organisation alone."`
}

func (c *volumeListCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) ([]api.Connection, error) {
		volumes := []api.Connection{}
		for connection, err := range cl.Admin().Connections(c.Org, true).List(ctx, c.Org) {
			if err != nil {
				return nil, err
			}
			if connection.Kind == proto.MountVolume {
				volumes = append(volumes, connection)
			}
		}
		return volumes, nil
	}, func(p *page, list []api.Connection) { printVolumes(p, list...) })
}

func printVolume(p *page, c *api.Connection) { printVolumes(p, *c) }

func printVolumes(p *page, list ...api.Connection) {
	p.row("VOLUME", "ORG", "QUOTA", "ACCESS", "CREATED", "DESCRIPTION")
	for i := range list {
		c := &list[i]
		p.row(c.Slug, c.Org, c.Bytes, accessOf(c), c.CreatedAt, c.Description)
	}
}

type volumeShowCommand struct {
	remote    `embed:""`
	volumeArg `embed:""`
}

func (c *volumeShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Volume, error) {
		return cl.Admin().Volume(ctx, c.Org, c.Slug)
	}, func(p *page, v *api.Volume) {
		p.row("volume", v.Slug)
		p.row("quota", v.Quota)
		p.row("size", mib(v.Bytes))
		p.row("files", v.Files)
		p.row("used", v.UsedAt)
		p.row("in use by", v.Holder)
		for _, version := range v.Versions {
			p.row("version", fmt.Sprintf("%d, %s, %d files, %s", version.Number, mib(version.Bytes), version.Files,
				cell(version.CreatedAt)))
		}
	})
}

type volumeResizeCommand struct {
	remote    `embed:""`
	volumeArg `embed:""`
	Size      proto.Bytes `arg:"" help:"The new quota, 1MiB to 1000GiB."`
}

func (*volumeResizeCommand) Help() string {
	return `It applies to executions that are accepted from then on. If the volume has more than the new quota, an
execution can only save changes that make it fit.`
}

func (c *volumeResizeCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		if _, err := cl.Admin().Volume(ctx, c.Org, c.Slug); err != nil { // it may be another connection
			return nil, err
		}
		return cl.Admin().Connections(c.Org, true).Edit(ctx, c.Slug, func(wanted *api.ConnectionRequest) {
			wanted.Bytes = c.Size
		})
	}, printVolume)
}

// volumeForkFlags name a new volume and the version to start from.
type volumeForkFlags struct {
	New         string `arg:"" name:"new" help:"Slug of the new volume."`
	Description string `placeholder:"TEXT" help:"Description for people."`
	versionFlag `embed:""`
}

func (f *volumeForkFlags) run(ctx context.Context, s streams, r *remote, from *volumeArg, readOnly bool) error {
	if err := proto.CheckSlug("new", f.New); err != nil {
		return usageError{err}
	}
	version, err := f.version()
	if err != nil {
		return err
	}
	return request(s, r, func(cl *client.Client) (*api.Connection, error) {
		return cl.Admin().ForkVolume(ctx, from.Org, from.Slug,
			&api.ForkVolumeRequest{Slug: f.New, Version: version, ReadOnly: readOnly, Description: f.Description})
	}, printVolume)
}

type volumeForkCommand struct {
	remote          `embed:""`
	volumeArg       `embed:""`
	volumeForkFlags `embed:""`
}

func (c *volumeForkCommand) Run(ctx context.Context, s streams) error {
	return c.run(ctx, s, &c.remote, &c.volumeArg, false)
}

type volumeSnapshotCommand struct {
	remote          `embed:""`
	volumeArg       `embed:""`
	volumeForkFlags `embed:""`
}

func (c *volumeSnapshotCommand) Run(ctx context.Context, s streams) error {
	return c.run(ctx, s, &c.remote, &c.volumeArg, true)
}

type volumeExportCommand struct {
	remote      `embed:""`
	volumeArg   `embed:""`
	versionFlag `embed:""`
	Path        string `placeholder:"DIRECTORY" help:"Directory to write, relative to /data/SLUG. Default: everything."`
	outputFlag  `embed:""`
}

func (c *volumeExportCommand) Run(ctx context.Context, s streams) error {
	version, err := c.version()
	if err != nil {
		return err
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	return c.write(s, func(w io.Writer) error { return cl.Admin().VolumeArchive(ctx, c.Org, c.Slug, version, c.Path, w) })
}

type volumeDeleteCommand struct {
	remote    `embed:""`
	volumeArg `embed:""`
}

func (*volumeDeleteCommand) Help() string {
	return "A volume that is in use cannot be removed. Its stored files are freed later: see bullpen thread gc. Forks " +
		"and snapshots stay."
}

func (c *volumeDeleteCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Connection, error) {
		if _, err := cl.Admin().Volume(ctx, c.Org, c.Slug); err != nil { // it may be another connection
			return nil, err
		}
		return cl.Admin().Connections(c.Org, true).Remove(ctx, c.Slug)
	}, printVolume)
}
