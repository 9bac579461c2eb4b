package proto

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// MaxOutput is the largest part of an output stream that a result keeps: a result is one message
// and one JSON body.
const MaxOutput = 256 * MiB

const (
	maxImagePathBytes  = 4096
	maxModuleNameLen   = 128 // characters
	defaultMemory      = 1 * GiB
	sandboxNameMessage = "must be 1 to 63 characters of a-z, 0-9, ., _ and -, the first a letter or digit"
)

// By default, the home takes half of the memory and /tmp a quarter.
const (
	DefaultHomeShare = 2
	DefaultTmpShare  = 4
)

// The names of built-in profiles, which are reserved.
const (
	DefaultProfileName = "default" // of API keys that are bound to none
	AgentsProfileName  = "agents"  // for API keys of agents, see [AgentsProfile]
)

// BuiltInProfile reports whether the profile of that name is built in.
func BuiltInProfile(name string) bool {
	return name == DefaultProfileName || name == AgentsProfileName
}

// Isolation limits what a Python execution shares with others of its API key. If it is empty, the
// worker may fork the execution from the key's warm interpreter.
type Isolation string

// IsolationStrict starts every Python execution in its own interpreter, in a single-use jail.
const IsolationStrict Isolation = "strict"

// Profile is a sandbox profile: a named set of limits and settings that API keys are bound to. It
// is always complete. An execution gets the profile at the time of its acceptance. Its request can
// only add to the environment.
type Profile struct {
	Name string `json:"name" pattern:"^[a-z0-9][a-z0-9._-]{0,62}$" doc:"Required, unless the path has it. Not default or agents, which are built in."`
	// Image is the root file system: empty for the server's default image or, if it has none, for
	// the host's own runtimes; an absolute path for a directory of the worker's host; otherwise the
	// name of an image in the registry.
	Image   string            `json:"image" default:"" doc:"Empty: the server's default image (--default-image) or, without one, the runtimes of the workers' hosts. An absolute path: a directory there. Otherwise the name of an image."`
	CPU     float64           `json:"cpu" default:"1" minimum:"0.05" maximum:"64" doc:"Cores."`
	Memory  Bytes             `json:"memory" minimum:"32MiB" maximum:"1024GiB" doc:"32MiB to 1024GiB, without swap; 1GiB by default."`
	Pids    int               `json:"pids" default:"256" minimum:"16" maximum:"32768" doc:"Processes and threads."`
	Disk    Disk              `json:"disk"`
	Network Network           `json:"network"`
	Env     map[string]string `json:"env" maxProperties:"50" keyPattern:"^[A-Z][A-Z0-9_]*$" keyMaxLength:"128" valueMaxLength:"4096" doc:"Variables of every program. The API key's override them, and the request's override both. The limits of env_vars apply here, and to all together."`
	Output  Bytes             `json:"output" minimum:"1" maximum:"256MiB" doc:"The part of each output stream that a result keeps: 1 byte to 256MiB. By default the server's --output-limit."`
	Secrets []string          `json:"secrets,omitempty" maxItems:"16" uniqueItems:"true" must:"have at most 16 secrets" valuePattern:"^[A-Za-z][A-Za-z0-9_-]{0,62}(=[A-Z][A-Z0-9_]{0,127})?!?$" doc:"Secrets of the executing organisation that programs get: NAME for a file, NAME=VARIABLE for a variable. A ! at the end masks the value in the output."`
	// OpenFiles, Isolation, Preload, SystemCalls and Terminals are omitted if empty, so that older
	// versions can read profiles that do not use them.
	OpenFiles   int       `json:"open_files,omitempty" minimum:"256" maximum:"4096" doc:"Open files of each process; 1024 if absent."`
	Isolation   Isolation `json:"isolation,omitempty" default:"" enum:",strict" must:"be strict, or empty for what the worker chooses" doc:"strict starts a separate interpreter for every python execution (a single-use jail). Empty: the worker chooses, and may fork python executions of one API key from one warm interpreter of that key."`
	Preload     []string  `json:"preload,omitempty" maxItems:"32" uniqueItems:"true" must:"have at most 32 modules" valuePattern:"^[A-Za-z_][A-Za-z0-9_]*(\\.[A-Za-z_][A-Za-z0-9_]*)*$" valueMaxLength:"128" doc:"Python modules that a key's warm interpreter imports before executions are forked from it, only from the image's read-only paths. Not with isolation strict."`
	SystemCalls []string  `json:"system_calls,omitempty" maxItems:"16" uniqueItems:"true" must:"have at most 16 system calls" valuePattern:"^(cachestat|file_getattr|file_setattr|landlock_add_rule|landlock_create_ruleset|landlock_restrict_self|map_shadow_stack|process_madvise|process_mrelease|remap_file_pages|rseq_slice_yield)$" doc:"System calls allowed in addition to the usual ones; the documentation lists them."`
	Terminals   int       `json:"terminals,omitempty" minimum:"0" maximum:"64" doc:"Pseudo-terminals that a program can have open at a time; none if absent."`
	// PrepareAgents is omitted if empty, too.
	PrepareAgents bool `json:"prepare_agents,omitempty" default:"false" doc:"Start the sandbox of an agent session, and the agent's program in it, when the session is created. Otherwise they start with its first message."`
}

// Disk limits what a program may write. The part kept in memory also counts against the memory
// limit.
type Disk struct {
	Home   Bytes `json:"home" minimum:"1MiB" maximum:"1024GiB" doc:"Size of the home directory: 1MiB to 1024GiB. By default 512MiB or half of the memory, whichever is less."`
	Tmp    Bytes `json:"tmp" minimum:"1MiB" maximum:"1024GiB" doc:"Size of /tmp: 1MiB to 1024GiB. By default 256MiB or a quarter of the memory, whichever is less."`
	Root   Bytes `json:"root,omitempty" minimum:"0" maximum:"1024GiB" doc:"What root in a live sandbox may change of the image's file system, for example to install packages: 1MiB to 1024GiB. The changes are lost when the sandbox stops. 0: nothing. Needs an image. Executions run as another user and do not use it."`
	Inodes int64 `json:"inodes" default:"65536" minimum:"256" maximum:"16777216" doc:"Files and directories in each of them."`
}

// DefaultProfile returns the profile of a key without one: the host's runtimes, 1 core, 1 GiB of
// memory, 256 processes, no network, 65,536 inodes in each of home and /tmp, 16 MiB of output per
// stream. Home has half of the memory and /tmp a quarter, so that a full disk causes ENOSPC before
// the program is killed for memory.
func DefaultProfile() Profile {
	return Profile{
		Name: DefaultProfileName, CPU: 1, Memory: defaultMemory, Pids: 256,
		Disk:    Disk{Home: defaultMemory / DefaultHomeShare, Tmp: defaultMemory / DefaultTmpShare, Inodes: 65536},
		Network: Network{Policy: NetworkBlocked}, Env: map[string]string{}, Output: 16 * MiB,
	}
}

// AgentsProfile returns the built-in profile for API keys of agents: the default one with the
// memory of the vendors' containers, and the same shares of it for home and /tmp. Anthropic
// documents 5 GiB; OpenAI's examples ask for 4 GB.
func AgentsProfile(defaults Profile) Profile {
	const memory = 5 * GiB
	defaults.Name, defaults.Memory = AgentsProfileName, memory
	defaults.Disk.Home, defaults.Disk.Tmp = memory/DefaultHomeShare, memory/DefaultTmpShare
	return defaults
}

// Sandbox returns the snapshot of the profile for a job. digest is its image's digest in the
// registry, or "" without an image. The snapshot has no environment, which is merged into the job's
// environment instead.
func (p *Profile) Sandbox(digest string) Sandbox {
	return Sandbox{
		Image: p.Image, ImageDigest: digest, CPU: p.CPU, Memory: int64(p.Memory), Pids: p.Pids,
		HomeBytes: int64(p.Disk.Home), TmpBytes: int64(p.Disk.Tmp), Inodes: p.Disk.Inodes, RootBytes: int64(p.Disk.Root),
		Network: p.Network, OutputBytes: int(p.Output), OpenFiles: p.OpenFiles, Isolation: p.Isolation, Preload: p.Preload,
		SystemCalls: p.SystemCalls, Terminals: p.Terminals,
	}
}

// ImageName returns the name of the profile's image in the registry. ok is false for the host's
// runtimes and for directories.
func (p *Profile) ImageName() (name string, ok bool) {
	return p.Image, p.Image != "" && !path.IsAbs(p.Image)
}

var profileNamePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*$`)

// CheckProfileForm checks the form of a profile's name in the named field. Its error is a
// [*FieldError].
func CheckProfileForm(field, name string) error {
	if len(name) > maxName || !profileNamePattern.MatchString(name) {
		return FieldErrorf(field, sandboxNameMessage)
	}
	return nil
}

// CheckProfileName checks the name of a profile to create, replace or remove. Its error is a
// [*FieldError].
func CheckProfileName(name string) error {
	if err := CheckProfileForm("name", name); err != nil {
		return err
	}
	if BuiltInProfile(name) {
		return FieldErrorf("name", "must not be %s: that sandbox is built in", name)
	}
	return nil
}

// Validate checks the rules of a profile that its struct tags do not express. Its error is a
// [*FieldError].
func (p *Profile) Validate() error {
	if err := CheckProfileName(p.Name); err != nil {
		return err
	}
	if err := checkProfileImage(p.Image); err != nil {
		return err
	}
	if err := p.checkRoot(); err != nil {
		return err
	}
	if err := p.Network.Validate(); err != nil {
		return err
	}
	if err := CheckEnvLevel("env", p.Env); err != nil {
		return err
	}
	if err := CheckSecretBindings("secrets", p.Secrets); err != nil {
		return err
	}
	if err := checkPreload(p.Preload, p.Isolation); err != nil {
		return err
	}
	return checkSystemCalls(p.SystemCalls)
}

func checkProfileImage(image string) error {
	switch {
	case image == "" || ValidImageName(image):
		return nil
	case !path.IsAbs(image):
		return FieldErrorf("image",
			"must be empty for the host's runtimes, the name of an image, or an absolute directory of the workers")
	case image == "/" || path.Clean(image) != image || len(image) > maxImagePathBytes ||
		strings.ContainsFunc(image, unicode.IsControl):
		return FieldErrorf("image", "must be an absolute directory without . or .. or a slash at its end, and not the root")
	}
	return nil
}

// checkRoot checks the size of a writable root.
func (p *Profile) checkRoot() error {
	switch {
	case p.Disk.Root == 0:
		return nil
	case p.Disk.Root < MiB:
		return FieldErrorf("disk.root", "must be 0, or 1MiB to 1024GiB")
	case p.Image == "":
		return FieldErrorf("disk.root", "needs an image: the file system of the workers' hosts is read-only")
	}
	return nil
}

var modulePattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$`)

func checkPreload(modules []string, i Isolation) error {
	for n, module := range modules {
		if len(module) > maxModuleNameLen || !modulePattern.MatchString(module) {
			return FieldErrorf("preload",
				"must have names of Python modules, such as matplotlib.pyplot: identifiers of A-Z, a-z, 0-9 and _ with dots "+
					"between them, at most %d characters; %q is not one", maxModuleNameLen, Shorten(module))
		}
		if slices.Contains(modules[:n], module) {
			return FieldErrorf("preload", "has %s twice", module)
		}
	}
	if len(modules) > 0 && i == IsolationStrict {
		return FieldErrorf("preload",
			"does not go with the isolation %s, where nothing is forked: leave out one of the two", i)
	}
	return nil
}

// addableSystemCalls are the names in the schema of [Profile.SystemCalls].
var addableSystemCalls = [...]string{ // read only
	"cachestat",
	"file_getattr",
	"file_setattr",
	"landlock_add_rule",
	"landlock_create_ruleset",
	"landlock_restrict_self",
	"map_shadow_stack",
	"process_madvise",
	"process_mrelease",
	"remap_file_pages",
	"rseq_slice_yield",
}

// AddableSystemCalls returns the system calls that a profile can allow in addition to the usual
// ones.
func AddableSystemCalls() []string { return slices.Clone(addableSystemCalls[:]) }

func checkSystemCalls(calls []string) error {
	for n, call := range calls {
		if !slices.Contains(addableSystemCalls[:], call) {
			return FieldErrorf("system_calls",
				"must have names of %s; %q is not one: either every program can make it, or none may",
				strings.Join(addableSystemCalls[:], ", "), Shorten(call))
		}
		if slices.Contains(calls[:n], call) {
			return FieldErrorf("system_calls", "has %s twice", call)
		}
	}
	return nil
}
