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
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/deploy/images"
	"github.com/bullpen-run/bullpen/storage/image"
)

// stopTime is how long an interrupted tool may clean up.
const stopTime = 30 * time.Second

type imageBuildCommand struct {
	remote      `embed:""`
	imageName   `embed:""`
	From        string   `default:"default" placeholder:"RECIPE" help:"Name of a recipe, or a file with one, NAME.yaml."`
	Suite       string   `placeholder:"SUITE" help:"Debian suite, instead of the recipe's."`
	Mirror      []string `placeholder:"SOURCE" help:"A mirror for mmdebstrap, such as a URL, a line of sources.list, or a file. Default: mmdebstrap's own."`
	StaleIndex  bool     `help:"Accept an expired index of a mirror."`
	Python      string   `placeholder:"PACKAGE" help:"Debian's package with Python, instead of the recipe's."`
	Package     []string `placeholder:"PACKAGE" help:"Another Debian package. Repeatable."`
	Pip         []string `type:"existingfile" sep:"none" placeholder:"FILE" help:"Install the wheels of this requirements.txt. Repeatable."`
	Npm         string   `type:"existingfile" placeholder:"FILE" help:"Install the dependencies of this package.json, with the versions of a package-lock.json beside it. Their install scripts are not run."`
	NodeVersion string   `placeholder:"VERSION" help:"Version of Node from npm's registry, whole or in part, instead of the recipe's."`
	NodeTarball string   `type:"existingfile" placeholder:"FILE" help:"Take Node from a .tar.gz as nodejs.org has them."`
}

func (*imageBuildCommand) Help() string {
	var text strings.Builder
	text.WriteString("Recipes:\n\n")
	for _, name := range images.Names() {
		r, err := images.Read(images.Files(), name+".yaml")
		if err != nil {
			panic(err) // the recipes are part of the program
		}
		text.WriteString("  - " + name + ": " + r.Description + "\n")
	}
	return text.String() + `
Every image has Bash, the GNU tools and certificates, without manual pages and translations. --package, --pip and
--npm add to the recipe.

Needs mmdebstrap; npm for Node; and Python 3 with pip for Python packages. Uses the package sources of this machine.
No package's code runs outside of
the new root file system.

TMPDIR must have enough space for the unpacked image.`
}

// basePackages are installed besides the essential ones: Bash, and certificates.
func basePackages() []string {
	return []string{"bash", "ca-certificates", "coreutils", "grep"}
}

// laterTime is the time of files written by the build itself, so that builds of the same packages
// are equal. It is the earliest time in zip archives.
var laterTime = time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC) // read only

// recipe returns the recipe with the flags applied, and its file system.
func (c *imageBuildCommand) recipe() (*images.Recipe, fs.FS, error) {
	from, file := images.Files(), c.From+".yaml"
	switch {
	case strings.HasSuffix(c.From, ".yaml"):
		from, file = os.DirFS(filepath.Dir(c.From)), filepath.Base(c.From)
	case !slices.Contains(images.Names(), c.From):
		return nil, nil, usagef("there is no recipe %q: choose one of %s, or a file NAME.yaml", c.From,
			strings.Join(images.Names(), ", "))
	}
	r, err := images.Read(from, file)
	if err != nil {
		return nil, nil, err
	}
	r.Suite, r.Python, r.Node = cmp.Or(c.Suite, r.Suite), cmp.Or(c.Python, r.Python), cmp.Or(c.NodeVersion, r.Node)
	r.Packages = append(r.Packages, c.Package...)
	if r.Python == "" && (r.Pip != "" || len(c.Pip) > 0) {
		return nil, nil, usagef("the recipe %q has no Python for --pip: choose a package with --python", c.From)
	}
	return r, from, nil
}

func (c *imageBuildCommand) Run(ctx context.Context, io streams) error {
	b, err := c.build(io)
	if err != nil {
		return err
	}
	return c.store(ctx, io, c.Name, func(t *image.Tree) error { return b.run(ctx, t) })
}

// build returns the build of the recipe with the flags.
func (c *imageBuildCommand) build(io streams) (*imageBuild, error) {
	recipe, from, err := c.recipe()
	if err != nil {
		return nil, err
	}
	return &imageBuild{imageBuildCommand: c, recipe: recipe, files: from, steps: newSteps(io)}, nil
}

// imageBuild is a build of an image. Its steps are tools that run one after another.
type imageBuild struct {
	*imageBuildCommand
	recipe *images.Recipe
	files  fs.FS  // of the recipe
	dir    string // temporary
	steps  *steps
	tools  map[string]string // paths by name
}

func (b *imageBuild) run(ctx context.Context, t *image.Tree) (err error) {
	if err := b.findTools(); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp("", "bullpen-build-*"); err != nil {
		return fmt.Errorf("make a directory for the build: %w", err)
	}
	defer func() { _ = os.RemoveAll(b.dir) }() // in the temporary directory
	defer b.steps.end()
	began := time.Now()
	if err := b.checkIndexes(ctx); err != nil {
		return err
	}
	node, err := b.node(ctx)
	if err != nil {
		return err
	}
	if err := b.npm(ctx, t); err != nil {
		return err
	}
	install, err := b.pip(ctx)
	if err != nil {
		return err
	}
	if err := b.debian(ctx, t, install); err != nil {
		return err
	}
	if node != "" {
		if err := addNode(t, node); err != nil {
			return fmt.Errorf("take Node from %s: %w", node, err)
		}
	}
	t.ReplaceTimes(began, laterTime)
	t.Env = map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
	return nil
}

// findTools finds all tools that the build needs, before anything is built.
func (b *imageBuild) findTools() error {
	needed := map[string]string{
		"mmdebstrap": "install the package mmdebstrap (apt-get install mmdebstrap), or make a root file system in " +
			"another way and use `bullpen image import`",
	}
	if b.recipe.Node != "" && b.NodeTarball == "" {
		needed["npm"] = "install it, or give --node-tarball"
	} else if b.Npm != "" || b.recipe.Npm != "" {
		needed["npm"] = "install it for --npm"
	}
	if len(b.Pip) > 0 || b.recipe.Pip != "" {
		needed["python3"] = "install it with pip, which downloads Python packages"
	}
	b.tools = map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(needed)) {
		path, err := tool(name, needed[name])
		if err != nil {
			return err
		}
		b.tools[name] = path
	}
	return nil
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

// tool runs a tool as a part of the current step and returns its output.
func (b *imageBuild) tool(ctx context.Context, name, dir string, args ...string) ([]byte, error) {
	cmd := command(ctx, b.tools[name], args...)
	cmd.Dir, cmd.Stderr = dir, b.steps
	out, err := cmd.Output()
	if err != nil {
		return nil, b.steps.failed(fmt.Errorf("%s: %w", name, err))
	}
	return out, nil
}

// pipDir is the directory for installing Python packages in the new root file system.
const pipDir = "/tmp/bullpen-build"

// installScript installs Python packages inside the new root file system, without a network. Debian
// has pip as a wheel, which can be run. Compiled files do not depend on times, and are never checked,
// since images are read-only.
const installScript = `set -e
cd ` + pipDir + `
pip="$(echo /usr/share/python-wheels/pip-*.whl)/pip"
for requirements in requirements-*.txt; do
	python3 "$pip" install --no-index --find-links wheels --only-binary :all: \
		--no-compile --no-cache-dir --root-user-action ignore \
		--break-system-packages --requirement "$requirements"
done
python3 -m compileall -q --invalidation-mode unchecked-hash /usr/local/lib
cd /
rm -rf ` + pipDir + `
`

// pip downloads Python packages. It returns mmdebstrap's arguments for installing them, none if
// there are no packages.
func (b *imageBuild) pip(ctx context.Context) (args []string, err error) {
	var texts [][]byte
	if b.recipe.Pip != "" {
		text, err := fs.ReadFile(b.files, b.recipe.Pip)
		if err != nil {
			return nil, fmt.Errorf("read the recipe: %w", err)
		}
		texts = append(texts, text)
	}
	for _, file := range b.Pip {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read the requirements: %w", err)
		}
		texts = append(texts, text)
	}
	if len(texts) == 0 {
		return nil, nil
	}
	version, ok := strings.CutPrefix(b.recipe.Python, "python")
	if !ok || version == "" {
		return nil, usagef("Python packages need a package of one version of Python, such as python3.14, not %q",
			b.recipe.Python)
	}
	dir := filepath.Join(b.dir, filepath.Base(pipDir))
	if err := os.MkdirAll(filepath.Join(dir, "wheels"), //nolint:gosec // no secrets; another user may read it
		0o755); err != nil {
		return nil, fmt.Errorf("make a directory for the build: %w", err)
	}
	download := []string{
		"-m", "pip", "download", "--disable-pip-version-check", "--only-binary", ":all:", "--dest",
		"wheels", "--python-version", version, "--implementation", "cp",
	}
	for _, platform := range wheelPlatforms() {
		download = append(download, "--platform", platform)
	}
	for n, text := range texts {
		name := fmt.Sprintf("requirements-%d.txt", n)
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil { //nolint:gosec // as above
			return nil, fmt.Errorf("write the requirements: %w", err)
		}
		b.steps.begin("downloading Python packages")
		if _, err := b.tool(ctx, "python3", dir, append(slices.Clone(download), "--requirement", name)...); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "install.sh"), []byte(installScript), //nolint:gosec // as above
		0o644); err != nil {
		return nil, fmt.Errorf("write the build's script: %w", err)
	}
	return []string{
		"--include=python3-pip-whl,libstdc++6", // manylinux wheels expect the C++ library of the system
		"--customize-hook=copy-in " + dir + " " + filepath.Dir(pipDir),
		`--customize-hook=chroot "$1" sh ` + pipDir + `/install.sh`,
	}, nil
}

// wheelPlatforms returns the platforms of wheels that run on Debian's C library, newest first.
func wheelPlatforms() (all []string) {
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	for minor := newestGlibc; minor >= 5; minor-- {
		all = append(all, fmt.Sprintf("manylinux_2_%d_%s", minor, arch))
	}
	return append(all, "manylinux2014_"+arch, "manylinux2010_"+arch, "manylinux1_"+arch)
}

// newestGlibc is the minor version of the newest C library whose wheels are accepted. Debian's last
// stable release has it.
const newestGlibc = 41

// npm adds the dependencies of package.json to the tree, in /node_modules, where programs in every
// directory find them.
func (b *imageBuild) npm(ctx context.Context, t *image.Tree) error {
	var from fs.FS
	var file string
	switch {
	case b.Npm != "":
		from, file = os.DirFS(filepath.Dir(b.Npm)), filepath.Base(b.Npm)
	case b.recipe.Npm != "":
		from, file = b.files, b.recipe.Npm
	default:
		return nil
	}
	dir := filepath.Join(b.dir, "npm")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("make a directory for the build: %w", err)
	}
	act := "install"
	for to, name := range map[string]string{
		"package.json": file, "package-lock.json": path.Join(path.Dir(file), "package-lock.json"),
	} {
		text, err := fs.ReadFile(from, name)
		if to == "package-lock.json" {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			act = "ci"
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), text, 0o600)
		}
		if err != nil {
			return fmt.Errorf("read the dependencies: %w", err)
		}
	}
	b.steps.begin("installing npm's packages")
	if _, err := b.tool(ctx, "npm", dir, act, "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--os=linux",
		"--cpu="+npmArch(), "--libc=glibc"); err != nil {
		return err
	}
	modules := filepath.Join(dir, "root", "node_modules")
	err := os.Mkdir(filepath.Dir(modules), 0o700)
	if err == nil {
		err = os.Rename(filepath.Join(dir, "node_modules"), modules)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no dependencies
	}
	if err != nil {
		return fmt.Errorf("move npm's packages: %w", err)
	}
	return t.AddDir(filepath.Dir(modules))
}

// checkIndexes makes mmdebstrap read the indexes and resolve the packages without installing. It
// finds a stale index or a missing package before the rest is downloaded, which takes minutes.
func (b *imageBuild) checkIndexes(ctx context.Context) error {
	if len(b.tools) == 1 {
		return nil // mmdebstrap is the only one that downloads
	}
	b.steps.begin("checking the package indexes of Debian " + b.recipe.Suite)
	_, err := b.tool(ctx, "mmdebstrap", b.dir, b.mmdebstrap("--simulate", "--format=null")...)
	return err
}

// mmdebstrap returns arguments for mmdebstrap: flags, and then the image's Debian packages.
func (b *imageBuild) mmdebstrap(flags ...string) []string {
	packages := basePackages()
	if b.recipe.Node != "" || b.NodeTarball != "" {
		packages = append(packages, "libatomic1", "libstdc++6")
	}
	if b.recipe.Python != "" {
		packages = append(packages, b.recipe.Python)
	}
	packages = append(packages, b.recipe.Packages...)
	args := append(flags, "--variant=essential", "--include="+strings.Join(packages, ","))
	if b.StaleIndex {
		args = append(args, `--aptopt=Acquire::Check-Valid-Until "false"`)
	}
	return append(append(args, "--", b.recipe.Suite, "-"), b.Mirror...)
}

// debian adds Debian's packages to the tree, and those installed by mmdebstrap's arguments.
func (b *imageBuild) debian(ctx context.Context, t *image.Tree, install []string) error {
	flags := []string{
		"--format=tar",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright",
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
	}
	if python := b.recipe.Python; python != "" {
		// Programs are run with python3, which the package of a version does not install.
		flags = append(flags, `--customize-hook=test -e "$1/usr/bin/python3" || ! test -e "$1/usr/bin/`+python+
			`" || ln -s `+python+` "$1/usr/bin/python3"`)
	}
	args := b.mmdebstrap(append(flags, install...)...)
	b.steps.begin("installing packages of Debian " + b.recipe.Suite)
	cmd := command(ctx, b.tools["mmdebstrap"], args...)
	cmd.Stderr = b.steps
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
		return b.steps.failed(fmt.Errorf("mmdebstrap: %w", err))
	}
	return added
}

// node returns the path of an archive with Node, or "" for an image without it.
func (b *imageBuild) node(ctx context.Context) (file string, err error) {
	if b.NodeTarball != "" || b.recipe.Node == "" {
		return b.NodeTarball, nil
	}
	b.steps.begin("downloading Node " + b.recipe.Node)
	if file, err = b.fetchNode(ctx); err != nil {
		return "", fmt.Errorf("get Node: %w", err)
	}
	return file, nil
}

// npmArch returns npm's name of this machine's architecture.
func npmArch() string {
	if runtime.GOARCH == "amd64" {
		return "x64"
	}
	return runtime.GOARCH
}

// nodeRelease is a version of Node in npm's registry.
type nodeRelease struct {
	Version   string `json:"version"`
	Integrity string `json:"dist.integrity"`
}

func (b *imageBuild) fetchNode(ctx context.Context) (string, error) {
	name := "node-linux-" + npmArch()
	out, err := b.tool(ctx, "npm", b.dir, "view", "--json", name+"@"+b.recipe.Node, "version", "dist.integrity")
	if err != nil {
		return "", err
	}
	release, err := newest(out)
	if err != nil {
		return "", fmt.Errorf("%s@%s: %w", name, b.recipe.Node, err)
	}
	b.steps.begin("downloading Node " + release.Version)
	if _, err := b.tool(ctx, "npm", b.dir, "pack", "--silent", "--pack-destination", b.dir,
		name+"@"+release.Version); err != nil {
		return "", err
	}
	file := filepath.Join(b.dir, name+"-"+release.Version+".tgz")
	return file, checkIntegrity(file, release.Integrity)
}

// newest returns the highest version in npm's output.
func newest(list []byte) (nodeRelease, error) {
	var all []nodeRelease
	list = bytes.TrimSpace(list)
	if !bytes.HasPrefix(list, []byte("[")) { // npm prints a single version without brackets, and nothing for none
		list = slices.Concat([]byte("["), list, []byte("]"))
	}
	if err := json.Unmarshal(list, &all); err != nil {
		return nodeRelease{}, fmt.Errorf("npm's answer is not understood: %w", err)
	}
	if len(all) == 0 {
		return nodeRelease{}, errors.New(
			"the registry has no such version: choose another with --node-version, or take one from a file with --node-tarball")
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
