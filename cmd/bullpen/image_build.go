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

	"golang.org/x/sync/errgroup"

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
No package's code runs outside of the new root file system.

TMPDIR must have enough space for the unpacked image.

Examples:

  bullpen image build default
  bullpen image build geo --from python-data --pip shapely`
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
	return &imageBuild{imageBuildCommand: c, streams: io, recipe: recipe, files: from}, nil
}

// imageBuild is a build of an image. Its steps are tools that run one after another.
type imageBuild struct {
	*imageBuildCommand
	streams streams
	recipe  *images.Recipe
	files   fs.FS // of the recipe
	parts   *partCache
	dir     string // temporary, in the cache
	steps   *steps
	tools   map[string]string // paths by name

	debs, wheels string // directories of downloads from the build's mirrors and index
	pipConfig    string // where pip downloads from
}

func (b *imageBuild) run(ctx context.Context, t *image.Tree) (err error) {
	if err := b.findTools(); err != nil {
		return err
	}
	if b.parts, err = openPartCache(); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp(b.parts.dir, "build-"); err != nil {
		return fmt.Errorf("make a directory for the build: %w", err)
	}
	defer func() { _ = os.RemoveAll(b.dir) }() // of the build alone
	b.steps = newSteps(b.streams)
	defer b.steps.close()
	requirements, err := b.requirements()
	if err != nil {
		return err
	}
	if err := b.checkIndexes(ctx, len(requirements) > 0); err != nil {
		return err
	}
	began, err := b.packages(ctx, t, requirements)
	if err != nil {
		return err
	}
	node, err := b.node(ctx)
	if err != nil {
		return err
	}
	if err := b.npm(ctx, t); err != nil {
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
	shown := b.steps.output()
	cmd.Dir, cmd.Stderr = dir, shown
	out, err := cmd.Output()
	if err != nil {
		return nil, shown.failed(fmt.Errorf("%s: %w", name, err))
	}
	return out, nil
}

// pipDir is the directory for installing Python packages in the new root file system.
const pipDir = "/tmp/bullpen-build"

// installScript installs Python packages inside the new root file system, without a network. Debian
// has pip as a wheel, which can be run. Compiled files do not depend on times, and are never checked,
// since images are read-only. The packages' own tests, two fifths of the files of python-data, are not
// compiled: programs do not import them. At the end, what was installed is below /tmp/part.
const installScript = `set -e
cd ` + pipDir + `
touch installing
pip="$(echo /usr/share/python-wheels/pip-*.whl)/pip"
python3 "$pip" install --no-index --find-links wheels --only-binary :all: \
	--no-compile --no-cache-dir --root-user-action ignore --no-warn-script-location --progress-bar off \
	--break-system-packages --requirement requirements.txt
echo compiling >&2
find /usr/local/lib -name tests -prune -o -name '*.py' -cnewer installing -print >compile
python3 -W ignore -m compileall -q -j 0 --invalidation-mode unchecked-hash -i compile
mkdir -p /tmp/part/usr
mv /usr/local /tmp/part/usr/
`

// requirements returns the texts of the requirements for pip: the recipe's and those of the flags.
func (b *imageBuild) requirements() (texts [][]byte, err error) {
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
	if version, ok := strings.CutPrefix(b.recipe.Python, "python"); len(texts) > 0 && (!ok || version == "") {
		return nil, usagef("Python packages need a package of one version of Python, such as python3.14, not %q",
			b.recipe.Python)
	}
	return texts, nil
}

// packages adds Debian's packages to the tree, and those that each text of requirements installs on top of
// the previous ones. Each is a part, and only missing parts are built. Wheels are downloaded while Debian's
// packages are installed. It returns when the build of the parts began.
func (b *imageBuild) packages(ctx context.Context, t *image.Tree, requirements [][]byte) (began time.Time, err error) {
	mirrors := mirrorTexts(b.Mirror)
	if b.debs, err = b.parts.downloads(b.parts.debs(), b.recipe.Suite, mirrors); err != nil {
		return began, err
	}
	if b.wheels, err = b.parts.downloads(b.parts.wheels(), b.pipConfig); err != nil {
		return began, err
	}
	content := []any{runtime.GOARCH, b.mmdebstrap(len(requirements) > 0), mirrors}
	base, err := b.parts.part("debian", time.Now(), content...)
	if err != nil {
		return began, err
	}
	parts, step := []part{base}, "installing packages of Debian "+b.recipe.Suite
	group, groupCtx := errgroup.WithContext(ctx)
	for i, text := range requirements {
		content = append(content, installScript, b.pipConfig, string(text))
		p, err := b.parts.part("python", base.made, content...)
		if err != nil {
			return began, err
		}
		p.exists = p.exists && parts[i].exists // it was built on top of another one
		parts = append(parts, p)
	}
	missing := slices.IndexFunc(parts, func(p part) bool { return !p.exists })
	switch {
	case missing < 0:
		b.steps.begin("taking all packages from the cache")
	case missing == 0 && len(requirements) > 0:
		step += " and downloading Python packages"
	case missing > 0:
		step = "downloading Python packages"
	}
	if missing >= 0 {
		b.steps.begin(step)
		group.Go(func() error { return b.debian(groupCtx, base, len(requirements) > 0) })
		group.Go(func() error {
			for i := max(missing, 1); i < len(parts); i++ {
				if err := b.download(groupCtx, i, requirements[i-1]); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return began, err
	}
	for i := 1; i < len(parts); i++ {
		if err := b.install(ctx, i, parts); err != nil {
			return began, err
		}
	}
	b.steps.begin("reading the files")
	for _, p := range parts {
		if err := p.addTo(t); err != nil {
			return began, err
		}
	}
	return base.made, nil
}

// mirrorTexts returns mirrors, and the contents of those that are files.
func mirrorTexts(mirrors []string) []string {
	texts := slices.Clone(mirrors)
	for _, mirror := range mirrors {
		if text, err := os.ReadFile(mirror); err == nil { // others are URLs or lines of sources.list
			texts = append(texts, string(text))
		}
	}
	return texts
}

// pipDirOf returns the directory with the files of part i for pip. It becomes pipDir.
func (b *imageBuild) pipDirOf(i int) string {
	return filepath.Join(b.dir, fmt.Sprint(i), filepath.Base(pipDir))
}

// download downloads the wheels of requirements for part i, unless they are in the cache.
func (b *imageBuild) download(ctx context.Context, i int, requirements []byte) error {
	dir := b.pipDirOf(i)
	wheels := filepath.Join(dir, "wheels")
	err := os.MkdirAll(wheels, 0o755) //nolint:gosec // no secrets; another user may read it
	for name, text := range map[string][]byte{"requirements.txt": requirements, "install.sh": []byte(installScript)} {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644) //nolint:gosec // as above
		}
	}
	if err != nil {
		return fmt.Errorf("prepare the download of Python packages: %w", err)
	}
	args := []string{
		"-m", "pip", "download", "--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:",
		"--dest", wheels, "--find-links", b.wheels, "--requirement", "requirements.txt",
		"--python-version", strings.TrimPrefix(b.recipe.Python, "python"), "--implementation", "cp",
	}
	for _, platform := range wheelPlatforms() {
		args = append(args, "--platform", platform)
	}
	if _, err := b.tool(ctx, "python3", dir, args...); err != nil {
		return err
	}
	downloaded, err := os.ReadDir(wheels)
	for _, wheel := range downloaded {
		err = errors.Join(err, os.Link(filepath.Join(wheels, wheel.Name()), filepath.Join(b.wheels, wheel.Name())))
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("keep Python packages: %w", err)
	}
	return nil
}

// install builds part i of parts, whose packages are downloaded, unless it exists.
func (b *imageBuild) install(ctx context.Context, i int, parts []part) error {
	if parts[i].exists {
		return nil
	}
	b.steps.begin("installing Python packages")
	file := filepath.Join(b.dir, "python.tar")
	args := []string{"--format=null", "--variant=custom", "--skip=update"}
	for _, p := range parts[:i] {
		args = append(args, "--setup-hook=tar-in "+hookArg(p.file)+" /")
	}
	args = append(args,
		"--customize-hook=copy-in "+hookArg(b.pipDirOf(i))+" "+filepath.Dir(pipDir),
		`--customize-hook=chroot "$1" sh `+pipDir+`/install.sh`,
		"--customize-hook=tar-out /tmp/part/usr "+hookArg(file),
		"--", b.recipe.Suite, "-")
	if _, err := b.tool(ctx, "mmdebstrap", b.dir, append(args, b.Mirror...)...); err != nil {
		return err
	}
	return parts[i].store(file)
}

// hookArg quotes a path for a hook of mmdebstrap.
func hookArg(path string) string { return "'" + strings.ReplaceAll(path, "'", `'"'"'`) + "'" }

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

// mmdebstrap returns the arguments of mmdebstrap that decide what Debian's part of the image contains. python
// adds what Python packages need.
func (b *imageBuild) mmdebstrap(python bool) []string {
	packages := basePackages()
	if b.recipe.Node != "" || b.NodeTarball != "" {
		packages = append(packages, "libatomic1", "libstdc++6")
	}
	if b.recipe.Python != "" {
		packages = append(packages, b.recipe.Python)
	}
	if python {
		packages = append(packages, "python3-pip-whl", "libstdc++6") // manylinux wheels expect the C++ library
	}
	args := []string{
		"--format=tar", "--variant=essential", "--include=" + strings.Join(append(packages, b.recipe.Packages...), ","),
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright",
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
	}
	if b.StaleIndex {
		args = append(args, `--aptopt=Acquire::Check-Valid-Until "false"`)
	}
	if python := b.recipe.Python; python != "" {
		// Programs are run with python3, which the package of a version does not install.
		args = append(args, `--customize-hook=test -e "$1/usr/bin/python3" || ! test -e "$1/usr/bin/`+python+
			`" || ln -s `+python+` "$1/usr/bin/python3"`)
	}
	return append(append(args, "--", b.recipe.Suite, "-"), b.Mirror...)
}

// debian builds the part with Debian's packages, unless it exists. Packages that it has downloaded when it
// fails stay in the cache.
func (b *imageBuild) debian(ctx context.Context, p part, python bool) error {
	if p.exists {
		return nil
	}
	const archives = "/var/cache/apt/archives"
	keep := "sync-out " + archives + " " + hookArg(b.debs)
	file := filepath.Join(b.dir, "debian.tar")
	args := append([]string{
		"--skip=essential/unlink", `--setup-hook=mkdir -p "$1` + archives + `"`,
		"--setup-hook=sync-in " + hookArg(b.debs) + " " + archives,
		"--essential-hook=" + keep, "--customize-hook=" + keep,
	}, b.mmdebstrap(python)...)
	args[slices.Index(args, "-")] = file
	if _, err := b.tool(ctx, "mmdebstrap", b.dir, args...); err != nil {
		return err
	}
	return p.store(file)
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
