#!/bin/bash
# Assembles the images into bin/images/gateway and bin/images/worker, which are OCI image layouts. The worker's needs mmdebstrap, root and a
# network. `make images` sets the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${VERSION:?}" "${DATE:?}"
images=$PWD/bin/images
rm -rf "$images"
mkdir -p "$images"
make --no-print-directory install DESTDIR="$images/tree" PREFIX=/usr >/dev/null
args=(-tree "$images/tree" -version "$VERSION" -commit "${COMMIT:-}" -date "$DATE" -out "$images")
if command -v mmdebstrap >/dev/null; then
	SOURCE_DATE_EPOCH=$(date -d "$DATE" +%s) mmdebstrap --quiet --variant=minbase \
		--include=bash,ca-certificates,e2fsprogs,libstdc++6,nodejs,python3,ruby,tzdata,zlib1g \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
		--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$images/debian.tar"
	args+=(-debian "$images/debian.tar")
else
	echo "images: NO IMAGE OF THE WORKER: apt-get install mmdebstrap" >&2
fi
go -C deploy/container run . "${args[@]}"
rm -f "$images/debian.tar"
du -sh "$images"/{gateway,worker} 2>/dev/null || true
