package queue

import (
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// A worker offers capabilities, and a job needs some: it goes only to a worker that offers all of them. Both are words, "language:python",
// that the dispatcher compares and does not understand, so that a new kind of need is a new word.

// OfferLanguage is the capability to run programs in a language.
func OfferLanguage(l proto.Language) string { return "language:" + string(l) }

// OfferImages is the capability to run programs in images, which bring their own runtimes.
const OfferImages = "images"

// OfferNetwork is the capability to let programs out to the network.
const OfferNetwork = "network"

// OfferDisk is the capability to give programs a home or /tmp that lies on disk.
const OfferDisk = "disk"

// OfferThreads is the capability to give programs the home of a thread.
const OfferThreads = "threads"

// needsOf gives the capabilities that a job needs, always in the same order.
func needsOf(m *proto.Meta) []string {
	needs := []string{OfferLanguage(m.Language)}
	if m.Image != "" {
		needs[0] = OfferImages
	}
	if m.Disk {
		needs = append(needs, OfferDisk)
	}
	if m.Network != "" && m.Network != proto.NetworkBlocked {
		needs = append(needs, OfferNetwork)
	}
	if m.ThreadID != "" {
		needs = append(needs, OfferThreads)
	}
	return needs
}

// kind is all queued jobs of the same needs.
type kind struct {
	needs []string
	turn  turn[*tenant] // of organisations with such jobs
}

// kindName names the kind of needs.
func kindName(needs []string) string { return strings.Join(needs, " ") }

// offers is a set of capabilities.
type offers map[string]bool

func offersOf(words []string) offers {
	o := make(offers, len(words))
	for _, w := range words {
		o[w] = true
	}
	return o
}

// meet reports whether needs are among the offers.
func (o offers) meet(needs []string) bool {
	return !slices.ContainsFunc(needs, func(n string) bool { return !o[n] })
}
