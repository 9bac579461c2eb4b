package oci_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/image"
	"github.com/bullpen-run/bullpen/storage/image/oci"
)

// entry is a file of a layer, or a directory if it has no content and a name that ends in a slash.
type entry struct{ name, content string }

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: e.name, Mode: 0o755, Size: int64(len(e.content))}
		if strings.HasSuffix(e.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func layer(t testing.TB, entries ...entry) v1.Layer {
	t.Helper()
	b := archive(t, entries...)
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// container creates an image for a platform.
func container(t testing.TB, arch string, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", arch
	config.Config.Env = []string{"PATH=/opt/app/bin:/bin", "LD_PRELOAD=/evil.so", "malformed"}
	if img, err = mutate.ConfigFile(img, config); err != nil {
		t.Fatal(err)
	}
	return img
}

// python returns an image whose second layer hides a part of the first.
func python(t testing.TB) v1.Image {
	return container(t, "amd64",
		layer(t, entry{"bin/", ""}, entry{"bin/bash", "#!"}, entry{"etc/secret", "x"}, entry{"opt/old/f", "x"}),
		layer(t, entry{"etc/.wh.secret", ""}, entry{"opt/.wh..wh..opq", ""}, entry{"opt/app/bin/python3", "#!"}))
}

func index(t testing.TB, images ...v1.Image) v1.ImageIndex {
	t.Helper()
	out := v1.ImageIndex(empty.Index)
	for _, img := range images {
		config, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		out = mutate.AppendManifests(out, mutate.IndexAddendum{
			Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: config.OS, Architecture: config.Architecture}},
		})
	}
	return out
}

func read(t testing.TB, from string) (*proto.Image, []byte, error) {
	t.Helper()
	tree, err := image.NewTree(t.TempDir(), image.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tree.Close() }()
	if err := oci.Read(t.Context(), tree, from); err != nil {
		return nil, nil, err
	}
	var b bytes.Buffer
	img, err := tree.Pack(&b)
	return img, b.Bytes(), err
}

// startRegistry starts a registry and returns its host.
func startRegistry(t testing.TB) string {
	t.Helper()
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func reference(t testing.TB, text string) name.Reference {
	t.Helper()
	ref, err := name.ParseReference(text)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

// Equal images have equal bytes, whatever their source.
func TestSourcesAreEquivalent(t *testing.T) {
	host, dir := startRegistry(t), t.TempDir()
	arm := container(t, "arm64", layer(t, entry{"bin/bash", "arm"}))
	img := python(t)
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	both := index(t, arm, img)
	saved, zipped, ociDir := filepath.Join(dir, "saved.tar"), filepath.Join(dir, "saved.tar.gz"),
		filepath.Join(dir, "layout")
	_, layoutErr := layout.Write(ociDir, mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: both}))
	for _, err := range []error{
		remote.Write(reference(t, host+"/one:1"), img),
		remote.WriteIndex(reference(t, host+"/both:1"), both),
		tarball.WriteToFile(saved, reference(t, "python:3.14"), img),
		zip(saved, zipped),
		layoutErr,
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var first []byte
	for _, from := range []string{
		host + "/one:1", host + "/one@" + digest.String(), host + "/both:1", saved,
		zipped, ociDir,
	} {
		got, stored, err := read(t, from)
		if err != nil {
			t.Errorf("%s: %v", from, err)
			continue
		}
		if first == nil {
			first = stored
		}
		if !bytes.Equal(first, stored) {
			t.Errorf("%s differs", from)
		}
		if got.Languages[proto.Python] != "/opt/app/bin/python3" || got.Languages[proto.Bash] != "/bin/bash" ||
			len(got.Env) != 1 || got.Env["PATH"] != "/opt/app/bin:/bin" || got.UnpackedSize != 4 {
			t.Errorf("%s: %+v", from, got)
		}
	}
}

func zip(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	if _, err := z.Write(b); err != nil {
		return err
	}
	return errors.Join(z.Close(), os.WriteFile(to, out.Bytes(), 0o600))
}

func TestRootFileSystems(t *testing.T) {
	dir := t.TempDir()
	file, root := filepath.Join(dir, "root.tar"), filepath.Join(dir, "root")
	for _, err := range []error{
		os.WriteFile(file, archive(t, entry{"bin/bash", "#!"}, entry{".wh.kept", "x"}), 0o600),
		os.MkdirAll(filepath.Join(root, "bin"), 0o700),
		os.WriteFile(filepath.Join(root, "bin", "bash"), []byte("#!"), 0o700),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for from, size := range map[string]int64{file: 3, root: 2} {
		img, _, err := read(t, from)
		if err != nil || img.Languages[proto.Bash] != "/bin/bash" || img.UnpackedSize != size {
			t.Errorf("%s: %+v, %v", from, img, err)
		}
	}
}

func TestRejectedSources(t *testing.T) {
	host, dir := startRegistry(t), t.TempDir()
	push := func(at string, img v1.Image) string {
		t.Helper()
		if err := remote.Write(reference(t, host+"/"+at), img); err != nil {
			t.Fatal(err)
		}
		return host + "/" + at
	}
	noise, err := random.Image(100, 1)
	if err != nil {
		t.Fatal(err)
	}
	// A layer that does not match the configuration.
	swapped := container(t, "amd64", layer(t, entry{"bin/bash", "#!"}))
	config, err := swapped.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	config = config.DeepCopy()
	config.RootFS.DiffIDs[0].Hex = strings.Repeat("0", 64)
	if swapped, err = mutate.ConfigFile(swapped, config); err != nil {
		t.Fatal(err)
	}
	trailing := container(t, "amd64",
		static.NewLayer(append(archive(t, entry{"bin/bash", "#!"}), make([]byte, 2<<20)...), types.OCIUncompressedLayer))
	ociTar := filepath.Join(dir, "oci.tar")
	text := filepath.Join(dir, "text")
	two := filepath.Join(dir, "two")
	_, layoutErr := layout.Write(two, index(t, python(t), container(t, "amd64", layer(t, entry{"bin/bash", "2"}))))
	for _, err := range []error{
		os.WriteFile(ociTar, archive(t, entry{"oci-layout", "{}"}, entry{"index.json", "{}"}), 0o600),
		os.WriteFile(text, []byte("a text that is long enough to be looked at, and no archive"), 0o600),
		layoutErr,
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for what, tt := range map[string]struct{ from, want string }{
		"another machine": {
			push("arm:1", container(t, "arm64", layer(t, entry{"bin/bash", "#!"}))),
			"for linux/arm64",
		},
		"no interpreter": {push("noise:1", noise), "linux"},
		"a hostile layer": {
			push("hostile:1", container(t, "amd64", layer(t, entry{"../evil", "x"}))),
			"its path has ..",
		},
		"a swapped layer":           {push("swapped:1", swapped), "the image requires sha256:0000"},
		"something behind a layer":  {push("trailing:1", trailing), "follow its end"},
		"no such image":             {host + "/nothing:1", "NAME_UNKNOWN"},
		"no such file":              {filepath.Join(dir, "nothing"), "no such file"},
		"no such relative file":     {"./nothing", "no such file"},
		"no name at all":            {"Not A Name", "neither a file"},
		"an OCI layout in one file": {ociTar, "unpack it"},
		"a text":                    {text, "as an archive"},
		"two images to choose from": {two, "must have one"},
	} {
		if _, _, err := read(t, tt.from); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestReadStopsWithContext(t *testing.T) {
	saved := filepath.Join(t.TempDir(), "saved.tar")
	if err := tarball.WriteToFile(saved, reference(t, "python:3.14"), python(t)); err != nil {
		t.Fatal(err)
	}
	tree, err := image.NewTree(t.TempDir(), image.DefaultLimits())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tree.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := oci.Read(ctx, tree, saved); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
