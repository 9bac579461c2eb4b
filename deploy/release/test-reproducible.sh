#!/bin/bash
# Builds the release of the last commit twice, at two paths, once with this machine's cache of Go and once with an empty
# one, and compares the checksums of all files.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
build() { # build PATH CACHE
	git clone --quiet . "$work/$1"
	GOCACHE=$2 make --silent -C "$work/$1" release >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}
build first "$(go env GOCACHE)"
build second/deeper "$work/cache"
diff "$work"/{first,second/deeper}/dist/SHA256SUMS
cat "$work/first/dist/SHA256SUMS"
echo "test-reproducible: passed"
