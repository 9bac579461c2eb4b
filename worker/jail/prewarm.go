package jail

import (
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// prewarmEnv is set only for interpreters that wait. Requests cannot set it.
const prewarmEnv = "BULLPEN_PREWARM"

// preloadEnv holds the modules that a zygote's interpreter imports.
const preloadEnv = "BULLPEN_PRELOAD"

// The scripts with which interpreters wait. Each runs before the program's file is opened. Python's
// script is PythonSite.
var (
	// PrewarmBash is sourced by bash before its script.
	//
	//go:embed prewarm.sh
	PrewarmBash []byte
	// PrewarmNode is required by node before its main module.
	//
	//go:embed prewarm.js
	PrewarmNode []byte
	// ZygoteScript is run by the Python interpreter of a zygote.
	//
	//go:embed zygote.py
	ZygoteScript []byte
)

// CanWait reports whether an interpreter of language can be started before its program is known,
// see Source.Prewarm.
func CanWait(language string) bool { return waiting[language] != nil }

// Prewarm returns the interpreter to start before the rest of s is known. It uses only the
// Language, Home, File, Interpreter and ImageEnv of s. It fails only for a language that cannot
// wait.
func (s Source) Prewarm() (Program, error) {
	s.Code, s.Args, s.Stdin, s.Env, s.TraceID = "", nil, "", nil, ""
	p, err := s.Program()
	if err == nil && !CanWait(s.Language) {
		err = fmt.Errorf("interpreters of %s cannot wait for a program", s.Language)
	}
	if err != nil {
		return Program{}, err
	}
	p.Files, p.Dir = nil, "/" // the home may be mounted later
	// Variables common to every program stay, so that the environment keeps its order.
	p.Env = append(p.Env, waiting[s.Language]...)
	return p, nil
}

// PrewarmGuest returns the guest p to start before its sandbox is known.
func PrewarmGuest(p Program) Program {
	p.Env = append(slices.Clone(p.Env), prewarmEnv+"=1")
	return p
}

// Forkable is the language whose interpreter can be forked. In a fork of bash, $$ and $BASHPID
// would be the parent's; a fork of node would not have its threads.
const Forkable = "python"

// Zygote returns the interpreter of a zygote, which imports modules. It uses only the Home,
// Interpreter and ImageEnv of s. Each fork is as if it had been prewarmed.
func (s Source) Zygote(modules []string) (Program, error) {
	s.Language = Forkable
	p, err := s.Prewarm()
	if err != nil {
		return Program{}, err
	}
	for i, v := range p.Env {
		if strings.HasPrefix(v, prewarmEnv+"=") {
			p.Env[i] = prewarmEnv + "=" + PrewarmDir + "/zygote.py"
		}
	}
	if len(modules) > 0 {
		p.Env = append(p.Env, preloadEnv+"="+strings.Join(modules, ","))
	}
	return p, nil
}

// Preloads reports whether p is the interpreter of a zygote that imports modules.
func (p Program) Preloads() bool {
	return slices.ContainsFunc(p.Env, func(v string) bool { return strings.HasPrefix(v, preloadEnv+"=") })
}

// waiting maps a language to the variables that make its interpreter wait.
var waiting = map[string][]string{ // read only
	"python": {prewarmEnv + "=1"},
	"node":   {prewarmEnv + "=1", "NODE_OPTIONS=--require " + PrewarmDir + "/prewarm.js"},
	"bash":   {"BASH_ENV=" + PrewarmDir + "/prewarm.sh"},
}

// startupVariables matches variables that interpreters and their libraries read at startup, or that
// bash treats as its own. They cannot be added to a waiting interpreter. Some can be set only by
// images.
var startupVariables = regexp.MustCompile(
	`^(?:BASH|GCONV_|GLIBC_|HIST|LC_|LD_|MALLOC_|NODE_|OPENSSL_|PYTHON|READLINE_|SSL_|UV_|_)|` +
		`^(?:CDPATH|CHILD_MAX|COLUMNS|COMPREPLY|COMP_[A-Z]+|COPROC|DIRSTACK|ENV|EPOCHREALTIME|EPOCHSECONDS|EUID|EXECIGNORE|` +
		`FCEDIT|FIGNORE|` +
		`FUNCNAME|FUNCNEST|GLOBIGNORE|GROUPS|HOME|HOSTFILE|HOSTNAME|HOSTTYPE|IFS|IGNOREEOF|INPUTRC|LANG|` +
		`LANGUAGE|LINENO|LINES|LOCPATH|` +
		`MACHTYPE|MAIL|MAILCHECK|MAILPATH|MAPFILE|NLSPATH|OLDPWD|OPTARG|` +
		`OPTERR|OPTIND|OSTYPE|PATH|PIPESTATUS|POSIXLY_CORRECT|PPID|` +
		`PROMPT_COMMAND|PS[0-4]|PWD|RANDOM|REPLY|RES_OPTIONS|SECONDS|SHELL|` +
		`SHELLOPTS|SHLVL|SRANDOM|TERM|TIMEFORMAT|TMOUT|TZ|TZDIR|UID)=`)

func readAtStart(variable string) bool {
	return startupVariables.MatchString(variable) && !strings.HasPrefix(variable, "NODE_ENV=")
}

// Continues reports whether an interpreter started as prewarmed can continue with p as if it had
// been started for p: it must have the same arguments and lack no variable that interpreters read
// at startup. Continues also returns the variables that the interpreter lacks.
func (p Program) Continues(prewarmed Program) (added []string, ok bool) {
	if !slices.Equal(p.Argv, prewarmed.Argv) {
		return nil, false
	}
	for _, v := range p.Env {
		if slices.Contains(prewarmed.Env, v) {
			continue
		}
		if readAtStart(v) {
			return nil, false
		}
		added = append(added, v)
	}
	for _, v := range prewarmed.Env {
		name, _, _ := strings.Cut(v, "=")
		missing := !slices.ContainsFunc(p.Env, func(w string) bool { return strings.HasPrefix(w, name+"=") })
		isHook := slices.ContainsFunc(slices.Collect(maps.Values(waiting)), func(w []string) bool {
			return slices.Contains(w, v)
		})
		if missing && !isHook {
			return nil, false
		}
	}
	return added, true
}
