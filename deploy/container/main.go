// Assemble writes the images of bullpen as OCI image layouts, without a container engine: the
// gateway, which has nothing but the
// program, and the worker, on a Debian that was made by mmdebstrap. The same files give the same
// images.
package main

import (
	"archive/tar"
	"bytes"
	"debug/buildinfo"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// user is the id of the user and the group of gateways, schedulers and senders of webhooks.
const user = 65532

func main() {
	var a assembly
	flag.StringVar(&a.tree, "tree", "", "directory that make install wrote, with PREFIX=/usr")
	flag.StringVar(&a.version, "version", "", "version, which is the images' tag")
	flag.StringVar(&a.commit, "commit", "", "commit")
	date := flag.String("date", "", "date of the commit, RFC 3339")
	flag.StringVar(&a.debian, "debian", "", "tar of mmdebstrap, for the worker's image; without it there is none")
	out := flag.String("out", "", "directory for the images")
	flag.Parse()
	var err error
	if a.date, err = time.Parse(time.RFC3339, *date); err == nil {
		err = a.run(*out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "assemble:", err)
		os.Exit(1)
	}
}

// assembly is what images are made of.
type assembly struct {
	tree, version, commit, debian string
	date                          time.Time
}

// run writes the images into directories of out.
func (a *assembly) run(out string) error {
	program := filepath.Join(a.tree, "usr/bin/bullpen")
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	var arch string
	for _, s := range info.Settings {
		if s.Key == "GOARCH" {
			arch = s.Value
		}
	}
	gateway, err := a.layer(func(w *tarWriter) {
		for _, dir := range []string{"etc", "etc/ssl", "etc/ssl/certs", "usr", "usr/bin", "var", "var/lib"} {
			w.dir(dir, 0o755, 0)
		}
		w.dir("tmp", 0o1777, 0)
		w.dir("var/lib/bullpen", 0o700, user)
		w.text("etc/passwd", fmt.Sprintf("root:x:0:0:root:/:/nonexistent\nbullpen:x:%d:%d::/var/lib/bullpen:/nonexistent\n",
			user, user))
		w.text("etc/group", fmt.Sprintf("root:x:0:\nbullpen:x:%d:\n", user))
		w.text("etc/ssl/certs/ca-certificates.crt", authorities())
		w.file("usr/bin/bullpen", program)
	})
	if err != nil {
		return err
	}
	if err := a.write(filepath.Join(out, "gateway"), arch, fmt.Sprintf("%d:%d", user, user), gateway); err != nil {
		return err
	}
	if a.debian == "" {
		return nil
	}
	base, err := a.layer(func(w *tarWriter) { w.debian(a.debian) })
	if err != nil {
		return err
	}
	worker, err := a.layer(func(w *tarWriter) {
		w.tree(a.tree)
		for _, dir := range []string{"var/lib/bullpen", "var/cache/bullpen", "var/cache/bullpen/images"} {
			w.dir(dir, 0o755, 0)
		}
	})
	if err != nil {
		return err
	}
	return a.write(filepath.Join(out, "worker"), arch, "0:0", base, worker)
}

// authorities returns the certificate authorities that Mozilla trusts, PEM. Those of this machine may
// have some of its own.
func authorities() string {
	var text strings.Builder
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			text.WriteString(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate})))
		}
	}
	return text.String()
}

// write writes an image layout to dir, which must not exist or is one.
func (a *assembly) write(dir, arch, user string, layers ...v1.Layer) error {
	oci := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.AppendLayers(oci, layers...)
	if err != nil {
		return err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return err
	}
	config = config.DeepCopy()
	config.Architecture, config.OS, config.Created = arch, "linux", v1.Time{Time: a.date}
	config.Config = v1.Config{
		User: user, Entrypoint: []string{"/usr/bin/bullpen"}, Cmd: []string{"serve"}, WorkingDir: "/var/lib/bullpen",
		Env:        []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "BULLPEN_DATA=/var/lib/bullpen"},
		StopSignal: "SIGTERM",
		Labels: map[string]string{
			"org.opencontainers.image.source":   "https://github.com/bullpen-run/bullpen",
			"org.opencontainers.image.version":  a.version,
			"org.opencontainers.image.revision": a.commit,
		},
	}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	index, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	return index.AppendImage(image,
		layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": a.version}),
		layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch}))
}

// layer returns a layer with what fill writes.
func (a *assembly) layer(fill func(*tarWriter)) (v1.Layer, error) {
	var buf bytes.Buffer
	w := &tarWriter{tar: tar.NewWriter(&buf), date: a.date}
	fill(w)
	if err := errors.Join(w.err, w.tar.Close()); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buf.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// tarWriter writes files of one date. After an error it writes nothing more.
type tarWriter struct {
	tar  *tar.Writer
	date time.Time
	err  error
}

func (w *tarWriter) entry(h *tar.Header, content io.Reader) {
	if w.err != nil {
		return
	}
	h.ModTime, h.AccessTime, h.ChangeTime, h.Format = w.date, time.Time{}, time.Time{}, tar.FormatPAX
	if w.err = w.tar.WriteHeader(h); w.err == nil && h.Typeflag == tar.TypeReg {
		_, w.err = io.Copy(w.tar, content)
	}
}

func (w *tarWriter) dir(name string, mode int64, owner int) {
	w.entry(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode, Uid: owner, Gid: owner}, nil)
}

func (w *tarWriter) text(name, text string) {
	w.entry(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text))}, strings.NewReader(text))
}

func (w *tarWriter) file(name, from string) {
	f, err := os.Open(from)
	if err != nil {
		w.err = errors.Join(w.err, err)
		return
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		w.err = errors.Join(w.err, err)
		return
	}
	w.entry(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: int64(info.Mode().Perm()), Size: info.Size()}, f)
}

// tree writes the directories and regular files below root. Directories that Debian has as links, it
// does not write: /usr is none.
func (w *tarWriter) tree(root string) {
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, relErr := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case relErr != nil:
			return relErr
		case name == ".":
		case d.IsDir():
			w.dir(name, 0o755, 0)
		case d.Type().IsRegular():
			w.file(name, path)
		default:
			return fmt.Errorf("%s is neither a file nor a directory", path)
		}
		return nil
	})
	w.err = errors.Join(w.err, err)
}

// debian writes what mmdebstrap wrote, without devices, which an engine makes.
func (w *tarWriter) debian(from string) {
	f, err := os.Open(from)
	if err != nil {
		w.err = errors.Join(w.err, err)
		return
	}
	defer func() { _ = f.Close() }() // only read
	for r := tar.NewReader(f); w.err == nil; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			w.err = fmt.Errorf("%s: %w", from, err)
			return
		}
		h.Name, h.Linkname = strings.TrimPrefix(h.Name, "./"), linkName(h)
		if h.Name == "" || strings.HasPrefix(h.Name, "dev/") && h.Name != "dev/" {
			continue
		}
		w.entry(h, r)
	}
}

// linkName returns the target of a link; that of a hard link is a name in the same archive.
func linkName(h *tar.Header) string {
	if h.Typeflag == tar.TypeLink {
		return strings.TrimPrefix(h.Linkname, "./")
	}
	return h.Linkname
}
