package proto

import (
	"cmp"
	"encoding/json"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// The limits of what a sandbox profile may say.
const (
	MinCPU             = 0.05
	MaxCPU             = 64.0
	MinMemory          = 32 * MiB
	MaxMemory          = 1024 * GiB
	MinPids            = 16
	MaxPids            = 32768
	MinDisk            = 1 * MiB // of home, and of /tmp
	MaxDisk            = 1024 * GiB
	MinInodes          = 256
	MaxInodes          = 1 << 24
	MaxOutput          = 256 * MiB // per stream: a result is one message and one JSON body
	MaxImagePathBytes  = 4096
	MaxPreload         = 32  // modules
	MaxModuleNameLen   = 128 // of a module to preload, in characters
	defaultHomeOfRAM   = 2   // home is a half of the memory, and /tmp a quarter
	defaultTmpOfRAM    = 4
	defaultMemory      = 1 * GiB
	sandboxNameMessage = "must be 1 to 63 characters of a-z, 0-9, ., _ and -, the first a letter or digit"
)

var profileMembers = [...]string{"name", "image", "cpu", "memory", "pids", "disk", "network", "env", "output", "isolation", "preload"}

// DefaultProfileName names the profile of API keys that are bound to none. No other profile can have that name.
const DefaultProfileName = "default"

// Isolation says what an execution of Python may have in common with others of its API key. Empty, the worker chooses: it may be forked
// from one warm interpreter that is that key's.
type Isolation string

// IsolationStrict gives every execution of Python an interpreter that was started for it alone, in a single-use jail.
const IsolationStrict Isolation = "strict"

// Profile is a sandbox profile: a named set of limits and settings that API keys are bound to. It is always complete. Every
// execution under such a key gets what it says at that moment; a request can change none of it but add to its environment.
type Profile struct {
	Name string `json:"name"`
	// Image is the root file system: empty for the host's own runtimes, an absolute path for a directory of the worker's host, else
	// the name of an image in the registry.
	Image   string            `json:"image"`
	CPU     float64           `json:"cpu"`    // cores
	Memory  Bytes             `json:"memory"` // without swap
	Pids    int               `json:"pids"`   // processes and threads
	Disk    Disk              `json:"disk"`
	Network Network           `json:"network"`
	Env     map[string]string `json:"env"`    // variables of every program, under those of the request; never nil
	Output  Bytes             `json:"output"` // kept of each output stream
	// Isolation and Preload are left out where they are empty, so that versions without them read what does not need them.
	Isolation Isolation `json:"isolation,omitempty"`
	// Preload are the Python modules that the warm interpreter of a key imports, from the image's read-only paths only, before it is
	// forked from. Not with [IsolationStrict].
	Preload []string `json:"preload,omitempty"`
}

// Disk is how much a program may write. What of it lies in memory counts against the memory limit, too.
type Disk struct {
	Home   Bytes `json:"home"`
	Tmp    Bytes `json:"tmp"`    // of /tmp
	Inodes int64 `json:"inodes"` // files and directories in the home directory, and again in /tmp
}

// DefaultProfile is the profile of a key that was bound to none: the host's runtimes, 1 core, 1 GiB of memory, 256 processes, no
// network, 65,536 inodes in each of home and /tmp, 16 MiB of output per stream. Home has half of the memory and /tmp a quarter, so
// that a full disk is told (ENOSPC) before the program is killed for memory.
func DefaultProfile() Profile {
	return Profile{
		Name: DefaultProfileName, CPU: 1, Memory: defaultMemory, Pids: 256,
		Disk:    Disk{Home: defaultMemory / defaultHomeOfRAM, Tmp: defaultMemory / defaultTmpOfRAM, Inodes: 65536},
		Network: Network{Policy: NetworkBlocked}, Env: map[string]string{}, Output: 16 * MiB,
	}
}

// Sandbox gives the snapshot that goes with a job. The digest is that of the image, empty for one that has none. The environment is
// not part of it: it is merged into that of the job.
func (p *Profile) Sandbox(digest string) Sandbox {
	return Sandbox{
		Image: p.Image, ImageDigest: digest, CPU: p.CPU, Memory: int64(p.Memory), Pids: p.Pids,
		HomeBytes: int64(p.Disk.Home), TmpBytes: int64(p.Disk.Tmp), Inodes: p.Disk.Inodes,
		Network: p.Network, OutputBytes: int(p.Output), Isolation: p.Isolation, Preload: p.Preload,
	}
}

// ImageName gives the name of the profile's image in the registry; ok is false where it runs on the host's runtimes or a directory.
func (p *Profile) ImageName() (name string, ok bool) {
	return p.Image, p.Image != "" && !path.IsAbs(p.Image)
}

// DecodeProfile reads the JSON form of a profile and checks it. What it does not say is as in defaults, except that a home and a
// /tmp that nobody asked for are no more than a half and a quarter of the memory. A name that is given here may be left out there,
// and must not be another there. What is wrong is a [*FieldError].
func DecodeProfile(name string, body []byte, defaults Profile) (Profile, error) {
	members, err := decodeObject(body, profileMembers[:]...)
	if err == nil {
		err = onlyKnown(body, profileMembers[:])
	}
	if err != nil {
		return Profile{}, err
	}
	p := defaults
	p.Name, p.Env, p.Network.Allow = name, maps.Clone(defaults.Env), slices.Clone(defaults.Network.Allow)
	p.Preload = slices.Clone(defaults.Preload)
	d := memberDecoder{members: members}
	d.name(&p.Name)
	d.read("image", func(raw []byte) (err error) { p.Image, err = decodeString("image", raw); return err })
	d.read("cpu", func(raw []byte) (err error) { p.CPU, err = decodeFloat("cpu", raw); return err })
	d.read("memory", func(raw []byte) (err error) { p.Memory, err = decodeBytes("memory", raw); return err })
	d.read("pids", func(raw []byte) error { return decodeWhole("pids", raw, &p.Pids) })
	p.Disk.Home = min(p.Disk.Home, p.Memory/defaultHomeOfRAM)
	p.Disk.Tmp = min(p.Disk.Tmp, p.Memory/defaultTmpOfRAM)
	d.read("disk", p.Disk.decode)
	d.read("network", p.Network.decode)
	p.Network.Policy = p.Network.Effective()
	d.read("env", func(raw []byte) (err error) {
		p.Env, err = decodeStrings("env", raw, MaxEnvVars, func(name, value string) error { return CheckEnv("env", name, value) })
		return err
	})
	d.read("output", func(raw []byte) (err error) { p.Output, err = decodeBytes("output", raw); return err })
	d.read("isolation", func(raw []byte) error {
		isolation, err := decodeString("isolation", raw)
		p.Isolation = Isolation(isolation)
		return err
	})
	d.read("preload", func(raw []byte) (err error) { p.Preload, err = decodeList("preload", raw); return err })
	if d.err != nil {
		return Profile{}, d.err
	}
	return p, p.check()
}

func (d *memberDecoder) name(to *string) {
	d.read("name", func(raw []byte) error {
		name, err := decodeString("name", raw)
		if err == nil && *to != "" && name != *to {
			return FieldErrorf("name", "must be %s or be left out", *to)
		}
		*to = name
		return err
	})
}

func (k *Disk) decode(raw []byte) error {
	return decodeMembers("disk", raw, func(member, field string, raw []byte) (err error) {
		switch member {
		case "home":
			k.Home, err = decodeBytes(field, raw)
		case "tmp":
			k.Tmp, err = decodeBytes(field, raw)
		case "inodes":
			var n int
			err = decodeWhole(field, raw, &n)
			k.Inodes = int64(n)
		default:
			err = errUnknown(field)
		}
		return err
	})
}

func (n *Network) decode(raw []byte) error {
	return decodeMembers("network", raw, func(member, field string, raw []byte) error {
		switch member {
		case "policy":
			policy, err := decodeString(field, raw)
			n.Policy = NetworkPolicy(policy)
			return err
		case "allow":
			allow, err := decodeList(field, raw)
			n.Allow = allow
			return err
		}
		return errUnknown(field)
	})
}

// decodeList reads an array of strings; an empty one is nil.
func decodeList(field string, raw []byte) (list []string, err error) {
	if kindOf(raw) != '[' {
		return nil, FieldErrorf(field, "must be an array of strings")
	}
	err = eachElement(raw, func(raw []byte) error {
		entry, err := decodeString(field, raw)
		list = append(list, entry)
		return err
	})
	return list, err
}

// decodeMembers calls f for each member of an object that is not null, with the member's name and that for messages.
func decodeMembers(object string, raw []byte, f func(member, field string, raw []byte) error) error {
	if kindOf(raw) != '{' {
		return FieldErrorf(object, "must be an object")
	}
	seen := make(map[string]bool)
	return eachMember(raw, func(member string, value []byte) error {
		field := object + "." + Shorten(member)
		if seen[member] {
			return errTwice(field)
		}
		if seen[member] = true; kindOf(value) == 'n' {
			return nil
		}
		return f(member, field, value)
	})
}

// decodeBytes reads a number of bytes, or a string with a unit.
func decodeBytes(field string, raw []byte) (Bytes, error) {
	var b Bytes
	wrong := FieldErrorf(field, "must be a number of bytes, or a string such as 512MiB or 2GiB (units: KiB, MiB, GiB)")
	if kindOf(raw) != '"' {
		n, err := decodeInt(raw)
		if err != nil {
			return 0, wrong
		}
		return Bytes(n), nil
	}
	text, err := decodeString(field, raw)
	if err != nil {
		return 0, err
	}
	if b.UnmarshalText([]byte(text)) != nil {
		return 0, wrong
	}
	return b, nil
}

func decodeWhole(field string, raw []byte, to *int) (err error) {
	if *to, err = decodeInt(raw); err != nil {
		return FieldErrorf(field, "must be a whole number")
	}
	return nil
}

func decodeFloat(field string, raw []byte) (f float64, err error) {
	if err := json.Unmarshal(raw, &f); err != nil {
		return 0, FieldErrorf(field, "must be a number")
	}
	return f, nil
}

var profileNamePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*$`)

func validProfileName(s string) bool { return len(s) <= maxName && profileNamePattern.MatchString(s) }

// CheckProfileName checks the name of a profile that somebody wants to make, change or remove. Its error is a [*FieldError].
func CheckProfileName(name string) error {
	if !validProfileName(name) {
		return FieldErrorf("name", sandboxNameMessage)
	}
	if name == DefaultProfileName {
		return FieldErrorf("name", "must not be %s: that is the sandbox of API keys that are bound to none, and is built in", name)
	}
	return nil
}

func (p *Profile) check() error {
	for _, err := range []error{
		CheckProfileName(p.Name),
		checkProfileImage(p.Image),
		checkRange("cpu", p.CPU, MinCPU, MaxCPU),
		checkRange("memory", p.Memory, MinMemory, MaxMemory),
		checkRange("pids", p.Pids, MinPids, MaxPids),
		checkRange("disk.home", p.Disk.Home, MinDisk, MaxDisk),
		checkRange("disk.tmp", p.Disk.Tmp, MinDisk, MaxDisk),
		checkRange("disk.inodes", p.Disk.Inodes, MinInodes, MaxInodes),
		p.Network.Validate(),
		checkEnvSize("env", p.Env, ""),
		checkRange("output", p.Output, 1, MaxOutput),
		checkIsolation(p.Isolation),
		checkPreload(p.Preload, p.Isolation),
	} {
		if err != nil {
			return err
		}
	}
	return nil
}

func checkRange[T cmp.Ordered](field string, v, least, most T) error {
	if v < least || v > most {
		return FieldErrorf(field, "must be from %v to %v", least, most)
	}
	return nil
}

func checkProfileImage(image string) error {
	switch {
	case image == "" || ValidImageName(image):
		return nil
	case !path.IsAbs(image):
		return FieldErrorf("image", "must be empty for the host's runtimes, the name of an image, or an absolute directory of the workers")
	case image == "/" || path.Clean(image) != image || len(image) > MaxImagePathBytes || strings.ContainsFunc(image, unicode.IsControl):
		return FieldErrorf("image", "must be an absolute directory without . or .. or a slash at its end, and not the root")
	}
	return nil
}

func checkIsolation(i Isolation) error {
	if i != "" && i != IsolationStrict {
		return FieldErrorf("isolation", "must be %s, or empty for what the worker chooses", IsolationStrict)
	}
	return nil
}

var modulePattern = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$`)

func checkPreload(modules []string, i Isolation) error {
	if len(modules) > MaxPreload {
		return FieldErrorf("preload", "must have at most %d modules", MaxPreload)
	}
	for n, module := range modules {
		if len(module) > MaxModuleNameLen || !modulePattern.MatchString(module) {
			return FieldErrorf("preload", "must have names of Python modules, such as matplotlib.pyplot: identifiers of A-Z, a-z, 0-9 and _ with dots "+
				"between them, at most %d characters; %q is not one", MaxModuleNameLen, Shorten(module))
		}
		if slices.Contains(modules[:n], module) {
			return FieldErrorf("preload", "has %s twice", module)
		}
	}
	if len(modules) > 0 && i == IsolationStrict {
		return FieldErrorf("preload", "does not go with the isolation %s, where nothing is forked: leave out one of the two", i)
	}
	return nil
}
