// Package image builds, stores and unpacks the root file systems of sandboxes. It reads layers,
// archives and directories into a [Tree] in memory with one spool file, writes the tree in a normal
// form, and unpacks only that form, into a [Cache]. It finds the interpreters in an image. It runs
// nothing and does not access registries: package oci does.
//
// # Normal form
//
// An image is a PAX tar compressed with zstd. Its digest is the SHA-256 of the compressed bytes.
// The first entry is a global header with the record BULLPEN.image, a JSON object whose member env
// is the image's environment. The entries follow depth first, siblings in byte order: directories
// (mode 0755), files (0755 if anybody could execute them, else 0644), symbolic links, and hard
// links to earlier files. Every entry belongs to uid and gid 0, has a time in whole seconds, no
// setuid bit and no extended attributes. There are no devices, FIFOs and sockets. Equal trees have
// equal bytes.
//
// Readers reject everything else. Nothing in an image can lead outside the directory that it is
// unpacked to, since unpacking follows no symbolic links.
package image

import (
	"errors"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
)

// Limits of names and paths: far more than any runtime needs, and no more than Linux allows.
const (
	maxName  = 255 // bytes of one component
	maxPath  = 4095
	maxDepth = 128 // nested directories
	maxHops  = 40  // symbolic links followed in one path
	// maxText bounds the memory of a tree's names and link targets, in bytes.
	maxText = 256 << 20
)

// Limits bound an image. Reading stops with [ErrTooLarge] at the first limit that is exceeded.
type Limits struct {
	Entries  int   // files, directories, symbolic and hard links, including those that a later layer replaces
	Unpacked int64 // bytes of all files, including those that a later layer replaces
	Stored   int64 // bytes of the compressed form
}

// DefaultLimits returns the limits of bullpen's registry.
func DefaultLimits() Limits {
	return Limits{Entries: proto.MaxImageEntries, Unpacked: proto.MaxImageUnpacked, Stored: proto.MaxImageBytes}
}

var (
	// ErrTooLarge means that an image exceeds a limit.
	ErrTooLarge = errors.New("the image is too large")
	// ErrHostile means that an archive contains what only an attack or a broken tool would write.
	ErrHostile = errors.New("malformed or hostile archive")
	// ErrForm means that the input is not an image in the normal form.
	ErrForm = errors.New("not an image packed by bullpen")
	// ErrArchitecture means that an image's interpreters are not all for one architecture that
	// workers have.
	ErrArchitecture = errors.New("no worker can run all interpreters of the image")
	// ErrNoLanguage means that an image contains no interpreter.
	ErrNoLanguage = errors.New("the image has no interpreter of any language in the directories of its PATH, in " +
		"/usr/local/bin, /usr/bin or /bin, nor in a virtual or conda environment")
)

func hostile(name, format string, args ...any) error {
	return fmt.Errorf("%w: entry %.200q: %s", ErrHostile, name, fmt.Sprintf(format, args...))
}
