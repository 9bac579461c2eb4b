package proto

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The limits of environment variables.
const (
	MaxEnvVars       = 50        // after the merge of all levels
	MaxEnvBytes      = 64 * 1024 // of names plus values, after the merge of all levels
	MaxEnvNameLen    = 128
	MaxEnvValueRunes = 4096
)

var envNamePattern = regexp.MustCompile(`^[A-Z][A-Z0-9_]*$`)

// reservedEnv are the names that change how a program is started.
const reservedEnv = ` PATH HOME TMPDIR PWD OLDPWD SHELL LANG LANGUAGE TERM USER LOGNAME MAIL EDITOR VISUAL` +
	` PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONHASHSEED` +
	` PYTHONWARNINGS PYTHONOPTIMIZE PYTHONINSPECT PYTHONDEBUG PYTHONIOENCODING PYTHONMALLOC PYTHONCOERCECLOCALE` +
	` PYTHONFAULTHANDLER PYTHONPROFILEIMPORTTIME PYTHONPYCACHEPREFIX PIP_USER PIP_TARGET PIP_PREFIX` +
	` BASH_ENV ENV CDPATH GLOBIGNORE BASH_XTRACEFD PS1 PS2 PS4 PROMPT_COMMAND IFS` +
	` HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY NO_PROXY` +
	` NODE_PATH NODE_OPTIONS NODE_EXTRA_CA_CERTS NPM_CONFIG_PREFIX NPM_CONFIG_CACHE NPM_CONFIG_GLOBALCONFIG` +
	` CARGO_HOME RUSTUP_HOME GOPATH GOMODCACHE GOBIN R_LIBS_USER JULIA_DEPOT_PATH `

const reservedEnvPrefixes = `BULLPEN_ BAPONI_ NSJAIL_ LD_ LC_ XDG_ _`

// ReservedEnv reports whether only bullpen may set a variable of that name.
func ReservedEnv(name string) bool {
	for prefix := range strings.FieldsSeq(reservedEnvPrefixes) {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return name != "" && !strings.Contains(name, " ") && strings.Contains(reservedEnv, " "+name+" ")
}

// CheckEnv checks one environment variable of the named field. Errors are [*FieldError]. They never
// quote a value, which may be a secret, and do not list the reserved names.
func CheckEnv(field, name, value string) error {
	if ReservedEnv(name) {
		return FieldErrorf(field, "must not set a reserved name; choose another name than %q", Shorten(name))
	}
	if len(name) > MaxEnvNameLen || !envNamePattern.MatchString(name) {
		return FieldErrorf(field, "names must be 1 to %d characters of A-Z, 0-9 and _, the first a letter; %q is not",
			MaxEnvNameLen, Shorten(name))
	}
	if utf8.RuneCountInString(value) > MaxEnvValueRunes {
		return FieldErrorf(field, "values must be at most %d characters; the value of %s is longer", MaxEnvValueRunes, name)
	}
	for _, r := range value {
		if unicode.IsControl(r) && r != '\t' && r != '\n' && r != '\r' {
			return FieldErrorf(field,
				"values must have no control characters but tab, newline and carriage return; the value of %s has U+%04X", name, r)
		}
	}
	return nil
}

// MergeEnv merges the levels of an execution's environment, later ones over earlier ones, and
// checks the limits of the result. Its error is a [*FieldError].
func MergeEnv(levels ...map[string]string) (map[string]string, error) {
	merged := make(map[string]string)
	for _, level := range levels {
		maps.Copy(merged, level)
	}
	if err := checkEnvSize("env_vars", merged, ", with the variables of the key and the sandbox"); err != nil {
		return nil, err
	}
	return merged, nil
}

// CheckEnvLevel checks one level of an execution's environment, in the named field. Its error is a
// [*FieldError].
func CheckEnvLevel(field string, env map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if err := CheckEnv(field, name, env[name]); err != nil {
			return err
		}
	}
	return checkEnvSize(field, env, "")
}

// checkEnvSize checks the limits of an environment as a whole. whose tells the message what was
// counted.
func checkEnvSize(field string, env map[string]string, whose string) error {
	if len(env) > MaxEnvVars {
		return FieldErrorf(field, "must be at most %d variables%s; there are %d", MaxEnvVars, whose, len(env))
	}
	size := 0
	for name, value := range env {
		size += len(name) + len(value)
	}
	if size > MaxEnvBytes {
		return FieldErrorf(field, "must be at most %d bytes of names and values%s; there are %d", MaxEnvBytes, whose, size)
	}
	return nil
}
