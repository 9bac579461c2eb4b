package queue

import (
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// Capabilities of workers. A job is assigned only to a worker that has all capabilities it needs.
// The dispatcher compares capabilities as strings and does not interpret them.
const (
	CapabilityImages  = "images"  // programs in images, which contain their own runtimes
	CapabilityNetwork = "network" // programs with network access
	// CapabilityNetworkExtended is for networks with private destinations or limits, which older
	// workers do not know.
	CapabilityNetworkExtended = "network-extended"

	CapabilityDisk    = "disk"    // programs with a home or /tmp on disk
	CapabilityThreads = "threads" // programs with the home of a thread
	CapabilitySecrets = "secrets" // programs with secrets, which older workers do not know
	// CapabilityInjections is for secrets that the worker adds to requests. A worker without it
	// would write them to files.
	CapabilityInjections = "injections"
	CapabilityMounts     = "mounts"  // programs with mounts of storage connections
	CapabilityVolumes    = "volumes" // programs with mounts of volumes, which older workers do not know
	CapabilityRich       = "rich"    // programs with rich results, which older workers do not know
	// CapabilitySandboxes is for live sandboxes, and CapabilitySandboxImages for those with images. Their
	// slots offer nothing that every program needs, so programs and sandboxes do not share slots.
	CapabilitySandboxes     = "sandboxes"
	CapabilitySandboxImages = "sandbox-images"
	// CapabilitySandboxNode is for live sandboxes without images whose agent needs Node.js.
	CapabilitySandboxNode = "sandbox-node"
)

// CapabilityAgent returns the capability to run live sandboxes with the program of an agent, in a
// version, or in any if version is empty.
func CapabilityAgent(agent, version string) string {
	if version != "" {
		agent += agentVersionSeparator + version
	}
	return agentPrefix + agent
}

const (
	agentPrefix           = "agent:"
	agentVersionSeparator = "@"
)

// agentVersions returns the versions of an agent among capabilities.
func agentVersions(capabilities []string, agent string) (versions []string) {
	for _, name := range capabilities {
		if version, ok := strings.CutPrefix(name, CapabilityAgent(agent, "")+agentVersionSeparator); ok {
			versions = append(versions, version)
		}
	}
	return versions
}

// capabilitySandboxMemory returns the capability to run a live sandbox with a memory limit in bytes.
// Workers announce a number instead, so only messages name it.
func capabilitySandboxMemory(memory int64) string {
	return sandboxMemoryPrefix + proto.Bytes(memory).String()
}

const sandboxMemoryPrefix = "sandbox-memory:"

// CapabilityLanguage returns the capability to run programs in a language.
func CapabilityLanguage(l proto.Language) string { return "language:" + string(l) }

// CapabilityArchitecture returns the capability to run images of an architecture, in Go's naming.
func CapabilityArchitecture(name string) string { return architecturePrefix + name }

const architecturePrefix = "architecture:"

// architectureOf returns the architecture among capabilities, or "" if there is none.
func architectureOf(capabilities []string) string {
	for _, name := range capabilities {
		if arch, ok := strings.CutPrefix(name, architecturePrefix); ok {
			return arch
		}
	}
	return ""
}

// needsOf returns the capabilities that a job needs, in a fixed order.
func needsOf(m *proto.Meta) []string {
	needs := []string{CapabilityLanguage(m.Language)}
	switch {
	case m.SandboxID != "" && m.Image != "":
		needs[0] = CapabilitySandboxImages
	case m.SandboxID != "":
		needs[0] = CapabilitySandboxes
	case m.Image != "":
		needs[0] = CapabilityImages
	}
	if m.SandboxID != "" && m.Agent != "" {
		needs = append(needs, CapabilityAgent(m.Agent, m.AgentVersion))
		if p, _ := proto.FindAgentProgram(m.Agent); p.Node && m.Image == "" {
			needs = append(needs, CapabilitySandboxNode)
		}
	}
	if m.Architecture != "" {
		needs = append(needs, CapabilityArchitecture(m.Architecture))
	}
	if m.Disk {
		needs = append(needs, CapabilityDisk)
	}
	if m.Network != "" && m.Network != proto.NetworkBlocked {
		needs = append(needs, CapabilityNetwork)
	}
	if m.NetworkExtended {
		needs = append(needs, CapabilityNetworkExtended)
	}
	if m.ThreadID != "" {
		needs = append(needs, CapabilityThreads)
	}
	if m.HasSecrets {
		needs = append(needs, CapabilitySecrets)
	}
	if m.HasInjections {
		needs = append(needs, CapabilityInjections)
	}
	if m.HasMounts {
		needs = append(needs, CapabilityMounts)
	}
	if m.HasVolumes {
		needs = append(needs, CapabilityVolumes)
	}
	if m.Rich {
		needs = append(needs, CapabilityRich)
	}
	return needs
}

// needSet schedules the organisations with queued jobs of the same needs.
type needSet struct {
	needs  []string
	memory int64 // limit of a live sandbox in bytes, otherwise 0
	orgs   sfq[*orgQueue]
}

// needKey returns the map key of a set of needs.
func needKey(needs []string) string { return strings.Join(needs, " ") }

// memoryKey returns the map key of a set of needs, or of capabilities, with memory for live sandboxes.
func memoryKey(names []string, memory int64) string {
	if memory == 0 {
		return needKey(names)
	}
	return needKey(append(slices.Clip(names), capabilitySandboxMemory(memory)))
}

// capabilities is the set of a worker's capabilities.
type capabilities map[string]bool

func newCapabilities(list []string) capabilities {
	c := make(capabilities, len(list))
	for _, name := range list {
		c[name] = true
	}
	return c
}

// equal reports whether c equals list, which has no duplicates.
func (c capabilities) equal(list []string) bool {
	return c != nil && len(c) == len(list) && c.meet(list)
}

// meet reports whether c contains all needs.
func (c capabilities) meet(needs []string) bool {
	return !slices.ContainsFunc(needs, func(n string) bool { return !c[n] })
}
