// Package layer is the form in which the change of a directory is stored: what
// it says, its encoding and its limits. It reads and writes streams, never a file
// system, and does not know how a change was found.
//
// A layer describes how the next version of a directory is made from the last
// one. It is one zstd frame with a window of 1 MiB, and in it, numbers being
// unsigned varints unless said otherwise and strings a length and so many bytes:
//
//	"bullpen home 1\n"
//	number of moves, and of each the path of a directory in the last version,
//	    whose components are separated by slashes
//	the root, a directory with an empty name, and after it all that is in it
//
// An entry is a byte, its Kind, a name and what the kind has:
//
//	D  directory  base (0 fresh, 1 merge, 2 moved and the move's index), metadata;
//	              what changes in it follows, up to its U
//	F  file       metadata, group, size, number of extents, and of each the hole
//	              before it and its length; then 0 and the content of the extents, or
//	              1 and the SHA-256 of that content, which is an object of its own
//	S  symlink    metadata, group, target
//	L  hard link  group
//	X  deletion   nothing
//	U  the end of the directory; it has no name
//
// Metadata are the permission bits (symlinks have none: 0777), the seconds of the
// modification time as a signed varint and its nanoseconds, and the number of
// extended attributes, each a name without its "user." and a value.
//
// There are no paths but those of the moves: an entry belongs to the directory
// that was begun last. Names in a directory ascend, bytewise; so do the names of
// attributes. The content of a file of up to 4 MiB, holes not counted, is in the
// layer, that of a larger one is not. Groups are numbered from 1 in the order in
// which they begin; 0 is a file that has one name. So one change has one encoding,
// and a reader accepts no other.
package layer
