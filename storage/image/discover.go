package image

import (
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// Limits of an image's environment, in bytes.
const (
	maxEnvValue = 4 << 10
	maxEnv      = 8 << 10
)

// Directories that are searched for interpreters, after the image's own PATH and before other
// virtual environments.
var (
	firstDirs = []string{"/opt/venv/bin", "/venv/bin", "/opt/conda/bin"}
	lastDirs  = []string{"/usr/local/bin", "/usr/bin", "/bin"}
)

const condaEnvs = "/opt/conda/envs"

// venvMark is the file that marks a virtual environment of Python.
const venvMark = "pyvenv.cfg"

// CleanEnv returns the part of an image's environment that programs get: the variables of
// [proto.ImageEnv] with printable values, and the absolute directories of PATH.
func CleanEnv(env map[string]string) map[string]string {
	out, size := map[string]string{}, 0
	for _, name := range proto.ImageEnv() {
		value, ok := env[name]
		if !ok || len(value) > maxEnvValue || !utf8.ValidString(value) || strings.ContainsFunc(value, unicode.IsControl) {
			continue
		}
		if name == "PATH" {
			value = strings.Join(absoluteDirs(value), ":")
		}
		if value == "" || size+len(name)+len(value) > maxEnv {
			continue
		}
		size += len(name) + len(value)
		out[name] = value
	}
	return out
}

func absoluteDirs(list string) (dirs []string) {
	for dir := range strings.SplitSeq(list, ":") {
		if path.IsAbs(dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// discover returns the path of each language's interpreter. The path is not resolved, since the
// python of a virtual environment is a link to another one and must be started under its own name.
func (t *Tree) discover(env map[string]string) map[proto.Language]string {
	dirs := slices.Concat(absoluteDirs(env["PATH"]), firstDirs, t.condaDirs(), lastDirs, t.venvDirs())
	found := map[proto.Language]string{}
	for _, dir := range dirs {
		d, err := t.walk(t.root, dir, true, false)
		if err != nil || d == nil || d.kind != isDir {
			continue
		}
		for _, r := range proto.Runtimes() {
			if _, ok := found[r.Language]; ok {
				continue
			}
			for _, name := range interpreterNames(r, d) {
				if t.isExecutable(d, name) {
					found[r.Language] = path.Join(dir, name)
					break
				}
			}
		}
	}
	return found
}

// describe returns the description of an image without name, time, digest and sizes. The errors are
// [ErrNoLanguage] and [ErrArchitecture].
func (t *Tree) describe(env map[string]string) (*proto.Image, error) {
	languages := t.discover(env)
	if len(languages) == 0 {
		return nil, ErrNoLanguage
	}
	architecture, err := t.architecture(languages)
	if err != nil {
		return nil, err
	}
	return &proto.Image{Architecture: architecture, Languages: languages, Env: env}, nil
}

// interpreterNames returns the names that the interpreter of r may have in dir, best first.
func interpreterNames(r proto.Runtime, dir *node) (all []string) {
	for _, name := range r.Interpreters {
		prefix, isPattern := strings.CutSuffix(name, "*")
		if !isPattern {
			all = append(all, name)
			continue
		}
		var numbers []int
		for child := range dir.children {
			digits, ok := strings.CutPrefix(child, prefix)
			if n, err := strconv.ParseUint(digits, 10, 16); ok && err == nil && strconv.FormatUint(n, 10) == digits {
				numbers = append(numbers, int(n))
			}
		}
		slices.Sort(numbers)
		for _, n := range slices.Backward(numbers) {
			all = append(all, prefix+strconv.Itoa(n))
		}
	}
	return all
}

// isExecutable reports whether a name leads to an executable file of the image.
func (t *Tree) isExecutable(dir *node, name string) bool {
	n, err := t.walk(dir, name, true, false)
	return err == nil && n != nil && n.kind == isFile && n.file.exec && n.file.size > 0
}

// condaDirs returns the bin directories of all conda environments.
func (t *Tree) condaDirs() (dirs []string) {
	envs, err := t.walk(t.root, condaEnvs, true, false)
	if err != nil || envs == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(envs.children)) {
		dirs = append(dirs, path.Join(condaEnvs, name, "bin"))
	}
	return dirs
}

// venvDirs returns the bin directories of all virtual environments, those closest to the root
// first.
func (t *Tree) venvDirs() (dirs []string) {
	var find func(d *node, at string)
	find = func(d *node, at string) {
		if mark := d.children[venvMark]; mark != nil && mark.kind == isFile {
			dirs = append(dirs, path.Join(at, "bin"))
		}
		for name, n := range d.children {
			if n.kind == isDir {
				find(n, path.Join(at, name))
			}
		}
	}
	find(t.root, "/")
	slices.SortFunc(dirs, func(a, b string) int {
		if d := strings.Count(a, "/") - strings.Count(b, "/"); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	return dirs
}
