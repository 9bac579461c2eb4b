// Package image makes, stores and unpacks the root file systems of sandboxes. It reads layers, archives and directories into a
// [Tree] that exists in memory and one spool file only, writes a tree in one normal form, and unpacks that form and no other below
// a [Cache]. It finds the interpreters in an image. It runs nothing, and knows no registry: package oci does.
//
// # The normal form
//
// An image is a PAX tar compressed with zstd, and its digest is the SHA-256 of that. The first entry is a global header with the
// record BULLPEN.image, a JSON object whose member env is the image's environment. Then come all entries depth first, siblings
// in the order of their bytes: directories (mode 0755), files (0755 where anybody could execute them, else 0644), symbolic links
// as they were, and hard links to files that came before. All belong to uid and gid 0, have a time in whole seconds, and neither
// setuid bits nor extended attributes. There are no devices, FIFOs and sockets. The same tree gives the same bytes.
//
// What reads the form refuses everything else, whoever wrote it: nothing of an image can lead outside the directory that it is
// unpacked to, since no symbolic link is ever followed there.
package image

import (
	"errors"
	"fmt"

	"github.com/bullpen-run/bullpen/proto"
)

// What no file system of a runtime comes near, and what Linux allows.
const (
	maxName  = 255 // bytes of one component
	maxPath  = 4095
	maxDepth = 128 // directories in each other
	maxHops  = 40  // symbolic links on the way to one file
	// maxText bounds what the names and link targets of a tree take in memory, in bytes.
	maxText = 256 << 20
)

// Limits bound an image. Reading ends with [ErrTooLarge] at the first that is passed.
type Limits struct {
	Entries  int   // files, directories and links; a hard link is one, and so is what a later layer replaces
	Unpacked int64 // bytes of all files, those that a later layer replaces too
	Stored   int64 // bytes of the compressed form
}

// DefaultLimits gives the limits that bullpen's registry has.
func DefaultLimits() Limits {
	return Limits{Entries: proto.MaxImageEntries, Unpacked: proto.MaxImageUnpacked, Stored: proto.MaxImageBytes}
}

var (
	// ErrTooLarge says that an image is over a limit.
	ErrTooLarge = errors.New("the image is too large")
	// ErrHostile says that an archive holds what only an attack or a broken tool would write.
	ErrHostile = errors.New("not a sound archive")
	// ErrForm says that something is not an image in the normal form.
	ErrForm = errors.New("not an image that bullpen packed")
	// ErrNoLanguage says that nothing could run in an image.
	ErrNoLanguage = errors.New("there is no interpreter in the image: none of python3, node and bash is in the directories of its PATH, in " +
		"/usr/local/bin, /usr/bin or /bin, nor in a virtual or conda environment")
)

func hostile(name, format string, args ...any) error {
	return fmt.Errorf("%w: entry %.200q: %s", ErrHostile, name, fmt.Sprintf(format, args...))
}
