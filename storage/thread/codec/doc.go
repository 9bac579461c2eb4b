// Package codec encodes and decodes layers, see package layer. It reads and writes streams and
// never accesses a file system.
//
// An encoded layer is a pack followed by an index. The pack holds the content of inline files, one
// after another in the order of their entries. It is split into frames of 1 MiB; only the last one
// may be shorter. Each frame is a zstd frame. Without content the pack is empty. The index holds
// everything else, compressed by zstd with a window of 1 MiB. Its numbers are unsigned varints
// unless noted otherwise; its strings are a length followed by that many bytes:
//
//	"bullpen home 1\n"
//	number of content bytes in the pack; for each frame its compressed size and its SHA-256
//	number of moves; for each the path of a directory in the previous version, with slashes
//	the root, which is a directory with an empty name, followed by everything in it
//
// An entry is a byte, its Kind, followed by a name and the fields of its kind:
//
//	D  directory  base (0 fresh, 1 merge, 2 moved followed by the index of the move), metadata;
//	              the changes inside follow, up to its U
//	F  file       metadata, group, size, number of extents; for each the size of the hole before
//	              it and its length; then 0 if the pack holds the content, or 1 and its SHA-256
//	              if the content is an object
//	S  symlink    metadata, group, target
//	L  hard link  group
//	X  deletion   nothing
//	U  the end of the directory; it has no name
//
// Metadata are the permission bits (0777 for symlinks), the seconds of the modification time as a
// signed varint, its nanoseconds, and the number of extended attributes, each a name without
// "user." and a value.
//
// Only moves have paths: an entry belongs to the directory that was opened last. Names in a
// directory are in ascending byte order, and so are the names of attributes. The pack holds the
// content of files of up to 4 MiB, not counting holes. Groups are numbered from 1 in the order in
// which they appear; 0 is a file with one name. A change has therefore a single encoding except for
// the choices of zstd, and readers reject any other.
//
// A reader that has the index and has verified its digest can list the layer without the pack, and
// can read a file by the frames that contain it. No frame is decompressed before its digest is
// verified. A part of an object in a store can thus be verified although only the digest of the
// whole is known.
package codec
