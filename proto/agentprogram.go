package proto

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
)

// AgentProgram describes the program of a coding agent. Its files are those of an npm package.
type AgentProgram struct {
	Agent string
	// Node means that Node.js runs the program. It is not a part of the package.
	Node bool
	// Files are the paths of the program in the package by the architecture of the machine, in Go's naming,
	// or by "" for all architectures.
	Files map[string]string
}

// AgentPrograms returns the programs that this version knows.
func AgentPrograms() []AgentProgram { return agentPrograms }

var agentPrograms = []AgentProgram{ // read only
	{Agent: "claude", Node: true, Files: map[string]string{"": "cli.js"}},
	{Agent: "codex", Files: map[string]string{
		"amd64": "vendor/x86_64-unknown-linux-musl/codex/codex", "arm64": "vendor/aarch64-unknown-linux-musl/codex/codex",
	}},
	{Agent: "opencode", Files: map[string]string{"amd64": "bin/opencode", "arm64": "bin/opencode"}},
	{Agent: "amp", Node: true, Files: map[string]string{"": "dist/main.js"}},
}

// FindAgentProgram returns the program of an agent, and whether this version knows it.
func FindAgentProgram(agent string) (AgentProgram, bool) {
	i := slices.IndexFunc(agentPrograms, func(p AgentProgram) bool { return p.Agent == agent })
	if i < 0 {
		return AgentProgram{}, false
	}
	return agentPrograms[i], true
}

// File returns the path of the program in the package, or "" if there is none for the architecture.
func (p *AgentProgram) File(architecture string) string {
	return cmp.Or(p.Files[architecture], p.Files[""])
}

// AgentDir returns the directory of an agent's package in the sandboxes that have the agent. It is
// read-only there, and outside of everything that tenants can mount.
func AgentDir(agent string) string { return AgentsDir + "/" + agent }

// AgentsDir is the directory of the directories of agents in sandboxes.
const AgentsDir = "/run/bullpen/agents"

var agentVersionPattern = regexp.MustCompile(`^[0-9][0-9A-Za-z.+-]{0,63}$`)

// ValidAgentVersion reports whether version can be the version of an agent's program. It is then also
// valid as the name of a directory.
func ValidAgentVersion(version string) bool { return agentVersionPattern.MatchString(version) }

// CompareAgentVersions compares two valid versions, the older first: by their numbers, then a
// prerelease before its release.
func CompareAgentVersions(a, b string) int {
	numbersA, restA, preA := strings.Cut(a, "-")
	numbersB, restB, preB := strings.Cut(b, "-")
	if c := slices.CompareFunc(strings.Split(numbersA, "."), strings.Split(numbersB, "."), compareNumbers); c != 0 {
		return c
	}
	switch {
	case preA && !preB:
		return -1
	case preB && !preA:
		return 1
	}
	return cmp.Or(slices.CompareFunc(strings.Split(restA, "."), strings.Split(restB, "."), compareNumbers),
		strings.Compare(a, b))
}

// compareNumbers compares decimal numbers of any size, and other texts by their bytes.
func compareNumbers(a, b string) int {
	number := func(s string) bool { return strings.Trim(s, "0123456789") == "" }
	if !number(a) || !number(b) {
		return strings.Compare(a, b)
	}
	a, b = strings.TrimLeft(a, "0"), strings.TrimLeft(b, "0")
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}
