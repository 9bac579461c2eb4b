package image

import (
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// What an image's environment may take, in bytes.
const (
	maxEnvValue = 4 << 10
	maxEnv      = 8 << 10
)

// Where interpreters are looked for, after the image's own PATH and before virtual environments elsewhere.
var (
	firstDirs = []string{"/opt/venv/bin", "/venv/bin", "/opt/conda/bin"}
	lastDirs  = []string{"/usr/local/bin", "/usr/bin", "/bin"}
)

const condaEnvs = "/opt/conda/envs"

// venvMark is the file that makes a directory a virtual environment of Python.
const venvMark = "pyvenv.cfg"

// versioned matches an interpreter that only goes by its version.
var versioned = regexp.MustCompile(`^python3\.([0-9]{1,4})$`)

// CleanEnv gives what is taken over of an image's environment: the variables of [proto.ImageEnv] with plain values, and of PATH the
// absolute directories.
func CleanEnv(env map[string]string) map[string]string {
	out, size := map[string]string{}, 0
	for _, name := range proto.ImageEnv() {
		value, ok := env[name]
		if !ok || len(value) > maxEnvValue || !utf8.ValidString(value) || strings.ContainsFunc(value, unicode.IsControl) {
			continue
		}
		if name == "PATH" {
			value = strings.Join(absolute(value), ":")
		}
		if value == "" || size+len(name)+len(value) > maxEnv {
			continue
		}
		size += len(name) + len(value)
		out[name] = value
	}
	return out
}

func absolute(list string) (dirs []string) {
	for dir := range strings.SplitSeq(list, ":") {
		if path.IsAbs(dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// discover finds the interpreter of each language, under the name by which it is to be started: a virtual environment's python is a
// link to another one.
func (t *Tree) discover(env map[string]string) map[proto.Language]string {
	dirs := slices.Concat(absolute(env["PATH"]), firstDirs, t.conda(), lastDirs, t.venvs())
	found := map[proto.Language]string{}
	for _, dir := range dirs {
		d, err := t.walk(t.root, dir, true, false)
		if err != nil || d == nil || d.kind != isDir {
			continue
		}
		for _, l := range proto.Languages() {
			if _, ok := found[l]; ok {
				continue
			}
			for _, name := range names(l, d) {
				if t.runs(d, name) {
					found[l] = path.Join(dir, name)
					break
				}
			}
		}
	}
	return found
}

// names are those that a language's interpreter may have in dir, best first.
func names(l proto.Language, dir *node) []string {
	switch l {
	case proto.Python:
		var minor []int
		for name := range dir.children {
			if m := versioned.FindStringSubmatch(name); m != nil {
				n, err := strconv.Atoi(m[1])
				if err == nil && "python3."+strconv.Itoa(n) == name {
					minor = append(minor, n)
				}
			}
		}
		slices.Sort(minor)
		all := []string{"python3", "python"}
		for _, n := range slices.Backward(minor) {
			all = append(all, "python3."+strconv.Itoa(n))
		}
		return all
	case proto.Node:
		return []string{"node", "nodejs"}
	case proto.Bash:
		return []string{"bash"}
	}
	return nil
}

// runs reports whether a name is that of an executable file of the image, links followed.
func (t *Tree) runs(dir *node, name string) bool {
	n, err := t.walk(dir, name, true, false)
	return err == nil && n != nil && n.kind == isFile && n.file.exec && n.file.size > 0
}

// conda gives the programs' directories of the conda environments.
func (t *Tree) conda() (dirs []string) {
	envs, err := t.walk(t.root, condaEnvs, true, false)
	if err != nil || envs == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(envs.children)) {
		dirs = append(dirs, path.Join(condaEnvs, name, "bin"))
	}
	return dirs
}

// venvs gives the programs' directories of all virtual environments, those near to the root first.
func (t *Tree) venvs() (dirs []string) {
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
