#!/bin/bash
# Builds the release of the last commit twice, at two paths, with two caches of Go, and compares the checksums of all files.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
for build in first second/deeper; do
	git clone --quiet . "$work/$build"
	GOCACHE=$work/cache-${build%/*} make --silent -C "$work/$build" release >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
done
diff "$work"/{first,second/deeper}/dist/SHA256SUMS
cat "$work/first/dist/SHA256SUMS"
echo "test-reproducible: passed"
