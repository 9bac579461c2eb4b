// Package layer is the form in which the change of a directory is stored: what
// it says, its encoding and its limits. It reads and writes streams, never a file
// system, and does not know how a change was found.
//
// A layer describes how the next version of a directory is made from the last
// one. It is a pack and after it an index. The pack has the content of files, one
// after another in the order of their entries, cut into pieces of 1 MiB of which
// only the last is shorter; each piece is a zstd frame of its own. Without content
// it is empty. The index has all the rest, compressed by zstd with a window of
// 1 MiB, numbers being unsigned varints unless said otherwise and strings a length
// and so many bytes:
//
//	"bullpen home 1\n"
//	bytes of content in the pack, and of each frame of it its size, compressed, and
//	    its SHA-256
//	number of moves, and of each the path of a directory in the last version,
//	    whose components are separated by slashes
//	the root, a directory with an empty name, and after it all that is in it
//
// An entry is a byte, its Kind, a name and what the kind has:
//
//	D  directory  base (0 fresh, 1 merge, 2 moved and the move's index), metadata;
//	              what changes in it follows, up to its U
//	F  file       metadata, group, size, number of extents, and of each the hole
//	              before it and its length; then 0 if the content of the extents is
//	              in the pack, or 1 and its SHA-256 if it is an object of its own
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
// pack, that of a larger one is not. Groups are numbered from 1 in the order in
// which they begin; 0 is a file that has one name. So one change has one encoding
// but for how zstd compresses it, and a reader accepts no other.
//
// Whoever has the index, and knows its digest, needs no more than it to tell what
// is in a layer, and no more than the frames that cover a file to read that:
// nothing is unpacked before its digest is right. So it does not matter that a
// part of an object in a store cannot be verified as the whole is.
package layer
