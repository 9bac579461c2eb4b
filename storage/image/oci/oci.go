// Package oci reads the root file systems of container images into an [image.Tree]: from
// registries, archives of docker save, OCI layouts, and plain archives and directories. It verifies
// digests.
package oci

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/storage/image"
)

const (
	maxLayers = 512
	maxNested = 4 // nested indexes
	// maxTrailer bounds what follows the end of a layer's archive, in bytes. Tools pad blocks with
	// zeros.
	maxTrailer = 1 << 20
	// window bounds the memory for decompression, in bytes.
	window = 128 << 20
)

func platform() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

// Read reads a root file system and its environment into t. from is a directory, a directory with
// an OCI layout, an archive of docker save, or an archive of a root file system. If no such file
// exists, it is an image in a registry, such as python:3.14-slim or ghcr.io/owner/image@sha256:…,
// and the credentials are those of the docker command.
func Read(ctx context.Context, t *image.Tree, from string) error {
	info, err := os.Stat(from)
	switch {
	case err != nil && (filepath.IsAbs(from) || strings.HasPrefix(from, ".")):
		return fmt.Errorf("read the image: %w", err)
	case err != nil:
		return pull(ctx, t, from)
	case !info.IsDir():
		return readArchive(ctx, t, from)
	}
	if _, err := os.Stat(filepath.Join(from, "oci-layout")); err != nil {
		return t.AddDir(from)
	}
	index, err := layout.ImageIndexFromPath(from)
	if err != nil {
		return fmt.Errorf("read the OCI layout: %w", err)
	}
	img, err := selectImage(index, maxNested)
	if err != nil {
		return fmt.Errorf("read the OCI layout: %w", err)
	}
	return flatten(ctx, t, img)
}

func pull(ctx context.Context, t *image.Tree, from string) error {
	ref, err := name.ParseReference(from)
	if err != nil {
		return fmt.Errorf("%q is neither a file or directory nor the name of an image in a registry: %w", from, err)
	}
	img, err := remote.Image(ref, remote.WithContext(ctx), remote.WithPlatform(platform()),
		remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		return fmt.Errorf("get %s: %w", ref, err)
	}
	return flatten(ctx, t, img)
}

// selectImage returns the only image of an index for this platform.
func selectImage(index v1.ImageIndex, nested int) (v1.Image, error) {
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	var found []v1.Descriptor
	for _, d := range manifest.Manifests {
		if (d.MediaType.IsImage() || d.MediaType.IsIndex()) && (d.Platform == nil || d.Platform.Satisfies(platform())) {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("it has %d images for %s and must have one", len(found), platform())
	}
	if found[0].MediaType.IsImage() {
		return index.Image(found[0].Digest)
	}
	if nested == 0 {
		return nil, errors.New("too many nested indexes")
	}
	inner, err := index.ImageIndex(found[0].Digest)
	if err != nil {
		return nil, err
	}
	return selectImage(inner, nested-1)
}

// flatten applies the layers of an image. It does not use mutate.Extract, which compares names as
// text where a layer writes through a link and emits upper layers first, so that hard links precede
// their targets.
func flatten(ctx context.Context, t *image.Tree, img v1.Image) error {
	config, err := img.ConfigFile()
	if err != nil {
		return fmt.Errorf("read the image's configuration: %w", err)
	}
	if want := platform(); config.OS != want.OS || config.Architecture != want.Architecture {
		return fmt.Errorf("the image is for %s/%s and this machine is %s: choose an image for it", config.OS,
			config.Architecture, want)
	}
	layers, err := img.Layers()
	if err != nil {
		return fmt.Errorf("read the image's layers: %w", err)
	}
	if len(layers) > maxLayers || len(layers) != len(config.RootFS.DiffIDs) {
		return fmt.Errorf("%w: it has %d layers and names %d; at most are %d", image.ErrHostile, len(layers),
			len(config.RootFS.DiffIDs), maxLayers)
	}
	for i, l := range layers {
		if err := addLayer(ctx, t, l, config.RootFS.DiffIDs[i]); err != nil {
			return fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
		}
	}
	t.Env = map[string]string{}
	for _, variable := range config.Config.Env {
		if key, value, ok := strings.Cut(variable, "="); ok {
			t.Env[key] = value
		}
	}
	return nil
}

func addLayer(ctx context.Context, t *image.Tree, l v1.Layer, want v1.Hash) (err error) {
	content, err := l.Uncompressed()
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, content.Close()) }()
	sum := sha256.New()
	r := io.TeeReader(&contextReader{ctx, content}, sum)
	if err := t.AddLayer(r); err != nil {
		return err
	}
	if n, err := io.Copy(io.Discard, io.LimitReader(r, maxTrailer+1)); err != nil {
		return fmt.Errorf("read: %w", err)
	} else if n > maxTrailer {
		return fmt.Errorf("%w: more than %d bytes follow its end", image.ErrHostile, maxTrailer)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); want.Algorithm != "sha256" || got != want.Hex {
		return fmt.Errorf("%w: its digest is sha256:%s, the image requires %s", image.ErrHostile, got, want)
	}
	return nil
}

// contextReader reads until ctx is done.
type contextReader struct {
	ctx  context.Context
	from io.Reader
}

func (u *contextReader) Read(b []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.from.Read(b)
}

// readArchive reads an archive of docker save or of a root file system.
func readArchive(ctx context.Context, t *image.Tree, file string) error {
	open := func() (io.ReadCloser, error) { return openArchive(file) }
	isDocker, err := isDockerArchive(ctx, open)
	if err != nil {
		return fmt.Errorf("read %s as an archive: %w", file, err)
	}
	if isDocker {
		img, err := tarball.Image(open, nil)
		if err != nil {
			return fmt.Errorf("read %s as an archive: %w", file, err)
		}
		return flatten(ctx, t, img)
	}
	in, err := open()
	if err != nil {
		return fmt.Errorf("read %s as an archive: %w", file, err)
	}
	return errors.Join(t.AddTar(&contextReader{ctx, in}), in.Close())
}

// isDockerArchive reports whether an archive was written by docker save.
func isDockerArchive(ctx context.Context, open func() (io.ReadCloser, error)) (isDocker bool, err error) {
	in, err := open()
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	archive, ociLayout := tar.NewReader(&contextReader{ctx, in}), false
	for {
		h, err := archive.Next()
		switch {
		case errors.Is(err, io.EOF) && ociLayout:
			return false, errors.New("it is an OCI layout in an archive: unpack it and pass the directory")
		case errors.Is(err, io.EOF):
			return false, nil
		case err != nil:
			return false, err
		}
		switch path.Clean(h.Name) {
		case "manifest.json":
			return true, nil
		case "oci-layout":
			ociLayout = true
		}
	}
}

// openArchive opens a file, decompressed if it is compressed with gzip or zstd.
func openArchive(file string) (io.ReadCloser, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	in := bufio.NewReaderSize(f, 1<<20)
	magic, err := in.Peek(4)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	switch {
	case string(magic[:2]) == "\x1f\x8b":
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return &archiveReader{z, f.Close}, nil
	case string(magic) == "\x28\xb5\x2f\xfd":
		z, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window))
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return &archiveReader{z, func() error { z.Close(); return f.Close() }}, nil
	default:
		return &archiveReader{in, f.Close}, nil
	}
}

type archiveReader struct {
	io.Reader
	close func() error
}

func (o *archiveReader) Close() error { return o.close() }
