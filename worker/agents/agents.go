// Package agents reads and fills the operator's directory with the programs of coding agents. Each
// version lies in a directory of its own:
//
//	claude/2.1.112/cli.js
//	claude/2.1.112/.bullpen.json
//
// It has the files of an npm package, and a manifest. A directory appears with all its files at once,
// and nothing in it changes afterwards: workers mount it into sandboxes.
package agents

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// ManifestFile is the name of an installation's manifest in its directory.
const ManifestFile = ".bullpen.json"

// Manifest describes an installation.
type Manifest struct {
	Agent   string `json:"agent"`
	Version string `json:"version"`
	// Architecture is that of the program, in Go's naming, empty for all.
	Architecture string `json:"architecture,omitempty"`
	// Integrity is that of the package from which the files are: sha512-BASE64.
	Integrity string `json:"integrity"`
}

// Installation is an entry of the operator's directory.
type Installation struct {
	Agent   string
	Version string // empty for an entry that is not an agent
	Dir     string
	Err     error // why workers cannot use it; nil if they can
}

// List returns the installations in a directory, by their agents and with the newest version first. Other
// entries have an error, except hidden ones.
func List(dir string) (all []Installation, err error) {
	agents, err := entries(dir)
	if err != nil {
		return nil, fmt.Errorf("read the directory of agents: %w", err)
	}
	for _, agent := range agents {
		path := filepath.Join(dir, agent)
		program, ok := proto.FindAgentProgram(agent)
		if !ok {
			all = append(all, Installation{Agent: agent, Dir: path, Err: fmt.Errorf("%s is not an agent: this version knows %s",
				path, strings.Join(Names(), ", "))})
			continue
		}
		versions, err := entries(path)
		if err != nil {
			all = append(all, Installation{Agent: agent, Dir: path, Err: err})
			continue
		}
		slices.SortFunc(versions, func(a, b string) int { return proto.CompareAgentVersions(b, a) })
		for _, version := range versions {
			path := filepath.Join(path, version)
			err := check(&program, version, path)
			if err != nil {
				err = fmt.Errorf("%w: remove %s and install it again (bullpen agent install %s)", err, path, agent)
			}
			all = append(all, Installation{agent, version, path, err})
		}
	}
	return all, nil
}

// entries returns the names in a directory except hidden ones and the one that file systems have.
func entries(dir string) (names []string, err error) {
	list, err := os.ReadDir(dir)
	for _, e := range list {
		if name := e.Name(); !strings.HasPrefix(name, ".") && name != "lost+found" {
			names = append(names, name)
		}
	}
	return names, err
}

// Names returns the names of the agents with a program.
func Names() (names []string) {
	for _, p := range proto.AgentPrograms() {
		names = append(names, p.Agent)
	}
	return names
}

// check returns an error if the installation of a program in dir cannot be used on this machine.
func check(p *proto.AgentProgram, version, dir string) error {
	if !proto.ValidAgentVersion(version) {
		return fmt.Errorf("%.100q is not a version", version)
	}
	m, err := readManifest(dir)
	switch {
	case err != nil:
		return err
	case m.Agent != p.Agent || m.Version != version:
		return fmt.Errorf("its manifest is of %.100q %.100q", m.Agent, m.Version)
	case m.Architecture != "" && m.Architecture != runtime.GOARCH:
		return fmt.Errorf("it is for %.100q, and this machine is %s", m.Architecture, runtime.GOARCH)
	}
	file := p.File(runtime.GOARCH)
	if file == "" {
		return fmt.Errorf("there is no program for %s", runtime.GOARCH)
	}
	return checkProgram(dir, file, !p.Node)
}

func readManifest(dir string) (m Manifest, err error) {
	text, err := os.ReadFile(filepath.Join(dir, ManifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return m, errors.New("it has no manifest")
	}
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("decode its manifest: %w", err)
	}
	return m, nil
}

// checkProgram returns an error unless every user can reach a file in dir and read it, or if execute is
// set execute it.
func checkProgram(dir, file string, execute bool) error {
	need, what := fs.FileMode(0o004), "read"
	if execute {
		need, what = 0o005, "execute"
	}
	for path := file; ; path = filepath.Dir(path) {
		info, err := os.Lstat(filepath.Join(dir, path))
		if err != nil {
			return err
		}
		switch {
		case path == file && !info.Mode().IsRegular():
			return fmt.Errorf("%s is not a file", file)
		case path == file && info.Mode()&need != need:
			return fmt.Errorf("not every user can %s %s", what, file)
		case path != file && !info.IsDir():
			return fmt.Errorf("%s is not a directory", path)
		case path != file && info.Mode()&0o005 != 0o005:
			return fmt.Errorf("not every user can enter %s", path)
		}
		if path == "." {
			break
		}
	}
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return fmt.Errorf("read the flags of the file system of %s: %w", dir, err)
	}
	if s.Flags&unix.ST_NOEXEC != 0 {
		return errors.New("its file system is mounted noexec: use a directory on another one")
	}
	return nil
}

// Directory has the usable installations of a directory, as they were when it was read.
type Directory struct{ installed []Installation }

// Open reads a directory. The problems are those of unusable entries.
func Open(dir string) (d *Directory, problems []Installation, err error) {
	all, err := List(dir)
	if err != nil {
		return nil, nil, err
	}
	d = &Directory{}
	for _, i := range all {
		if i.Err == nil {
			d.installed = append(d.installed, i)
		} else {
			problems = append(problems, i)
		}
	}
	return d, problems, nil
}

// Versions returns the versions of the agents, the newest first.
func (d *Directory) Versions() map[string][]string {
	versions := map[string][]string{}
	for _, i := range d.installed {
		versions[i.Agent] = append(versions[i.Agent], i.Version)
	}
	return versions
}

// Find returns the directory of an agent's version, the newest if version is empty.
func (d *Directory) Find(agent, version string) (dir string, err error) {
	for _, i := range d.installed {
		if i.Agent == agent && (version == "" || i.Version == version) {
			return i.Dir, nil
		}
	}
	return "", fmt.Errorf("this worker does not have the agent %s %s", proto.Shorten(agent), proto.Shorten(version))
}
