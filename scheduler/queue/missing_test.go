package queue

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// subset returns the names whose bits are set.
func subset(names []string, bits int) (some []string) {
	for i, name := range names {
		if bits&(1<<i) != 0 {
			some = append(some, name)
		}
	}
	return some
}

// All needs against all sets of up to three workers, each with all sets of capabilities. A set is a
// number whose bits are capabilities.
func TestMissingOfAllCombinations(t *testing.T) {
	names := []string{"language:ruby", "network", "architecture:arm64"}
	const sets = 1 << 3
	check := func(needs int, workers ...int) {
		t.Helper()
		able, union := false, 0
		var lists [][]string
		for _, w := range workers {
			able = able || needs&^w == 0
			union |= w
			lists = append(lists, subset(names, w))
		}
		want, wantTogether := subset(names, needs&^union), !able && needs&^union == 0
		switch {
		case able:
			want = nil
		case wantTogether:
			want = subset(names, needs)
		}
		if got, together := missing(subset(names, needs), lists); !slices.Equal(got, want) || together != wantTogether {
			t.Errorf("needs %03b, workers %03b: got %v, %v; want %v, %v", needs, workers, got, together, want, wantTogether)
		}
	}
	for needs := 1; needs < sets; needs++ {
		check(needs)
		for a := range sets {
			check(needs, a)
			for b := range sets {
				check(needs, a, b)
				for c := range sets {
					check(needs, a, b, c)
				}
			}
		}
	}
}

// Whatever a job needs is missing without workers, and named in words.
func TestMissingNamesEachNeed(t *testing.T) {
	const fields = 14
	for bits := range 1 << fields {
		on := func(field int) bool { return bits&(1<<field) != 0 }
		m := &proto.Meta{
			Language: proto.Python, Disk: on(2), HasSecrets: on(3), HasInjections: on(4), HasMounts: on(5),
			HasVolumes: on(6), Rich: on(12), NetworkExtended: on(13),
		}
		if on(0) {
			m.Image, m.Architecture = "image", "arm64"
		}
		if on(1) {
			m.Network = proto.NetworkUnrestricted
		}
		if on(7) {
			m.ThreadID = "thread"
		}
		if on(8) {
			m.Language = "ruby"
		}
		if on(9) {
			m.SandboxID, m.Agent = "sandbox", "claude"
		}
		if on(10) {
			m.AgentVersion = "2.1.112"
		}
		if on(11) {
			m.Agent = "codex" // of no consequence without a sandbox
		}
		needs := needsOf(m)
		o := Offers{Workers: []*offer{{Capabilities: []string{"other"}, Live: true}}}
		got := o.missing(needs, 0, noon)
		if got == nil || !slices.Equal(got.Capabilities, needs) || got.Expected {
			t.Fatalf("needs %v: got %+v", needs, got)
		}
		o.Workers[0].Capabilities = needs
		if got := o.missing(needs, 0, noon); got != nil {
			t.Fatalf("needs %v are offered: got %+v", needs, got)
		}
	}
}

func TestExpectedWorkers(t *testing.T) {
	ruby, python := CapabilityLanguage("ruby"), CapabilityLanguage(proto.Python)
	live := &offer{Capabilities: []string{python}, Live: true}
	for name, tt := range map[string]struct {
		offers   Offers
		expected bool
		message  string
	}{
		"none": {Offers{}, false, "no worker is live; the operator of this server starts one"},
		"another language": {
			Offers{Workers: []*offer{live}},
			false,
			"no worker offers the language ruby; the operator of this server can add one that does " +
				"(bullpen doctor on its machine says what is missing there), or bind the API key to another sandbox",
		},
		"left a moment ago": {
			Offers{Workers: []*offer{live, {Capabilities: []string{ruby}, Until: noon.Add(time.Second)}}}, true, "",
		},
		"left a minute ago": {
			Offers{Workers: []*offer{live, {Capabilities: []string{ruby}, Until: noon}}}, false, "",
		},
		"not all connected": {Offers{Workers: []*offer{live}, Complete: noon.Add(time.Second)}, true, ""},
		"a pool that can": {
			Offers{Workers: []*offer{live}, Started: [][]string{{python}, {python, ruby}}},
			true, "no worker offers the language ruby; the autoscaler starts one that does",
		},
		"a pool that cannot":             {Offers{Workers: []*offer{live}, Started: [][]string{{python}}}, false, ""},
		"a pool that never had a worker": {Offers{Workers: []*offer{live}, Started: [][]string{nil}}, true, ""},
		"a pool at zero": {
			Offers{Started: [][]string{{ruby}}}, true, "no worker is live; the autoscaler starts one",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := tt.offers.missing([]string{ruby}, 0, noon)
			if got == nil || got.Expected != tt.expected || fmt.Sprint(got.Capabilities) != "[language:ruby]" ||
				tt.message != "" && got.Message != tt.message {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// A live sandbox with an agent needs a worker that has it. Node.js is the image's matter if there is one.
func TestNeedsOfAgents(t *testing.T) {
	for _, tt := range []struct {
		meta proto.Meta
		want string
		says string
	}{
		{
			proto.Meta{SandboxID: "s", Agent: "claude"},
			"[sandboxes agent:claude sandbox-node]", "the agent claude or Node.js for live sandboxes without an image;",
		},
		{
			proto.Meta{SandboxID: "s", Agent: "claude", AgentVersion: "2.1.9", Image: "i"},
			"[sandbox-images agent:claude@2.1.9]", "the agent claude 2.1.9;",
		},
		{proto.Meta{SandboxID: "s", Agent: "codex"}, "[sandboxes agent:codex]", "the agent codex;"},
	} {
		needs := needsOf(&tt.meta)
		if fmt.Sprint(needs) != tt.want {
			t.Errorf("got %v, want %s", needs, tt.want)
		}
		o := Offers{Workers: []*offer{{
			Capabilities: []string{CapabilitySandboxes, CapabilitySandboxImages, "agent:claude@2.1.10"}, Live: true,
		}}}
		if got := o.missing(needs, 0, noon); got == nil || !strings.Contains(got.Message, "no worker offers "+tt.says) {
			t.Errorf("%v: got %+v", needs, got)
		}
	}
}
