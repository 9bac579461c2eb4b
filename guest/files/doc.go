// Package files reads and changes files in a sandbox: the service filesystem.Filesystem of E2B's
// daemon, and up- and downloads over plain HTTP.
//
// Reading is done with the guest's rights, which are those of root in the sandbox. Changes are first
// tried with the rights of the request's user, and the kernel follows symbolic links as it does for
// that user. If they do not suffice, the guest uses its own, but then follows no symbolic link at all:
// programs in the sandbox must not be able to have it change what they cannot change themselves.
package files
