package jail

import (
	"cmp"
	_ "embed"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// Places inside a jail.
const (
	// HarnessDir holds what is ours; the program can read it.
	HarnessDir = "/run/bullpen"
	// JobDir is where files of OwnerInit go.
	JobDir = HarnessDir + "/job"
	// PythonDir holds sitecustomize.py.
	PythonDir = HarnessDir + "/python"
	// StdinFile is the program's standard input, if it has one.
	StdinFile = JobDir + "/stdin"
	// AheadDir holds what makes bash and node wait.
	AheadDir = HarnessDir + "/ahead"
)

// ProgramID is the program's uid and gid inside a jail.
const ProgramID = 1000

// PythonSite is the sitecustomize.py that every python3 of ours starts with: it
// waits for the program if it was started ahead, makes stdout line-buffered, puts
// the user's site on the path even if it is not there yet, and removes every other
// trace of itself.
//
//go:embed sitecustomize.py
var PythonSite []byte

// Source is a piece of code to run.
type Source struct {
	Language string   // python, node or bash
	Code     string   // UTF-8
	Args     []string // of the program, after its file name
	Stdin    string
	Env      map[string]string // the caller's, already validated
	TraceID  string
	Home     string // such as /home/baponi, no trailing slash
	// File is the name in Home of the file that python and node run; default main.py
	// and main.js. It must not be there yet.
	File string
	// Interpreter is the file that runs the code, absolute inside the jail; when
	// empty it is looked up by its usual name in the system's directories.
	Interpreter string
	// ImageEnv is the environment that the sandbox's image sets. PATH is put after
	// the home's own directories, the rest gives way to ours.
	ImageEnv map[string]string
}

// traceEnv names the execution to its program.
const traceEnv = "BULLPEN_TRACE_ID"

// systemPath is where commands are found when the image does not say.
const systemPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// FileInHome is the usual name of the file in the home that runs a language's
// programs; empty where they lie elsewhere.
func FileInHome(language string) string {
	switch language {
	case "python":
		return "main.py"
	case "node":
		return "main.js"
	default:
		return ""
	}
}

// Program returns what runs s as `python3 <home>/main.py` (and so on) would run
// in home: same argv, same environment, stdin at its end unless s has one. The error is only for
// an unknown language.
func (s Source) Program() (Program, error) {
	p := Program{Dir: s.Home}
	var file File
	env := s.env()
	switch s.Language {
	case "python":
		file = File{Path: s.Home + "/" + cmp.Or(s.File, FileInHome(s.Language)), Mode: 0o644}
		p.Argv = []string{"python3", file.Path}
		env["PYTHONPATH"] = PythonDir
	case "node":
		file = File{Path: s.Home + "/" + cmp.Or(s.File, FileInHome(s.Language)), Mode: 0o644}
		p.Argv = []string{"node", file.Path}
	case "bash":
		// Outside home, so that ls and grep -r see only the user's files; and a
		// file rather than stdin, so that a command that reads stdin does not
		// eat the program.
		file = File{Path: JobDir + "/main.sh", Mode: 0o644, Owner: OwnerInit}
		p.Argv = []string{"bash", file.Path}
	default:
		return Program{}, fmt.Errorf("program: unknown language %q: use python, node or bash", s.Language)
	}
	if s.Interpreter != "" {
		p.Argv[0] = s.Interpreter
	}
	p.Argv = append(p.Argv, s.Args...)
	p.Stdin = []byte(s.Stdin)
	file.Content = []byte(s.Code)
	p.Files = []File{file}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		p.Env = append(p.Env, name+"="+env[name])
	}
	return p, nil
}

// env is the environment of every program: the image's, ours over it, and the
// caller's over both.
func (s Source) env() map[string]string {
	local, system := s.Home+"/.local", systemPath
	if p := s.ImageEnv["PATH"]; p != "" {
		system = p
	}
	if dir := path.Dir(s.Interpreter); s.Interpreter != "" && !slices.Contains(strings.Split(system, ":"), dir) {
		system = dir + ":" + system
	}
	env := map[string]string{"LANG": "C.UTF-8"}
	maps.Copy(env, s.ImageEnv)
	maps.Copy(env, map[string]string{
		"HOME":   s.Home,
		"USER":   path.Base(s.Home),
		"TMPDIR": "/tmp",
		"PATH":   local + "/bin:" + s.Home + "/node_modules/.bin:" + system,
		// Not PIP_USER, which breaks virtual environments; pip falls back to the
		// user's site by itself.
		"PIP_BREAK_SYSTEM_PACKAGES": "1",
		"PIP_CACHE_DIR":             "/tmp/.cache/pip",
		"NPM_CONFIG_PREFIX":         local,
		"NPM_CONFIG_CACHE":          "/tmp/.cache/npm",
		traceEnv:                    s.TraceID,
	})
	maps.Copy(env, s.Env)
	return env
}
