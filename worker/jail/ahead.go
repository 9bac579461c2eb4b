package jail

import (
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// aheadEnv is set only for interpreters that wait. Requests cannot set it.
const aheadEnv = "BULLPEN_AHEAD"

// preloadEnv holds the modules that a zygote's interpreter imports.
const preloadEnv = "BULLPEN_PRELOAD"

// The scripts with which interpreters wait. Each runs before the program's file is opened. Python's
// script is PythonSite.
var (
	// AheadBash is sourced by bash before its script.
	//
	//go:embed ahead.sh
	AheadBash []byte
	// AheadNode is required by node before its main module.
	//
	//go:embed ahead.js
	AheadNode []byte
	// AheadForks is run by the Python interpreter of a zygote.
	//
	//go:embed forks.py
	AheadForks []byte
)

// CanWait reports whether an interpreter of language can be started before its program is known,
// see Source.Ahead.
func CanWait(language string) bool { return waiting[language] != nil }

// Ahead returns the interpreter to start before the rest of s is known. It uses only the Language,
// Home, File, Interpreter and ImageEnv of s. It fails only for a language that cannot wait.
func (s Source) Ahead() (Program, error) {
	s.Code, s.Args, s.Stdin, s.Env, s.TraceID = "", nil, "", nil, ""
	p, err := s.Program()
	if err == nil && !CanWait(s.Language) {
		err = fmt.Errorf("interpreters of %s cannot wait for a program", s.Language)
	}
	if err != nil {
		return Program{}, err
	}
	p.Files, p.Dir = nil, "/" // the home may be mounted later
	// Variables that every program has stay, so that the environment keeps its order.
	p.Env = append(p.Env, waiting[s.Language]...)
	return p, nil
}

// Forkable is the language whose interpreter can be forked. In a fork of bash, $$ and $BASHPID
// would be the parent's; a fork of node would lack its threads.
const Forkable = "python"

// Zygote returns the interpreter of a zygote, which imports modules. It uses only the Home,
// Interpreter and ImageEnv of s. Each fork is as if it had been started as Ahead returns it.
func (s Source) Zygote(modules []string) (Program, error) {
	s.Language = Forkable
	p, err := s.Ahead()
	if err != nil {
		return Program{}, err
	}
	for i, v := range p.Env {
		if strings.HasPrefix(v, aheadEnv+"=") {
			p.Env[i] = aheadEnv + "=" + AheadDir + "/forks.py"
		}
	}
	if len(modules) > 0 {
		p.Env = append(p.Env, preloadEnv+"="+strings.Join(modules, ","))
	}
	return p, nil
}

// waiting maps a language to the variables that make its interpreter wait.
var waiting = map[string][]string{ // read only
	"python": {aheadEnv + "=1"},
	"node":   {aheadEnv + "=1", "NODE_OPTIONS=--require " + AheadDir + "/ahead.js"},
	"bash":   {"BASH_ENV=" + AheadDir + "/ahead.sh"},
}

// steering matches the variables that interpreters and their libraries read when they start, or
// that bash treats as its own. They cannot be added to a waiting interpreter. Some can be set
// only by images.
var steering = regexp.MustCompile(`^(?:BASH|GCONV_|GLIBC_|HIST|LC_|LD_|MALLOC_|NODE_|OPENSSL_|PYTHON|READLINE_|SSL_|UV_|_)|` +
	`^(?:CDPATH|CHILD_MAX|COLUMNS|COMPREPLY|COMP_[A-Z]+|COPROC|DIRSTACK|ENV|EPOCHREALTIME|EPOCHSECONDS|EUID|EXECIGNORE|FCEDIT|FIGNORE|` +
	`FUNCNAME|FUNCNEST|GLOBIGNORE|GROUPS|HOME|HOSTFILE|HOSTNAME|HOSTTYPE|IFS|IGNOREEOF|INPUTRC|LANG|LANGUAGE|LINENO|LINES|LOCPATH|` +
	`MACHTYPE|MAIL|MAILCHECK|MAILPATH|MAPFILE|NLSPATH|OLDPWD|OPTARG|OPTERR|OPTIND|OSTYPE|PATH|PIPESTATUS|POSIXLY_CORRECT|PPID|` +
	`PROMPT_COMMAND|PS[0-4]|PWD|RANDOM|REPLY|RES_OPTIONS|SECONDS|SHELL|SHELLOPTS|SHLVL|SRANDOM|TERM|TIMEFORMAT|TMOUT|TZ|TZDIR|UID)=`)

func steers(variable string) bool {
	return steering.MatchString(variable) && !strings.HasPrefix(variable, "NODE_ENV=")
}

// Continues reports whether an interpreter that was started as ahead can continue with p as if it
// had been started for p. It can if it has the same arguments and lacks no variable that
// interpreters read when they start. Continues also returns the variables that the interpreter
// lacks.
func (p Program) Continues(ahead Program) (added []string, ok bool) {
	if !slices.Equal(p.Argv, ahead.Argv) {
		return nil, false
	}
	for _, v := range p.Env {
		if slices.Contains(ahead.Env, v) {
			continue
		}
		if steers(v) {
			return nil, false
		}
		added = append(added, v)
	}
	for _, v := range ahead.Env {
		name, _, _ := strings.Cut(v, "=")
		lacks := !slices.ContainsFunc(p.Env, func(w string) bool { return strings.HasPrefix(w, name+"=") })
		hook := slices.ContainsFunc(slices.Collect(maps.Values(waiting)), func(w []string) bool { return slices.Contains(w, v) })
		if lacks && !hook {
			return nil, false
		}
	}
	return added, true
}
