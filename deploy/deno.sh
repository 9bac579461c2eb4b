#!/bin/sh
# Fetches deno, pinned by hash, into bin/deno for the tests of its language. Quick when it is there already.
set -eu

version=2.9.8
sha256=b1d1318e7deda8efd593aefa8b565a827fe71cf83aeff09d3a5ceb047444ca18

cd "$(dirname "$0")/.."
dest=bin/deno
if [ "$(cat "$dest/.sha256" 2>/dev/null)" = "$sha256" ] && [ -x "$dest/deno" ]; then
	exit 0
fi

machine=$(uname -m)
if [ "$machine" != x86_64 ]; then
	echo "deno.sh: the pinned build is for x86_64, this is $machine: put deno $version into $dest and $sha256 into $dest/.sha256" >&2
	exit 1
fi

mkdir -p bin
tmp=$(mktemp -d bin/.deno.XXXXXX)
trap 'rm -rf "$tmp"' EXIT
echo "deno==$version --hash=sha256:$sha256" >"$tmp/requirements.txt"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	--only-binary=:all: --platform manylinux_2_27_x86_64 --python-version 3.12 \
	--dest "$tmp" -r "$tmp/requirements.txt"

mkdir "$tmp/deno"
python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
	"$tmp"/*.whl "deno-$version.data/scripts/deno" >"$tmp/deno/deno"
chmod 755 "$tmp/deno/deno"
echo "$sha256" >"$tmp/deno/.sha256"
rm -rf "$dest"
mv "$tmp/deno" "$dest"
