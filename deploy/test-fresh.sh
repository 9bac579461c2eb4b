#!/bin/bash
# Runs the README's two commands in a fresh clone on a minimal Debian 12 that has what the README asks for: Go, Python 3 with pip,
# git and make. As root, with mmdebstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,git,make,ca-certificates bookworm "$root"
# The network is this machine's, and with it the name server and the authorities that sign its certificates.
cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$root/etc/hosts"
cp -a "$(go env GOROOT)" "$root/usr/local/go"
git clone --quiet . "$root/root/bullpen"
cat >"$root/test" <<'SCRIPT'
#!/bin/bash
set -euxo pipefail
export HOME=/root PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /root/bullpen
make quickstart
make test
SCRIPT
chmod 755 "$root/test"
deploy/in-root.sh "$root" /test
echo "test-fresh: passed"
