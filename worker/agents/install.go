package agents

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/npm"
)

// limits bound an agent's package.
var limits = npm.Limits{Tarball: 1 << 30, Content: 4 << 30, Files: 50_000} // read only

// release is the version of an agent that is installed by default: the one with which its adapter was
// tested.
type release struct {
	version string
	name    string // of the package; %s is the architecture in npm's naming
	suffix  string // of the package's version, likewise
	// integrity is by the architecture in Go's naming, or by "" for all. The registry's is used for
	// others.
	integrity map[string]string
	license   string // a note about it, empty for free software
}

var releases = map[string]release{ // read only
	"claude": {
		version: "2.1.112", name: "@anthropic-ai/claude-code",
		integrity: map[string]string{
			"": "sha512-9FUgJ0EOvILyhIqxFKNVliebiUjL68dwpEW3eGSSe0vkVDJ1c5qMDNWc22gW3zkD7zRAqtfQPSGv0t4vMM2DPA==",
		},
		license: "Claude Code is not free software: Anthropic reserves all rights, and its use is subject to " +
			"https://code.claude.com/docs/en/legal-and-compliance. Do not pass it on, for example in a public image.",
	},
	"codex": {
		version: "0.116.0", name: "@openai/codex", suffix: "-linux-%s",
		integrity: map[string]string{
			"amd64": "sha512-S9InOgJT3tj6uQp55NqrCA1k5tklwFaH00JdC2ElbRmxchm7ard4WxHSJZX9TiY8enj4cQoLIC04NFTUCO+/PQ==",
			"arm64": "sha512-X7cL8rBSGDB+RSZc2FoKiqcMVeLPMmo06bkss/en4lLQsV1XG2DZI56WuXg92IOX3SjYl6Av/eOWgsb1t3UeLQ==",
		},
	},
	"opencode": {
		version: "1.18.33", name: "opencode-linux-%s",
		integrity: map[string]string{
			"amd64": "sha512-q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
		},
	},
	"amp": {
		version: "0.0.1771243550-geaf318", name: "@sourcegraph/amp",
		integrity: map[string]string{
			"": "sha512-ZrxW54tyNNtJFNpCjsPVozZxkD/sbi9BHFKRylZkHrCOCT17oCokmtrg36QpErULrVHhrQwlPYmzL/gvI3sv3w==",
		},
		license: "Amp is not free software: Sourcegraph reserves all rights, and its use is subject to " +
			"https://ampcode.com/terms. Do not pass it on, for example in a public image.",
	},
}

// DefaultVersion returns the version of an agent that is installed if none is named.
func DefaultVersion(agent string) string { return releases[agent].version }

// License returns a note about the license of an agent's program, empty for free software.
func License(agent string) string { return releases[agent].license }

// Request says what to install.
type Request struct {
	Agent     string
	Version   string // empty for the default
	Integrity string // sha512-BASE64; empty for the built-in one or, without one, the registry's
	Registry  string // URL; empty for npm's default
}

// Installed is the result of an installation.
type Installed struct {
	Manifest
	Dir string
	// Existed means that it was there already, so that nothing was fetched.
	Existed bool
	// Unpinned means that the integrity is the registry's.
	Unpinned bool
}

// architectures maps Go's names of architectures to npm's.
var architectures = map[string]string{"amd64": "x64", "arm64": "arm64"} // read only

// Install fetches the program of an agent for this machine's architecture into a directory of the operator.
// It runs nothing of the package.
func Install(ctx context.Context, dir string, r Request) (*Installed, error) {
	program, ok := proto.FindAgentProgram(r.Agent)
	if !ok {
		return nil, fmt.Errorf("there is no agent %q: choose one of %s", proto.Shorten(r.Agent), strings.Join(Names(), ", "))
	}
	release := releases[r.Agent]
	version := cmp.Or(r.Version, release.version)
	if !proto.ValidAgentVersion(version) {
		return nil, fmt.Errorf("%q is not a version: write one such as %s", proto.Shorten(version), release.version)
	}
	if program.File(runtime.GOARCH) == "" {
		return nil, fmt.Errorf("%s has no program for %s", r.Agent, runtime.GOARCH)
	}
	p := npm.Package{
		Name: forArchitecture(release.name), Version: version + forArchitecture(release.suffix), Integrity: r.Integrity,
	}
	if p.Integrity == "" && version == release.version {
		p.Integrity = cmp.Or(release.integrity[runtime.GOARCH], release.integrity[""])
	}
	x := &Installed{
		Manifest: Manifest{Agent: r.Agent, Version: version, Integrity: p.Integrity},
		Dir:      filepath.Join(dir, r.Agent, version), Unpinned: p.Integrity == "",
	}
	if program.Files[runtime.GOARCH] != "" {
		x.Architecture = runtime.GOARCH
	}
	if x.exists(&program) {
		x.Existed = true
		return x, nil
	}
	if _, err := os.Lstat(x.Dir); !errors.Is(err, fs.ErrNotExist) {
		return nil, errors.Join(err, fmt.Errorf("%s exists, and is not what was asked for: remove it first", x.Dir))
	}
	registry := &npm.Registry{URL: r.Registry, Limits: limits}
	if x.Unpinned {
		var err error
		if p.Integrity, err = registry.Integrity(ctx, p.Name, p.Version); err != nil {
			return nil, fmt.Errorf("read the integrity of %s %s: %w", r.Agent, version, err)
		}
		x.Integrity = p.Integrity
	}
	return x, x.fetch(ctx, registry, p, &program)
}

// exists reports whether the installation is there and usable. Its integrity is compared if it is
// known, and otherwise set.
func (x *Installed) exists(program *proto.AgentProgram) bool {
	m, err := readManifest(x.Dir)
	if err != nil || check(program, x.Version, x.Dir) != nil {
		return false
	}
	if x.Integrity == "" {
		x.Integrity = m.Integrity
	}
	return m == x.Manifest
}

// forArchitecture replaces %s by this machine's architecture in npm's naming.
func forArchitecture(text string) string {
	return strings.ReplaceAll(text, "%s", architectures[runtime.GOARCH])
}

// fetch creates the directory of the installation with everything in it.
func (x *Installed) fetch(ctx context.Context, from *npm.Registry, p npm.Package, program *proto.AgentProgram) error {
	parent := filepath.Dir(x.Dir)
	if err := os.MkdirAll(parent, 0o755); err != nil { //nolint:gosec // public
		return fmt.Errorf("create the directory of agents: %w", err)
	}
	unfinished, err := os.MkdirTemp(parent, ".unfinished-")
	if err != nil {
		return fmt.Errorf("create a directory for %s: %w", x.Agent, err)
	}
	defer func() { _ = os.RemoveAll(unfinished) }() // gone after a success
	if err := from.Fetch(ctx, p, unfinished); err != nil {
		return fmt.Errorf("fetch %s %s: %w", x.Agent, x.Version, err)
	}
	text, err := json.Marshal(x.Manifest)
	if err == nil {
		err = os.WriteFile(filepath.Join(unfinished, ManifestFile), append(text, '\n'), 0o644) //nolint:gosec // public
	}
	if err == nil {
		err = os.Chmod(unfinished, 0o755) //nolint:gosec // jails read it
	}
	if err != nil {
		return fmt.Errorf("write the manifest of %s: %w", x.Agent, err)
	}
	if err := check(program, x.Version, unfinished); err != nil {
		return fmt.Errorf("%s %s of the registry cannot be used: %w", x.Agent, x.Version, err)
	}
	if err := syncFiles(unfinished); err != nil {
		return fmt.Errorf("write %s to the disk: %w", x.Agent, err)
	}
	// Another process may have installed the same meanwhile.
	if err := os.Rename(unfinished, x.Dir); err != nil && !x.exists(program) {
		return fmt.Errorf("install %s: %w", x.Agent, err)
	}
	return nil
}

// syncFiles makes the files on the file system of dir survive a power failure.
func syncFiles(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}
