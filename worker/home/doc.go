// Package home makes the home directory of a thread for one execution, and takes
// what changed in it out again, as a layer (see package layer).
//
// A home is always an overlay: below it the last version of the thread, a plain
// directory that nobody changes, and above it an empty directory on a volume.
// When the jail is dead, Overlay.Diff reads the upper directory into a layer, in
// the time that the change takes, not the home. Apply makes the next version of
// the last one. Full is the layer of a whole directory, for a chain of layers
// that has become long; Fingerprint tells whether two directories are the same.
// Before the program runs, Overlay.Put writes files into its home that become a
// part of it, and Overlay.Lend one that does not.
//
// A version consists of files, directories, symlinks and hard links, permission
// bits without set-uid and set-gid, modification times in nanoseconds, extended
// attributes in user.* and where the holes of files are. Owners are no part of
// it: a version belongs to root, and a jail sees it with another owner through an
// id-mapped mount. FIFOs, sockets and devices are not kept, nor POSIX access
// control lists.
//
// What a jail left is the tenant's, and so may be what a store returns. Everything
// is opened one name at a time below a descriptor of the directory, never through
// a symlink or onto another mount. Opening what is not a regular file or a
// directory is avoided, not survived. The lower directory and the upper one must
// be at rest; if they are not, results are wrong, and still nothing outside is
// touched.
package home
