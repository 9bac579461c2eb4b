package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/storage/image"
)

// stopTime is how long an interrupted tool may clean up.
const stopTime = 30 * time.Second

type imageBuildCommand struct {
	remote      `embed:""`
	imageName   `embed:""`
	Suite       string   `default:"sid" placeholder:"SUITE" help:"Suite of Debian to take packages from."`
	Mirror      []string `placeholder:"SOURCE" help:"Where to get packages: what mmdebstrap takes as a mirror, such as a URL, a line of sources.list, or a file. Without it, mmdebstrap's own."`
	StaleIndex  bool     `help:"Take a mirror's index also when it is past the date until which it was to be used."`
	Python      string   `default:"python3.14" placeholder:"PACKAGE" help:"Package with Python."`
	Package     []string `placeholder:"PACKAGE" help:"One more package for the image. Can be repeated."`
	NodeVersion string   `default:"25" placeholder:"VERSION" help:"Version of Node to get from npm's registry, whole or in part."`
	NodeTarball string   `type:"existingfile" placeholder:"FILE" help:"Take Node from this file instead: a .tar.gz with bin/node in its one directory, such as the ones of nodejs.org."`
}

func (*imageBuildCommand) Help() string {
	return `Needs mmdebstrap, and npm unless --node-tarball is given; both use the sources and the registry that this machine is set up for. The
image has Python with its standard library, Node, Bash, the GNU tools, and certificates. Manual pages and translations are left out.

TMPDIR must have enough space for the unpacked image.`
}

// basePackages are installed besides the essential ones: Bash, libraries of Node, and certificates.
func basePackages() []string {
	return []string{"bash", "ca-certificates", "coreutils", "grep", "libatomic1", "libstdc++6"}
}

func (c *imageBuildCommand) Run(ctx context.Context, io streams) error {
	return c.store(ctx, io, c.Name, func(t *image.Tree) error {
		mmdebstrap, err := tool("mmdebstrap", "install the package mmdebstrap (apt-get install mmdebstrap), or make a root file system in "+
			"another way and use `bullpen image import`")
		if err != nil {
			return err
		}
		node, clean, err := c.node(ctx, io)
		if err != nil {
			return err
		}
		defer clean()
		if err := c.debian(ctx, io.err, mmdebstrap, t); err != nil {
			return err
		}
		if err := addNode(t, node); err != nil {
			return fmt.Errorf("take Node from %s: %w", node, err)
		}
		t.Env = map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
		return nil
	})
}

// tool returns the path of a program.
func tool(name, remedy string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s is not on this machine: %s", name, remedy)
	}
	return path, nil
}

// command returns a command that gets SIGTERM when ctx is done, and stopTime to clean up.
func command(ctx context.Context, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTime
	return cmd
}

// debian adds Debian's packages to the tree.
func (c *imageBuildCommand) debian(ctx context.Context, progress io.Writer, mmdebstrap string, t *image.Tree) error {
	packages := slices.Concat(basePackages(), []string{c.Python}, c.Package)
	args := []string{
		"--variant=essential", "--format=tar", "--include=" + strings.Join(packages, ","),
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright",
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		// Programs are run with python3, which the package of a version does not install.
		`--customize-hook=test -e "$1/usr/bin/python3" || ! test -e "$1/usr/bin/` + c.Python + `" || ln -s ` + c.Python + ` "$1/usr/bin/python3"`,
	}
	if c.StaleIndex {
		args = append(args, `--aptopt=Acquire::Check-Valid-Until "false"`)
	}
	args = append(append(args, "--", c.Suite, "-"), c.Mirror...)
	cmd := command(ctx, mmdebstrap, args...)
	cmd.Stderr = progress
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("run mmdebstrap: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("run mmdebstrap: %w", err)
	}
	added := t.AddTar(out)
	_, _ = io.Copy(io.Discard, out) // padding, or the rest after an error; Wait reports read errors
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("mmdebstrap: %w: see above; --mirror, --suite and --stale-index choose where packages come from", err)
	}
	return added
}

// node returns the path of an archive with Node.
func (c *imageBuildCommand) node(ctx context.Context, to streams) (file string, clean func(), err error) {
	if c.NodeTarball != "" {
		return c.NodeTarball, func() {}, nil
	}
	npm, err := tool("npm", "install it, or give --node-tarball")
	if err != nil {
		return "", nil, err
	}
	dir, err := os.MkdirTemp("", "bullpen-node-*")
	if err != nil {
		return "", nil, fmt.Errorf("get Node: %w", err)
	}
	clean = func() { _ = os.RemoveAll(dir) } // in the temporary directory
	if file, err = c.fetchNode(ctx, to, npm, dir); err != nil {
		clean()
		return "", nil, fmt.Errorf("get Node: %w: --node-version and --node-tarball choose another", err)
	}
	return file, clean, nil
}

// nodeRelease is a version of Node in npm's registry.
type nodeRelease struct {
	Version   string `json:"version"`
	Integrity string `json:"dist.integrity"`
}

func (c *imageBuildCommand) fetchNode(ctx context.Context, to streams, npm, dir string) (string, error) {
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	name := "node-linux-" + arch
	run := func(args ...string) ([]byte, error) {
		cmd := command(ctx, npm, args...)
		cmd.Dir, cmd.Stderr = dir, to.err
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("npm %s: %w", args[0], err)
		}
		return out, nil
	}
	out, err := run("view", "--json", name+"@"+c.NodeVersion, "version", "dist.integrity")
	if err != nil {
		return "", err
	}
	release, err := newest(out)
	if err != nil {
		return "", fmt.Errorf("%s@%s: %w", name, c.NodeVersion, err)
	}
	to.progressf("getting Node %s", release.Version)
	if _, err := run("pack", "--silent", "--pack-destination", dir, name+"@"+release.Version); err != nil {
		return "", err
	}
	file := filepath.Join(dir, name+"-"+release.Version+".tgz")
	return file, checkIntegrity(file, release.Integrity)
}

// newest returns the highest version in npm's output.
func newest(list []byte) (nodeRelease, error) {
	var all []nodeRelease
	list = bytes.TrimSpace(list)
	if !bytes.HasPrefix(list, []byte("[")) { // npm prints a single version without brackets, and none as nothing
		list = slices.Concat([]byte("["), list, []byte("]"))
	}
	if err := json.Unmarshal(list, &all); err != nil {
		return nodeRelease{}, fmt.Errorf("npm's answer is not understood: %w", err)
	}
	if len(all) == 0 {
		return nodeRelease{}, errors.New("the registry has no such version")
	}
	return slices.MaxFunc(all, func(a, b nodeRelease) int { return compareVersions(a.Version, b.Version) }), nil
}

func compareVersions(a, b string) int {
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(a, b string) int {
		m, _ := strconv.Atoi(a) // 0 if it is not a number, which sorts first
		n, _ := strconv.Atoi(b)
		return cmp.Compare(m, n)
	})
}

// checkIntegrity compares the digest of a file with the registry's.
func checkIntegrity(file, integrity string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	sum := sha512.New()
	if _, err := io.Copy(sum, f); err != nil {
		return err
	}
	if got := "sha512-" + base64.StdEncoding.EncodeToString(sum.Sum(nil)); got != integrity {
		return fmt.Errorf("%s has the digest %s, want %q as in the registry", filepath.Base(file), got, integrity)
	}
	return nil
}

// addNode adds bin/node from an archive to the tree.
func addNode(t *image.Tree, archive string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return err
	}
	for in := tar.NewReader(z); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return errors.New("there is no bin/node in it")
		}
		if err != nil {
			return err
		}
		if _, rest, _ := strings.Cut(strings.TrimPrefix(h.Name, "./"), "/"); rest == "bin/node" && h.Typeflag == tar.TypeReg {
			return t.AddFile("/usr/local/bin/node", in, h.Size, true, h.ModTime)
		}
	}
}
