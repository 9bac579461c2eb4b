#!/bin/bash
# in-root.sh ROOT COMMAND…: runs a command in the directory tree ROOT of a Debian as if it were a machine of its own, with this
# machine's network and kernel. As root. A chroot would not do: no jail can be created in one, since its root is not the root of
# a mount namespace.
set -euo pipefail
mkdir -p "$1/.old"
exec unshare --mount --pid --fork bash -euc '
	mount --bind "$1" "$1"
	cd "$1"
	mount --rbind /dev dev
	mount --rbind /sys sys
	mount -t proc proc proc
	mount -t tmpfs -o mode=755 tmpfs run
	pivot_root . .old
	umount -l .old
	shift
	exec env --unset=TMPDIR "$@"' bash "$@"
