package jail

import (
	"cmp"
	_ "embed"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/proto"
)

// Paths inside a jail.
const (
	// HarnessDir holds bullpen's own files. The program can read it.
	HarnessDir = "/run/bullpen"
	// JobDir holds files of OwnerInit.
	JobDir = HarnessDir + "/job"
	// SecretsDir holds the secrets of the program, in memory.
	SecretsDir = JobDir + "/secrets"
	// PythonDir holds sitecustomize.py.
	PythonDir = HarnessDir + "/python"
	// ProcDir holds a jail's replacements for files of /proc.
	ProcDir = HarnessDir + "/proc"
	// TrustFile holds the certificate authorities trusted by a program whose requests get secrets.
	TrustFile = JobDir + "/ca.pem"
	// StdinFile is the program's standard input, if it has one.
	StdinFile = JobDir + "/stdin"
	// PrewarmDir holds the scripts that make bash and node wait for their program.
	PrewarmDir = HarnessDir + "/prewarm"
)

// GuestConfig is the configuration of the guest of a live sandbox, and GuestUser the name of the user
// with [ProgramID] there.
const (
	GuestConfig = JobDir + "/guest.json"
	GuestUser   = "user"
)

// ProgramID is the program's uid and gid inside a jail.
const ProgramID = 1000

// PythonSite is the sitecustomize.py of every Python interpreter in a jail. It waits for the
// program if the interpreter was prewarmed, and makes stdout line-buffered. It adds the user's
// site to the path even if it does not exist yet. It removes every other trace of itself.
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
	// File is the name of the program's file in Home, for languages that keep it there. The default
	// is the usual name. The file must not exist yet.
	File string
	// Cell, if not empty, is the nonce of the frames of a Python program that is run as one cell, see
	// package cell.
	Cell string
	// Interpreter is the absolute path of the interpreter inside the jail. If empty, its usual
	// name is looked up in the system's directories.
	Interpreter string
	// ImageEnv is the environment of the sandbox's image. Its PATH follows the home's own
	// directories; bullpen's variables override the rest.
	ImageEnv map[string]string
}

// traceEnv holds the id of the execution.
const traceEnv = "BULLPEN_TRACE_ID"

// systemPath is the PATH of images that set none.
const systemPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// FileInHome returns the usual name of the file in the home that holds a program of language. It
// returns "" if such programs are not in the home.
func FileInHome(language string) string {
	r, ok := proto.Language(language).Runtime()
	if !ok || r.OutsideHome {
		return ""
	}
	return r.File
}

// FileContent returns the content of a program's file: its code without a leading byte order mark.
// bash treats a carriage return as part of a command, so a bash program whose lines all end in CRLF
// gets LF. One with mixed line ends may need its carriage returns, and keeps them.
func FileContent(language, code string) []byte {
	code = strings.TrimPrefix(code, "\ufeff")
	if language == string(proto.Bash) && strings.Count(code, "\r\n") == strings.Count(code, "\n") {
		code = strings.ReplaceAll(code, "\r\n", "\n")
	}
	return []byte(code)
}

// Program returns the program that runs s like `python3 <home>/main.py` (and so on) run in home. It
// has the same argv and the same environment. stdin is at its end unless s has one. The error is
// non-nil only for an unknown language.
func (s Source) Program() (Program, error) {
	r, ok := proto.Language(s.Language).Runtime()
	if !ok {
		return Program{}, fmt.Errorf("program: unknown language %q", s.Language)
	}
	file := File{Path: s.Home + "/" + cmp.Or(s.File, r.File), Mode: 0o644, Content: FileContent(s.Language, s.Code)}
	if r.OutsideHome {
		file.Path, file.Owner = JobDir+"/"+r.File, OwnerInit
	}
	p := Program{Dir: s.Home, Stdin: []byte(s.Stdin), Files: []File{file}}
	env, run := s.env(r), []string{file.Path}
	if s.Cell != "" {
		env[cell.NonceEnv], run = s.Cell, []string{cell.PythonRunner, "--cell", file.Path}
	}
	p.Argv = slices.Concat([]string{cmp.Or(s.Interpreter, r.Interpreters[0])}, r.Args, run, s.Args)
	for _, name := range slices.Sorted(maps.Keys(env)) {
		p.Env = append(p.Env, name+"="+env[name])
	}
	return p, nil
}

// env returns the program's environment. The caller's variables override bullpen's, which override
// the image's.
func (s Source) env(r proto.Runtime) map[string]string {
	local, system := s.Home+"/.local", systemPath
	if p := s.ImageEnv["PATH"]; p != "" {
		system = p
	}
	if dir := path.Dir(s.Interpreter); s.Interpreter != "" && !slices.Contains(strings.Split(system, ":"), dir) {
		system = dir + ":" + system
	}
	env := map[string]string{"LANG": "C.UTF-8", "TERM": "dumb"}
	maps.Copy(env, s.ImageEnv)
	maps.Copy(env, map[string]string{
		"HOME":   s.Home,
		"USER":   path.Base(s.Home),
		"TMPDIR": "/tmp",
		"PATH":   local + "/bin:" + s.Home + "/node_modules/.bin:" + system,
		// Not PIP_USER, which breaks virtual environments. pip falls back to the user's site
		// without it.
		"PIP_BREAK_SYSTEM_PACKAGES": "1",
		"PIP_CACHE_DIR":             "/tmp/.cache/pip",
		"NPM_CONFIG_PREFIX":         local,
		"NPM_CONFIG_CACHE":          "/tmp/.cache/npm",
		traceEnv:                    s.TraceID,
	})
	maps.Copy(env, r.Env)
	if r.Language == proto.Python {
		env["PYTHONPATH"] = PythonDir
	}
	maps.Copy(env, s.Env)
	return env
}
