package layer

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
)

// What a layer can hold at all. Most are what every file system that a home may
// lie on takes, so that what could be stored can be restored anywhere.
const (
	MaxInline = 4 << 20 // bytes of a file's content; of a larger one they are an object
	MaxDepth  = 512     // directories in each other, the root included
	MaxName   = 255     // bytes
	MaxTarget = 1023    // bytes of a symlink's target
	MaxXattrs = 4000    // bytes of a file's attributes: names and values, and 24 for each
	// MaxAttributes is for those of all files of a home, or a layer, together. They
	// are kept in memory, in indexes and in what is made of these.
	MaxAttributes = 16 << 20 // bytes
	MaxExtents    = 1 << 20  // of a file
	MaxFileSize   = 1 << 41  // bytes, holes counted
	MaxLinks      = 65_000   // names of a file
	MaxMoves      = 1 << 24  // bytes of the paths of all directories that move
	// ModeBits are the bits of a mode that are kept. Set-uid and set-gid are not:
	// they have no effect in a home, and would have one outside.
	ModeBits = 0o1777
)

// Kind is what an entry is.
type Kind byte

// Kinds.
const (
	Dir     Kind = 'D'
	File    Kind = 'F'
	Symlink Kind = 'S'
	Link    Kind = 'L' // another name of a file or symlink before it
	Delete  Kind = 'X'
	Leave   Kind = 'U' // the end of the directory begun last
)

// Base says what a directory is made of.
type Base byte

// Bases.
const (
	Fresh Base = 0 // nothing; what had its name is gone
	Merge Base = 1 // the directory that has its name
	Moved Base = 2 // one of the moves; what had its name is gone
)

// Digest is a SHA-256.
type Digest = [sha256.Size]byte

// Xattr is an extended attribute. Its name lacks the prefix "user.".
type Xattr struct {
	Name  string
	Value []byte
}

// Extent is a part of a file that is not a hole, in bytes.
type Extent struct{ Offset, Len int64 }

// Entry is one change. Fields that its kind does not have are zero.
type Entry struct {
	Kind Kind
	Name string // one component; empty for the root and for Leave

	Base Base // of a directory
	Move int  // of a directory that is Moved: index of the move

	Mode   uint32 // permission bits, within ModeBits
	Sec    int64  // modification time, seconds since 1970
	Nsec   uint32
	Xattrs []Xattr // by name

	Group   int      // of a file or symlink with several names, and of Link
	Size    int64    // of a file, bytes
	Extents []Extent // of a file, by offset; adjacent ones are one
	Object  Digest   // of a file whose Data is more than MaxInline

	Target string // of a symlink
}

// Data is how many bytes of a file are not holes.
func (e *Entry) Data() int64 {
	var n int64
	for _, x := range e.Extents {
		n += x.Len
	}
	return n
}

// Inline says whether a file's content is in the layer.
func (e *Entry) Inline() bool { return e.Kind == File && e.Data() <= MaxInline }

// Limits are what a caller allows a layer to be. Both must be positive.
type Limits struct {
	Bytes   int64 // content of files without their holes, objects included
	Entries int64 // files, directories, symlinks, further names, deletions and moves
}

// ErrLimit is in errors about a layer that is larger than its Limits.
var ErrLimit = errors.New("limit exceeded")

// ErrAttributes is in errors about a layer with more than MaxAttributes.
var ErrAttributes = fmt.Errorf("the extended attributes of all files take more than %d bytes together", MaxAttributes)

// ErrDepth is in errors about a layer of a home with more than MaxDepth.
var ErrDepth = fmt.Errorf("more than %d directories in each other", MaxDepth)

// AttributeBytes is what attributes take: names and values, and 24 bytes for each.
func AttributeBytes(all []Xattr) int64 {
	var n int64
	for _, x := range all {
		n += int64(len(x.Name)+len(x.Value)) + 24
	}
	return n
}

// ValidName says whether a string can be the name of something in a directory.
func ValidName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= MaxName && !strings.ContainsAny(s, "/\x00")
}

// order is what writer and reader check in the same way, so that nothing is
// stored that could not be restored.
type order struct {
	limits         Limits
	entries, bytes int64
	attributes     int64    // bytes
	moves          []bool   // whether they have been used
	stack          []string // the last name in each directory that is open
	groups         []int    // how many names each has
	begun          bool
}

func newOrder(limits Limits, moves []string) (*order, error) {
	o := &order{limits: limits, moves: make([]bool, len(moves))}
	seen := make(map[string]bool, len(moves))
	size := 0
	for _, path := range moves {
		if size += len(path); size > MaxMoves {
			return nil, fmt.Errorf("the paths of moved directories take more than %d bytes together: %w", MaxMoves, ErrLimit)
		}
		if err := o.count(1); err != nil {
			return nil, err
		}
		if err := checkMove(path); err != nil {
			return nil, err
		}
		if seen[path] {
			return nil, fmt.Errorf("%q is moved twice", path)
		}
		seen[path] = true
	}
	return o, nil
}

func checkMove(path string) error {
	depth := 1
	for name := range strings.SplitSeq(path, "/") {
		if depth++; !ValidName(name) || depth > MaxDepth {
			return fmt.Errorf("the path of a move, %.300q, is not one", path)
		}
	}
	return nil
}

func (o *order) count(n int64) error {
	if o.entries += n; o.entries > o.limits.Entries {
		return fmt.Errorf("more than %d files, directories and deletions: %w", o.limits.Entries, ErrLimit)
	}
	return nil
}

// ended says whether the root has been left.
func (o *order) ended() bool { return o.begun && len(o.stack) == 0 }

// admit checks the next entry.
func (o *order) admit(e *Entry) error {
	if o.ended() {
		return errors.New("an entry after the end")
	}
	if e.Kind == Leave {
		return o.leave()
	}
	if err := o.count(1); err != nil {
		return err
	}
	if err := o.name(e); err != nil {
		return err
	}
	if o.attributes += AttributeBytes(e.Xattrs); o.attributes > MaxAttributes {
		return ErrAttributes
	}
	switch e.Kind {
	case Dir:
		return errors.Join(o.enter(e), e.checkMeta())
	case File:
		return errors.Join(e.checkMeta(), o.content(e), o.group(e))
	case Symlink:
		if e.Target == "" || len(e.Target) > MaxTarget || strings.ContainsRune(e.Target, 0) {
			return fmt.Errorf("the target of symlink %q has %d bytes, not 1 to %d without NUL", e.Name, len(e.Target), MaxTarget)
		}
		return errors.Join(e.checkMeta(), o.group(e))
	case Link:
		return o.group(e)
	case Delete:
		return nil
	}
	return fmt.Errorf("unknown kind of entry %q", e.Kind)
}

func (o *order) leave() error {
	if !o.begun {
		return errors.New("the root is missing")
	}
	if o.stack = o.stack[:len(o.stack)-1]; len(o.stack) > 0 {
		return nil
	}
	for _, used := range o.moves {
		if !used {
			return errors.New("a move leads nowhere")
		}
	}
	return nil
}

func (o *order) name(e *Entry) error {
	if !o.begun {
		o.begun = true
		if e.Kind != Dir || e.Name != "" || e.Base == Moved || e.Base == Fresh && len(o.moves) > 0 {
			return errors.New("the first entry is not a root")
		}
		return nil
	}
	last := &o.stack[len(o.stack)-1]
	if !ValidName(e.Name) {
		return fmt.Errorf("%.300q is not a name", e.Name)
	}
	if e.Name <= *last {
		return fmt.Errorf("name %q follows %q", e.Name, *last)
	}
	*last = e.Name
	return nil
}

func (o *order) enter(e *Entry) error {
	if len(o.stack) == MaxDepth {
		return ErrDepth
	}
	o.stack = append(o.stack, "")
	if e.Base > Moved {
		return fmt.Errorf("directory %q has the unknown base %d", e.Name, e.Base)
	}
	if e.Base == Moved {
		if e.Move < 0 || e.Move >= len(o.moves) || o.moves[e.Move] {
			return fmt.Errorf("directory %q is move %d, which is not free", e.Name, e.Move)
		}
		o.moves[e.Move] = true
	}
	return nil
}

func (o *order) group(e *Entry) error {
	switch {
	case e.Kind != Link && e.Group == 0:
		return nil
	case e.Kind != Link && e.Group == len(o.groups)+1:
		o.groups = append(o.groups, 0)
	case e.Kind != Link || e.Group < 1 || e.Group > len(o.groups):
		return fmt.Errorf("%q has group %d of %d", e.Name, e.Group, len(o.groups))
	}
	names := &o.groups[e.Group-1]
	if *names++; *names > MaxLinks {
		return fmt.Errorf("%q is a file with more than %d names", e.Name, MaxLinks)
	}
	return nil
}

func (o *order) content(e *Entry) error {
	if e.Size < 0 || e.Size > MaxFileSize {
		return fmt.Errorf("file %q has a size of %d bytes, more than %d", e.Name, e.Size, int64(MaxFileSize))
	}
	if len(e.Extents) > MaxExtents {
		return fmt.Errorf("file %q has %d parts with holes between, more than %d", e.Name, len(e.Extents), MaxExtents)
	}
	end := int64(-1)
	for _, x := range e.Extents {
		if x.Offset <= end || x.Len <= 0 || x.Len > e.Size || x.Offset > e.Size-x.Len {
			return fmt.Errorf("the parts of file %q are not within it in order", e.Name)
		}
		end = x.Offset + x.Len
	}
	if o.bytes += e.Data(); o.bytes > o.limits.Bytes {
		return fmt.Errorf("more than %d bytes in files: %w", o.limits.Bytes, ErrLimit)
	}
	return nil
}

func (e *Entry) checkMeta() error {
	if e.Mode&^ModeBits != 0 || e.Nsec >= 1e9 {
		return fmt.Errorf("%q has mode %#o and nanoseconds %d", e.Name, e.Mode, e.Nsec)
	}
	last := ""
	for _, x := range e.Xattrs {
		if x.Name <= last || len(x.Name) > MaxName-len("user.") || strings.ContainsRune(x.Name, 0) {
			return fmt.Errorf("attribute %.300q of %q is out of order, or not a name", x.Name, e.Name)
		}
		last = x.Name
	}
	if size := AttributeBytes(e.Xattrs); size > MaxXattrs {
		return fmt.Errorf("the attributes of %q take %d bytes, more than %d", e.Name, size, MaxXattrs)
	}
	return nil
}
