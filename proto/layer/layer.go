// Package layer defines the change from one version of a directory to the next, and how to apply
// it. It performs no I/O: package storage/thread/codec encodes layers, package worker/home reads
// them from and applies them to directories, package storage/thread applies them in memory.
//
// A layer is a list of moves and a sequence of entries. A move names a directory of the previous
// version that has a new place in the next one. Entries come depth first: a [Dir] is followed by
// the entries of that directory, by name, and a [Leave]. The first entry is the root.
package layer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// Limits of every layer. Most are the limits common to all suitable file systems, so that a layer
// can be restored on any of them.
const (
	MaxInline = 4 << 20 // content of a file in bytes; larger content is an object of its own
	MaxDepth  = 512     // nested directories, including the root
	MaxName   = 255     // bytes
	MaxTarget = 1023    // bytes of a symlink's target
	MaxXattrs = 4000    // bytes of a file's extended attributes, see AttributeBytes
	// MaxAttributes limits the extended attributes of all files of a home or a layer, in bytes.
	// Trees and indexes hold them in memory.
	MaxAttributes = 16 << 20
	// MaxExtents limits the extents of a file, and the extents of all files with holes in one change.
	// Each extent takes several system calls when the home is saved and restored, and no quota counts
	// that time. Disk images and databases have at most a few thousand.
	MaxExtents  = 1 << 15
	MaxFileSize = 1 << 41 // bytes, including holes
	MaxLinks    = 65_000  // names of a file
	MaxMoves    = 1 << 24 // bytes of the paths of all moves
	// ModeBits are the mode bits that are stored. Set-uid and set-gid are excluded: they have no
	// effect in a home, but would have one outside.
	ModeBits = 0o1777
)

// Kind is the type of an entry.
type Kind byte

// Kinds.
const (
	Dir     Kind = 'D'
	File    Kind = 'F'
	Symlink Kind = 'S'
	Link    Kind = 'L' // another name of an earlier file or symlink
	Delete  Kind = 'X'
	Leave   Kind = 'U' // the end of the current directory
)

// Base is what a directory is derived from.
type Base byte

// Bases.
const (
	Fresh Base = 0 // a new directory, which replaces whatever had its name
	Merge Base = 1 // the directory of the same name in the previous version
	Moved Base = 2 // a move, which replaces whatever had its name
)

// Digest is a SHA-256.
type Digest = [sha256.Size]byte

// Xattr is an extended attribute. Name lacks the prefix "user.".
type Xattr struct {
	Name  string
	Value []byte
}

// Extent is a range of a file that is not a hole, in bytes.
type Extent struct{ Offset, Len int64 }

// Entry is one change. Fields that do not apply to its kind are zero.
type Entry struct {
	Kind Kind
	Name string // one path component; empty for the root and for Leave

	Base Base // of a directory
	Move int  // of a Moved directory: index of the move

	Mode   uint32 // permission bits, within ModeBits
	Sec    int64  // modification time, seconds since 1970
	Nsec   uint32
	Xattrs []Xattr // by name

	Group   int      // identifies a file or symlink with several names; 0 if it has one name
	Size    int64    // of a file in bytes, including holes
	Extents []Extent // of a file, by offset; adjacent extents are merged
	Object  Digest   // of a file that is not Inline

	Target string // of a symlink
}

// Data returns the size of a file without its holes, in bytes.
func (e *Entry) Data() int64 {
	var n int64
	for _, x := range e.Extents {
		n += x.Len
	}
	return n
}

// Inline reports whether the layer itself contains the content of a file.
func (e *Entry) Inline() bool { return e.Kind == File && e.Data() <= MaxInline }

// Limits bound a layer. Both must be positive.
type Limits struct {
	Bytes   int64 // content of files without holes, including objects
	Entries int64 // files, directories, symlinks, links, deletions and moves
}

// ErrLimit is wrapped by errors about a layer that exceeds its Limits.
var ErrLimit = errors.New("limit exceeded")

// ErrAttributes is wrapped by errors about a layer that exceeds MaxAttributes.
var ErrAttributes = fmt.Errorf("the extended attributes of all files take more than %d bytes", MaxAttributes)

// ErrDepth is wrapped by errors about a layer that exceeds MaxDepth.
var ErrDepth = fmt.Errorf("directories are nested more than %d levels deep", MaxDepth)

// AttributeBytes returns the size of attributes: names, values and 24 bytes for each.
func AttributeBytes(all []Xattr) int64 {
	var n int64
	for _, x := range all {
		n += int64(len(x.Name)+len(x.Value)) + 24
	}
	return n
}

// ValidName reports whether s can be the name of a directory entry.
func ValidName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= MaxName && !strings.ContainsAny(s, "/\x00")
}

// Source yields a layer's entries.
type Source interface {
	// Moves returns the paths of the moves in the previous version.
	Moves() []string
	// Next returns the next entry, or io.EOF after the last one.
	Next() (*Entry, error)
}

// Reader is a Source that also reads the content of files.
type Reader interface {
	Source
	// Content reads the content, without holes, of the last entry if that is an inline file. It is
	// valid until the next call of Next.
	Content() io.Reader
}

// Writer receives a layer.
type Writer interface {
	// Begin must be called first, with the paths of the moves in the previous version.
	Begin(moves []string) error
	// Write appends an entry. If that is an inline file, content must hold exactly e.Data bytes;
	// otherwise content is not used.
	Write(e *Entry, content io.Reader) error
	// Left returns how much may still be written.
	Left() Limits
}

// Draft is a new layer that is not in the store yet.
type Draft interface {
	Writer
	// Digest completes the layer and returns the digest of its blob.
	Digest() (string, error)
	// Store completes the layer, which refers to the given number of objects, and stores it as the
	// change that leads to a version.
	Store(ctx context.Context, version int64, objects int) (proto.Layer, error)
	// Reopen returns a reader of a layer that was stored. It must be closed.
	Reopen() (ReadCloser, error)
}

// ReadCloser is a Reader that holds resources.
type ReadCloser interface {
	Reader
	Close()
}
