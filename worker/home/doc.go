// Package home mounts the home directory of a thread for one execution and reads what the execution
// changed as a layer, see package layer.
//
// A home is an overlay. Its lower directory is the thread's last version, which is never modified
// while it is mounted. Its upper directory is empty at first and lies on a volume. Once the jail is
// dead, [Overlay.Diff] turns the upper directory into a layer, in time proportional to the change
// rather than the home. [Apply] turns the last version into the next one. [Full] reads a whole
// directory as a layer, to replace a long chain of layers. Before the program starts, [Overlay.Put]
// writes files into the home that become part of it, and [Overlay.PutTemporary] writes one that
// does not.
//
// A version consists of files, directories, symlinks and hard links, permission bits without
// set-uid and set-gid, modification times in nanoseconds, extended attributes in user.* and the
// holes of files. It does not record owners: a version belongs to root, and an id-mapped mount
// shows it to a jail with another owner. FIFOs, sockets, devices and POSIX access control lists are
// not stored.
//
// A jail's files are untrusted, and so is what a store returns. Every name is opened relative to
// the descriptor of its directory, never through a symlink and never across a mount point. Files
// other than regular files and directories are never opened deliberately. The lower and the upper
// directory must not change while they are read. If they do, results are wrong, but nothing outside
// of them is touched.
package home
