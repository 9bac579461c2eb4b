package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/storage/image"
	"github.com/bullpen-run/bullpen/storage/image/oci"
)

type imageCommands struct {
	Build  imageBuildCommand  `cmd:"" help:"Build an image with Python, Node and Bash from packages, and store it."`
	Import imageImportCommand `cmd:"" help:"Store an image from a registry, an archive or a directory."`
	List   imageListCommand   `cmd:"" help:"List all images."`
	Rm     imageRmCommand     `cmd:"" help:"Remove an image."`
}

// imageName is the argument that names an image.
type imageName struct {
	Name string `arg:"" help:"Name of the image: a-z 0-9 . _ -."`
}

// Validate checks the name before anything is built.
func (n *imageName) Validate() error { return proto.CheckImageName(n.Name) }

type imageImportCommand struct {
	remote    `embed:""`
	imageName `embed:""`
	From      string `arg:"" help:"An image's name in a registry, such as docker.io/library/python:3.14-slim, or an existing file or directory: what docker save wrote, an OCI layout, a root file system."`
}

// Help completes the --help text.
func (*imageImportCommand) Help() string {
	return `Leaves out devices, setuid bits and extended attributes. From the image's environment, programs get
` + strings.Join(proto.ImageEnv(), " ") + `.

Interpreters are found in the image's PATH, then in /opt/venv, /venv, /opt/conda and its environments,
/usr/local/bin, /usr/bin, /bin, and in other
virtual environments. Registry credentials come from docker's configuration, see docker login.

TMPDIR must have enough space for the unpacked image.`
}

// Run runs the command.
func (c *imageImportCommand) Run(ctx context.Context, io streams) error {
	return c.store(ctx, io, c.Name, func(t *image.Tree) error { return oci.Read(ctx, t, c.From) })
}

// store fills a tree, stores it as an image, and prints the image.
func (r *remote) store(ctx context.Context, io streams, name string, fill func(*image.Tree) error) error {
	cl, err := r.client(io)
	if err != nil {
		return err
	}
	if _, err := client.Collect(cl.Admin().Images(ctx)); err != nil { // fails early without a server or a valid key
		return err
	}
	img, err := storeImage(ctx, cl, io, name, fill)
	if err != nil {
		return err
	}
	return show(io, r.JSON, img, func(p *page, img *api.Image) { printImages(p, *img) })
}

// storeImage fills a tree and stores it as an image.
func storeImage(
	ctx context.Context, cl *client.Client, io streams, name string, fill func(*image.Tree) error,
) (img *api.Image, err error) {
	t, err := image.NewTree("", image.DefaultLimits())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	if err := fill(t); err != nil {
		return nil, err
	}
	if img, err = upload(ctx, cl, io, name, t); err != nil {
		return nil, err
	}
	printOmitted(io.err, t.Omitted())
	return img, nil
}

// upload packs a tree and stores it.
func upload(
	ctx context.Context, cl *client.Client, to streams, name string, t *image.Tree,
) (img *api.Image, err error) {
	packed, err := os.CreateTemp("", "bullpen-image-*")
	if err != nil {
		return nil, fmt.Errorf("pack the image: %w", err)
	}
	// An unnamed file disappears with the process.
	defer func() { err = errors.Join(err, packed.Close()) }()
	if err := os.Remove(packed.Name()); err != nil {
		return nil, fmt.Errorf("pack the image: %w", err)
	}
	progress := newSteps(to)
	defer progress.close()
	progress.begin("compressing the image")
	packedImage, err := t.Pack(packed)
	if err != nil {
		return nil, err
	}
	if _, err := packed.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read the packed image: %w", err)
	}
	progress.begin("sending the image")
	body := &countedReader{from: packed, size: packedImage.Size, steps: progress}
	return cl.Admin().PutImage(ctx, name, packedImage.Digest, body, packedImage.Size)
}

// printOmitted prints what was left out of the image.
func printOmitted(w io.Writer, omitted image.Omitted) {
	for _, l := range []struct {
		n    int
		what string
	}{
		{omitted.Devices, "device nodes, FIFOs and sockets"},
		{omitted.Setuid, "setuid and setgid bits"},
		{omitted.Attributes, "files' extended attributes, such as capabilities"},
		{omitted.Mounts, "directories' contents, which are on another file system"},
	} {
		if l.n > 0 {
			_, _ = fmt.Fprintf(w, "Left out: %d %s.\n", l.n, l.what)
		}
	}
}

type imageListCommand struct {
	remote `embed:""`
}

func (c *imageListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Image, error] {
		return cl.Admin().Images(ctx)
	}, func(p *page, images []api.Image) { printImages(p, images...) })
}

type imageRmCommand struct {
	remote    `embed:""`
	imageName `embed:""`
}

func (*imageRmCommand) Help() string {
	return `An image that a sandbox profile names cannot be removed. Executions that were accepted before can still use
the image. Its disk space is freed when none is left, after the server's --queue-expiry.`
}

func (c *imageRmCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Image, error) {
		return cl.Admin().RemoveImage(ctx, c.Name)
	}, func(p *page, image *api.Image) { printImages(p, *image) })
}

func printImages(p *page, images ...api.Image) {
	const shown = len("sha256:") + 12
	p.row("NAME", "DIGEST", "STORED", "UNPACKED", "ARCH", "INTERPRETERS", "CREATED")
	for _, i := range images {
		var paths []string
		for _, l := range slices.Sorted(maps.Keys(i.Languages)) {
			paths = append(paths, i.Languages[l])
		}
		p.row(i.Name, fmt.Sprintf("%.*s", shown, i.Digest), mib(i.Size), mib(i.UnpackedSize), i.Architecture,
			strings.Join(paths, " "), i.CreatedAt)
	}
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
